"""What looking after published tables ends with: their state, what a night changed, what was verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fibc.schema.facts import Difference, Role, of_role
from fibc.schema.observed import Observed


@dataclass(frozen=True)
class LastRun:
    """How the run that published a generation went.

    Attributes:
        kind: ``tune`` or ``retune``.
        ended: ISO 8601 in UTC.
        took_s: Wall time of its stages.
        reasons: Why a night measured anything.
        devices: What it measured on.
        seed: Of the search and of inputs.
        num_pairs: Paired timings.
        num_trials: Of its searches.
        observed: What was seen of GPUs while pairs were timed; None on a CPU.
    """

    kind: str
    ended: str
    took_s: float
    reasons: tuple[str, ...]
    devices: tuple[str, ...]
    seed: int
    num_pairs: int
    num_trials: int
    observed: Observed | None

    def __str__(self) -> str:
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        seen = f"; {self.observed}" if self.observed is not None else ""
        return (
            f"{self.kind} of {self.ended}{why}: {self.took_s:.0f} s, {self.num_trials} trials, {self.num_pairs} pairs, "
            f"seed {self.seed}, on {', '.join(self.devices) or 'a device that is not recorded'}{seen}"
        )


@dataclass(frozen=True)
class PackageStatus:
    """A published package as it stands.

    Attributes:
        definition: Name.
        package: Its directory.
        generation: Name of the serving generation.
        created: When its table was made, ISO 8601 in UTC.
        shown: When its replacements were last shown to hold.
        age_s: Seconds since then.
        num_replaced: Cells that a variant serves, of ``num_cells``.
        partial: The budget ended before the table was whole.
        differences: What differs here from where the evidence was collected.
        earlier: Names of the generations before the serving one, oldest first.
        later: Of those after it: somebody has rolled back.
        problem: Why the package cannot be read; empty where it can.
        run: How the run that published the serving generation went; None where no record tells.
    """

    definition: str
    package: str
    generation: str = ""
    created: str = ""
    shown: str = ""
    age_s: float = 0.0
    target: str = ""
    num_replaced: int = 0
    num_cells: int = 0
    partial: bool = False
    differences: tuple[Difference, ...] = ()
    earlier: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    problem: str = ""
    run: LastRun | None = None

    @property
    def foreign(self) -> tuple[Difference, ...]:
        """Differences of silicon: the table serves nothing here."""
        return of_role(self.differences, Role.IDENTITY)

    @property
    def triggers(self) -> tuple[Difference, ...]:
        """Differences that call for measuring again."""
        return of_role(self.differences, Role.TRIGGER)

    @property
    def match(self) -> str:
        """``same``, ``changed`` (measure again), ``foreign`` (other silicon) or ``unreadable``."""
        if self.problem:
            return "unreadable"
        return "foreign" if self.foreign else "changed" if self.triggers else "same"


@dataclass(frozen=True)
class Shown:
    """A speedup with its 95 % interval at the weakest point of a cell."""

    point: str
    speedup: float
    ci_low: float
    ci_high: float

    def __str__(self) -> str:
        return f"{self.speedup:.3f}x ({self.ci_low:.3f} to {self.ci_high:.3f}) at {self.point}"


@dataclass(frozen=True)
class Flip:
    """A cell that is served otherwise than before, or would be.

    Attributes:
        cell: ``str`` of it.
        old: The variant that served, or ``native``.
        new: What serves from now on; empty where nothing was decided (``--check``).
        then: What the old one had shown; None for native.
        now: What it shows now; None where it was not measured or failed.
        shown: What the new one shows; None for native.
        why: A sentence.
    """

    cell: str
    old: str
    new: str
    then: Shown | None
    now: Shown | None
    shown: Shown | None
    why: str


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at before measuring.

    Attributes:
        name: ``disk``, ``load``, ``gpu 0``.
        ok: Measuring may begin.
        text: What was seen.
    """

    name: str
    ok: bool
    text: str


@dataclass(frozen=True)
class RetuneResult:
    """What a night did with one package.

    Attributes:
        action: ``unchanged``, ``renewed`` (the next generation serves), ``checked`` (``--check``) or ``failed``.
        reasons: Why anything was measured, or why nothing was.
        flips: Cells that changed hands, or would.
        num_rechecked: Cells whose winner was measured against native anew.
        num_held: Those that showed it again.
        retuned: Cells that were searched again.
        unchecked: Cells that time ran out for; they serve as before, and the next night begins with them.
        generation: Name of the serving generation.
        num_pairs: Paired timings, search included and the A/A gate left out.
        num_replaced: Cells that a variant serves.
        findings: Of the preflight.
        stage_s: Wall time of each stage, in seconds.
        devices: What was measured on.
        seed: Of the search and of inputs.
        observed: What was seen of GPUs while pairs were timed; None on a CPU, and where nothing was.
    """

    definition: str
    package: str
    action: str
    reasons: tuple[str, ...]
    flips: tuple[Flip, ...] = ()
    num_rechecked: int = 0
    num_held: int = 0
    retuned: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    generation: str = ""
    num_pairs: int = 0
    num_replaced: int = 0
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    stage_s: Mapping[str, float] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    seed: int = 0
    observed: Observed | None = None


@dataclass(frozen=True)
class Verified:
    """One item of a manifest, computed again.

    Attributes:
        item: What it is, ``variant fibc_0123 object``.
        verdict: ``same``, ``differs``, ``missing`` or ``unknown`` (what it would be computed from is not here).
        text: What was found.
    """

    item: str
    verdict: str
    text: str


@dataclass(frozen=True)
class VerifyResult:
    """Every item of one package."""

    definition: str
    package: str
    generation: str
    items: tuple[Verified, ...]

    @property
    def sound(self) -> bool:
        """Nothing differs and nothing is missing."""
        return all(item.verdict in ("same", "unknown") for item in self.items)

"""What one run of ``fibc tune`` ends with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fibc.schema.decision import Comparison
from fibc.schema.observed import Observed
from fibc.schema.table import DispatchTable


@dataclass(frozen=True)
class SetSizes:
    """How many recorded workloads each set holds."""

    tune: int
    boundary: int
    test: int
    skipped: int
    traffic_weighted: bool
    synthetic: bool


@dataclass(frozen=True)
class BuildCounts:
    """How a search came by its builds.

    Attributes:
        waited_s: Seconds for which the search waited for compilers, part of its wall time.
        ready: Builds that were done when they were asked for, compiled beside the measurement of others.
        awaited: Builds that were under way.
        built: Builds that began when they were asked for; those in the cache are among them.
        unused: Builds that were done and that nobody asked for.
    """

    waited_s: float = 0.0
    ready: int = 0
    awaited: int = 0
    built: int = 0
    unused: int = 0


@dataclass(frozen=True)
class TuneResult:
    """The outcome of a run, printable and JSON-able.

    Attributes:
        definition: Name of the definition.
        module: Name to import, ``fibc_gemm_bf16_n4096_k4096``.
        package: Directory of the package; empty where no module was written.
        table: What the module serves; None where no module was written.
        boundary: Evidence of the boundary workloads.
        test: Evidence of the test workloads, read once after publication.
        slower_on_test: Descriptions of test workloads that are slower than native by more than the margin.
        sets: Sizes of the sets.
        trials: Trials by status over all keys, this run and resumed ones.
        stage_s: Wall time of each stage, in seconds.
        notes: Sentences that a user must read (a native outside its bound, an empty set, void old evidence).
        up_to_date: Nothing had changed, so nothing was built or measured.
        partial: The budget ended first, or the user interrupted.
        interrupted: Ctrl-C ended the run.
        observed: What was seen of the GPU while pairs were timed; None on a CPU, and where nothing was.
        builds: How the search came by its builds.
        plan: What a dry run would do; empty otherwise.
    """

    definition: str
    module: str
    package: str
    table: DispatchTable | None
    boundary: tuple[Comparison, ...]
    test: tuple[Comparison, ...]
    slower_on_test: tuple[str, ...]
    sets: SetSizes
    trials: Mapping[str, int]
    stage_s: Mapping[str, float]
    notes: tuple[str, ...]
    up_to_date: bool = False
    partial: bool = False
    interrupted: bool = False
    observed: Observed | None = None
    builds: BuildCounts = BuildCounts()
    plan: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class CompiledTemplate:
    """What became of a template's configs in a run that only compiles.

    Attributes:
        compiled: In the store, from this run or an earlier one.
        failed: Did not compile, or need more than the target has.
        left_out: Planned and not kept, see ``CompileResult.left_out``.
        num_bytes: Of those in the store.
    """

    template: str
    compiled: int
    failed: int
    left_out: int
    num_bytes: int


@dataclass(frozen=True)
class CompileResult:
    """The outcome of a run that only compiles, printable and JSON-able.

    Attributes:
        store: Directory to take to where it is measured.
        num_keys: Keys that the configs were chosen for.
        templates: Sorted by name.
        failures: Why configs did not compile, with how many did not for that reason; most first.
        left_out: Why configs were planned and not kept, with how many were not.
        mismatches: Templates that do not serve the definition, each with its reason.
        num_new: Compiled by this run; the others were there.
    """

    definition: str
    target: str
    store: str
    num_keys: int
    templates: tuple[CompiledTemplate, ...]
    failures: tuple[tuple[str, int], ...]
    left_out: tuple[tuple[str, int], ...]
    mismatches: tuple[tuple[str, str], ...]
    num_new: int
    duration_s: float
    notes: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.templates)


@dataclass(frozen=True)
class BuildResult:
    """The outcome of making a module again from its records.

    Attributes:
        module: Name to import.
        package: Its directory.
        kernels: Each variant's symbol, with where its object comes from.
        notes: What the module says when it is imported here: why every call goes native, where that is so.
    """

    definition: str
    module: str
    package: str
    target: str
    table: DispatchTable
    kernels: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

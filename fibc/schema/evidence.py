"""What the stages of measuring end with, before anything is decided or published."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from fibc.schema.decision import Verdict
from fibc.schema.evaluation import Arm, SessionSamples, Status


@dataclass(frozen=True)
class ArmFailure:
    """An arm whose candidate failed while it was timed."""

    arm: Arm
    status: Status
    log: str


@dataclass(frozen=True)
class Screening:
    """Finalists of one key.

    Attributes:
        finalists: Arms, best first.
        values: Latest value (median log speedup) of every arm that was screened, in their order.
        num_pairs: Paired rounds that were run, over all candidates.
        failures: Arms that failed meanwhile.
        samples: Raw pairs of the rungs.
    """

    finalists: tuple[Arm, ...]
    values: tuple[float, ...]
    num_pairs: int
    failures: tuple[ArmFailure, ...]
    samples: tuple[SessionSamples, ...]


@dataclass(frozen=True)
class Estimate:
    """What sessions say about one arm.

    Attributes:
        effects: Log speedup of each session.
        mean: Their mean.
        sd: Their standard deviation; infinite for a single session.
        lower: One-sided lower bound of the log speedup, with error ``alpha``.
        upper: One-sided upper bound, alike.
        num_pairs: Pairs over all sessions.
        native_s: Median latency of a native call.
        candidate_s: Median latency of a candidate's call.
    """

    arm: Arm
    effects: tuple[float, ...]
    mean: float
    sd: float
    lower: float
    upper: float
    alpha: float
    num_pairs: int
    native_s: float
    candidate_s: float


class Fate(StrEnum):
    """How a finalist stands in the test of its key."""

    RUNNING = "running"
    """Neither bound has reached the margin; where the test is over, it ended without a result."""
    ACCEPTED = "accepted"
    """Its lower bound beat the margin at every point."""
    OUTRUN = "outrun"
    """Another one was accepted, and its own mean is no larger."""
    DROPPED = "dropped"
    """Its upper bound is below the margin at one point or more."""
    OUT_OF_REACH = "out_of_reach"
    """Even at the upper end of its interval it would need more pairs than the test has."""
    FAILED = "failed"
    """It crashed, timed out or answered wrongly."""


@dataclass(frozen=True)
class Contender:
    """A finalist at the end of the test.

    Attributes:
        estimates: One per point, in their order, from the last look that it took part in; empty before the first.
        failure: Where and how it failed.
    """

    candidate: str
    fate: Fate
    estimates: tuple[Estimate, ...]
    failure: ArmFailure | None

    @property
    def mean(self) -> float:
        """Log speedup averaged over the points; minus infinity where nothing is known."""
        return math.fsum(e.mean for e in self.estimates) / len(self.estimates) if self.estimates else -math.inf

    @property
    def lower(self) -> float:
        """Lower bound averaged over the points; minus infinity where nothing is known."""
        return math.fsum(e.lower for e in self.estimates) / len(self.estimates) if self.estimates else -math.inf


@dataclass(frozen=True)
class Confirmation:
    """How the test of one key ended.

    Attributes:
        key: ``str`` of its cell.
        verdict: ``replace`` where a finalist was accepted, ``keep_native`` where all were dropped or failed.
        winner: Digest of the accepted finalist with the highest lower bound; empty without one.
        contenders: The finalists, best first.
        split: Digests of finalists that lost one point beyond doubt and lead at another one, where nobody was accepted.
        num_sessions: Sessions that were run.
        partial: Time ran out before the test ended.
        samples: Raw pairs.
    """

    key: str
    verdict: Verdict
    winner: str
    contenders: tuple[Contender, ...]
    split: tuple[str, ...]
    num_sessions: int
    partial: bool
    samples: tuple[SessionSamples, ...]


@dataclass(frozen=True)
class Assessment:
    """What a fixed number of fresh sessions says about some arms.

    Attributes:
        stage: ``reconfirm``, ``boundary``, ``test`` or ``gate``.
        arms: What was asked for.
        estimates: One per arm, in their order; None where it failed or time ran out first.
        failures: Arms that failed.
        samples: Raw pairs.
    """

    stage: str
    arms: tuple[Arm, ...]
    estimates: tuple[Estimate | None, ...]
    failures: tuple[ArmFailure, ...]
    samples: tuple[SessionSamples, ...]

    def of(self, key: str) -> tuple[Estimate | None, ...]:
        """Return the estimates of the arms of ``key``, in their order."""
        return tuple(e for arm, e in zip(self.arms, self.estimates, strict=True) if arm.key == key)


@dataclass(frozen=True)
class GateResult:
    """The A/A gate: native against native, which a sound bench finds equal.

    Attributes:
        num_comparisons: Comparisons, all in the same sessions.
        replaces_at_zero: How many would have replaced native with no margin.
        replaces_at_margin: How many with the policy's margin.
        repeated: The first attempt failed, and this is the second.
        allowed: How many at zero pass.
        samples: Raw pairs of every attempt.
    """

    num_comparisons: int
    replaces_at_zero: int
    replaces_at_margin: int
    repeated: bool
    allowed: int
    samples: tuple[SessionSamples, ...]

    @property
    def passed(self) -> bool:
        """Whether fibc may tune with this bench."""
        return self.replaces_at_zero <= self.allowed

    def __str__(self) -> str:
        attempt = "second attempt" if self.repeated else "first attempt"
        seen = f"{self.replaces_at_zero} of {self.num_comparisons} native-against-native comparisons look faster"
        return (
            f"A/A gate {'passed' if self.passed else 'failed'} ({attempt}): {seen} (accepted: at most {self.allowed})"
        )

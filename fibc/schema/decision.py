"""Comparisons and decisions: what the evidence says and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fibc.schema.feature import Cell, Point

SESSION = "process"
"""What a session is: a process of its own. Before this was said, those on a GPU were fresh buffers in one process."""


class Verdict(StrEnum):
    """``replace`` serves the variant; the other two serve native."""

    REPLACE = "replace"
    KEEP_NATIVE = "keep_native"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Conditions:
    """How both sides of every comparison of a run were timed; the fields mean what they mean in Comparison."""

    residency: str
    mode: str
    timer: str
    num_threads: int


@dataclass(frozen=True)
class Comparison:
    """A speedup (native latency / candidate latency) with its interval, as published.

    Attributes:
        speedup: exp of the mean session effect.
        ci_low: Lower end of the two-sided interval at ``confidence_level``.
        ci_high: Upper end.
        confidence_level: 0.95 unless said.
        n_sessions: Sessions, the unit of replication.
        n_pairs: Pairs over all sessions.
        session_sd: Standard deviation of the session effects, in log units.
        native_us: Median native latency of one call.
        candidate_us: Median candidate latency of one call.
        stage: ``confirm``, ``reconfirm``, ``boundary`` or ``test``.
        estimator: ``hodges-lehmann``.
        design: ``paired-abba-processes``: each session is a process. ``paired-abba-sessions`` in records from before it
            was told apart, where on a GPU all sessions were fresh buffers in one process.
        residency: ``cold`` or ``hot`` per input, ``A=hot B=cold``.
        mode: ``eager`` on a CPU.
        timer: ``steady_clock``.
        num_threads: Threads of both sides.
    """

    point: Point
    speedup: float
    ci_low: float
    ci_high: float
    confidence_level: float
    n_sessions: int
    n_pairs: int
    session_sd: float
    native_us: float
    candidate_us: float
    stage: str
    estimator: str
    design: str
    residency: str
    mode: str
    timer: str
    num_threads: int


@dataclass(frozen=True)
class Decision:
    """The verdict of one cell.

    Attributes:
        cell: Where it holds.
        verdict: What follows.
        candidate: Digest of the winner where the verdict is ``replace``, else empty.
        confirm: One Comparison per point of the best finalist, from the confirm sessions; may be empty.
        reconfirm: One per point of the winner, from fresh sessions alone; empty unless replaced or revoked.
        reason: A sentence: why native stays, what it would take, or what was shown.
        revoked: True where the reconfirm or a boundary workload took an acceptance back.
        boundary_rejected: True where it was a boundary workload.
        synthetic: True where no recorded tune workload backs the cell.
        partial: True where the budget ended before the evidence did.
    """

    cell: Cell
    verdict: Verdict
    candidate: str
    confirm: tuple[Comparison, ...]
    reconfirm: tuple[Comparison, ...]
    reason: str
    revoked: bool = False
    boundary_rejected: bool = False
    synthetic: bool = False
    partial: bool = False

    @property
    def evidence(self) -> tuple[Comparison, ...]:
        """What is published: of fresh sessions where there are some, else of the confirm sessions."""
        return self.reconfirm or self.confirm

    @property
    def weakest(self) -> Comparison | None:
        """The comparison with the smallest speedup; None without evidence."""
        return min(self.evidence, key=lambda comparison: comparison.speedup, default=None)

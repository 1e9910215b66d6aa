"""A bench whose sessions are worker processes: one that an arm kills is replaced, and the arm is blamed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Protocol

from fibc.bench import ArmFailed, Session
from fibc.child import Child, ChildFailedError, may_be_bad_luck
from fibc.schema import codec
from fibc.schema.candidate import Artifact
from fibc.schema.evaluation import Correctness, Status
from fibc.schema.feature import Point
from fibc.sustained import Sustained, check_sustained


@dataclass(frozen=True)
class Outcome:
    """What a full validation ends with; as ``Trial``, without a session."""

    status: Status
    log: str
    correctness: Correctness | None


@dataclass(frozen=True)
class ArmPlan:
    """An arm with what a worker needs to bind it; ``artifact`` is None for native."""

    candidate: str
    point: Point
    artifact: Artifact | None
    deterministic: bool


class Host(Protocol):
    """Who starts the processes of sessions, and remembers what outlives them.

    Attributes:
        timeout_s: For one pair.
        late_failures: Candidates whose output was another one after it had been timed, by digest.
    """

    timeout_s: float
    late_failures: dict[str, Outcome]

    def start_session(self, seed: int, *, fresh_process: bool) -> Child:
        """Return a worker for a session whose inputs follow from ``seed``, with no arm bound."""
        ...

    def end_session(self, child: Child) -> None:
        """Take back what ``start_session`` gave; called once, also where the child has died."""
        ...

    def known_inner(self, point: Point) -> int | None:
        """Return how many calls make a sample at ``point``, where an earlier session has found it."""
        ...

    def keep_inner(self, point: Point, inner: int) -> None:
        """Remember it."""
        ...


@dataclass
class ProcessBench:
    """A bench whose sessions are worker processes; see ``measure.Bench``.

    Attributes:
        failed: Arms that failed in an earlier session, or whose outputs had changed at its end.
        pardoned: Arms whose process died once; they were tried again in a clean one, and will not be a second time.
    """

    host: Host
    plans: Sequence[ArmPlan]
    fresh_process: bool
    failed: dict[int, ArmFailed] = field(default_factory=dict)
    pardoned: set[int] = field(default_factory=set)

    def fail(self, arm: int, status: Status, log: str, *, late: bool = False) -> None:
        """Have every later pair of the arm raise; a ``late`` failure goes with the candidate beyond this bench."""
        self.failed[arm] = ArmFailed(arm, status, log)
        if late:
            self.host.late_failures[self.plans[arm].candidate] = Outcome(status, log, None)

    def session(self, seed: int) -> AbstractContextManager[Session]:
        return ProcessSession(self, seed, None)

    def start(self, seed: int) -> Child:
        return self.host.start_session(seed, fresh_process=self.fresh_process)


class ProcessSession:
    """A session in a worker process that is replaced when an arm kills it; see ``measure.Session``."""

    def __init__(self, bench: ProcessBench, seed: int, child: Child | None) -> None:
        self._bench = bench
        self._seed = seed
        self._child = child
        self._dismissed: set[int] = set()

    def dismiss(self, candidate: int) -> None:
        """Check its output no more when the session is left: nothing comes of its timings."""
        self._dismissed.add(candidate)

    def pair(self, candidate: int, native_first: bool) -> tuple[float, float]:
        """Return seconds per call of (native, candidate).

        Raises:
            ArmFailed: If the candidate failed now or earlier.
        """
        bench = self._bench
        plan, host = bench.plans[candidate], bench.host
        while candidate not in bench.failed:
            child = self._running()
            try:
                if candidate not in child.bound:
                    bind(child, candidate, plan, host.timeout_s)
                native_s, candidate_s, inner = child.call(
                    "pair",
                    host.timeout_s,
                    arm=candidate,
                    native_first=native_first,
                    inner=host.known_inner(plan.point),
                )
            except ChildFailedError as error:
                if may_be_bad_luck(error) and candidate not in bench.pardoned:
                    bench.pardoned.add(candidate)
                else:
                    bench.fail(candidate, error.status, error.log)
            else:
                host.keep_inner(plan.point, inner)
                return native_s, candidate_s
        raise bench.failed[candidate]

    def block(self, candidate: int, native: bool, seconds: float) -> float:
        """Return seconds per call of one side over about ``seconds`` without a pause, behind a pair of the arm.

        Raises:
            ArmFailed: If the candidate failed.
        """
        bench = self._bench
        assert self._child is not None
        inner = bench.host.known_inner(bench.plans[candidate].point)
        limit_s = bench.host.timeout_s + 4 * seconds
        try:
            found: float = self._child.call(
                "block", limit_s, arm=candidate, native=native, inner=inner, seconds=seconds
            )
        except ChildFailedError as error:
            raise ArmFailed(candidate, error.status, error.log) from error
        return found

    def close(self) -> None:
        """Check outputs after timing, and end the process."""
        child = self._child
        if child is None:
            return
        try:
            for arm in sorted(child.bound):
                if child.open and arm not in self._bench.failed and arm not in self._dismissed:
                    self._check_outputs(child, arm)
        finally:
            self._bench.host.end_session(child)
            self._child = None

    def _check_outputs(self, child: Child, arm: int) -> None:
        try:
            message = child.call("check_outputs", self._bench.host.timeout_s, arm=arm)
        except ChildFailedError as error:
            self._bench.fail(arm, error.status, error.log, late=True)
        else:
            if message is not None:
                self._bench.fail(arm, Status.INCORRECT_NUMERICAL, message, late=True)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif self._child is not None:
            self._bench.host.end_session(self._child)

    def _running(self) -> Child:
        if self._child is None or not self._child.open:
            if self._child is not None:
                self._bench.host.end_session(self._child)
            self._child = self._bench.start(self._seed)
        return self._child


def bind(child: Child, arm: int, plan: ArmPlan, timeout_s: float) -> None:
    child.call(
        "bind",
        timeout_s,
        arm=arm,
        point=codec.to_plain(plan.point),
        artifact=None if plan.artifact is None else codec.to_plain(plan.artifact),
        deterministic=plan.deterministic,
    )
    child.bound.add(arm)


def run_sustained(bench: ProcessBench, seed: int) -> Sustained:
    """Run the first arm against native in long blocks, in a session of its own.

    Raises:
        ArmFailed: If it fails, or its output is another one afterwards.
    """
    session = ProcessSession(bench, seed, None)
    with session:
        session.pair(0, native_first=True)
        seen = check_sustained(partial(session.block, 0))
    if 0 in bench.failed:
        raise bench.failed[0]
    return seen

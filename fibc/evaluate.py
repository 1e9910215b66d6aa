"""Isolated evaluation: trials, validations and benches of a definition, in processes that may die."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fibc import inputs, isolation
from fibc.bench import ArmFailed, Bench, Session
from fibc.child import START_TIMEOUT_S, Child, ChildFailedError, may_be_bad_luck, spawn
from fibc.errors import EvaluationError, InputError
from fibc.process_bench import ArmPlan, Outcome, ProcessBench, ProcessSession, bind
from fibc.rpc import Channel
from fibc.schema import codec
from fibc.schema.candidate import NATIVE, Artifact, Candidate
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Arm, Correctness, Status
from fibc.schema.feature import FeatureKey, Point
from fibc.schema.table import CpuValidity, NativeSource
from fibc.schema.workload import Workload
from fibc.validation import Validation
from fibc.worker import MALLOC_TUNABLES, Setup

REFERENCE_TIMEOUT_S = 120.0
"""For the reference and native over all cases of one key."""

DATA_FRACTION = 0.25
KEEP_FRACTION = 0.125
"""Parts of the memory: what a candidate may allocate, and what inputs of several points may take at once."""

DATA_BYTES = 32 << 30
"""The most that a candidate may allocate on a machine with more memory than it can ask for by mistake."""


@dataclass(frozen=True)
class _Fork:
    """A child of the zygote."""

    zygote: Child
    pid: int

    def end(self, *, kill: bool) -> int:
        if not self.zygote.open:  # it went with the zygote
            return -signal.SIGKILL
        status = self.zygote.call("reap", isolation.GRACE_S * 2, pid=self.pid, kill=kill)
        return os.waitstatus_to_exitcode(status)


@dataclass
class Trial:
    """A validated candidate, and a session in the same process for its first rung.

    Attributes:
        status: PASSED, or why it did not.
        log: What was seen and the tail of the worker's output; empty where it passed.
        correctness: Present where outputs were compared.
    """

    status: Status
    log: str
    correctness: Correctness | None
    _session: Session | None = None

    @property
    def session(self) -> Session:
        """The session; its one arm is 0."""
        if self._session is None:
            raise EvaluationError(f"trial: a session needs a candidate that passed, got {self.status}")
        return self._session


class Evaluator:
    """Evaluates candidates of one definition beside its native. A context manager: no process outlives it.

    Candidates are judged and timed in children: whatever one does costs that candidate only. One that dies is tried
    once more in a clean process before it is blamed. One thread drives parent and children.

    Attributes:
        late_failures: Candidates whose output was another one after it had been timed, by digest: they fail every later
            validation, and every later bench when it first times them.
    """

    def __init__(
        self,
        definition: Definition,
        native: NativeSource,
        validity: CpuValidity,
        harness_path: Path,
        *,
        timeout_s: float,
        seed: int,
        workloads: Iterable[Workload] = (),
    ) -> None:
        """Prepare; nothing is started.

        Args:
            validity: The machine (``Environment.cpu_validity()``): threads of both sides, size of the last-level cache.
            harness_path: What ``fibc.codegen.harness`` built.
            timeout_s: For one candidate's validation, and for each of its pairs.
            seed: Of inputs of validations and screens; sessions have their own.
            workloads: Those that points name.
        """
        ram_bytes = memory_bytes()
        self._definition = definition
        self.timeout_s = timeout_s
        self._setup = Setup(
            definition=definition.to_json(),
            native_source=native.source,
            harness_path=str(harness_path),
            workloads={workload.uuid: (workload.to_json(), workload.root) for workload in workloads},
            num_threads=validity.num_threads,
            num_copies=inputs.num_copies(definition, validity.l3_bytes, ram_bytes),
            keep_bytes=int(ram_bytes * KEEP_FRACTION),
            data_bytes=min(DATA_BYTES, int(ram_bytes * DATA_FRACTION)),
            seed=seed,
        )
        self._zygote: Child | None = None
        self._spare: Child | None = None
        self._prepared: dict[str, tuple[Point, ...]] = {}
        self._survivors: set[tuple[str, int]] = set()
        self._inner: dict[Point, int] = {}
        self._deterministic: dict[str, bool] = {}
        self._native_problems: dict[str, None] = {}
        self.late_failures: dict[str, Outcome] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop_zygote()
        self._stop_spare()

    @property
    def facts(self) -> dict[str, str]:
        """How timings are made, printable, for records."""
        residency = inputs.residency(self._definition)
        return {
            "residency": " ".join(f"{name}={where}" for name, where in residency.items()),
            "copies": str(self._setup.num_copies),
            "threads": str(self._setup.num_threads),
            "malloc": MALLOC_TUNABLES,
            "mode": "eager",
            "timer": "steady_clock",
        }

    # Checks ----------------------------------------------------------------------------------------------------------

    def reference_check(self, points: Sequence[Point], *, limit_s: float = REFERENCE_TIMEOUT_S) -> tuple[str, ...]:
        """Return what is wrong with the reference at ``points``: it raises, hangs, dies, or returns another form."""
        try:
            problems = self._running().call(
                "reference",
                limit_s + isolation.GRACE_S,
                points=[codec.to_plain(point) for point in points],
                limit_s=limit_s,
            )
        except ChildFailedError as error:
            return (f"{self._definition.name}: reference: {error.log}",)
        return tuple(problems)

    def native_check(self, keys: Sequence[FeatureKey]) -> tuple[str, ...]:
        """Return where native is outside the bound that candidates are held to.

        Looks at the trial cases of ``keys``, and at all cases that were prepared before. Such a native is reported,
        keeps serving, and is never the oracle.
        """
        for key in keys:
            self._prepare_trial(key)
        return tuple(self._native_problems)

    # Trials ----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def trial(self, candidate: Candidate, artifact: Artifact, key: FeatureKey) -> Iterator[Trial]:
        """Validate a candidate on the key's trial cases; while the block runs, its session times the screening point.

        Raises:
            InputError: If the reference fails.
            EvaluationError: If native fails, or no worker starts.
        """
        self._prepare_trial(key)
        plan = ArmPlan(candidate.digest, key.points[key.screen_point], artifact, True)
        outcome, child = self._validated(plan, "trial")
        if child is None:
            yield Trial(outcome.status, outcome.log, outcome.correctness)
            return
        bench = ProcessBench(self, [self._judged(plan, outcome)], fresh_process=False)
        with ProcessSession(bench, self._setup.seed, child) as session:
            yield Trial(outcome.status, outcome.log, outcome.correctness, session)

    def validate(self, candidate: Candidate, artifact: Artifact, key: FeatureKey) -> Outcome:
        """Validate a finalist: dense inputs at every point of the key, every adversarial input and layout at one.

        Adversarial inputs depend on a call's size only as kernels have a few ways through them, and bring large weights
        of their own: they are tried once per binary and power of 16 of the size, at the first key's smallest point.
        """
        low = min(key.points, key=_size)
        decade = int(math.log2(_size(low))) // 4
        hard = f"adversarial {decade}"
        if (artifact.digest, decade) not in self._survivors:
            self._prepare(hard, self._prepared.get(hard, (low,)), "adversarial")
            outcome = self._judge(candidate, artifact, low, hard)
            if outcome.status is not Status.PASSED:
                return outcome
            self._survivors.add((artifact.digest, decade))
        self._prepare("points", key.points, "points")
        return self._judge(candidate, artifact, low, "points")

    def _judge(self, candidate: Candidate, artifact: Artifact, point: Point, cases: str) -> Outcome:
        """Validate on prepared cases; an output that was wrong after an earlier timing counts."""
        plan = ArmPlan(candidate.digest, point, artifact, True)
        outcome, child = self._validated(plan, cases)
        if child is None:
            return outcome
        child.close()
        self._judged(plan, outcome)
        late = self.late_failures.get(candidate.digest)
        return outcome if late is None else Outcome(late.status, late.log, outcome.correctness)

    def _judged(self, plan: ArmPlan, outcome: Outcome) -> ArmPlan:
        """Return the plan with what its validation showed, and remember that for later benches."""
        assert outcome.correctness is not None
        self._deterministic[plan.candidate] = outcome.correctness.deterministic
        return replace(plan, deterministic=outcome.correctness.deterministic)

    def _validated(self, plan: ArmPlan, cases: str) -> tuple[Outcome, Child | None]:
        """Return the outcome, and the child that still holds the candidate where it passed."""
        for attempt in (1, 2):
            child = self._fork()
            try:
                bind(child, 0, plan, self.timeout_s)
                reply = child.call("validate", self.timeout_s, arm=0, cases=cases)
            except ChildFailedError as error:
                child.close()
                if attempt == 1 and may_be_bad_luck(error):
                    continue
                return Outcome(error.status, error.log, None), None
            except BaseException:
                child.close()
                raise
            judged = codec.from_plain(Validation, reply)
            if judged.status is Status.PASSED:
                return Outcome(Status.PASSED, "", judged.correctness), child
            log = "\n".join(filter(None, (judged.message, child.log_tail())))
            child.close()
            return Outcome(judged.status, log, judged.correctness), None
        raise AssertionError("two attempts always end above")

    # Benches ---------------------------------------------------------------------------------------------------------

    def bench(
        self,
        arms: Sequence[Arm],
        artifacts: Mapping[str, Artifact],
        keys: Sequence[FeatureKey],
        *,
        fresh_process: bool,
    ) -> Bench:
        """Return a bench of ``arms``.

        Args:
            artifacts: By the candidates' digests; an arm whose candidate is ``native`` times native beside itself.
            keys: Those that the arms name.
            fresh_process: Sessions are exec'd processes, as inference needs; else children of the zygote, which share
                its memory layout and the weights' values.
        """
        points = {str(key): key.points for key in keys}
        plans = [
            ArmPlan(
                arm.candidate,
                points[arm.key][arm.point],
                None if arm.candidate == NATIVE else artifacts[arm.candidate],
                self._deterministic.get(arm.candidate, arm.candidate != NATIVE),
            )
            for arm in arms
        ]
        late = {
            index: ArmFailed(index, failure.status, failure.log)
            for index, failure in enumerate(self.late_failures.get(arm.candidate) for arm in arms)
            if failure is not None
        }
        return ProcessBench(self, plans, fresh_process=fresh_process, failed=late)

    def aa_bench(self, keys: Sequence[FeatureKey], num: int) -> tuple[Bench, tuple[Arm, ...]]:
        """Return a bench of ``num`` arms of native against native at screening points of ``keys``, and the arms."""
        arms = tuple(
            Arm(str(key), key.screen_point, NATIVE) for key in (keys[index % len(keys)] for index in range(num))
        )
        return self.bench(arms, {}, keys, fresh_process=True), arms

    # Processes -------------------------------------------------------------------------------------------------------

    def start_session(self, seed: int, *, fresh_process: bool) -> Child:
        """Start a session: exec'd, or a child of the zygote that shares its weights."""
        if fresh_process:
            return self._exec_session(seed)
        child = self._fork()
        child.call("reseed", START_TIMEOUT_S, seed=seed)
        return child

    def end_session(self, child: Child) -> None:
        """End a session's process."""
        child.close()

    def _exec_session(self, seed: int) -> Child:
        """Exec a worker.

        Two are started at once and one is kept for the next call: importing torch takes one core, and nothing is timed
        meanwhile. The spare has nothing to do, and no weights, until its turn.
        """
        self._stop_zygote()  # its copies of the weights and a session's would together take half of the memory
        child, self._spare = self._spare, None
        if child is None:
            child, self._spare = spawn("fibc.worker"), spawn("fibc.worker")
            self._set_up(self._spare, seed)
        self._set_up(child, seed)
        self._first(child, "start")
        return child

    def known_inner(self, point: Point) -> int | None:
        return self._inner.get(point)

    def keep_inner(self, point: Point, inner: int) -> None:
        self._inner[point] = inner

    def _set_up(self, child: Child, seed: int) -> None:
        """Wait for a worker, and tell it what it works on."""
        self._first(child, "setup", setup=codec.to_plain(self._setup) | {"seed": seed})

    def _first(self, child: Child, op: str, **arguments: Any) -> None:
        """Ask what no candidate has a part in."""
        try:
            child.call(op, START_TIMEOUT_S, **arguments)
        except ChildFailedError as error:
            child.close()
            raise EvaluationError(f"{self._definition.name}: a worker must start, and did not:\n{error.log}") from error

    def _running(self) -> Child:
        """Return the zygote, started if there is none or if it was lost."""
        if self._zygote is None or not self._zygote.open:
            self._stop_zygote()
            self._stop_spare()
            self._zygote = spawn("fibc.zygote")
            self._set_up(self._zygote, self._setup.seed)
        return self._zygote

    def _stop_spare(self) -> None:
        if self._spare is not None:
            self._spare.close()
        self._spare = None

    def _stop_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
        self._zygote = None
        self._prepared.clear()

    def _fork(self) -> Child:
        zygote = self._running()
        ours, theirs = Channel.pair()
        log = tempfile.TemporaryFile()  # noqa: SIM115  the Child closes it
        try:
            zygote.tell("fork")
            zygote.channel.send_fds((theirs.fileno(), log.fileno()))
            pid = zygote.answer(START_TIMEOUT_S)
        except ChildFailedError as error:
            raise EvaluationError(f"{self._definition.name}: a worker must fork, and did not:\n{error.log}") from error
        finally:
            theirs.close()
        child = Child(ours, log, _Fork(zygote, pid))
        self._first(child, "start")
        return child

    def _prepare_trial(self, key: FeatureKey) -> None:
        screened = key.points[key.screen_point]
        low = min(key.points, key=_size)
        if self._prepare("trial", tuple(dict.fromkeys((low, screened))), "trial"):
            self._running().call("hold", START_TIMEOUT_S, point=codec.to_plain(screened))

    def _prepare(self, name: str, points: Sequence[Point], kind: str) -> bool:
        """Have the zygote hold the cases ``name`` of ``points`` in place of earlier ones; False where it has them."""
        zygote = self._running()
        if self._prepared.get(name) == tuple(points):
            return False
        low = min(range(len(points)), key=lambda index: _size(points[index]))
        try:
            natives = zygote.call(
                "prepare",
                REFERENCE_TIMEOUT_S * 2,
                name=name,
                points=[codec.to_plain(point) for point in points],
                low=low,
                kind=kind,
                limit_s=REFERENCE_TIMEOUT_S,
            )
        except ChildFailedError as error:
            raise InputError(f"{self._definition.name}: reference: {error.log}") from error
        self._prepared[name] = tuple(points)
        for native in natives:
            if native["status"] != Status.PASSED:
                self._native_problems[f"native: {native['case']} at {native['point']}: {native['message']}"] = None
        return True


def memory_bytes() -> int:
    """Return the memory of this machine, or of its container where that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def _size(point: Point) -> int:
    size = 1
    for _, value in point.axes:
        size *= value
    return size

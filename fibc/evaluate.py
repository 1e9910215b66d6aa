"""Isolated evaluation: trials, validations and benches of a definition, in processes that may die."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

from fibc import inputs, isolation
from fibc.errors import EvaluationError, InputError
from fibc.measure import ArmFailed, Bench, Session
from fibc.rpc import Channel, ChannelClosedError
from fibc.schema import codec
from fibc.schema.candidate import NATIVE, Artifact, Candidate
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Arm, Correctness, Status
from fibc.schema.feature import FeatureKey, Point
from fibc.schema.table import CpuValidity, NativeSource
from fibc.schema.workload import Workload
from fibc.validation import Validation
from fibc.worker import MALLOC_TUNABLES, Setup

START_TIMEOUT_S = 180.0
"""Importing torch takes 1.3 s; a native's package that compiles kernels when it is imported takes minutes."""

REFERENCE_TIMEOUT_S = 120.0
"""For the reference and native over all cases of one key."""

DATA_FRACTION = 0.25
KEEP_FRACTION = 0.125
"""Parts of the memory: what a candidate may allocate, and what inputs of several points may take at once."""

DATA_BYTES = 32 << 30
"""The most that a candidate may allocate on a machine with more memory than it can ask for by mistake."""

LOG_TAIL_BYTES = 8192


class ChildFailedError(Exception):
    """A request failed because of what the child ran.

    Attributes:
        alive: The child still serves.
    """

    def __init__(self, status: Status, log: str, *, alive: bool) -> None:
        super().__init__(log)
        self.status = status
        self.log = log
        self.alive = alive


class _Process(Protocol):
    """How a child's process is ended."""

    def end(self, *, kill: bool) -> int:
        """Wait for its end, which was seen to come or is forced; return its exit code, minus the signal."""
        ...


class Child:
    """A worker as its parent sees it."""

    def __init__(self, channel: Channel, log: IO[bytes], process: _Process) -> None:
        self.channel = channel
        self._log = log
        self._process = process
        self.open = True
        self.bound: set[int] = set()

    def call(self, op: str, timeout_s: float, **arguments: Any) -> Any:
        """Return what the child answers.

        Raises:
            ChildFailedError: If a candidate failed: it raised, died, or took longer, which ends the child.
            EvaluationError: If native failed.
        """
        self.tell(op, **arguments)
        return self.answer(timeout_s)

    def tell(self, op: str, **arguments: Any) -> None:
        """Send a request whose answer is read later."""
        try:
            self.channel.send({"op": op, **arguments})
        except ChannelClosedError:
            raise self._died(kill=False) from None

    def answer(self, timeout_s: float) -> Any:
        """Return the answer to the last request, as ``call``."""
        try:
            reply = self.channel.receive(timeout_s)
        except TimeoutError:
            self._died(kill=True)
            log = f"took longer than {timeout_s:g} s\n{self.log_tail()}".rstrip()
            raise ChildFailedError(Status.TIMEOUT, log, alive=False) from None
        except ChannelClosedError:
            raise self._died(kill=False) from None
        except BaseException:  # an interrupt: the answer is still to come, so nothing more can be asked
            self._died(kill=True)
            raise
        if "ok" in reply:
            return reply["ok"]
        if "failed" in reply:
            status, log = reply["failed"]
            raise ChildFailedError(Status(status), log, alive=True)
        raise EvaluationError(f"native failed while it was timed:\n{reply['broken']}")

    def close(self) -> None:
        """End the child."""
        if self.open:
            self._died(kill=True)
        self._log.close()

    def log_tail(self) -> str:
        """Return the end of what the child wrote to its standard streams."""
        if self._log.closed:
            return ""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip()

    def _died(self, *, kill: bool) -> ChildFailedError:
        self.open = False
        self.channel.close()
        code = self._process.end(kill=kill)
        tail = self.log_tail()
        status = Status.RUNTIME_ERROR
        how = f"exited with status {code}"
        if code < 0:
            number = signal.Signals(-code)
            how = f"ended by {number.name}"
            exhausted = number in (signal.SIGKILL, signal.SIGXFSZ) or "bad_alloc" in tail
            status = Status.RESOURCE if exhausted else Status.CRASH
        return ChildFailedError(status, f"{how}\n{tail}".rstrip(), alive=False)


@dataclass(frozen=True)
class _Exec:
    """An exec'd worker."""

    supervised: isolation.Supervised

    def end(self, *, kill: bool) -> int:
        done = None if kill else self.supervised.wait(isolation.GRACE_S)
        return (done or self.supervised.stop()).returncode


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


@dataclass(frozen=True)
class Outcome:
    """What a full validation ends with; as ``Trial``, without a session."""

    status: Status
    log: str
    correctness: Correctness | None


@dataclass(frozen=True)
class _ArmPlan:
    """An arm with what a worker needs to bind it; ``artifact`` is None for native."""

    candidate: str
    point: Point
    artifact: Artifact | None
    deterministic: bool


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
        self._timeout_s = timeout_s
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
        plan = _ArmPlan(candidate.digest, key.points[key.screen_point], artifact, True)
        outcome, child = self._validated(plan, "trial")
        if child is None:
            yield Trial(outcome.status, outcome.log, outcome.correctness)
            return
        bench = _ProcessBench(self, [self._judged(plan, outcome)], fresh_process=False)
        with _ProcessSession(bench, self._setup.seed, child) as session:
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
        plan = _ArmPlan(candidate.digest, point, artifact, True)
        outcome, child = self._validated(plan, cases)
        if child is None:
            return outcome
        child.close()
        self._judged(plan, outcome)
        late = self.late_failures.get(candidate.digest)
        return outcome if late is None else Outcome(late.status, late.log, outcome.correctness)

    def _judged(self, plan: _ArmPlan, outcome: Outcome) -> _ArmPlan:
        """Return the plan with what its validation showed, and remember that for later benches."""
        assert outcome.correctness is not None
        self._deterministic[plan.candidate] = outcome.correctness.deterministic
        return replace(plan, deterministic=outcome.correctness.deterministic)

    def _validated(self, plan: _ArmPlan, cases: str) -> tuple[Outcome, Child | None]:
        """Return the outcome, and the child that still holds the candidate where it passed."""
        for attempt in (1, 2):
            child = self._fork()
            try:
                _bind(child, 0, plan, self._timeout_s)
                reply = child.call("validate", self._timeout_s, arm=0, cases=cases)
            except ChildFailedError as error:
                child.close()
                if attempt == 1 and _may_be_bad_luck(error):
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
            _ArmPlan(
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
        return _ProcessBench(self, plans, fresh_process=fresh_process, failed=late)

    def aa_bench(self, keys: Sequence[FeatureKey], num: int) -> tuple[Bench, tuple[Arm, ...]]:
        """Return a bench of ``num`` arms of native against native at screening points of ``keys``, and the arms."""
        arms = tuple(
            Arm(str(key), key.screen_point, NATIVE) for key in (keys[index % len(keys)] for index in range(num))
        )
        return self.bench(arms, {}, keys, fresh_process=True), arms

    # Processes -------------------------------------------------------------------------------------------------------

    def start_session(self, seed: int) -> Child:
        """Start an exec'd session.

        Two are started at once and one is kept for the next call: importing torch takes one core, and nothing is timed
        meanwhile. The spare has nothing to do, and no weights, until its turn.
        """
        self._stop_zygote()  # its copies of the weights and a session's would together take half of the memory
        child, self._spare = self._spare, None
        if child is None:
            child, self._spare = self._spawn("fibc.worker"), self._spawn("fibc.worker")
            self._set_up(self._spare, seed)
        self._set_up(child, seed)
        self._first(child, "start")
        return child

    def fork_session(self, seed: int) -> Child:
        """Fork a session that shares the zygote's weights."""
        child = self._fork()
        child.call("reseed", START_TIMEOUT_S, seed=seed)
        return child

    def known_inner(self, point: Point) -> int | None:
        return self._inner.get(point)

    def keep_inner(self, point: Point, inner: int) -> None:
        self._inner[point] = inner

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    def _spawn(self, module: str) -> Child:
        """Exec a worker, without waiting for it."""
        ours, theirs = Channel.pair()
        log = tempfile.TemporaryFile()  # noqa: SIM115  the Child closes it
        tunables = ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), MALLOC_TUNABLES)))
        try:
            supervised = isolation.start(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                env={**os.environ, "GLIBC_TUNABLES": tunables},
                pass_fds=(theirs.fileno(),),
                stdout=log.fileno(),
                stderr=log.fileno(),
            )
        finally:
            theirs.close()
        return Child(ours, log, _Exec(supervised))

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
            self._zygote = self._spawn("fibc.zygote")
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


def _bind(child: Child, arm: int, plan: _ArmPlan, timeout_s: float) -> None:
    child.call(
        "bind",
        timeout_s,
        arm=arm,
        point=codec.to_plain(plan.point),
        artifact=None if plan.artifact is None else codec.to_plain(plan.artifact),
        deterministic=plan.deterministic,
    )
    child.bound.add(arm)


def _may_be_bad_luck(error: ChildFailedError) -> bool:
    """Return whether a clean process could show another outcome: the child died, and not of its deadline."""
    return not error.alive and error.status is not Status.TIMEOUT


@dataclass
class _ProcessBench:
    """A bench whose sessions are worker processes; see ``measure.Bench``.

    Attributes:
        failed: Arms that failed in an earlier session, or whose outputs had changed at its end.
        pardoned: Arms whose process died once; they were tried again in a clean one, and will not be a second time.
    """

    evaluator: Evaluator
    plans: Sequence[_ArmPlan]
    fresh_process: bool
    failed: dict[int, ArmFailed] = field(default_factory=dict)
    pardoned: set[int] = field(default_factory=set)

    def fail(self, arm: int, status: Status, log: str, *, late: bool = False) -> None:
        """Have every later pair of the arm raise; a ``late`` failure goes with the candidate beyond this bench."""
        self.failed[arm] = ArmFailed(arm, status, log)
        if late:
            self.evaluator.late_failures[self.plans[arm].candidate] = Outcome(status, log, None)

    def session(self, seed: int) -> AbstractContextManager[Session]:
        return _ProcessSession(self, seed, None)

    def start(self, seed: int) -> Child:
        return self.evaluator.start_session(seed) if self.fresh_process else self.evaluator.fork_session(seed)


class _ProcessSession:
    """A session in a worker process that is replaced when an arm kills it; see ``measure.Session``."""

    def __init__(self, bench: _ProcessBench, seed: int, child: Child | None) -> None:
        self._bench = bench
        self._seed = seed
        self._child = child

    def pair(self, candidate: int, native_first: bool) -> tuple[float, float]:
        """Return seconds per call of (native, candidate).

        Raises:
            ArmFailed: If the candidate failed now or earlier.
        """
        bench = self._bench
        plan, evaluator = bench.plans[candidate], bench.evaluator
        while candidate not in bench.failed:
            child = self._running()
            try:
                if candidate not in child.bound:
                    _bind(child, candidate, plan, evaluator.timeout_s)
                native_s, candidate_s, inner = child.call(
                    "pair",
                    evaluator.timeout_s,
                    arm=candidate,
                    native_first=native_first,
                    inner=evaluator.known_inner(plan.point),
                )
            except ChildFailedError as error:
                if _may_be_bad_luck(error) and candidate not in bench.pardoned:
                    bench.pardoned.add(candidate)
                else:
                    bench.fail(candidate, error.status, error.log)
            else:
                evaluator.keep_inner(plan.point, inner)
                return native_s, candidate_s
        raise bench.failed[candidate]

    def close(self) -> None:
        """Check outputs after timing, and end the process."""
        child = self._child
        if child is None:
            return
        try:
            for arm in sorted(child.bound):
                if child.open and arm not in self._bench.failed:
                    self._recheck(child, arm)
        finally:
            child.close()
            self._child = None

    def _recheck(self, child: Child, arm: int) -> None:
        try:
            message = child.call("recheck", self._bench.evaluator.timeout_s, arm=arm)
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
            self._child.close()

    def _running(self) -> Child:
        if self._child is None or not self._child.open:
            if self._child is not None:
                self._child.close()
            self._child = self._bench.start(self._seed)
        return self._child

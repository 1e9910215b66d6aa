"""Isolated evaluation: trials, validations and benches of a definition, in processes that may die."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from fibc import inputs, isolation
from fibc.backends.memory import total_bytes
from fibc.bench import ArmFailed, Bench, Session
from fibc.child import START_TIMEOUT_S, Child, ChildFailedError, may_be_bad_luck
from fibc.errors import EvaluationError, InputError
from fibc.gpu_processes import GpuProcesses
from fibc.process_bench import ArmPlan, Outcome, ProcessBench, ProcessSession, bind, run_sustained
from fibc.processes import CpuProcesses, Processes
from fibc.schema import codec
from fibc.schema.candidate import NATIVE, Artifact, Candidate, Guards
from fibc.schema.decision import SESSION
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Arm, Correctness, Status
from fibc.schema.feature import FeatureKey, Point
from fibc.schema.observed import Observed
from fibc.schema.options import CPU_MODE, MODES
from fibc.schema.silicon import Gpu
from fibc.schema.table import CpuValidity, NativeSource
from fibc.schema.workload import Workload
from fibc.stand_in import HEAVY, recorded_values, stand_in, trial_points
from fibc.sustained import Sustained
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
class _Cases:
    """Cases that the keeper holds under one name."""

    points: tuple[Point, ...]
    kind: str


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
    _session: ProcessSession | None = None

    @property
    def session(self) -> Session:
        """The session; its one arm is 0."""
        if self._session is None:
            raise EvaluationError(f"trial: a session needs a candidate that passed, got {self.status}")
        return self._session

    def dismiss(self) -> None:
        """Check the output after timing no more: the candidate is too slow to be timed again."""
        if self._session is not None:
            self._session.dismiss(0)


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
        silicon: CpuValidity | Gpu,
        harness_path: Path,
        *,
        timeout_s: float,
        seed: int,
        workloads: Iterable[Workload],
        num_threads: int,
        mode: str,
        cache_share_bytes: int | None,
    ) -> None:
        """Prepare; nothing is started. Nothing has a default: an evaluator is made in ``fibc.evaluators``.

        Args:
            silicon: A CPU with the threads of both sides, or a GPU. Either with its last cache.
            harness_path: What ``fibc.codegen.harness`` built.
            timeout_s: For one candidate's validation, and for each of its pairs.
            seed: Of inputs of validations and screens; sessions have their own.
            workloads: Those that points name.
            num_threads: Of workers for a GPU.
            mode: How calls are timed, one of ``schema.options.MODES``; empty: the target's own.
            cache_share_bytes: Of a CPU's last cache, what this machine can use (``fibc.cache_share``); None is all.
        """
        gpu = silicon if isinstance(silicon, Gpu) else None
        ram_bytes = total_bytes() if gpu is None else gpu.validity.memory_bytes
        cache_bytes = silicon.validity.l2_bytes if isinstance(silicon, Gpu) else silicon.l3_bytes
        known = {workload.uuid: workload for workload in workloads}
        num_copies = inputs.num_copies(definition, cache_bytes, ram_bytes, cache_share_bytes)
        keep_bytes = int(ram_bytes * KEEP_FRACTION)
        held_bytes = keep_bytes + num_copies * inputs.cold_bytes(definition)
        self._definition = definition
        self.timeout_s = timeout_s
        self._setup = Setup(
            definition=definition.to_json(),
            native_source=native.source,
            harness_path=str(harness_path),
            workloads={uuid: (workload.to_json(), workload.root) for uuid, workload in known.items()},
            num_threads=num_threads if isinstance(silicon, Gpu) else silicon.num_threads,
            num_copies=num_copies,
            keep_bytes=keep_bytes,
            data_bytes=held_bytes + min(DATA_BYTES, int(ram_bytes * DATA_FRACTION)),
            seed=seed,
            device="cpu" if gpu is None else "cuda",
            mode=mode or (CPU_MODE if gpu is None else MODES[0]),
            gpu=None if gpu is None else codec.to_plain(gpu),
            run_pid=os.getpid(),
        )
        processes = CpuProcesses if gpu is None else GpuProcesses
        self._processes: Processes = processes(definition.name, self._setup)
        self._epoch = self._processes.epoch
        self._recorded = recorded_values(definition, known.values())
        self._heavy = HEAVY[self._setup.device]
        self._prepared: dict[str, _Cases] = {}
        self._held: Point | None = None
        self._passed: dict[tuple[str, Guards, _Cases], Outcome] = {}
        self._survivors: set[tuple[str, int]] = set()
        self._inner: dict[Point, int] = {}
        self._deterministic: dict[str, bool] = {}
        self._native_problems: dict[str, None] = {}
        self.late_failures: dict[str, Outcome] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._processes.stop()

    @property
    def facts(self) -> dict[str, str]:
        """How timings are made, printable, for records."""
        residency = inputs.residency(self._definition)
        on_gpu = self._setup.device == "cuda"
        return {
            "residency": " ".join(f"{name}={where}" for name, where in residency.items()),
            "copies": str(self._setup.num_copies),
            "threads": str(self._setup.num_threads),
            "malloc": MALLOC_TUNABLES,
            "mode": self._setup.mode,
            "session": SESSION,
            "timer": "cuda_event" if on_gpu and self._setup.mode != "eager" else "steady_clock",
        }

    @property
    def setup(self) -> Setup:
        """What workers are told first."""
        return self._setup

    @property
    def observed(self) -> Observed | None:
        """What was seen of the GPU while pairs were timed; None on a CPU. A worker that serves is asked."""
        return self._processes.observed()

    @property
    def started_s(self) -> float:
        """Seconds that starting processes of fresh sessions took so far on a GPU; 0 on a CPU."""
        return self._processes.started_s

    def starting_s(self, num_sessions: int) -> float:
        """Return about how many seconds such starts take for so many more sessions; 0 on a CPU, where they are part of
        a session."""
        return self._processes.starting_s(num_sessions)

    # Checks ----------------------------------------------------------------------------------------------------------

    def reference_check(self, points: Sequence[Point], *, limit_s: float = REFERENCE_TIMEOUT_S) -> tuple[str, ...]:
        """Return what is wrong with the reference at ``points``: it raises, hangs, dies, or returns another form."""
        try:
            problems = self._processes.keeper().call(
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
        with (session := ProcessSession(bench, self._setup.seed, child)):
            yield Trial(outcome.status, outcome.log, outcome.correctness, session)

    def validate(self, candidate: Candidate, artifact: Artifact, key: FeatureKey) -> Outcome:
        """Validate a finalist: dense inputs at every point of the key, every adversarial input and layout at one.

        Adversarial inputs depend on a call's size only as kernels have a few ways through them, and bring large weights
        of their own: they are tried once per binary and power of 16 of the size, at the first key's smallest point, or
        what stands in for it.
        """
        low = min(key.points, key=Point.size)
        light = stand_in(self._definition, low, self._heavy.finalist_terms, self._recorded)
        decade = int(math.log2(light.size())) // 4
        hard = f"adversarial {decade}"
        if (artifact.digest, decade) not in self._survivors:
            known = self._prepared.get(hard)
            self._prepare(hard, known.points if known else (light,), "adversarial")
            outcome = self._judge(candidate, artifact, light, hard)
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
        self._processes.end(child)
        self._judged(plan, outcome)
        late = self.late_failures.get(candidate.digest)
        return outcome if late is None else Outcome(late.status, late.log, outcome.correctness)

    def _judged(self, plan: ArmPlan, outcome: Outcome) -> ArmPlan:
        """Return the plan with what its validation showed, and remember that for later benches."""
        assert outcome.correctness is not None
        self._deterministic[plan.candidate] = outcome.correctness.deterministic
        return replace(plan, deterministic=outcome.correctness.deterministic)

    def _validated(self, plan: ArmPlan, cases: str) -> tuple[Outcome, Child | None]:
        """Return the outcome, and the child that still holds the candidate where it passed.

        A binary that passed the same cases of a trial before, at another key, is not judged on them again.
        """
        assert plan.artifact is not None
        wanted = self._prepared[cases]
        same = plan.artifact.digest, plan.artifact.guards, wanted
        known = None if plan.candidate in self.late_failures else self._passed.get(same)
        for attempt in (1, 2):
            child = self._judge_of(cases, wanted)
            try:
                bind(child, 0, plan, self.timeout_s)
                if known is not None:
                    return known, child
                reply = child.call("validate", self.timeout_s, arm=0, cases=cases)
            except ChildFailedError as error:
                self._processes.condemn(child)
                if attempt == 1 and may_be_bad_luck(error):
                    continue
                return Outcome(error.status, error.log, None), None
            except BaseException:
                self._processes.end(child)
                raise
            judged = codec.from_plain(Validation, reply)
            if judged.status is Status.PASSED:
                outcome = Outcome(Status.PASSED, "", judged.correctness)
                if wanted.kind == "trial":
                    self._passed[same] = outcome
                return outcome, child
            log = "\n".join(filter(None, (judged.message, child.log_tail())))
            self._processes.condemn(child)
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
                its memory layout and the weights' values, or on a GPU the keeper.
        """
        points = {str(key): key.points for key in keys}
        plans = [
            ArmPlan(
                arm.candidate,
                points[arm.key][arm.point],
                None if arm.candidate == NATIVE else artifacts[arm.candidate],
                self._deterministic.get(
                    arm.candidate, arm.candidate != NATIVE and not artifacts[arm.candidate].is_python
                ),
            )
            for arm in arms
        ]
        late = {
            index: ArmFailed(index, failure.status, failure.log)
            for index, failure in enumerate(self.late_failures.get(arm.candidate) for arm in arms)
            if failure is not None
        }
        return ProcessBench(self, plans, fresh_process=fresh_process, failed=late)

    def sustained(self, candidate: str, artifact: Artifact, point: Point) -> Sustained:
        """Run a winner against native in long blocks. Nothing is inferred from them, and no fresh process is spent.

        Raises:
            ArmFailed: If it fails, or its output is another one afterwards.
        """
        plan = ArmPlan(candidate, point, artifact, self._deterministic.get(candidate, True))
        return run_sustained(ProcessBench(self, [plan], fresh_process=False), self._setup.seed)

    def aa_bench(self, keys: Sequence[FeatureKey], num: int) -> tuple[Bench, tuple[Arm, ...]]:
        """Return a bench of ``num`` arms of native against native at screening points of ``keys``, and the arms."""
        arms = tuple(
            Arm(str(key), key.screen_point, NATIVE) for key in (keys[index % len(keys)] for index in range(num))
        )
        return self.bench(arms, {}, keys, fresh_process=True), arms

    # Host of sessions -------------------------------------------------------------------------------------------------

    def start_session(self, seed: int, *, fresh_process: bool) -> Child:
        return self._processes.session(seed, fresh=fresh_process)

    def end_session(self, child: Child) -> None:
        self._processes.end(child)

    def known_inner(self, point: Point) -> int | None:
        return self._inner.get(point)

    def keep_inner(self, point: Point, inner: int) -> None:
        self._inner[point] = inner

    # Cases -----------------------------------------------------------------------------------------------------------

    def _prepare_trial(self, key: FeatureKey) -> None:
        """Have the keeper hold the key's trial cases, and the inputs for timing its screening point."""
        screened = key.points[key.screen_point]
        points = trial_points(self._definition, key.points, screened, self._heavy.trial_terms, self._recorded)
        self._prepare("trial", points, "trial")
        if self._held != screened:
            self._processes.keeper().call("hold", START_TIMEOUT_S, point=codec.to_plain(screened))
            self._held = screened

    def _prepare(self, name: str, points: Sequence[Point], kind: str) -> bool:
        """Have the keeper hold the cases ``name`` of ``points`` in place of earlier ones; False where it has them."""
        keeper = self._keeper()
        wanted = _Cases(tuple(points), kind)
        if self._prepared.get(name) == wanted:
            return False
        self._make(keeper, name, wanted)
        return True

    def _keeper(self) -> Child:
        """Return the keeper, with what was prepared of it: a new one has nothing."""
        keeper = self._processes.keeper()
        if self._epoch != self._processes.epoch:
            self._prepared.clear()
            self._held = None
            self._epoch = self._processes.epoch
        return keeper

    def _judge_of(self, cases: str, wanted: _Cases) -> Child:
        """Return a judge that has the cases ``cases``, made again where the keeper was lost."""
        keeper = self._keeper()
        if self._prepared.get(cases) != wanted:
            self._make(keeper, cases, wanted)
        return self._processes.judge()

    def _make(self, keeper: Child, name: str, wanted: _Cases) -> None:
        points = wanted.points
        low = min(range(len(points)), key=lambda index: points[index].size())
        try:
            natives = keeper.call(
                "prepare",
                REFERENCE_TIMEOUT_S * 2,
                name=name,
                points=[codec.to_plain(point) for point in points],
                low=low,
                kind=wanted.kind,
                limit_s=REFERENCE_TIMEOUT_S,
            )
        except ChildFailedError as error:
            raise InputError(f"{self._definition.name}: reference: {error.log}") from error
        self._prepared[name] = wanted
        for native in natives:
            if native["status"] != Status.PASSED:
                self._native_problems[f"native: {native['case']} at {native['point']}: {native['message']}"] = None

"""A simulated backend and evaluator: the pipeline runs on true speedups that a test states, on no machine's noise."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest
from worlds import SimulatedBench, World

import fibc.evaluators
import fibc.task
from fibc.backends.base import BuildFailure, Mismatch
from fibc.measure import Bench, Session
from fibc.process_bench import Outcome
from fibc.schema.candidate import NATIVE, Artifact, Candidate, ConfigValue, Guards, Target, TensorGuard
from fibc.schema.definition import Definition
from fibc.schema.digest import digest_json
from fibc.schema.evaluation import Arm, Correctness, Status
from fibc.schema.feature import FeatureKey, Point
from fibc.schema.observed import Observed
from fibc.schema.space import Space, Tunable
from fibc.sustained import Sustained

BLOCKS = (1, 2, 3, 4, 5, 6)

QUIET = World("quiet", jitter=0.003, drift=0.0, outliers=0.0)

REFERENCE = "def run(x, weight):\n    return x * weight\n"


def write_definition(directory: Path, sizes: Sequence[int], reference: str = REFERENCE) -> Path:
    """Write a definition named ``toy`` with one workload per size; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "toy.json"
    tensor = {"dtype": "float32"}
    path.write_text(
        json.dumps(
            {
                "name": "toy",
                "op_type": "toy",
                "axes": {"rows": {"type": "var"}, "hidden": {"type": "const", "value": 8}},
                "inputs": {"x": {"shape": ["rows", "hidden"], **tensor}, "weight": {"shape": ["hidden"], **tensor}},
                "outputs": {"y": {"shape": ["rows", "hidden"], **tensor}},
                "reference": reference,
            }
        )
    )
    lines = [
        {
            "definition": "toy",
            "solution": None,
            "workload": {
                "uuid": f"w{size}",
                "axes": {"rows": size},
                "inputs": {"x": {"type": "random"}, "weight": {"type": "random"}},
            },
            "evaluation": None,
        }
        for size in sizes
    ]
    path.with_suffix(".workloads.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@dataclass
class Machine:
    """What is true, and what was asked of it.

    Attributes:
        speedup: True native / candidate latency of a config's block at a number of rows.
        statuses: What validating a block ends with, where that is not PASSED.
        unbuildable: Blocks that do not compile.
        twins: Blocks with the object code of another block.
        gate_bias: True speedup of native against itself, as a biased host shows it.
        interrupt_after: Ctrl-C comes with this validation.
        observed: What is seen of a GPU.
        alone: Speedup of a block that runs alone for long, where it is not 1.1.
        log: Of a validation that fails.
        asked: Counts of what was done.
    """

    directory: Path
    speedup: Callable[[int, int], float]
    statuses: Mapping[int, Status] = field(default_factory=dict)
    unbuildable: frozenset[int] = frozenset()
    twins: Mapping[int, int] = field(default_factory=dict)
    gate_bias: float = 1.0
    interrupt_after: int | None = None
    observed: Observed | None = None
    alone: Mapping[int, float] = field(default_factory=dict)
    log: str = "boom"
    asked: Counter[str] = field(default_factory=Counter)
    tried: Counter[tuple[str, int]] = field(default_factory=Counter)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the pipeline find this machine instead of the real one."""
        monkeypatch.setattr(fibc.task, "make_backends", lambda *_: (SimulatedBackend(self),))
        monkeypatch.setattr(
            fibc.evaluators, "Evaluator", lambda definition, *_, **__: SimulatedEvaluator(self, definition)
        )
        monkeypatch.setattr("fibc.codegen.harness.build", lambda _: self.directory / "no-harness")
        monkeypatch.setattr("fibc.cache_share.find", lambda *_: None)  # two seconds of reading the real one's memory


def block_of(candidate: Candidate) -> int:
    value = dict(candidate.config)["block"]
    assert isinstance(value, int)
    return value


class SimulatedBackend:
    """One template with one tunable; an object is a kernel that declines every call."""

    name = "cpu"
    target = Target("cpu", "avx2")

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def fingerprint(self, definition: Definition) -> str:
        return definition.digest

    def spaces(self, definition: Definition, key: FeatureKey) -> tuple[tuple[Space, ...], tuple[Mismatch, ...]]:
        space = Space("toy/kernel", (Tunable("block", BLOCKS),), (), {})
        return (space,), (Mismatch("toy/other", "serves op_type other, the definition is toy"),)

    def candidate(self, definition: Definition, template: str, config: Mapping[str, ConfigValue]) -> Candidate:
        block = config["block"]
        return Candidate("cpu", template, (("block", block),), digest_json([definition.digest, block]), self.target)

    def build(
        self, definition: Definition, candidates: Sequence[Candidate], *, timeout_s: float, jobs: int
    ) -> dict[str, Artifact | BuildFailure]:
        return {candidate.digest: self._build(candidate) for candidate in candidates}

    def _build(self, candidate: Candidate) -> Artifact | BuildFailure:
        block = block_of(candidate)
        if block in self._machine.unbuildable:
            return BuildFailure(timed_out=False, log="error: no such instruction")
        self._machine.asked["built"] += 1
        symbol = f"fibc_{candidate.digest}"
        target = self._machine.directory / f"{symbol}.o"
        if not target.exists():
            source = f"int {symbol}(const void* call) {{ (void)call; return 1; }}"
            command = ["gcc", "-x", "c", "-fPIC", "-c", "-o", str(target), "-"]
            subprocess.run(command, input=source.encode(), check=True)
        guard = TensorGuard()
        code = digest_json(self._machine.twins.get(block, block))
        return Artifact(code, str(target), str(target), symbol, 1, "// toy", Guards((guard, guard), (guard,)))


@dataclass
class _Trial:
    status: Status
    log: str
    correctness: Correctness | None
    session: Session

    def dismiss(self) -> None:
        """Outputs are not checked in any case."""


class SimulatedEvaluator:
    """Answers for the machine; sessions are simulated."""

    facts: Mapping[str, str] = {
        "residency": "x=hot weight=hot",
        "mode": "eager",
        "timer": "steady_clock",
        "threads": "2",
    }
    started_s = 0.0

    def __init__(self, machine: Machine, definition: Definition) -> None:
        self._machine = machine
        self._seeds = itertools.count()
        self.late_failures: dict[str, Outcome] = {}
        self.setup = None
        self.observed: Observed | None = machine.observed
        backend = SimulatedBackend(machine)
        every = [backend.candidate(definition, "toy/kernel", {"block": block}) for block in BLOCKS]
        self._blocks = {candidate.digest: block_of(candidate) for candidate in every}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def starting_s(self, num_sessions: int) -> float:
        return 0.0

    def reference_check(self, points: Sequence[Point], *, limit_s: float) -> tuple[str, ...]:
        return ()

    def native_check(self, keys: Sequence[FeatureKey]) -> tuple[str, ...]:
        return ()

    @contextlib.contextmanager
    def trial(self, candidate: Candidate, artifact: Artifact, key: FeatureKey) -> Iterator[_Trial]:
        machine, block = self._machine, block_of(candidate)
        self._blocks[candidate.digest] = block  # also of a backend that a test made
        machine.asked["trials"] += 1
        machine.tried[str(key), block] += 1
        if machine.asked["trials"] == machine.interrupt_after:
            raise KeyboardInterrupt
        status = machine.statuses.get(block, Status.PASSED)
        arm = Arm(str(key), key.screen_point, candidate.digest)
        with self._bench([arm], [key]).session(0) as session:
            yield _Trial(status, "" if status is Status.PASSED else machine.log, None, session)

    def validate(self, candidate: Candidate, artifact: Artifact, key: FeatureKey) -> Outcome:
        self._machine.asked["validations"] += 1
        return Outcome(Status.PASSED, "", Correctness(0.0, 0.0, 0.0, True, 1))

    def sustained(self, candidate: str, artifact: Artifact, point: Point) -> Sustained:
        self._machine.asked["sustained"] += 1
        speedup = self._machine.alone.get(self._blocks[candidate], 1.1)
        return Sustained((speedup, speedup), (1.0, 1.0))

    def bench(
        self,
        arms: Sequence[Arm],
        artifacts: Mapping[str, Artifact],
        keys: Sequence[FeatureKey],
        *,
        fresh_process: bool,
    ) -> Bench:
        self._machine.asked["benches"] += 1
        assert set(artifacts) >= {arm.candidate for arm in arms}
        return self._bench(arms, keys)

    def aa_bench(self, keys: Sequence[FeatureKey], num: int) -> tuple[Bench, tuple[Arm, ...]]:
        arms = tuple(Arm(str(keys[0]), 0, NATIVE) for _ in range(num))
        bias = [self._machine.gate_bias] * num
        return SimulatedBench(QUIET, arms, bias, next(self._seeds)), arms

    def _bench(self, arms: Sequence[Arm], keys: Sequence[FeatureKey]) -> SimulatedBench:
        points = {str(key): key.points for key in keys}
        speedups = [
            self._machine.speedup(self._blocks[arm.candidate], points[arm.key][arm.point].axes[0][1]) for arm in arms
        ]
        return SimulatedBench(QUIET, arms, speedups, next(self._seeds))

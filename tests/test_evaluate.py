"""A candidate that misbehaves costs itself only: it is judged, blamed and recorded, and the evaluator goes on."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fibc import supervisor
from fibc.child import Child
from fibc.errors import EvaluationError, InputError
from fibc.evaluate import Evaluator
from fibc.measure import ArmFailed
from fibc.schema.candidate import NATIVE, Artifact, Candidate, Guards, Target, TensorGuard
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Arm, Status
from fibc.schema.feature import Cell, FeatureKey, Point
from fibc.schema.table import CpuValidity, NativeSource
from fibc.stand_in import Heavy

HERE = Path(__file__).parent
INCLUDE = HERE.parent / "csrc" / "include"
VALIDITY = CpuValidity("test", ("avx2",), 1 << 20, 1 << 20, 2)


def definition(reference: str) -> Definition:
    return Definition.model_validate(
        {
            "name": "doubled",
            "op_type": "elementwise",
            "axes": {"rows": {"type": "var"}, "columns": {"type": "const", "value": 64}},
            "inputs": {"x": {"shape": ["rows", "columns"], "dtype": "float32"}},
            "outputs": {"y": {"shape": ["rows", "columns"], "dtype": "float32"}},
            "reference": reference,
        }
    )


def point(rows: int) -> Point:
    return Point((("rows", rows),), "tune")


KEY = FeatureKey(Cell(((3, 9),)), (point(3), point(9)), 1, False)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "hostile.so"
    source = HERE / "hostile.c"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", f"-I{INCLUDE}", source, "-o", path], check=True)
    return path


def artifact(library: Path, symbol: str, guard: TensorGuard | None = None) -> Artifact:
    guards = Guards((guard or TensorGuard(),), (TensorGuard(),))
    return Artifact(symbol, "", str(library), symbol, 1, "", guards)


def candidate(symbol: str) -> Candidate:
    return Candidate("cpu", f"hostile/{symbol}", (), symbol, Target("cpu", "avx2"))


REFERENCE = "def run(x):\n    return x + x\n"
NATIVE_SOURCE = "def call(x):\n    return x + x\n"


def evaluator(*, timeout_s: float = 30.0, reference: str = REFERENCE, native: str = NATIVE_SOURCE) -> Evaluator:
    return Evaluator(
        definition(reference),
        NativeSource("x + x", native, "option", "digest"),
        VALIDITY,
        HERE / "standin_harness.py",
        timeout_s=timeout_s,
        seed=1,
        workloads=(),
        num_threads=1,
        mode="",
        cache_share_bytes=None,
    )


@pytest.fixture(scope="module")
def shared() -> Iterator[Evaluator]:
    """One zygote for every candidate: what one does must not touch the next."""
    with evaluator() as running:
        yield running
    assert supervisor.descendants() == []


def test_a_right_candidate_passes_and_can_be_timed(shared: Evaluator, library: Path) -> None:
    with shared.trial(candidate("good"), artifact(library, "good"), KEY) as trial:
        assert trial.status is Status.PASSED, trial.log
        assert trial.log == ""
        assert trial.correctness is not None
        assert trial.correctness.deterministic
        assert trial.correctness.max_bound_ratio == 0.0
        assert trial.correctness.num_cases >= 4
        pairs = [trial.session.pair(0, index % 2 == 0) for index in range(6)]
        for seconds in zip(*pairs, strict=True):  # a call takes microseconds: the fastest of six was not put off
            assert 0.0 < min(seconds) < 0.1


@pytest.mark.parametrize(
    ("symbol", "status", "said"),
    [
        ("segfault", Status.CRASH, "SIGSEGV"),
        ("aborts", Status.CRASH, "SIGABRT"),
        ("exits", Status.RUNTIME_ERROR, "exited with status 3"),
        ("endless", Status.TIMEOUT, "longer than 1 s"),
        ("greedy", Status.RUNTIME_ERROR, "the kernel did nothing"),
        ("zeros", Status.INCORRECT_NUMERICAL, "output y[0, 0]: must be within"),
        ("copied", Status.INCORRECT_NUMERICAL, "output y[0, 0]: must be within"),
        ("half_written", Status.INCORRECT_NUMERICAL, "output y[2, 0]: must be within"),
        ("stale", Status.INCORRECT_NUMERICAL, "must be within"),
        ("past_the_end", Status.INCORRECT_NUMERICAL, "y: bytes outside of the tensor"),
        ("before_the_start", Status.INCORRECT_NUMERICAL, "y: bytes outside of the tensor"),
        ("changes_its_input", Status.INCORRECT_NUMERICAL, "input x: must stay unchanged"),
    ],
)
def test_a_hostile_candidate_fails_alone_and_says_how(
    shared: Evaluator,
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    symbol: str,
    status: Status,
    said: str,
) -> None:
    if status is Status.TIMEOUT:
        monkeypatch.setattr(shared, "timeout_s", 1.0)
    with shared.trial(candidate(symbol), artifact(library, symbol), KEY) as trial:
        assert trial.status is status, trial.log
        assert said in trial.log
        with pytest.raises(EvaluationError, match="needs a candidate that passed"):
            _ = trial.session
    monkeypatch.undo()
    with shared.trial(candidate("good"), artifact(library, "good"), KEY) as trial:
        assert trial.status is Status.PASSED, trial.log


def test_a_binary_that_passed_the_same_cases_at_another_key_is_not_judged_again(
    shared: Evaluator, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_heavy", Heavy(1 << 40, 64 * 1024 * 40))  # 40 rows are heavy
    asked: list[str] = []
    call = Child.call

    def counted(child: Child, op: str, timeout_s: float, **arguments: Any) -> Any:
        asked.append(op)
        return call(child, op, timeout_s, **arguments)

    monkeypatch.setattr(Child, "call", counted)
    seen = []
    for rows in (65, 129, 257):
        key = FeatureKey(Cell(((rows, rows + 63),)), (point(rows), point(rows + 63)), 1, False)
        asked.clear()
        with shared.trial(candidate("good"), artifact(library, "good"), key) as trial:
            assert trial.status is Status.PASSED, trial.log
            assert min(trial.session.pair(0, True)) > 0.0
        seen.append((asked.count("validate"), asked.count("prepare"), asked.count("hold"), trial.correctness))
    assert [item[:3] for item in seen] == [(1, 1, 1), (0, 0, 1), (0, 0, 1)]
    assert seen[0][3] == seen[1][3] == seen[2][3]


def test_a_candidate_without_its_symbol_is_a_runtime_error(shared: Evaluator, library: Path) -> None:
    with shared.trial(candidate("missing"), artifact(library, "missing"), KEY) as trial:
        assert trial.status is Status.RUNTIME_ERROR
        assert "missing" in trial.log


def test_a_candidate_whose_repeats_differ_in_a_bit_passes_and_is_marked(shared: Evaluator, library: Path) -> None:
    with shared.trial(candidate("non_deterministic"), artifact(library, "non_deterministic"), KEY) as trial:
        assert trial.status is Status.PASSED, trial.log
        assert trial.correctness is not None
        assert not trial.correctness.deterministic
        assert 0.0 < trial.correctness.max_bound_ratio < 1.0


def test_processes_that_a_candidate_leaves_behind_are_killed(shared: Evaluator, library: Path) -> None:
    with shared.trial(candidate("good"), artifact(library, "good"), KEY) as trial:
        assert trial.status is Status.PASSED
    before = set(supervisor.descendants())
    with shared.trial(candidate("leaves_a_child"), artifact(library, "leaves_a_child"), KEY) as trial:
        assert trial.status is Status.PASSED, trial.log
        assert len(set(supervisor.descendants()) - before) > 1
    assert set(supervisor.descendants()) == before


def test_a_candidate_is_not_blamed_for_dying_once(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIBC_TEST_MARK", str(tmp_path / "died"))
    with evaluator() as fresh, fresh.trial(candidate("unlucky"), artifact(library, "unlucky"), KEY) as trial:
        assert trial.status is Status.PASSED, trial.log
    assert (tmp_path / "died").exists()


def test_a_guarded_candidate_is_not_given_what_its_guards_refuse(shared: Evaluator, library: Path) -> None:
    """`good` takes rows for contiguous ones: with a guard that lets sliced rows in, it is wrong."""
    with shared.trial(candidate("good"), artifact(library, "good", TensorGuard("rows")), KEY) as trial:
        assert trial.status is Status.INCORRECT_NUMERICAL
        assert "row-sliced" in trial.log


def test_a_finalist_meets_every_adversarial_input_once_and_dense_ones_at_every_point(
    shared: Evaluator, library: Path
) -> None:
    first = shared.validate(candidate("good"), artifact(library, "good"), KEY)
    assert first.status is Status.PASSED, first.log
    assert first.correctness is not None
    assert first.correctness.num_cases == len(KEY.points)
    assert shared.validate(candidate("zeros"), artifact(library, "zeros"), KEY).status is Status.INCORRECT_NUMERICAL


def test_a_session_goes_on_after_an_arm_has_died(
    shared: Evaluator, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    symbols = ("good", "dies_later", "endless")
    arms = [Arm(str(KEY), 1, symbol) for symbol in symbols]
    bench = shared.bench(arms, {symbol: artifact(library, symbol) for symbol in symbols}, [KEY], fresh_process=False)
    with bench.session(5) as session:
        assert all(seconds > 0.0 for seconds in session.pair(0, True))
        with pytest.raises(ArmFailed) as failed:
            for _ in range(200):
                session.pair(1, False)
        assert (failed.value.arm, failed.value.status) == (1, Status.CRASH)
        monkeypatch.setattr(shared, "timeout_s", 1.0)
        with pytest.raises(ArmFailed) as failed:
            session.pair(2, True)
        assert (failed.value.arm, failed.value.status) == (2, Status.TIMEOUT)
        monkeypatch.undo()
        assert all(seconds > 0.0 for seconds in session.pair(0, True))
    with bench.session(6) as session, pytest.raises(ArmFailed):
        session.pair(1, True)


def test_a_trial_that_was_dismissed_is_not_checked_after_its_timing(
    shared: Evaluator, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    call = Child.call

    def counted(child: Child, op: str, timeout_s: float, **arguments: Any) -> Any:
        asked.append(op)
        return call(child, op, timeout_s, **arguments)

    monkeypatch.setattr(Child, "call", counted)
    for dismissed in (False, True):
        with shared.trial(candidate("good"), artifact(library, "good"), KEY) as trial:
            trial.session.pair(0, True)
            if dismissed:
                trial.dismiss()
    assert asked.count("check_outputs") == 1


def test_an_output_that_changed_while_it_was_timed_fails_its_arm(shared: Evaluator, library: Path) -> None:
    built = artifact(library, "wrong_later")
    bench = shared.bench([Arm(str(KEY), 1, "wrong_later")], {"wrong_later": built}, [KEY], fresh_process=False)
    with bench.session(5) as session:
        for _ in range(110):  # at least a call each
            session.pair(0, True)
    again = shared.bench([Arm(str(KEY), 0, "wrong_later")], {"wrong_later": built}, [KEY], fresh_process=False)
    for later in (bench, again):
        with later.session(6) as session, pytest.raises(ArmFailed, match="must be as before it was timed"):
            session.pair(0, True)
    assert set(shared.late_failures) == {"wrong_later"}


def test_exec_sessions_hold_all_arms_and_native_beside_itself(shared: Evaluator, library: Path) -> None:
    arms = [Arm(str(KEY), 0, "good"), Arm(str(KEY), 1, "good"), Arm(str(KEY), 1, NATIVE)]
    bench = shared.bench(arms, {"good": artifact(library, "good")}, [KEY], fresh_process=True)
    with bench.session(7) as session:
        for arm in range(3):
            assert all(seconds > 0.0 for seconds in session.pair(arm, True))
    with bench.session(8) as session:  # in the process that was started beside the first one
        assert all(seconds > 0.0 for seconds in session.pair(0, False))
    assert supervisor.descendants() == []


def test_native_beside_itself_goes_through_the_whole_path(shared: Evaluator) -> None:
    bench, arms = shared.aa_bench([KEY], 3)
    assert [arm.candidate for arm in arms] == [NATIVE] * 3
    with bench.session(1) as session:
        ratios = [math.log(native_s / again_s) for native_s, again_s in (session.pair(arm, True) for arm in range(3))]
    assert all(math.isfinite(ratio) for ratio in ratios)


def test_a_right_reference_and_native_have_no_problems(shared: Evaluator) -> None:
    assert shared.reference_check([point(1), point(5)]) == ()
    assert shared.native_check([KEY]) == ()


REFERENCE_OF_MANY_FAULTS = """
import os


def run(x):
    rows = x.shape[0]
    if rows == 1:
        raise ValueError("no")
    if rows == 2:
        return x[:, 1:]
    if rows == 4:
        return x.double()
    if rows == 5:
        return x, x
    if rows == 6:
        os.abort()
    assert not x.isnan().any(), "never saw a nan"
    return x + x
"""


def test_what_a_reference_does_against_its_contract_is_a_problem_each(library: Path) -> None:
    with evaluator(reference=REFERENCE_OF_MANY_FAULTS) as broken:
        problems = broken.reference_check([point(rows) for rows in (1, 2, 3, 4, 5)])
        said = (
            "raised ValueError: no",
            "got [2, 63]",
            "dtype must be float32, got float64",
            "outputs: must be 1, got 2",
        )
        assert len(problems) == len(said)
        for problem, text in zip(problems, said, strict=True):
            assert problem.startswith("doubled: reference: at rows=")
            assert text in problem
        assert broken.reference_check([point(6)]) == ("doubled: reference: its process died",)
        with (
            pytest.raises(InputError, match="never saw a nan"),
            broken.trial(candidate("good"), artifact(library, "good"), KEY),
        ):
            pass


def test_a_native_outside_of_its_bound_is_reported_and_keeps_serving(library: Path) -> None:
    source = "def call(x):\n    return x * 2.001\n"
    with evaluator(native=source) as off:
        problems = off.native_check([KEY])
        assert problems
        assert all(problem.startswith("native: ") and "must be within" in problem for problem in problems)
        with off.trial(candidate("good"), artifact(library, "good"), KEY) as trial:
            assert trial.status is Status.PASSED, trial.log
            assert all(seconds > 0.0 for seconds in trial.session.pair(0, True))


def test_a_native_that_raises_is_nobodys_candidates_fault(library: Path) -> None:
    source = "def call(x):\n    raise ValueError('native is broken')\n"
    with (
        evaluator(native=source) as off,
        off.trial(candidate("good"), artifact(library, "good"), KEY) as trial,
    ):
        assert trial.status is Status.PASSED
        with pytest.raises(EvaluationError, match="native is broken"):
            trial.session.pair(0, True)


def test_python_source_is_timed_beside_native_like_a_candidate_and_need_not_repeat_bit_by_bit(
    shared: Evaluator,
) -> None:
    source = "import itertools\ncount = itertools.count()\ndef call(x):\n    return x * 2 * (1 + next(count) * 1e-9)\n"
    peers = {
        "peer": Artifact("peer", "", "", "", 0, source, Guards((), ())),
        "wrong": Artifact("wrong", "", "", "", 0, "def call(x):\n    raise ValueError('no')\n", Guards((), ())),
    }
    arms = [Arm(str(KEY), 1, name) for name in peers]
    with shared.bench(arms, peers, [KEY], fresh_process=True).session(3) as session:
        for native_first in (True, False):
            assert min(session.pair(0, native_first)) > 0
        with pytest.raises(ArmFailed, match="no"):
            session.pair(1, True)
    assert "peer" not in shared.late_failures

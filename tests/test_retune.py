"""A night over published tables, on a simulated machine: what is true decides what flips, and nothing else moves."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulation import Machine, write_definition

import fibc
import fibc.evaluators
import fibc.installed
import fibc.retuning
from fibc import measure
from fibc.codegen import generations
from fibc.errors import InputError, SchemaError
from fibc.paths import OutLayout
from fibc.records import RecordLog
from fibc.runtime.package import load, read_table
from fibc.schema.evaluation import Status
from fibc.schema.evidence import Assessment, Estimate
from fibc.schema.observed import Observed
from fibc.schema.retune_options import duration_s
from fibc.schema.silicon import Gpu
from fibc.schema.table import DispatchTable
from fibc.schema.upkeep import RetuneResult

SIZES = (1, 2, 3, 4, 7, 8)


pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    def make(speedup: Callable[[int, int], float]) -> Machine:
        made = Machine(tmp_path, speedup)
        made.install(monkeypatch)
        return made

    return make


@pytest.fixture
def upgrade(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Install another FlashInfer, as far as facts tell."""

    def install(version: str) -> None:
        known = dict(fibc.installed.package_facts())
        monkeypatch.setattr(fibc.installed, "package_facts", lambda: {**known, "flashinfer": version})

    return install


def tune(tmp_path: Path, sizes: tuple[int, ...] = SIZES, **options: Any) -> DispatchTable:
    path = write_definition(tmp_path / "defs", sizes)
    split = options.pop("split", (1.0, 0.0, 0.0))
    result = fibc.tune(path, out=tmp_path / "out", target="cpu", split=split, **options)
    assert result.table is not None
    return result.table


def retune(tmp_path: Path, *, salt: str = "tonight", **options: Any) -> RetuneResult:
    (result,) = fibc.retune(tmp_path / "out", salt=salt, **options)
    return result


def package(tmp_path: Path) -> Path:
    return tmp_path / "out" / "fibc_toy"


def served(tmp_path: Path) -> dict[str, int | None]:
    """Return the block that serves each cell."""
    table = read_table(package(tmp_path))
    blocks = {variant.candidate.digest: dict(variant.candidate.config)["block"] for variant in table.variants}
    return {str(row.cell): blocks.get(row.candidate) for row in table.rows}  # type: ignore[misc]


def num_pairs(tmp_path: Path) -> int:
    """Return the paired timings in the records, the A/A gate left out: it is run once per environment."""
    log = RecordLog(OutLayout(tmp_path / "out").records("toy"), definition="", environment="")
    total = 0
    for record in log.read():
        if record.kind == "evaluation" or (record.kind == "samples" and record.value["stage"] != "gate"):
            total += len(record.value["pairs"])
    return total


def test_a_night_locks_what_it_measures_on_and_times_as_the_tune_did(
    machine: Callable[..., Machine],
    upgrade: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = machine(lambda block, rows: 1.2 if block == 1 else 0.8)
    tune(tmp_path)
    seen: list[tuple[str, bool]] = []
    modes: list[str] = []
    evaluator: Any = vars(fibc.evaluators)["Evaluator"]

    @contextlib.contextmanager
    def lock(gpus: Sequence[Gpu | None], *, wait_s: float, say: Callable[[str], None]) -> Iterator[None]:
        assert list(gpus) == [None]  # of a CPU's environment
        made.asked.clear()
        yield
        seen.append(("measured inside", bool(made.asked["benches"])))
        made.asked.clear()

    def spy(*arguments: Any, mode: str, **options: Any) -> Any:
        modes.append(mode)
        return evaluator(*arguments, **options)

    monkeypatch.setattr(fibc.retuning, "lock_devices", lock)
    monkeypatch.setattr(fibc.evaluators, "Evaluator", spy)
    retune(tmp_path)
    assert (seen, modes) == ([], []), "a night without a change measures nothing"
    upgrade("99")
    retune(tmp_path)
    assert seen == [("measured inside", True)]
    assert not made.asked, "nothing is measured outside"
    assert modes == ["eager"]


# Nothing has changed --------------------------------------------------------------------------------------------------


def test_a_night_without_a_change_measures_nothing(machine: Callable[..., Machine], tmp_path: Path) -> None:
    made = machine(lambda block, rows: 1.2 if block == 1 else 0.8)
    tune(tmp_path)
    made.asked.clear()
    before = generations.generations(package(tmp_path))
    result = retune(tmp_path)
    assert (result.action, result.flips, result.num_pairs) == ("unchanged", (), 0)
    assert not made.asked
    assert generations.generations(package(tmp_path)) == before


def test_a_night_without_a_change_imports_no_torch_and_takes_less_than_five_seconds_of_a_cpu(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    machine(lambda block, rows: 1.2 if block == 1 else 0.8)
    tune(tmp_path)
    program = (
        "import sys, time, fibc\n"
        f"(result,) = fibc.retune({str(tmp_path / 'out')!r})\n"
        "print(result.action, 'torch' in sys.modules, time.process_time())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    action, has_torch, cpu_s = done.stdout.split()
    assert (action, has_torch) == ("unchanged", "False")
    assert float(cpu_s) < 5.0


# An upgrade -----------------------------------------------------------------------------------------------------------

MANY = (*range(1, 9), 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024)
SPEEDUPS = {1: 1.30, 2: 1.26, 3: 1.22, 4: 1.18, 5: 1.14, 6: 0.9}


def test_an_upgrade_that_slows_one_winner_flips_exactly_its_cell_for_a_quarter_of_the_samples(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: SPEEDUPS[block])
    before = tune(tmp_path, MANY, split=(0.6, 0.2, 0.2), trials=16)
    full = num_pairs(tmp_path)
    assert set(served(tmp_path).values()) == {1}
    upgrade("99.0")
    made.speedup = lambda block, rows: 0.8 if block == 1 and 129 <= rows <= 192 else SPEEDUPS[block]
    result = retune(tmp_path)
    assert result.action == "renewed"
    assert [flip.cell for flip in result.flips] == ["129..192"]
    (flip,) = result.flips
    assert flip.then is not None
    assert flip.then.speedup == pytest.approx(1.30, rel=0.02)
    assert flip.now is not None
    assert flip.now.speedup == pytest.approx(0.80, rel=0.02)
    assert flip.shown is not None
    assert flip.shown.speedup == pytest.approx(1.26, rel=0.02)
    assert served(tmp_path) == {cell: 2 if cell == "129..192" else 1 for cell in served(tmp_path)}
    assert result.retuned == ("129..192",)
    assert (result.num_rechecked, result.num_held) == (len(before.rows), len(before.rows) - 1)
    spent = num_pairs(tmp_path) - full
    assert spent == result.num_pairs
    assert spent <= full / 4, f"{spent} of {full} pairs"
    after = read_table(package(tmp_path))
    assert after.environment["flashinfer"] == "99.0"
    assert {item.stage for row in after.rows for item in row.reconfirm} == {"recheck", "reconfirm"}
    assert retune(tmp_path).action == "unchanged"


def test_a_winner_that_nothing_replaces_is_demoted_to_native(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    tune(tmp_path)
    upgrade("99.0")
    made.speedup = lambda block, rows: 0.8 if rows > 4 else 1.3 if block == 1 else 0.8
    result = retune(tmp_path)
    assert [(flip.cell, flip.new) for flip in result.flips] == [("5..8", "native")]
    assert served(tmp_path) == {"1": 1, "2": 1, "3..4": 1, "5..8": None}
    assert "not show" in result.flips[0].why


def test_a_winner_that_fails_validation_now_is_demoted(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from simulation import SimulatedEvaluator, block_of

    from fibc.process_bench import Outcome

    machine(lambda block, rows: {1: 1.3, 2: 1.2}.get(block, 0.8))
    tune(tmp_path)
    upgrade("99.0")

    def validate(self: Any, candidate: Any, artifact: Any, key: Any) -> Outcome:
        wrong = block_of(candidate) == 1
        return Outcome(Status.INCORRECT_NUMERICAL if wrong else Status.PASSED, "wrong" if wrong else "", None)

    monkeypatch.setattr(SimulatedEvaluator, "validate", validate)
    result = retune(tmp_path)
    assert set(served(tmp_path).values()) == {2}
    assert len(result.flips) == 4
    assert all("INCORRECT_NUMERICAL" in flip.why for flip in result.flips)
    assert sessions_of(tmp_path, "recheck") == {}, "what is wrong is not timed"


def test_a_winner_whose_margin_vanished_is_searched_again_and_the_better_one_serves(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: {1: 1.3, 2: 1.2}.get(block, 0.8))
    tune(tmp_path)
    upgrade("99.0")
    made.speedup = lambda block, rows: 1.012 if block == 1 and rows == 2 else {1: 1.3, 2: 1.2}.get(block, 0.8)
    result = retune(tmp_path)
    assert result.retuned == ("2",)
    assert served(tmp_path)["2"] == 2
    assert "no longer 1.02x" in result.flips[0].why


def test_a_margin_that_vanished_at_one_size_of_a_cell_is_enough_to_search_it_again(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: {1: 1.3, 2: 1.2}.get(block, 0.8))
    tune(tmp_path)
    upgrade("99.0")
    made.speedup = lambda block, rows: 1.012 if block == 1 and rows == 4 else {1: 1.3, 2: 1.2}.get(block, 0.8)
    result = retune(tmp_path)
    assert result.retuned == ("3..4",)
    assert served(tmp_path) == {"1": 1, "2": 1, "3..4": 2, "5..8": 1}
    assert "at rows=4 is no longer 1.02x" in result.flips[0].why


def sessions_of(tmp_path: Path, stage: str) -> dict[str, int]:
    """Return how many sessions of ``stage`` each key has in the records."""
    log = RecordLog(OutLayout(tmp_path / "out").records("toy"), definition="", environment="")
    found: dict[str, set[int]] = {}
    for record in log.read():
        if record.kind == "samples" and record.value["stage"] == stage:
            found.setdefault(record.value["arm"]["key"], set()).add(record.value["seed"])
    return {key: len(seeds) for key, seeds in found.items()}


def test_four_sessions_do_for_a_clear_winner_and_one_within_noise_of_the_margin_gets_eight_more(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    tune(tmp_path)
    upgrade("99.0")
    made.speedup = lambda block, rows: (1.0208 if rows == 2 else 1.3) if block == 1 else 0.8
    first: list[Estimate | None] = []
    assess = measure.assess

    def spy(*arguments: Any, **options: Any) -> Assessment:
        seen = assess(*arguments, **options)
        first.extend(seen.of("2"))
        return seen

    monkeypatch.setattr(measure, "assess", spy)
    retune(tmp_path)
    doubtful = first[0]
    assert doubtful is not None
    assert (len(doubtful.effects), doubtful.mean > math.log(1.02) > doubtful.lower) == (4, True), doubtful
    assert sessions_of(tmp_path, "recheck") == {"1": 4, "2": 4 + 8, "3..4": 4, "5..8": 4}


def test_serving_kernels_are_the_bytes_that_were_published(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path
) -> None:
    from fibc.published import find_published

    made = machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    first = tune(tmp_path)
    made.asked.clear()
    upgrade("99.0")
    retune(tmp_path)
    assert made.asked["built"] == 0
    assert made.asked["trials"] == 0
    records = OutLayout(tmp_path / "out").records("toy")
    before, after = find_published(records, first), find_published(records, read_table(package(tmp_path)))
    assert before is not None
    assert after is not None
    assert after.kernels == before.kernels
    assert after.table.variants == before.table.variants


def test_tuning_after_a_night_has_nothing_to_do(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    tune(tmp_path)
    upgrade("99.0")
    retune(tmp_path)
    made.asked.clear()
    path = write_definition(tmp_path / "defs", SIZES)
    assert fibc.tune(path, out=tmp_path / "out", target="cpu", split=(1.0, 0.0, 0.0)).up_to_date
    assert not made.asked


def test_a_search_after_an_upgrade_begins_with_what_was_best_before(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.3 if block == 5 else 0.8)
    made.unbuildable = frozenset({2})
    tune(tmp_path, sizes=(1,))
    made.tried.clear()
    upgrade("99.0")
    path = write_definition(tmp_path / "defs", (1,))
    result = fibc.tune(path, out=tmp_path / "out", target="cpu", split=(1.0, 0.0, 0.0), trials=1)
    assert made.tried == {("1", 5): 1}, "the best of the old environment is tried first, and measured anew"
    assert result.table is not None
    assert len(result.table.variants) == 1


def test_a_night_of_one_salt_sees_the_same_again_and_without_one_the_generation_is_it(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fibc.recheck import Recheck, recheck

    machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    tune(tmp_path)
    upgrade("99.0")
    seen: list[tuple[str, Recheck]] = []

    def spy(shop: Any, rows: Any, salt: str, others: Any) -> Recheck:
        seen.append((salt, recheck(shop, rows, salt, others)))
        return seen[-1][1]

    monkeypatch.setattr(fibc.retuning, "recheck", spy)
    for salt in ("one", "one", "other", ""):
        retune(tmp_path, salt=salt, check=True)
    generation = (package(tmp_path) / "current").resolve().name
    assert [salt for salt, _ in seen] == ["one", "one", "other", generation]
    first, again, other, _ = (checked.rows for _, checked in seen)
    assert first == again
    assert first != other


# Reasons --------------------------------------------------------------------------------------------------------------


def test_old_evidence_is_shown_again(machine: Callable[..., Machine], tmp_path: Path) -> None:
    made = machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    tune(tmp_path)
    made.speedup = lambda block, rows: 1.3 if block == 3 else 0.8
    result = retune(tmp_path, max_age_s=0.0)
    assert "days ago" in result.reasons[0]
    assert len(result.flips) == 4
    assert set(served(tmp_path).values()) == {3}, "what an earlier search had seen was measured anew"


def test_check_measures_and_changes_nothing(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    tune(tmp_path)
    upgrade("99.0")
    made.speedup = lambda block, rows: 0.8 if rows == 1 else 1.3 if block == 1 else 0.8
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    result = retune(tmp_path, check=True)
    assert result.action == "checked"
    assert [(flip.cell, flip.new) for flip in result.flips] == [("1", "")]
    assert result.num_pairs > 0
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_a_forced_cell_is_searched_and_the_others_are_left_alone(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    before = tune(tmp_path)
    made.tried.clear()
    made.speedup = lambda block, rows: 1.4 if block == 4 else 0.8
    result = retune(tmp_path, force=("3..4",))
    assert result.num_rechecked == 0
    assert {key for key, _ in made.tried} <= {"3..4"}
    assert result.retuned == ("3..4",)
    after = read_table(package(tmp_path))
    assert [row for row in after.rows if str(row.cell) != "3..4"] == [
        row for row in before.rows if str(row.cell) != "3..4"
    ]
    assert after.shown == before.created, "the others were not shown again"
    with pytest.raises(AssertionError, match=r"accepted: 1, 2, 3\.\.4, 5\.\.8"):
        failed = retune(tmp_path, force=("9",))
        raise AssertionError(failed.reasons[0])


def test_more_workloads_extend_the_table_and_leave_the_rest(machine: Callable[..., Machine], tmp_path: Path) -> None:
    made = machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    before = tune(tmp_path)
    made.tried.clear()
    more = write_definition(tmp_path / "more", (16, 30)).with_suffix(".workloads.jsonl")
    result = retune(tmp_path, workloads=str(more))
    assert result.retuned == ("9..16", "17..30")
    assert {key for key, _ in made.tried} == {"9..16", "17..30"}
    after = read_table(package(tmp_path))
    assert after.rows[:4] == before.rows
    assert served(tmp_path) == {"1": 1, "2": 1, "3..4": 1, "5..8": 1, "9..16": 1, "17..30": 1}
    assert load(package(tmp_path)).table()["regions"][0]["cell"]["bounds"] == [[1, 30]]


def stats_file(path: Path, calls: int, outside: int) -> str:
    native = {"region": outside, "grad": 1}
    path.write_text(json.dumps({"calls": calls, "hits": {}, "empty": 0, "raised": 0, "native": native}))
    return str(path)


def test_calls_outside_regions_that_rose_by_five_points_call_for_a_night(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    tune(tmp_path)
    few = [stats_file(tmp_path / "a.json", 100, 4), stats_file(tmp_path / "b.json", 100, 5)]
    assert retune(tmp_path, stats=tuple(few)).action == "unchanged", "4.5 % of all"
    many = (stats_file(tmp_path / "c.json", 100, 6), stats_file(tmp_path / "d.json", 100, 4))
    result = retune(tmp_path, stats=many)
    assert result.action == "renewed"
    assert "5.0% of 200 calls are outside all regions, 0.0% before" in result.reasons[0]
    assert retune(tmp_path, stats=many).action == "unchanged", "that is what is usual now"
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(SchemaError, match=r"--stats .*bad\.json"):
        retune(tmp_path, stats=(str(tmp_path / "bad.json"),))


def test_time_that_runs_out_demotes_nothing_and_the_next_night_goes_on(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    before = tune(tmp_path)
    upgrade("99.0")
    result = retune(tmp_path, budget_s=1e-6)
    assert len(result.unchecked) == 4
    assert not result.flips
    after = read_table(package(tmp_path))
    assert after.rows == before.rows
    assert after.environment == before.environment, "so that the change is still seen"
    made.asked.clear()
    assert retune(tmp_path).num_rechecked == 4


def test_a_package_that_fails_does_not_end_the_night_of_the_others(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path
) -> None:
    machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    tune(tmp_path)
    broken = tmp_path / "out" / "fibc_broken"
    broken.mkdir()
    (broken / "__init__.py").touch()
    upgrade("99.0")
    results = fibc.retune(tmp_path / "out", salt="tonight")
    assert [(item.definition, item.action) for item in results] == [("broken", "failed"), ("toy", "renewed")]


def test_a_table_of_other_silicon_is_left_alone(
    machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fibc.watch
    from fibc.environment import detect

    machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    tune(tmp_path)
    monkeypatch.setattr(fibc.watch, "detect", lambda *_: replace(detect(1), model="another CPU"))
    result = retune(tmp_path)
    assert result.action == "failed"
    assert "other silicon" in result.reasons[0]
    assert "another CPU" in result.reasons[0]


def test_another_number_of_threads_is_no_reason_to_publish_evidence_of_it(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fibc.task
    from fibc.environment import detect

    machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    table = tune(tmp_path)
    upgrade("99.0")
    monkeypatch.setattr(fibc.task, "detect", lambda **_: detect(77))
    result = retune(tmp_path)
    assert result.action == "failed"
    assert "-> 77" in result.reasons[0]
    assert "OMP_NUM_THREADS" in result.reasons[0]
    assert read_table(package(tmp_path)) == table


# What a night leaves --------------------------------------------------------------------------------------------------


def test_a_night_keeps_how_it_went_and_reports_show_it(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path
) -> None:
    seen = Observed(40, 2, {"an XID event (79)": 1})
    made = machine(lambda block, rows: {1: 1.3, 2: 1.2}.get(block, 0.8))
    before = tune(tmp_path)
    (tuned,) = fibc.report(tmp_path / "out").tables
    assert tuned.run is not None
    assert (tuned.run.kind, tuned.run.reasons, tuned.run.observed) == ("tune", (), "")
    upgrade("99.0")
    made.observed = seen
    made.speedup = lambda block, rows: 0.8 if block == 1 and rows == 1 else {1: 1.3, 2: 1.2}.get(block, 0.8)
    night = retune(tmp_path)
    (report,) = fibc.report(tmp_path / "out").tables
    assert report.run is not None
    assert report.run.kind == "retune"
    assert report.run.reasons == ("flashinfer: not installed -> 99.0",)
    assert report.run.observed == str(seen) == str(night.observed)
    assert report.run.devices == night.devices == tuned.run.devices
    assert len(night.devices) == 1
    assert (report.run.seed, night.seed) == (0, 0)
    assert report.run.environment == {}, "the table is shown in the environment of the night"
    assert report.environment["flashinfer"] == "99.0"
    assert list(report.cost.stages) == list(night.stage_s) == ["check", "recheck", "search", "prove", "publish"]
    assert report.sets == tuned.sets
    assert sum(number for stage, number in report.cost.num_pairs.items() if stage != "gate") == night.num_pairs
    assert set(report.cost.num_pairs) >= {"recheck", "confirm", "reconfirm", "trial"}
    assert 0 < report.run.num_trials < tuned.run.num_trials
    searched = {search.key: len(search.trials) for search in report.searches}
    assert sorted(searched) == sorted(str(row.cell) for row in before.rows), "the others keep what they had"
    assert [point.runner_up.split(" ")[0] for point in report.latencies if point.cell != "1"] == [
        point.runner_up.split(" ")[0] for point in tuned.latencies if point.cell != "1"
    ], "runners-up are known from the tune's sessions"
    (state,) = fibc.status(tmp_path / "out")
    assert state.run is not None
    assert (state.run.kind, state.run.num_pairs) == ("retune", sum(report.cost.num_pairs.values()))
    assert str(state.run).endswith(f"; {seen}")
    fibc.rollback(tmp_path / "out")
    (state,) = fibc.status(tmp_path / "out")
    assert state.run is not None
    assert state.run.kind == "tune"


def test_nights_whose_tables_differ_by_their_evidence_alone_are_told_apart(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    tune(tmp_path)
    seeds = []
    for number in range(2):
        generation = retune(tmp_path, max_age_s=0.0).generation
        (report,) = fibc.report(package(tmp_path) / generation).tables
        assert report.run is not None
        assert set(report.cost.num_pairs) <= {"gate", "recheck"}
        seeds.append((number, report.run.reasons))
    assert all("days ago" in reasons[0] for _, reasons in seeds)


def test_a_night_carries_on_the_test_set_of_cells_that_keep_their_variant(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: {1: 1.3, 2: 1.2}.get(block, 0.8))
    tune(tmp_path, tuple(range(1, 17)), split=(0.5, 0.0, 0.5))
    (tuned,) = fibc.report(tmp_path / "out").tables
    assert tuned.test is not None
    upgrade("99.0")
    made.speedup = lambda block, rows: 0.8 if block == 1 and 5 <= rows <= 8 else {1: 1.3, 2: 1.2}.get(block, 0.8)
    assert [flip.cell for flip in retune(tmp_path).flips] == ["5..8"]
    (report,) = fibc.report(tmp_path / "out").tables
    assert report.test is not None
    kept = [item for item in tuned.test.measured if not 5 <= int(item.point.split("=")[1].split()[0]) <= 8]
    assert 0 < len(kept) < len(tuned.test.measured)
    assert list(report.test.measured) == kept


# Generations ----------------------------------------------------------------------------------------------------------


def test_going_back_is_one_step_and_a_process_that_imported_goes_on(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path
) -> None:
    import torch

    made = machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    first = tune(tmp_path)
    old = load(package(tmp_path))
    upgrade("99.0")
    made.speedup = lambda block, rows: 1.3 if block == 2 else 0.8
    retune(tmp_path)
    second = read_table(package(tmp_path))
    x, weight = torch.randn(2, 8), torch.randn(8)
    torch.testing.assert_close(old.run(x, weight), x * weight)
    (state,) = fibc.status(tmp_path / "out")
    assert len(state.earlier) == 1
    ((name, generation),) = fibc.rollback(tmp_path / "out")
    assert name == "toy"
    assert generation.serving
    assert read_table(package(tmp_path)) == first
    torch.testing.assert_close(load(package(tmp_path)).run(x, weight), x * weight)
    (state,) = fibc.status(tmp_path / "out")
    assert (len(state.earlier), len(state.later)) == (0, 1)
    with pytest.raises(InputError, match="no generation before"):
        fibc.rollback(tmp_path / "out")
    fibc.rollback(tmp_path / "out", to=state.later[0])
    assert read_table(package(tmp_path)) == second
    ((_, removed),) = fibc.gc(tmp_path / "out", keep=1)
    assert removed == (), "the one before the serving one stays, for who has read the link"
    torch.testing.assert_close(old.run(x, weight), x * weight)


def test_packages_go_back_together_or_not_at_all(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    first = tune(tmp_path)
    young = tmp_path / "out" / "fibc_toy_young"
    shutil.copytree(package(tmp_path), young, symlinks=True)
    upgrade("99.0")
    made.speedup = lambda block, rows: 1.3 if block == 2 else 0.8
    fibc.retune(package(tmp_path))
    second = read_table(package(tmp_path))
    with pytest.raises(InputError, match="fibc_toy_young: has no generation before"):
        fibc.rollback(tmp_path / "out")
    assert read_table(package(tmp_path)) == second
    shutil.rmtree(young)
    fibc.rollback(tmp_path / "out")
    assert read_table(package(tmp_path)) == first


def test_a_night_after_going_back_starts_from_what_serves(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    tune(tmp_path)
    upgrade("98.0")
    made.speedup = lambda block, rows: 1.3 if block == 2 else 0.8
    retune(tmp_path)
    fibc.rollback(tmp_path / "out")
    made.speedup = lambda block, rows: 1.3 if block in (1, 2) else 0.8
    result = retune(tmp_path)
    assert result.num_held == 4
    assert set(served(tmp_path).values()) == {1}


def test_the_state_of_a_package_says_what_differs(
    machine: Callable[..., Machine], upgrade: Callable[[str], None], tmp_path: Path
) -> None:
    machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    tune(tmp_path)
    (state,) = fibc.status(tmp_path / "out")
    assert (state.match, state.num_replaced, state.num_cells, state.partial) == ("same", 4, 4, False)
    assert state.generation == (package(tmp_path) / "current").resolve().name
    assert 0 <= state.age_s < 600
    upgrade("99.0")
    (state,) = fibc.status(tmp_path / "out")
    assert state.match == "changed"
    assert str(state.differences[0]) == "flashinfer: not installed -> 99.0"
    with pytest.raises(InputError, match="found none"):
        fibc.status(tmp_path / "defs")
    (next((package(tmp_path) / "current").resolve().glob("table.msgpack"))).write_bytes(b"torn")
    (state,) = fibc.status(tmp_path / "out")
    assert state.match == "unreadable"
    assert retune(tmp_path).action == "failed"


def test_durations_have_units() -> None:
    assert [duration_s(text, "--max-age") for text in ("90", "90s", "30m", "12h", "7d", "1.5h")] == [
        90.0,
        90.0,
        1800.0,
        43200.0,
        604800.0,
        5400.0,
    ]
    with pytest.raises(SchemaError, match="--max-age: must be a duration, got '1w'"):
        duration_s("1w", "--max-age")


def test_options_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="--budget-s"):
        fibc.retune(tmp_path, budget_s=0)
    with pytest.raises(InputError, match="found none"):
        fibc.retune(tmp_path)
    with pytest.raises(InputError, match="--keep"):
        fibc.gc(tmp_path, keep=0)
    assert not list(tmp_path.iterdir())

"""The pipeline on a simulated machine: what is true decides, and nothing else does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulation import BLOCKS, Machine, write_definition

import fibc
import fibc.explore
import fibc.prove
from fibc.errors import GateError, InputError
from fibc.paths import OutLayout
from fibc.records import RecordLog
from fibc.runtime.package import load, read_table
from fibc.schema.decision import Verdict
from fibc.schema.evaluation import Status
from fibc.schema.result import TuneResult

SIZES = (1, 2, 3, 4, 7, 8)


@pytest.fixture(autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory, worker_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path_factory.getbasetemp()
    root = base if worker_id == "master" else base.parent
    monkeypatch.setenv("FIBC_CACHE_DIR", str(root / "pipeline-cache"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    def make(speedup: Callable[[int, int], float], **facts: object) -> Machine:
        made = Machine(tmp_path, speedup, **facts)  # type: ignore[arg-type]
        made.install(monkeypatch)
        return made

    return make


def tune(tmp_path: Path, sizes: tuple[int, ...] = SIZES, **options: Any) -> TuneResult:
    path = write_definition(tmp_path / "defs", sizes)
    split = options.pop("split", (1.0, 0.0, 0.0))
    return fibc.tune(path, out=tmp_path / "out", target="cpu", split=split, **options)


def blocks(result: TuneResult) -> dict[str, int | None]:
    """Return the block that serves each cell, None for native."""
    assert result.table is not None
    known = {variant.candidate.digest: dict(variant.candidate.config)["block"] for variant in result.table.variants}
    served = {}
    for row in result.table.rows:
        block = known[row.candidate] if row.verdict is Verdict.REPLACE else None
        assert block is None or isinstance(block, int)
        served[str(row.cell)] = block
    return served


def test_the_fastest_block_serves_where_it_is_faster_and_native_elsewhere(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    machine(lambda block, rows: {3: 1.30, 4: 1.20}.get(block, 0.9) if rows <= 2 else 0.8)
    result = tune(tmp_path)
    assert blocks(result) == {"1": 3, "2": 3, "3..4": None, "5..8": None}
    assert result.table is not None
    assert [(str(region.cell), region.variant) for region in result.table.regions] == [("1..2", 0)]
    published = result.table.rows[0].reconfirm[0]
    assert published.speedup == pytest.approx(1.30, rel=0.01)
    assert published.ci_low <= 1.30 * 1.005
    assert published.ci_high >= 1.30 * 0.995
    assert result.table.expected_false_replacements <= 0.05 * 4
    assert not result.partial


def test_the_module_that_was_written_imports_and_answers(machine: Callable[..., Machine], tmp_path: Path) -> None:
    import torch

    machine(lambda block, rows: 1.5 if block == 2 else 0.7)
    result = tune(tmp_path)
    module = load(result.package)
    x, weight = torch.randn(2, 8), torch.randn(8)
    torch.testing.assert_close(module.run(x, weight), x * weight)
    assert read_table(result.package) == result.table


def test_a_second_run_with_nothing_changed_builds_and_measures_nothing(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.2 if block == 1 else 0.8)
    first = tune(tmp_path)
    made.asked.clear()
    second = tune(tmp_path)
    assert second.up_to_date
    assert second.table == first.table
    assert not made.asked


def test_a_cell_that_an_earlier_run_decided_is_not_searched_again(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.2 if block == 1 else 0.8)
    first = tune(tmp_path)
    log = RecordLog(OutLayout(tmp_path / "out").records("toy"), definition="", environment="")
    log.compact(lambda record: record.kind != "finalists")
    shutil.rmtree(first.package)
    made.asked.clear()
    second = tune(tmp_path)
    assert blocks(second) == blocks(first)
    assert made.asked["trials"] == 0
    assert made.asked["benches"] == 0


def test_a_key_of_long_trials_gets_a_quarter_of_them(
    machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fibc.explore, "LONG_TRIAL_S", 0.0)
    made = machine(lambda block, rows: 1.2 if block == 1 else 0.9)
    result = tune(tmp_path, trials=16, jobs=2)
    assert made.asked["trials"] == 4 * 4
    assert not result.partial


def test_keys_of_heavy_calls_are_proven_after_the_others(
    machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fibc.prove, "HEAVY_CALL_S", 0.0)
    machine(lambda block, rows: 1.2 if block == 1 else 0.9)
    result = tune(tmp_path)
    assert set(blocks(result).values()) == {1}
    assert not result.partial


def test_stages_share_sessions(machine: Callable[..., Machine], tmp_path: Path) -> None:
    """Whole cells, halves and winners: 8 confirm sessions, 8 of the halves beside the winners', 8 of the halves'."""
    machine(lambda block, rows: (1.3 if rows != 9 else 0.8) if block == 5 else 0.7)
    result = tune(tmp_path, sizes=(1, 2, 4, 8, 9, 16))
    log = RecordLog(OutLayout(tmp_path / "out").records("toy"), definition="", environment="")
    seeds: dict[str, set[int]] = {}
    for record in log.read():
        if record.kind == "samples" and record.value["stage"] in {"confirm", "reconfirm"}:
            seeds.setdefault(record.value["stage"], set()).add(record.value["seed"])
    assert blocks(result)["1"] == 5
    assert len(seeds["confirm"] & seeds["reconfirm"]) >= 8, "halves race in the sessions of the first reconfirm"


def test_fresh_forgets_and_measures_again(machine: Callable[..., Machine], tmp_path: Path) -> None:
    made = machine(lambda block, rows: 1.2 if block == 1 else 0.8)
    tune(tmp_path)
    made.asked.clear()
    assert not tune(tmp_path, fresh=True).up_to_date
    assert made.asked["trials"] >= len(BLOCKS)


def test_an_interrupted_run_keeps_its_trials_and_the_next_one_goes_on(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.2 if block == 1 else 0.8, interrupt_after=9)
    result = tune(tmp_path)
    assert result.interrupted
    assert result.table is None
    made.interrupt_after = None
    result = tune(tmp_path)
    assert blocks(result)["1"] == 1
    assert max(made.tried.values()) <= 2, "only the interrupted trial runs again"
    assert sum(count > 1 for count in made.tried.values()) <= 1


def test_a_failed_candidate_is_recorded_and_never_tried_again(machine: Callable[..., Machine], tmp_path: Path) -> None:
    made = machine(
        lambda block, rows: 1.2 if block == 1 else 0.9,
        statuses={2: Status.CRASH, 3: Status.INCORRECT_NUMERICAL},
        unbuildable=frozenset({4}),
    )
    result = tune(tmp_path)
    assert result.trials["CRASH"] == 1
    assert result.trials["INCORRECT_NUMERICAL"] == 1
    assert result.trials["COMPILE_ERROR"] == 1
    assert sum(count for (_, block), count in made.tried.items() if block in {2, 3}) == 2
    assert set(blocks(result).values()) == {1}


def test_equal_binaries_are_measured_once(machine: Callable[..., Machine], tmp_path: Path) -> None:
    made = machine(lambda block, rows: 1.2 if block in {1, 2} else 0.9, twins={2: 1})
    result = tune(tmp_path, sizes=(1,))
    assert sum(made.tried["1", block] for block in (1, 2)) == 1
    assert result.table is not None
    assert len(result.table.variants) == 1


def test_a_cell_is_split_where_a_finalist_wins_a_part_of_it(machine: Callable[..., Machine], tmp_path: Path) -> None:
    machine(lambda block, rows: (1.3 if rows > 12 else 0.8) if block == 5 else 0.9)
    result = tune(tmp_path, sizes=(1, 9, 16))
    served = blocks(result)
    assert served["13..16"] == 5
    assert served["9..12"] is None


def test_the_boundary_set_takes_a_row_back(machine: Callable[..., Machine], tmp_path: Path) -> None:
    sizes = tuple(range(17, 33))
    probe = tune_sets(tmp_path, sizes)
    slow = next(size for size in probe["boundary"] if size not in probe["points"])
    machine(lambda block, rows: 0.7 if rows == slow else 1.3)
    result = tune(tmp_path, sizes=sizes, split=(0.6, 0.2, 0.2))
    assert result.table is not None
    assert result.table.num_boundary_rejected == 1
    row = next(row for row in result.table.rows if str(row.cell) == "17..32")
    assert row.revoked
    assert row.verdict is Verdict.KEEP_NATIVE
    assert f"rows={slow}" in row.reason


def tune_sets(tmp_path: Path, sizes: tuple[int, ...]) -> dict[str, list[int]]:
    """Return the sizes of the boundary set, and of all points, as the pipeline will see them."""
    from fibc.cache import Cache
    from fibc.schema.options import TuneOptions
    from fibc.task import read_task

    task = read_task(write_definition(tmp_path / "defs", sizes), None, TuneOptions(split=(0.6, 0.2, 0.2)), Cache())
    points = [dict(point.axes)["rows"] for key in task.keys for point in key.points]
    return {"boundary": [workload.axes["rows"] for workload in task.sets.boundary], "points": points}


def test_the_test_set_is_read_and_decides_nothing(machine: Callable[..., Machine], tmp_path: Path) -> None:
    sizes = tuple(range(17, 65))
    machine(lambda block, rows: 1.3)
    result = tune(tmp_path, sizes=sizes, split=(0.6, 0.2, 0.2))
    assert len(result.test) == result.sets.test > 0
    assert not result.slower_on_test
    assert {item.stage for item in result.test} == {"test"}


def test_a_host_that_finds_native_faster_than_itself_is_refused(
    machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIBC_CACHE_DIR", str(tmp_path / "own-cache"))
    machine(lambda block, rows: 1.3, gate_bias=1.05)
    with pytest.raises(GateError, match="40 of 40"):
        tune(tmp_path)
    assert not (tmp_path / "out" / "fibc_toy").exists()


def test_without_time_the_result_is_partial_and_says_so(machine: Callable[..., Machine], tmp_path: Path) -> None:
    machine(lambda block, rows: 1.3)
    result = tune(tmp_path, budget_s=1e-6)
    assert result.partial
    assert result.table is not None
    assert set(blocks(result).values()) == {None}
    assert any("out of time" in note for note in result.notes)
    again = tune(tmp_path)
    assert not again.up_to_date
    assert not again.partial
    assert set(blocks(again).values()) != {None}


def test_evidence_of_an_earlier_definition_is_void_and_the_tool_says_so(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.2 if block == 1 else 0.8)
    tune(tmp_path)
    made.asked.clear()
    path = write_definition(tmp_path / "defs", SIZES, reference="def run(x, weight):\n    return weight * x\n")
    result = fibc.tune(path, out=tmp_path / "out", target="cpu", split=(1.0, 0.0, 0.0))
    assert any("void" in note for note in result.notes)
    assert made.asked["trials"] > 0


def test_a_dry_run_says_what_it_would_do_and_does_nothing(machine: Callable[..., Machine], tmp_path: Path) -> None:
    made = machine(lambda block, rows: 1.3)
    result = tune(tmp_path, dry_run=True)
    assert result.plan["keys"] == 4
    assert result.plan["candidates"] == len(BLOCKS)
    assert result.table is None
    assert not made.asked
    assert not (tmp_path / "out").exists()


def test_an_out_that_cannot_be_written_is_refused_before_any_work(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.3)
    (tmp_path / "out").write_text("a file")
    with pytest.raises(InputError, match="--out"):
        tune(tmp_path)
    assert not made.asked


def test_the_dataset_holds_a_solution_per_variant_and_a_trace_per_evaluation(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    from fibc.schema.dataset import read_dataset

    machine(lambda block, rows: 1.2 if block == 1 else 0.8)
    result = tune(tmp_path)
    dataset = read_dataset(tmp_path / "out" / "fibc-dataset")
    assert not dataset.problems
    assert len(dataset.traces["toy"]) == sum(result.trials.values())
    assert result.table is not None
    for variant in result.table.variants:
        assert f"toy_{variant.candidate.digest}" in dataset.solutions
    published = [t for t in dataset.traces["toy"] if t.evaluation is not None and t.evaluation.correctness is not None]
    assert published

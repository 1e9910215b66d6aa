"""A report's numbers are those of the records, in every view."""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from simulation import Machine, write_definition

import fibc
from fibc.errors import InputError
from fibc.reporting.report import report_json
from fibc.schema.evaluation import Status

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
SIZES = (1, 2, 3, 4, 6, 8, 11, 16, 20, 24, 27, 32)
H200_GEMM = RESULTS / "h200" / "gemm_bf16_n4096_k4096.records"


def test_the_numbers_of_a_recorded_tune_are_those_that_it_printed() -> None:
    (table,) = fibc.report(H200_GEMM).tables
    assert (table.definition, table.target, table.margin) == ("gemm_bf16_n4096_k4096", "cuda:sm_90a", 1.01)
    assert (table.num_replaced, len(table.cells)) == (7, 27)
    first = table.cells[0].weakest
    assert first is not None
    assert (f"{first.value:.3f} {first.low:.3f} {first.high:.3f}", f"{first.native_us:.1f}") == (
        "1.330 1.317 1.344",
        "12.6",
    )
    assert table.variants[table.cells[0].serves - 1].name.startswith("gemm/triton_matvec(rows=1, block_n=4")
    assert sum(len(search.trials) for search in table.searches) == 466
    assert table.failures == ()
    assert table.cost.compile_s is None
    assert table.test is not None
    assert [f"{item.value:.3f} ({item.low:.3f} - {item.high:.3f})" for item in table.test.measured] == [
        "1.159 (1.156 - 1.163)",
        "1.150 (1.145 - 1.154)",
    ]


def test_json_csv_and_markdown_say_the_same(tmp_path: Path) -> None:
    data = fibc.report(H200_GEMM, csv=tmp_path / "a.csv", markdown=tmp_path / "a.md")
    plain = json.loads(json.dumps(report_json(data), allow_nan=False))
    rows = list(csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text())))
    assert len(rows) == 466
    assert [row["template"] for row in rows if row["key"] == "1" == row["serves"]] == ["gemm/triton_matvec"]
    cells = plain["tables"][0]["cells"]
    printed = re.findall(r"^\| (\S+) \| \S+(?: #\d+)? \| ([\d.]+|-) \|", (tmp_path / "a.md").read_text(), re.MULTILINE)
    assert printed == [(cell["cell"], f"{cell['weakest']['value']:.3f}" if cell["weakest"] else "-") for cell in cells]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be there, is not"):
        fibc.report(tmp_path / "none")
    with pytest.raises(InputError, match="must hold records, found none"):
        fibc.report(tmp_path)


@pytest.fixture(scope="module")
def outs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two tunes of the simulated operator: the key is the block that is 1.3 times as fast up to 16 rows."""
    root = tmp_path_factory.mktemp("tuned")
    definition = write_definition(root / "defs", SIZES)
    workloads = definition.with_suffix(".workloads.jsonl")
    lines = [json.loads(line) for line in workloads.read_text().splitlines()]
    for line in lines:
        line["workload"]["count"] = 100 if line["workload"]["axes"]["rows"] == 4 else 1
    workloads.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = {}
    for best in (1, 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FIBC_CACHE_DIR", str(root / "cache"))
            speedup = functools.partial(_speedup, best)
            Machine(root, speedup, {2: Status.CRASH}, frozenset({4})).install(patch)
            fibc.tune(definition, out=root / f"out{best}", target="cpu", jobs=1)
        made[best] = root / f"out{best}"
    return made


def _speedup(best: int, block: int, rows: int) -> float:
    return 1.3 if block == best and rows <= 16 else 0.8


def test_a_run_leaves_what_it_took_its_sets_and_the_test_set(outs: dict[int, Path]) -> None:
    (table,) = fibc.report(outs[1], fraction=0.5).tables
    assert table.sets is not None
    assert table.test is not None
    assert (table.sets.tune, table.sets.boundary, table.sets.test) == (7, 3, 2)
    spent = [table.cost.compile_s, table.cost.validate_s, table.cost.screen_s, table.cost.confirm_s]
    assert all(seconds is not None and seconds >= 0 for seconds in spent)
    assert list(table.cost.stages) == ["check", "search", "prove", "publish", "test"]
    assert table.fast_p[0].group == "tune"
    assert {(item.status, item.template) for item in table.failures} == {
        ("CRASH", "toy/kernel"),
        ("COMPILE_ERROR", "toy/kernel"),
    }
    assert {item.status: item.example for item in table.failures}["CRASH"] == "boom"


def test_traffic_weighs_native_and_served_time(outs: dict[int, Path]) -> None:
    (table,) = fibc.report(outs[1], fraction=0.5).tables
    tune_set = next(item for item in table.traffic if item.set_name == "tune")
    assert tune_set.reason == ""
    assert tune_set.weighted is not None
    assert table.end_to_end is not None
    assert table.end_to_end.speedup == tune_set.weighted
    assert table.end_to_end.estimate == pytest.approx(1 / (0.5 + 0.5 / tune_set.weighted))
    assert table.end_to_end.worth_it is None


def test_a_package_and_its_generation_are_the_same_report(outs: dict[int, Path]) -> None:
    out = outs[1]
    package = out / "fibc_toy"
    of_package, of_generation = (fibc.report(path).tables[0] for path in (package, (package / "current").resolve()))
    (of_out,) = fibc.report(out).tables
    assert replace(of_package, source="") == replace(of_generation, source="") == replace(of_out, source="")
    assert of_package.cost.num_trials == of_out.cost.num_trials > 0


def test_two_generations_differ_where_another_variant_serves(outs: dict[int, Path], tmp_path: Path) -> None:
    before, after = outs[1], outs[3]
    data = fibc.report(before, after, markdown=tmp_path / "a.md")
    (comparison,) = data.comparisons
    replaced = [cell.cell for cell in data.tables[0].cells if cell.serves]
    assert [change.cell for change in comparison.changes if change.what == "other variant"] == replaced
    assert {change.before for change in comparison.changes} == {"toy/kernel(block=1)", "native"}
    assert {change.after for change in comparison.changes} == {"toy/kernel(block=3)", "native"}
    assert f"{len(replaced)} of {len(comparison.changes)} cells changed." in (tmp_path / "a.md").read_text()
    assert {change.what for change in fibc.report(before, before).comparisons[0].changes} == {"same"}


def test_machines_are_compared_cell_by_cell() -> None:
    """The fused norm on a CPU and on an H200: both replace native, by other variants."""
    cpu = next(RESULTS.glob("Intel*/fused_add_rmsnorm_h4096.records"))
    (comparison,) = fibc.report(cpu, RESULTS / "h200" / "fused_add_rmsnorm_h4096.records").comparisons
    first = next(change for change in comparison.changes if change.cell == "1")
    assert first.what == "other variant"
    assert first.before_speedup is not None
    assert first.after_speedup is not None
    assert (f"{first.before_speedup.value:.3f}", f"{first.after_speedup.value:.3f}") == ("12.548", "3.126")
    with_gemm = fibc.report(cpu, H200_GEMM)
    assert with_gemm.comparisons == ()
    assert len(with_gemm.unmatched) == 2


def test_optuna_shows_the_studies_that_a_tune_writes(outs: dict[int, Path]) -> None:
    """What `optuna-dashboard sqlite:///build/fibc-studies.db` reads."""
    import optuna

    storage = f"sqlite:///{outs[1] / 'fibc-studies.db'}"
    names = optuna.get_all_study_names(storage)
    (table,) = fibc.report(outs[1]).tables
    assert len(names) == len(table.searches)
    name = next(name for name in names if name.split(" ")[-2] == "1")
    study = optuna.load_study(study_name=name, storage=storage)
    search = next(search for search in table.searches if search.key == "1")
    passed = [trial for trial in search.trials if trial.speedup is not None]
    assert len(study.get_trials(states=[optuna.trial.TrialState.COMPLETE])) == len(passed)
    assert math.exp(study.best_value) == pytest.approx(search.best)
    assert study.best_trial.user_attrs["template"] == "toy/kernel"

"""A report's numbers are those of the records, in every view."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest

import fibc
from fibc.errors import InputError
from fibc.reporting.report import report_json

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
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

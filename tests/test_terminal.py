"""What people read of a table for GPUs: generated kernels and library calls are counted apart."""

from __future__ import annotations

import io
from dataclasses import replace

import toys
from rich.console import Console

from fibc import terminal
from fibc.explain import CallExplained
from fibc.schema.result import BuildCounts, SetSizes, TuneResult
from fibc.schema.silicon import CudaValidity
from fibc.schema.table import DispatchTable

H200 = CudaValidity("sm_90a", 90, 132, 60 << 20, 150 * 10**9)


def _printed(table: DispatchTable) -> str:
    text = io.StringIO()
    terminal.print_table(Console(file=text, width=200), table)
    return text.getvalue()


def test_generated_kernels_and_library_calls_are_counted_apart() -> None:
    table = toys.rows_table(H200)
    called = ("fibc_toy_rows", "fibc_toy_split")
    variants = tuple(
        replace(variant, library="cuBLASLt 13.0.2" if variant.symbol in called else "") for variant in table.variants
    )
    assert "served by 4 generated kernels in 4 cells, 2 library calls in 2 cells (cuBLASLt 13.0.2)" in _printed(
        replace(table, variants=variants)
    )
    assert "served by 6 generated kernels in 6 cells\n" in _printed(table)
    revoked = (replace(table.rows[0], revoked=True), *table.rows[1:])
    assert "served by 6 generated kernels in 5 cells\n" in _printed(replace(table, rows=revoked))


def test_a_table_for_gpus_says_how_calls_were_timed() -> None:
    table = toys.rows_table(H200)
    timed = [replace(item, mode="device") for item in table.rows[0].reconfirm]
    assert timed
    rows = tuple(replace(row, confirm=(), reconfirm=tuple(timed)) for row in table.rows)
    assert "margin 1.02  mode device\n" in _printed(replace(table, rows=rows))
    assert "mode" not in _printed(toys.gemm_table()).splitlines()[0]


def test_a_table_for_cpus_calls_no_library_and_says_nothing_of_it() -> None:
    assert "served by" not in _printed(toys.gemm_table())


def test_a_call_says_which_library_answers_it() -> None:
    text = io.StringIO()
    terminal.print_call(
        Console(file=text), CallExplained({"M": 4}, "gemm/cublaslt(...)", "hit", None, "cuBLASLt 13.0.2")
    )
    assert "calls   cuBLASLt 13.0.2\n" in text.getvalue()


def test_a_run_says_how_long_its_search_waited_for_compilers_where_some_worked_ahead() -> None:
    def printed(builds: BuildCounts) -> str:
        text = io.StringIO()
        sets = SetSizes(tune=1, boundary=0, test=0, skipped=0, traffic_weighted=False, synthetic=False)
        result = TuneResult(
            "toy", "", "", toys.gemm_table(), (), (), (), sets, {"PASSED": 50}, {"search": 44.0}, (), builds=builds
        )
        terminal.print_result(Console(file=text, width=200), result)
        return text.getvalue()

    beside = printed(BuildCounts(waited_s=6.4, ready=40, awaited=4, built=6))
    assert "44 of 50 ahead, 4 of them waited for; the search waited 6 s for compilers" in beside
    assert "ahead" not in printed(BuildCounts(waited_s=60.0, built=50))

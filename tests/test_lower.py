"""Rows to regions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import toys
from hypothesis import given
from hypothesis import strategies as st

from fibc.codegen.lower import build_variants, lower, serves
from fibc.schema.candidate import Artifact, Candidate, Guards, Target, TensorGuard
from fibc.schema.decision import Comparison, Decision, Verdict
from fibc.schema.feature import Cell, Point
from fibc.schema.table import Region

GUARDS = Guards((TensorGuard(),), (TensorGuard(),))
CANDIDATES = {
    candidate.digest: candidate
    for candidate in (
        Candidate("cpu", "gemm/matvec", (("rows", rows),), f"source{rows}", Target("cpu", "avx512"))
        for rows in range(4)
    )
}
DIGESTS = sorted(CANDIDATES)
ARTIFACTS = {
    digest: Artifact(f"code{index}", "", "", f"fibc_code{index}", 100, "", GUARDS)
    for index, digest in enumerate(DIGESTS)
}
ARTIFACTS[DIGESTS[3]] = ARTIFACTS[DIGESTS[2]]  # two configs that compile to one object code


def comparison(candidate_us: float) -> Comparison:
    point = Point((("M", 1),), "end")
    return replace(toys.COMPARISON, point=point, native_us=1.5 * candidate_us, candidate_us=candidate_us)


def row(bounds: tuple[tuple[int, int], ...], digest: str, *latencies_us: float, revoked: bool = False) -> Decision:
    verdict = Verdict.REPLACE if digest else Verdict.KEEP_NATIVE
    evidence = tuple(comparison(latency) for latency in latencies_us or (10.0,))
    return Decision(Cell(bounds), verdict, digest, evidence, evidence, "", revoked=revoked)


def regions_of(rows: list[Decision]) -> tuple[Region, ...]:
    return lower(rows, build_variants(rows, ARTIFACTS, CANDIDATES), ARTIFACTS)


def served_by_rows(rows: list[Decision], values: tuple[int, ...]) -> tuple[str, bool] | None:
    """The object code and the GIL that the row of ``values`` asks for; None for native."""
    for decision in rows:
        if decision.cell.holds(values) and serves(decision):
            slow = min(c.candidate_us for c in decision.reconfirm) > 100
            return ARTIFACTS[decision.candidate].digest, slow
    return None


def served_by_regions(
    rows: list[Decision], regions: tuple[Region, ...], values: tuple[int, ...]
) -> tuple[str, bool] | None:
    variants = build_variants(rows, ARTIFACTS, CANDIDATES)
    hits = [region for region in regions if region.cell.holds(values)]
    assert len(hits) <= 1, "regions overlap"
    return (variants[hits[0].variant].artifact, hits[0].release_gil) if hits else None


winners = st.sampled_from(["", *DIGESTS])
latencies = st.sampled_from([20.0, 99.0, 101.0, 5000.0])


@st.composite
def lines_of_rows(draw: st.DrawFn) -> list[Decision]:
    """Rows of one feature, without a gap or with some, in any order."""
    edges = sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=12)))
    cells = list(zip([1, *(edge + 1 for edge in edges[:-1])], edges, strict=True))
    rows = [row((bounds,), draw(winners), draw(latencies), revoked=draw(st.booleans())) for bounds in cells]
    kept = [decision for decision in rows if draw(st.integers(0, 9)) > 0]
    return draw(st.permutations(kept))


@given(lines_of_rows())
def test_regions_serve_every_size_as_its_row_does(rows: list[Decision]) -> None:
    regions = regions_of(rows)
    for size in range(1, 63):
        assert served_by_regions(rows, regions, (size,)) == served_by_rows(rows, (size,))


@given(st.lists(st.tuples(winners, latencies), min_size=9, max_size=9))
def test_boxes_of_two_features_serve_every_size_as_their_rows_do(labels: list[tuple[str, float]]) -> None:
    ranges = [(1, 1), (2, 3), (4, 6)]
    cells = [(first, second) for first in ranges for second in ranges]
    rows = [row(cell, winner, latency) for cell, (winner, latency) in zip(cells, labels, strict=True)]
    regions = regions_of(rows)
    for first in range(1, 8):
        for second in range(1, 8):
            assert served_by_regions(rows, regions, (first, second)) == served_by_rows(rows, (first, second))


@given(lines_of_rows())
def test_lowering_does_not_depend_on_the_order_of_rows(rows: list[Decision]) -> None:
    assert regions_of(rows) == regions_of(list(reversed(rows)))


def test_neighbouring_cells_with_one_winner_become_one_region() -> None:
    rows = [row(((1, 1),), DIGESTS[0]), row(((2, 2),), DIGESTS[0]), row(((3, 4),), DIGESTS[0])]
    assert regions_of(rows) == (Region(Cell(((1, 4),)), 0, release_gil=False),)


def test_a_native_cell_between_two_of_one_winner_keeps_them_apart() -> None:
    rows = [row(((1, 1),), DIGESTS[0]), row(((2, 2),), ""), row(((3, 4),), DIGESTS[0])]
    assert [region.cell for region in regions_of(rows)] == [Cell(((1, 1),)), Cell(((3, 4),))]


def test_a_revoked_row_is_native() -> None:
    assert regions_of([row(((1, 8),), DIGESTS[0], revoked=True)]) == ()


def test_the_gil_is_released_only_where_every_point_of_the_cell_is_slow() -> None:
    rows = [row(((1, 1),), DIGESTS[0], 150.0, 90.0), row(((2, 4),), DIGESTS[0], 150.0, 101.0)]
    assert [(str(region.cell), region.release_gil) for region in regions_of(rows)] == [("1", False), ("2..4", True)]


def test_configs_with_one_object_code_are_one_variant() -> None:
    rows = [row(((1, 1),), DIGESTS[2]), row(((2, 4),), DIGESTS[3])]
    (variant,) = build_variants(rows, ARTIFACTS, CANDIDATES)
    assert variant.candidate.digest == DIGESTS[2]
    assert [region.cell for region in regions_of(rows)] == [Cell(((1, 4),))]


def test_a_variant_is_deterministic_unless_one_of_its_configs_was_not() -> None:
    rows = [row(((1, 1),), DIGESTS[2]), row(((2, 4),), DIGESTS[3]), row(((5, 8),), DIGESTS[0])]
    variants = build_variants(rows, ARTIFACTS, CANDIDATES, nondeterministic={DIGESTS[3]})
    assert {variant.artifact: variant.deterministic for variant in variants} == {"code0": True, "code2": False}


def test_a_variant_releases_the_gil_where_all_its_rows_do() -> None:
    slow, mixed = row(((1, 1),), DIGESTS[0], 200.0), row(((2, 2),), DIGESTS[0], 50.0)
    assert build_variants([slow], ARTIFACTS, CANDIDATES)[0].release_gil
    assert not build_variants([slow, mixed], ARTIFACTS, CANDIDATES)[0].release_gil


def test_variants_are_sorted_by_symbol_and_carry_their_isa() -> None:
    rows = [row(((i + 1, i + 1),), digest) for i, digest in enumerate(reversed(DIGESTS[:3]))]
    variants = build_variants(rows, ARTIFACTS, CANDIDATES)
    assert [variant.symbol for variant in variants] == ["fibc_code0", "fibc_code1", "fibc_code2"]
    assert {variant.isa for variant in variants} == {"avx512"}


@pytest.mark.parametrize("rows", [[], [row(((1, 8),), "")]])
def test_a_table_without_a_replacement_has_neither_variants_nor_regions(rows: list[Decision]) -> None:
    assert build_variants(rows, ARTIFACTS, CANDIDATES) == ()
    assert regions_of(rows) == ()


def test_a_kernel_on_a_gpu_keeps_the_gil_because_a_call_only_enqueues_it() -> None:
    candidate = Candidate("triton", "gemm/tile", (), "source", Target("cuda", "sm_90a"))
    artifacts = {candidate.digest: Artifact("code", "", "", "fibc_code", 100, "", GUARDS)}
    rows = [row(((1, 8),), candidate.digest, 5000.0)]
    variants = build_variants(rows, artifacts, {candidate.digest: candidate})
    assert [variant.release_gil for variant in variants] == [False]
    assert [region.release_gil for region in lower(rows, variants, artifacts)] == [False]

"""Features, cells, keys and points."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fibc.errors import InputError, SchemaError
from fibc.schema.capture_sizes import CAPTURE_SIZES
from fibc.schema.cells import MAX_POINTS, default_edges, default_features, make_keys, split_key, tuning_order
from fibc.schema.constraints import check_constraints
from fibc.schema.definition import Definition
from fibc.schema.feature import Cell, Feature, FeatureKey, feature_values
from fibc.schema.workload import RandomInput, Workload


def definition(axes: Mapping[str, int | None], shape: Sequence[str], constraints: Sequence[str] = ()) -> Definition:
    """A contract with one input of ``shape``; None marks a var axis."""
    document: dict[str, Any] = {
        "name": "op",
        "op_type": "op",
        "axes": {n: {"type": "var"} if v is None else {"type": "const", "value": v} for n, v in axes.items()},
        "inputs": {"A": {"shape": list(shape), "dtype": "float32"}},
        "outputs": {"C": {"shape": list(shape), "dtype": "float32"}},
        "reference": "def run(A):\n    return A\n",
        "constraints": list(constraints),
    }
    return Definition.model_validate(document)


ROWS = definition({"M": None, "N": 64}, ["M", "N"])
DECODE = definition(
    {"batch_size": None, "num_pages": None, "len_indptr": None, "num_kv_indices": None},
    ["batch_size"],
    ["len_indptr == batch_size + 1"],
)


def rows(uuid: str, size: int, weight: float = 1.0) -> Workload:
    return Workload(uuid, {"M": size}, {"A": RandomInput()}, weight)


def decode(uuid: str, batch_size: int, num_kv_indices: int, num_pages: int = 50_000) -> Workload:
    axes = {
        "batch_size": batch_size,
        "num_pages": num_pages,
        "len_indptr": batch_size + 1,
        "num_kv_indices": num_kv_indices,
    }
    return Workload(uuid, axes, {"A": RandomInput()})


def keys_of(workloads: Sequence[Workload], contract: Definition = ROWS) -> tuple[FeatureKey, ...]:
    return make_keys(default_features(contract, workloads), workloads, contract)


def sizes_of(key: FeatureKey) -> list[tuple[int, str]]:
    return [(dict(point.axes)["M"], point.origin) for point in key.points]


row_lists = st.lists(st.integers(1, 20_000), min_size=1, max_size=30).map(
    lambda sizes: [rows(f"uuid-{index}", size) for index, size in enumerate(sizes)]
)
decode_lists = st.lists(st.tuples(st.integers(1, 70), st.integers(1, 2000)), min_size=1, max_size=20).map(
    lambda calls: [decode(f"uuid-{i}", batch, batch * mean) for i, (batch, mean) in enumerate(calls)]
)


# Edges and features


def test_default_edges_are_powers_of_two_with_half_steps_above_64() -> None:
    assert default_edges(700) == (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 700)


@pytest.mark.parametrize(("largest", "edges"), [(1, (1,)), (2, (1, 2)), (64, (1, 2, 4, 8, 16, 32, 64)), (3, (1, 2, 3))])
def test_the_last_edge_is_the_largest_size(largest: int, edges: tuple[int, ...]) -> None:
    assert default_edges(largest) == edges


@given(st.integers(1, 10**9))
def test_edges_increase_and_no_cell_more_than_doubles(largest: int) -> None:
    edges = default_edges(largest)
    assert edges[0] == 1 and edges[-1] == largest
    assert all(low < high <= 2 * low for low, high in itertools.pairwise(edges))


@pytest.mark.parametrize("edges", [(), (0, 1), (4, 4), (8, 4)])
def test_edges_that_do_not_increase_are_refused(edges: tuple[int, ...]) -> None:
    with pytest.raises(SchemaError, match="strictly increasing"):
        Feature("M", None, edges)


def test_a_feature_is_made_per_var_axis() -> None:
    contract = definition({"M": None, "H": 8, "N": None}, ["M", "H", "N"])
    workloads = [Workload("a", {"M": 5, "N": 3}, {"A": RandomInput()}), Workload("b", {"M": 2, "N": 9}, {})]
    assert [(f.name, f.edges[-1]) for f in default_features(contract, workloads)] == [("M", 5), ("N", 9)]


def test_decode_has_the_batch_and_the_mean_length_as_features() -> None:
    features = default_features(DECODE, [decode("a", 4, 400), decode("b", 64, 640)])
    assert [(feature.name, feature.edges[-1]) for feature in features] == [
        ("batch_size", 64),
        ("num_kv_indices / batch_size", 100),
    ]


def test_axes_that_an_equation_determines_and_capacities_are_no_features() -> None:
    contract = definition(
        {"rows": None, "rows_plus": None, "pool_size": None}, ["rows"], ["rows_plus == rows + 1", "pool_size >= rows"]
    )
    workload = Workload("a", {"rows": 3, "rows_plus": 4, "pool_size": 9}, {"A": RandomInput()})
    assert [feature.name for feature in default_features(contract, [workload])] == ["rows"]


def test_a_capacity_that_is_the_only_axis_is_a_feature() -> None:
    contract = definition({"num_pages": None}, ["num_pages"])
    workload = Workload("a", {"num_pages": 3}, {"A": RandomInput()})
    assert [feature.name for feature in default_features(contract, [workload])] == ["num_pages"]


def test_empty_batches_do_not_count_for_features() -> None:
    with pytest.raises(InputError, match=r"M >= 1, got 0 workloads"):
        default_features(ROWS, [rows("a", 0)])


@given(st.integers(1, 20_000))
def test_the_range_of_a_size_holds_it(size: int) -> None:
    feature = Feature("M", None, default_edges(20_000))
    bounds = feature.range_of(size)
    assert bounds is not None and bounds[0] <= size <= bounds[1] and bounds in feature.ranges()
    assert feature.range_of(0) is None and feature.range_of(20_001) is None


# Cells


@given(row_lists)
def test_cells_of_one_feature_run_from_1_to_the_largest_size_without_gap_or_overlap(workloads: list[Workload]) -> None:
    cells = [key.cell.bounds[0] for key in keys_of(workloads)]
    assert cells[0] == (1, 1)
    assert cells[-1][1] == max(workload.axes["M"] for workload in workloads)
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(cells))


@given(decode_lists)
def test_boxes_are_disjoint_and_each_recorded_call_lies_in_one(workloads: list[Workload]) -> None:
    features = default_features(DECODE, workloads)
    keys = make_keys(features, workloads, DECODE)
    for workload in workloads:
        values = feature_values(features, workload.axes)
        assert sum(key.cell.holds(values) for key in keys) == 1
    assert not any(key.synthetic for key in keys)
    assert len({key.cell for key in keys}) == len(keys) <= len(workloads)


@given(st.one_of(row_lists.map(lambda found: (ROWS, found)), decode_lists.map(lambda found: (DECODE, found))))
def test_points_lie_in_their_cell_and_obey_the_constraints(case: tuple[Definition, list[Workload]]) -> None:
    contract, workloads = case
    features = default_features(contract, workloads)
    for key in make_keys(features, workloads, contract):
        assert 1 <= len(key.points) <= MAX_POINTS
        assert len(set(key.points)) == len(key.points)
        for point in key.points:
            assert tuple(name for name, _ in point.axes) == contract.var_axes
            assert key.cell.holds(feature_values(features, dict(point.axes)))
            assert check_constraints(contract, dict(point.axes)) == []
            assert (point.origin == "tune") == bool(point.workload) == (point.weight > 0)


@given(row_lists)
def test_both_ends_of_a_cell_are_points(workloads: list[Workload]) -> None:
    for key in keys_of(workloads):
        assert {size for size, _ in sizes_of(key)} >= set(key.cell.bounds[0])


@given(row_lists)
def test_a_key_is_synthetic_exactly_where_no_workload_was_recorded(workloads: list[Workload]) -> None:
    for key in keys_of(workloads):
        assert key.synthetic == (not any(key.cell.holds((w.axes["M"],)) for w in workloads))
        assert key.synthetic == all(point.origin != "tune" for point in key.points)


# Points


def test_points_are_the_ends_and_three_workloads_heaviest_first() -> None:
    sizes = {70: 1.0, 75: 9.0, 80: 5.0, 85: 7.0, 90: 2.0}
    workloads = [rows(str(size), size, weight) for size, weight in sizes.items()] + [rows("last", 96, 1.0)]
    (key,) = [key for key in keys_of(workloads) if key.cell.holds((70,))]
    assert sizes_of(key) == [(65, "end"), (75, "tune"), (80, "tune"), (85, "tune"), (96, "tune")]
    assert dict(key.points[key.screen_point].axes) == {"M": 75}


def test_of_equal_weights_the_smallest_the_largest_and_the_middle_become_points() -> None:
    workloads = [rows(str(size), size) for size in (70, 72, 75, 85, 90)] + [rows("above", 100)]
    (key,) = [key for key in keys_of(workloads) if key.cell.holds((70,))]
    assert sizes_of(key) == [(65, "end"), (70, "tune"), (75, "tune"), (90, "tune"), (96, "end")]


def test_an_end_that_was_recorded_counts_as_the_workload() -> None:
    keys = keys_of([rows("a", 33), rows("b", 64), rows("c", 200)])
    (key,) = [key for key in keys if key.cell.holds((33,))]
    assert [origin for size, origin in sizes_of(key) if size in (33, 64)] == ["tune", "tune"]


def test_capture_sizes_fill_a_cell_up_to_five_points_spread_out() -> None:
    (key,) = [key for key in keys_of([rows("a", 300)]) if key.cell.holds((130,))]
    assert sizes_of(key) == [(129, "end"), (144, "capture"), (160, "capture"), (176, "capture"), (192, "end")]
    assert set(CAPTURE_SIZES) >= {144, 160, 176}


def test_capture_sizes_never_push_a_workload_out() -> None:
    workloads = [rows(str(size), size) for size in (131, 133, 135)] + [rows("last", 300)]
    (key,) = [key for key in keys_of(workloads) if key.cell.holds((130,))]
    assert sizes_of(key) == [(129, "end"), (131, "tune"), (133, "tune"), (135, "tune"), (192, "end")]


def test_screening_without_a_workload_runs_at_the_upper_end() -> None:
    (key,) = [key for key in keys_of([rows("a", 300)]) if key.cell.holds((130,))]
    assert key.synthetic and dict(key.points[key.screen_point].axes) == {"M": 192}


def test_a_cell_of_one_size_has_one_point() -> None:
    first = keys_of([rows("a", 9)])[0]
    assert first.cell == Cell(((1, 1),)) and sizes_of(first) == [(1, "end")]


def test_calls_of_one_size_with_different_tensors_stay_different_points() -> None:
    first, second = decode("a", 4, 400), decode("b", 4, 400)
    (key,) = keys_of([first, second], DECODE)
    assert {point.workload for point in key.points} >= {"a", "b"}


def test_axes_that_features_leave_open_come_from_the_nearest_workload() -> None:
    workloads = [decode("a", 12, 1200, num_pages=111), decode("b", 16, 1600, num_pages=222)]
    (key,) = keys_of(workloads, DECODE)
    low = dict(next(point for point in key.points if point.origin == "end").axes)
    assert low == {"batch_size": 9, "num_pages": 111, "len_indptr": 10, "num_kv_indices": 9 * 97}


def test_an_axis_with_a_lower_bound_is_raised_to_it() -> None:
    contract = definition({"batch_size": None, "pool_size": None}, ["batch_size"], ["pool_size >= batch_size"])
    workload = Workload("a", {"batch_size": 5, "pool_size": 6}, {"A": RandomInput()})
    other = Workload("b", {"batch_size": 100, "pool_size": 640}, {"A": RandomInput()})
    (key,) = [key for key in keys_of([workload, other], contract) if key.cell.holds((8,))]
    assert dict(key.points[-1].axes) == {"batch_size": 8, "pool_size": 8}


def test_ends_move_inward_to_sizes_that_the_constraints_allow() -> None:
    contract = definition({"M": None}, ["M"], ["M % 8 == 0"])
    keys = keys_of([rows("a", 48)], contract)
    assert [str(key.cell) for key in keys] == ["5..8", "9..16", "17..32", "33..48"]
    assert sizes_of(keys[2]) == [(24, "end"), (32, "end")]


def test_a_constraint_that_divides_by_zero_leaves_the_cell_out() -> None:
    contract = definition({"M": None}, ["M"], ["8 % (M - 1) == 0"])
    assert [str(key.cell) for key in keys_of([rows("a", 2)], contract)] == ["2"]


# Splitting and order


@given(row_lists, st.integers(0, 30))
def test_a_split_cell_gives_two_that_cover_it(workloads: list[Workload], which: int) -> None:
    features = default_features(ROWS, workloads)
    keys = make_keys(features, workloads, ROWS)
    key = keys[which % len(keys)]
    first, last = key.cell.bounds[0]
    halves = split_key(key, features, workloads, ROWS)
    if first == last:
        assert halves == ()
        return
    (low, middle), (after, high) = (half.cell.bounds[0] for half in halves)
    assert (low, high, after) == (first, last, middle + 1)
    assert middle == (first + last) // 2
    for half in halves:
        assert {size for size, _ in sizes_of(half)} >= set(half.cell.bounds[0])


def test_a_box_is_split_along_its_widest_feature() -> None:
    features = (Feature("batch_size", None, (8, 16)), Feature("num_kv_indices", "batch_size", (64, 1024)))
    workloads = [decode("a", 12, 1200)]
    (key,) = make_keys(features, workloads, DECODE)
    assert str(key.cell) == "9..16 x 65..1024"
    halves = split_key(key, features, workloads, DECODE)
    assert [str(half.cell) for half in halves] == ["9..16 x 65..544", "9..16 x 545..1024"]
    assert [half.synthetic for half in halves] == [False, True]


def test_recorded_keys_are_tuned_first_then_heavy_ones_then_small_ones() -> None:
    workloads = [rows("a", 3), rows("b", 6, 5.0), rows("c", 40)]
    ordered = tuning_order(keys_of(workloads))
    assert [str(key.cell) for key in ordered] == ["5..8", "3..4", "33..40", "1", "2", "9..16", "17..32"]


def test_keys_do_not_depend_on_the_hash_seed() -> None:
    program = f"""
from fibc.schema.cells import default_features, make_keys
from fibc.schema.definition import Definition
from fibc.schema.workload import Workload
contract = Definition.model_validate({DECODE.to_json()!r})
calls = [(b, b * mean) for b in (1, 7, 16, 64) for mean in (3, 50, 300, 301)]
workloads = [
    Workload(f"u{{i}}", dict(batch_size=b, num_pages=9000 + i, len_indptr=b + 1, num_kv_indices=n), {{}})
    for i, (b, n) in enumerate(calls)
]
print(make_keys(default_features(contract, workloads), workloads, contract))
"""
    printed = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(printed) == 1 and "u15" in printed.pop()

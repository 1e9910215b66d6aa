"""Warm start: which neighbour a key learns from."""

from __future__ import annotations

from fibc.schema.evaluation import Status
from fibc.schema.feature import Cell
from fibc.search.store import Trial
from fibc.search.warm import LOST, NUM_WARM, distance, nearest, trailing, warm_start


def cell(*bounds: tuple[int, int]) -> Cell:
    return Cell(bounds)


def trial(rows: int, value: float) -> Trial:
    return Trial("gemm/matvec", (("rows", rows),), value, Status.PASSED)


def test_near_is_measured_in_powers_of_two() -> None:
    tuned = [cell((1, 1)), cell((5, 8)), cell((33, 64))]
    assert nearest(cell((9, 16)), tuned) == cell((5, 8))
    assert nearest(cell((17, 32)), tuned) == cell((33, 64))
    assert nearest(cell((2, 2)), tuned) == cell((1, 1))
    assert nearest(cell((2, 2)), []) is None


def test_of_two_equally_near_cells_the_smaller_is_taken_in_any_order() -> None:
    tuned = [cell((2, 2)), cell((8, 8))]
    assert distance(cell((4, 4)), tuned[0]) == distance(cell((4, 4)), tuned[1])
    assert nearest(cell((4, 4)), tuned) == nearest(cell((4, 4)), tuned[::-1]) == cell((2, 2))


def test_every_feature_counts() -> None:
    tuned = [cell((1, 1), (1024, 1024)), cell((4, 4), (2, 2))]
    assert nearest(cell((1, 1), (2, 2)), tuned) == cell((4, 4), (2, 2))


def test_the_best_of_the_nearest_tuned_cell_are_handed_over_best_first() -> None:
    best = {
        cell((1, 1)): [trial(1, 0.1)],
        cell((5, 8)): [trial(rows, 1.0 / rows) for rows in range(1, 8)],
        cell((9, 16)): [],
    }
    assert warm_start(cell((9, 16)), best) == tuple(
        ("gemm/matvec", (("rows", rows),)) for rows in range(1, NUM_WARM + 1)
    )


def test_the_first_key_has_no_neighbour() -> None:
    assert warm_start(cell((1, 1)), {}) == ()


def test_a_template_trails_where_its_best_at_the_neighbour_was_left_behind() -> None:
    tile = Trial("gemm/tile", (("block_m", 4),), -0.1, Status.PASSED)
    slow = Trial("gemm/tile", (("block_m", 8),), -2.0, Status.PASSED)
    best = {cell((5, 8)): [tile, trial(1, -0.8), slow]}
    assert trailing(cell((9, 16)), best) == {"gemm/matvec": 1}
    assert trailing(cell((9, 16)), {}) == {}


def test_a_template_four_times_slower_at_a_near_key_counts_as_tried() -> None:
    tile = Trial("gemm/tile", (("block_m", 4),), 0.1, Status.PASSED)
    best = {cell((5, 8)): [tile, trial(1, LOST - 0.1)]}
    assert trailing(cell((9, 16)), best) == {"gemm/matvec": 2}
    assert trailing(cell((33, 64)), best) == {"gemm/matvec": 1}


def test_the_best_template_is_tried_however_slow_it_was_next_door() -> None:
    assert trailing(cell((9, 16)), {cell((5, 8)): [trial(1, LOST - 0.1)]}) == {"gemm/matvec": 1}

"""Smaller calls stand in for heavy ones: the largest light ones of the same remainder, where sizes are free."""

from __future__ import annotations

import pytest

from fibc.schema.definition import Definition
from fibc.schema.feature import Point
from fibc.schema.workload import RandomInput, ScalarInput, Workload
from fibc.stand_in import num_terms, recorded_values, stand_in, trial_points

LIMIT = 1 << 30


def gemm(**changed: object) -> Definition:
    return Definition.model_validate(
        {
            "name": "gemm",
            "op_type": "gemm",
            "axes": {
                "M": {"type": "var"},
                "N": {"type": "const", "value": 4096},
                "K": {"type": "const", "value": 4096},
            },
            "inputs": {
                "A": {"shape": ["M", "K"], "dtype": "bfloat16"},
                "B": {"shape": ["N", "K"], "dtype": "bfloat16"},
            },
            "outputs": {"C": {"shape": ["M", "N"], "dtype": "bfloat16"}},
            "reference": "def run(A, B):\n    return A @ B.T\n",
            **changed,
        }
    )


def point(m: int, workload: str = "") -> Point:
    return Point((("M", m),), "tune", workload=workload)


def test_a_call_has_its_output_elements_times_the_reduction_as_terms_and_1024_at_least() -> None:
    assert num_terms(gemm(), point(3)) == 3 * 4096 * 4096
    axes = {"M": {"type": "var"}, "N": {"type": "const", "value": 8}, "K": {"type": "const", "value": 2}}
    assert num_terms(gemm(axes=axes), point(3)) == 3 * 8 * 1024


@pytest.mark.parametrize(("size", "smaller"), [(1, 1), (63, 63), (64, 48), (65, 49), (193, 49), (8192, 48), (8186, 58)])
def test_a_stand_in_is_the_largest_light_call_with_the_same_remainder_of_16(size: int, smaller: int) -> None:
    made = stand_in(gemm(), point(size), LIMIT)
    assert dict(made.axes) == {"M": smaller}
    assert num_terms(gemm(), made) < LIMIT
    assert (made.origin == "stand-in") == (size != smaller)
    assert size % 16 == smaller % 16


def test_a_workload_with_any_value_of_its_own_is_recorded() -> None:
    random, scalar = RandomInput(), ScalarInput(value=2.0)
    workloads = [
        Workload("plain", {"M": 1}, {"A": random, "B": random}),
        Workload("scalar", {"M": 1}, {"A": random, "B": scalar}),
        Workload("left out", {"M": 1}, {"A": random}),
    ]
    assert recorded_values(gemm(), workloads) == {"scalar", "left out"}


def test_nothing_stands_in_for_recorded_values_constraints_several_axes_or_rows_that_are_heavy_alone() -> None:
    heavy = point(8192, "recorded")
    assert stand_in(gemm(), heavy, LIMIT, {"recorded"}) is heavy
    assert stand_in(gemm(constraints=["M % 4096 == 0"]), heavy, LIMIT) is heavy
    assert stand_in(gemm(), heavy, 1 << 26) is heavy  # not even 16 rows are light
    both = gemm(axes={"M": {"type": "var"}, "N": {"type": "var"}, "K": {"type": "const", "value": 4096}})
    at = Point((("M", 8192), ("N", 4096)), "tune")
    assert stand_in(both, at, LIMIT) is at


def test_heavy_keys_share_the_points_of_their_trials_and_light_ones_keep_theirs() -> None:
    definition = gemm()
    light = (point(17), point(24), point(32))
    assert trial_points(definition, light, point(24), LIMIT) == (point(17), point(24))
    heavy = [
        trial_points(definition, tuple(map(point, sizes)), point(sizes[1]), LIMIT)
        for sizes in ((129, 176, 192), (1025, 1536), (4097, 4500, 6144))
    ]
    assert [[dict(p.axes)["M"] for p in points] for points in heavy] == [[49, 48]] * 3
    assert heavy[0] == heavy[1] == heavy[2]
    mixed = trial_points(definition, (point(33), point(64)), point(64), LIMIT)
    assert [dict(p.axes)["M"] for p in mixed] == [33, 48]

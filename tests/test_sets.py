"""The split of workloads into sets."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fibc.errors import InputError
from fibc.schema.feature import Feature
from fibc.schema.sets import Sets, split
from fibc.schema.workload import RandomInput, Workload


def workload(uuid: str, weight: float = 1.0, **axes: int) -> Workload:
    return Workload(uuid, axes, {"A": RandomInput()}, weight)


def recorded(sets: Sets) -> list[Workload]:
    return [*sets.tune, *sets.boundary, *sets.test]


sizes = st.integers(1, 10_000)
workload_lists = st.dictionaries(st.uuids().map(str), st.tuples(sizes, sizes), min_size=1, max_size=40).map(
    lambda found: [workload(uuid, M=m, N=n) for uuid, (m, n) in found.items()]
)
fractions = st.sampled_from([(0.6, 0.2, 0.2), (1.0, 0.0, 0.0), (0.1, 0.9, 0.0), (0.34, 0.33, 0.33)])


@given(workload_lists, fractions)
def test_sets_are_disjoint_and_hold_every_workload(
    workloads: list[Workload], parts: tuple[float, float, float]
) -> None:
    sets = split(workloads, parts)
    calls = Counter(tuple(sorted(w.axes.items())) for w in recorded(sets))
    assert set(calls.values()) == {1}
    assert calls.keys() == {tuple(sorted(w.axes.items())) for w in workloads}
    assert sum(w.weight for w in recorded(sets)) == len(workloads)


@given(workload_lists, fractions)
def test_the_smallest_and_the_largest_size_are_tuned(
    workloads: list[Workload], parts: tuple[float, float, float]
) -> None:
    features = (Feature("M", None, (1,)), Feature("N", "M", (1,)))
    tune = split(workloads, parts, features).tune
    for feature in features:
        values = [feature.value(w.axes) for w in workloads]
        assert {min(values), max(values)} <= {feature.value(w.axes) for w in tune}


@given(workload_lists, st.randoms(use_true_random=False))
def test_the_order_of_workloads_does_not_matter(workloads: list[Workload], random: Random) -> None:
    shuffled = list(workloads)
    random.shuffle(shuffled)
    assert split(shuffled) == split(workloads)


@given(workload_lists, st.uuids().map(str), st.integers(2, 9_999))
def test_a_workload_recorded_later_moves_only_former_ends(workloads: list[Workload], uuid: str, size: int) -> None:
    assume(all(w.uuid != uuid for w in workloads))
    ends = [workload("smallest", M=1, N=1), workload("largest", M=10_000, N=10_000)]
    inside = [w for w in workloads if 1 < w.axes["M"] < 10_000 and 1 < w.axes["N"] < 10_000]
    new = workload(uuid, M=size, N=77)
    before, after = split([*ends, *inside]), split([*ends, *inside, new])

    def place(sets: Sets) -> dict[tuple[int, ...], int]:
        groups = (sets.tune, sets.boundary, sets.test)
        return {tuple(w.axes.values()): index for index, group in enumerate(groups) for w in group}

    same = {call: index for call, index in place(after).items() if call != (size, 77)}
    assert same == {call: index for call, index in place(before).items() if call != (size, 77)}


def test_the_fractions_are_met_over_many_workloads() -> None:
    sets = split([workload(f"uuid-{index}", M=index + 1) for index in range(4000)])
    shares = [len(group) / 4000 for group in (sets.tune, sets.boundary, sets.test)]
    assert shares == pytest.approx([0.6, 0.2, 0.2], abs=0.03)  # three standard deviations are 0.023


def test_duplicates_are_merged_into_weights() -> None:
    sets = split([workload("b", M=4), workload("a", M=4), workload("c", M=8)])
    assert [(w.uuid, w.axes["M"], w.weight) for w in sets.tune if w.axes["M"] == 4] == [("a", 4, 2.0)]
    assert sets.traffic_weighted


def test_equal_weights_are_not_called_traffic() -> None:
    assert not split([workload("a", M=4), workload("b", M=8)]).traffic_weighted
    assert not split([workload("a", 3.0, M=4), workload("b", 3.0, M=8)]).traffic_weighted


def test_an_empty_batch_is_skipped_with_a_reason() -> None:
    sets = split([workload("a", M=0, N=3), workload("b", M=8, N=3)])
    ((skipped),) = sets.skipped
    assert skipped.workload.uuid == "a"
    assert skipped.reason == "M = 0: a tensor without elements, answered without a kernel"
    assert [w.uuid for w in recorded(sets)] == ["b"]


def test_fewer_than_ten_workloads_are_noted() -> None:
    few = split([workload(f"uuid-{index}", M=index + 1) for index in range(3)], (1.0, 0.0, 0.0))
    assert few.notes == (
        "3 recorded workloads are fewer than 10: 3 tune, 0 boundary, 0 test",
        "the boundary set is empty",
        "the test set is empty",
    )
    many = split([workload(f"uuid-{index}", M=index + 1) for index in range(60)])
    assert many.notes == ()


def test_no_workload_gives_empty_sets_that_say_so() -> None:
    assert split([]).notes == ("the tune set is empty", "the boundary set is empty", "the test set is empty")


@pytest.mark.parametrize(
    "parts", [(0.6, 0.2, 0.1), (0.0, 0.5, 0.5), (1.2, -0.2, 0.0), (0.5, 0.5), (float("nan"), 0, 1)]
)
def test_fractions_that_are_none_are_refused(parts: tuple[float, float, float]) -> None:
    with pytest.raises(InputError, match=r"needs three fractions .*, got .* \(accepted: "):
        split([workload("a", M=1)], parts)


def test_sets_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from fibc.schema.sets import split\n"
        "from fibc.schema.workload import RandomInput, Workload\n"
        "sets = split([Workload(f'uuid-{i}', {'M': i % 17 + 1}, {'A': RandomInput()}) for i in range(40)])\n"
        "print([[(w.uuid, w.weight) for w in group] for group in (sets.tune, sets.boundary, sets.test)])\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(printed) == 1

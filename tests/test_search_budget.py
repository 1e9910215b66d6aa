"""The budget of a run, on a fake clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fibc.search.budget import Budget


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_time_runs_out_at_the_total_and_never_below_zero(clock: Clock) -> None:
    budget = Budget(100, clock=clock)
    clock.now += 99.5
    assert (budget.elapsed(), budget.remaining(), budget.expired()) == (99.5, 0.5, False)
    clock.now += 10
    assert (budget.elapsed(), budget.remaining(), budget.expired()) == (109.5, 0.0, True)


def test_the_search_leaves_the_reserve_until_it_is_released(clock: Clock) -> None:
    budget = Budget(100, reserve_fraction=0.4, clock=clock)
    assert budget.searchable() == pytest.approx(60)
    clock.now += 70
    assert budget.searchable() == 0
    assert budget.remaining() == pytest.approx(30)
    budget.release_reserve()
    assert budget.searchable() == pytest.approx(30)


def test_starts_come_on_top_of_a_reserve_which_leaves_the_search_something(clock: Clock) -> None:
    budget = Budget(100, clock=clock)
    budget.reserve(0.4, 15.0)
    assert budget.searchable() == pytest.approx(45.0)
    budget.reserve(0.4, 90.0)
    assert budget.searchable() == pytest.approx(40.0)


def test_another_reserve_may_be_kept_once_the_target_is_known(clock: Clock) -> None:
    budget = Budget(100, reserve_fraction=0.6, clock=clock)
    assert budget.searchable() == pytest.approx(40)
    budget.reserve(0.25)
    assert budget.searchable() == pytest.approx(75)
    budget.release_reserve()
    assert budget.searchable() == pytest.approx(100)


def test_time_that_a_key_leaves_goes_to_the_later_ones(clock: Clock) -> None:
    budget = Budget(100, reserve_fraction=0.4, clock=clock)
    assert budget.share_for_key(0, 3) == pytest.approx(20)
    clock.now += 5
    assert budget.share_for_key(1, 3) == pytest.approx(27.5)
    clock.now += 27.5
    assert budget.share_for_key(2, 3) == pytest.approx(27.5)


@given(st.lists(st.floats(0, 2), min_size=1, max_size=30))
def test_keys_that_keep_their_share_together_keep_the_bound(parts: list[float]) -> None:
    clock = Clock()
    budget = Budget(60, reserve_fraction=0.5, clock=clock)
    for index, part in enumerate(parts):
        clock.now += min(part, 1.0) * budget.share_for_key(index, len(parts))
    assert budget.elapsed() <= 30 + 1e-6


def test_one_heavy_operation_cannot_run_past_the_budget(clock: Clock) -> None:
    """65536 x 32768 x 384 with 50 ms of budget and 5 iterations asked for: none is begun that does not fit."""
    budget = Budget(0.050, reserve_fraction=0, clock=clock)
    call_s = 0.030
    done = 0
    for _ in range(5):
        if not budget.fits(call_s):
            budget.cut("warm-up")
            break
        clock.now += call_s
        done += 1
    assert done == 1
    assert budget.elapsed() <= 0.050
    assert budget.partial
    assert budget.cuts == ("warm-up",)


def test_a_step_must_fit_its_share_as_well(clock: Clock) -> None:
    budget = Budget(100, clock=clock)
    assert budget.fits(10, within_s=11)
    assert not budget.fits(10, within_s=9)
    clock.now += 95
    assert not budget.fits(10, within_s=11)


def test_a_childs_deadline_is_cut_to_what_remains(clock: Clock) -> None:
    budget = Budget(100, clock=clock)
    assert budget.deadline_s(60) == 60
    clock.now += 70
    assert budget.deadline_s(60) == pytest.approx(30)
    clock.now += 70
    assert budget.deadline_s(60) == 0
    assert not budget.fits(0)


def test_a_run_is_partial_once_something_was_cut_and_says_what_once(clock: Clock) -> None:
    budget = Budget(100, clock=clock)
    assert not budget.partial
    for what in ("search of 9..16", "confirm", "search of 9..16"):
        budget.cut(what)
    assert budget.partial
    assert budget.cuts == ("search of 9..16", "confirm")

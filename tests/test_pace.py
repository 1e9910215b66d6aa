"""The pace of a proof: time for the reconfirm is kept, as an acceptance without one serves native."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fibc.environment import Environment
from fibc.gpus import stand_in
from fibc.pace import PUBLISH_S, RECONFIRM_SHARE, Pace
from fibc.progress import Quiet
from fibc.schema.policy import Policy
from fibc.schema.silicon import Gpu
from fibc.search.budget import Budget
from fibc.sustain import CHECK_S, CHECKS_A_RACE

FIRST_LOOK = Policy().looks[0]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_pace(
    clock: Clock, total_s: float, gpu: Gpu | None = None, starting_s: Callable[[int], float] = lambda num: 0.0
) -> Pace:
    task = SimpleNamespace(policy=Policy(), environment=Environment("", (), 0, 0, 1, gpu=gpu))
    budget = Budget(total_s, clock=clock)
    evaluator = SimpleNamespace(started_s=0.0, starting_s=starting_s)
    shop: Any = SimpleNamespace(
        budget=budget,
        task=task,
        progress=Quiet(),
        evaluator=evaluator,
        time_to_start=lambda: budget.fits(starting_s(1)),
    )
    return Pace(shop)


def needed_s(longest_s: float) -> float:
    return (Policy().fixed_sessions + 1) * RECONFIRM_SHARE * longest_s + PUBLISH_S


def run_sessions(pace: Pace, clock: Clock, session_s: float, num: int = FIRST_LOOK) -> None:
    for _ in range(num):
        clock.now += session_s
        pace.ended("a session")


def test_races_end_while_the_sessions_of_the_reconfirm_still_fit(clock: Clock) -> None:
    pace = make_pace(clock, total_s=100.0)
    assert pace.leaves_enough(0)
    run_sessions(pace, clock, session_s=4.0)
    clock.now = 100.0 - needed_s(4.0) - 0.1
    assert pace.leaves_enough(FIRST_LOOK)
    clock.now = 100.0 - needed_s(4.0) + 0.1
    assert not pace.leaves_enough(FIRST_LOOK)


def test_on_a_gpu_time_is_kept_for_winners_to_run_alone(clock: Clock) -> None:
    on_cpu, on_gpu = (make_pace(clock, 200.0, gpu) for gpu in (None, stand_in("sm_90a")))
    for _ in range(FIRST_LOOK):
        clock.now += 4.0
        on_cpu.ended("a session")
        on_gpu.ended("a session")
    clock.now = 200.0 - needed_s(4.0) - 8 * CHECKS_A_RACE * CHECK_S - 0.1
    assert on_gpu.leaves_enough(FIRST_LOOK, 8)
    clock.now += 0.2
    assert not on_gpu.leaves_enough(FIRST_LOOK, 8)
    assert on_cpu.leaves_enough(FIRST_LOOK, 8)


def test_the_first_look_is_waited_for_while_there_is_any_time(clock: Clock) -> None:
    pace = make_pace(clock, total_s=100.0)
    clock.now = 90.0
    pace.ended("a long session")
    assert pace.leaves_enough(FIRST_LOOK - 1)
    clock.now = 101.0
    assert not pace.leaves_enough(FIRST_LOOK - 1)


def test_the_longest_session_counts_also_when_later_ones_are_short(clock: Clock) -> None:
    pace = make_pace(clock, total_s=200.0)
    run_sessions(pace, clock, session_s=8.0)
    run_sessions(pace, clock, session_s=1.0)
    clock.now = 200.0 - needed_s(8.0) - 0.1
    assert pace.leaves_enough(2 * FIRST_LOOK)
    clock.now = 200.0 - needed_s(8.0) + 0.1
    assert not pace.leaves_enough(2 * FIRST_LOOK)


def test_halves_race_only_where_their_race_and_reconfirm_still_fit(clock: Clock) -> None:
    pace = make_pace(clock, total_s=200.0)
    run_sessions(pace, clock, session_s=4.0)
    clock.now = 200.0 - (16 * RECONFIRM_SHARE * 4.0 + PUBLISH_S) - 0.1
    assert pace.fits(16)
    clock.now += 0.2
    assert not pace.fits(16)


def test_starts_of_processes_are_kept_time_for_and_are_no_part_of_a_session(clock: Clock) -> None:
    def starting_s(num_sessions: int) -> float:
        return 7.0 * -(-num_sessions // FIRST_LOOK)

    pace = make_pace(clock, 200.0, starting_s=starting_s)
    evaluator: Any = pace._shop.evaluator
    clock.now, evaluator.started_s = 7.0, 7.0
    run_sessions(pace, clock, session_s=4.0)
    clock.now = 200.0 - needed_s(4.0) - 14.0 - 0.1  # nine sessions in eights
    assert pace.leaves_enough(FIRST_LOOK)
    clock.now += 0.2
    assert not pace.leaves_enough(FIRST_LOOK)
    clock.now = 200.0 - 7.0 + 0.1
    assert not pace.leaves_enough(0), "nothing is started that would end after the budget"

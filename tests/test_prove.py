"""Proving: time for the reconfirm is kept, as an acceptance without one serves native."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fibc.progress import Quiet
from fibc.prove import PUBLISH_S, RECONFIRM_SHARE, _Pace
from fibc.schema.policy import Policy
from fibc.search.budget import Budget


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_pace(clock: Clock, total_s: float) -> _Pace:
    shop: Any = SimpleNamespace(
        budget=Budget(total_s, clock=clock), task=SimpleNamespace(policy=Policy()), progress=Quiet()
    )
    return _Pace(shop)


def needed_s(longest_s: float) -> float:
    return Policy().fixed_sessions * RECONFIRM_SHARE * longest_s + PUBLISH_S


def run_to_first_look(pace: _Pace, clock: Clock, session_s: float) -> None:
    for _ in range(Policy().looks[0]):
        clock.now += session_s
        pace.ended("a session")


def test_confirm_ends_while_the_sessions_of_the_reconfirm_still_fit(clock: Clock) -> None:
    pace = make_pace(clock, total_s=100.0)
    assert pace.leaves_enough()
    run_to_first_look(pace, clock, session_s=4.0)
    clock.now = 100.0 - needed_s(4.0) - 0.1
    assert pace.leaves_enough()
    clock.now = 100.0 - needed_s(4.0) + 0.1
    assert not pace.leaves_enough()


def test_a_round_that_has_begun_goes_on_to_its_first_look(clock: Clock) -> None:
    pace = make_pace(clock, total_s=100.0)
    clock.now = 90.0
    pace.ended("a long session")
    assert pace.leaves_enough()
    clock.now = 101.0
    assert not pace.leaves_enough()


def test_the_longest_session_of_all_rounds_counts(clock: Clock) -> None:
    pace = make_pace(clock, total_s=200.0)
    run_to_first_look(pace, clock, session_s=8.0)
    pace.begins()
    run_to_first_look(pace, clock, session_s=1.0)
    clock.now = 200.0 - needed_s(8.0) - 0.1
    assert pace.leaves_enough()
    clock.now = 200.0 - needed_s(8.0) + 0.1
    assert not pace.leaves_enough()

"""Proving: time for the reconfirm is kept, as an acceptance without one serves native."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fibc.progress import Quiet
from fibc.prove import PUBLISH_S, _Pace
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


def test_confirm_ends_while_the_sessions_of_the_reconfirm_still_fit(clock: Clock) -> None:
    pace = make_pace(clock, total_s=100.0)
    assert pace.leaves_enough()
    clock.now = 5.0
    pace.ended("session 1")
    needed_s = Policy().fixed_sessions * 5.0 + PUBLISH_S
    clock.now = 100.0 - needed_s - 0.1
    assert pace.leaves_enough()
    clock.now = 100.0 - needed_s + 0.1
    assert not pace.leaves_enough()


def test_the_longest_session_of_all_rounds_counts(clock: Clock) -> None:
    pace = make_pace(clock, total_s=100.0)
    clock.now = 8.0
    pace.ended("a session with every key")
    clock.now = 15.0
    pace.begins()
    clock.now = 16.0
    pace.ended("a session of two halves")
    needed_s = Policy().fixed_sessions * 8.0 + PUBLISH_S
    clock.now = 100.0 - needed_s - 0.1
    assert pace.leaves_enough()
    clock.now = 100.0 - needed_s + 0.1
    assert not pace.leaves_enough()

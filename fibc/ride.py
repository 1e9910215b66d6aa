"""The entrants of a session: tests of any stage and key that ride in one fresh process, each in its turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from fibc.bench import Bench
from fibc.turn import KeyTimer, Turn, open_session

TimeLeft = Callable[[], bool]


class Entrant(Protocol):
    """What is measured session by session: the race of a key's finalists, or a series of a winner.

    Attributes:
        stage: As in SessionSamples.
        timer: Times its arms.
        num_sessions: How many it has taken in.
    """

    stage: str
    timer: KeyTimer
    num_sessions: int

    @property
    def open(self) -> bool:
        """Whether another session would be of use."""
        ...

    def add(self, turn: Turn) -> None:
        """Take in a session."""
        ...


def ride(bench: Bench, entrants: Sequence[Entrant], seed: int, time_left: TimeLeft = lambda: True) -> None:
    """Measure every entrant once, in one session, in random order.

    A process start is paid once for all of them, and a key's sessions are spaced in time by the others' turns.

    Args:
        bench: Holds the entrants' arms.
        entrants: In any stage.
        seed: Of the session.
        time_left: Asked before each turn; those that get none have one session less.
    """
    rng = random.Random(seed)
    order = list(entrants)
    rng.shuffle(order)
    turns: list[Turn] = []
    with open_session(bench, seed, turns) as session:
        for entrant in order:
            if not time_left():
                break
            turns.append(entrant.timer.run(session, Turn(entrant.stage, entrant.num_sessions, seed), rng))
    for entrant, turn in zip(order, turns, strict=False):
        entrant.add(turn)

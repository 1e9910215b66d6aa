"""A fixed number of fresh sessions of one key's arms: reconfirm, boundary, test and gate."""

from __future__ import annotations

from collections.abc import Sequence

from fibc.race import Evidence
from fibc.schema.evaluation import Arm, SessionSamples
from fibc.schema.evidence import ArmFailure, Estimate
from fibc.schema.policy import PUBLISHED_LEVEL, Policy
from fibc.turn import KeyTimer, Turn


class Series:
    """The fresh sessions of some arms of one key.

    Attributes:
        stage: ``reconfirm``, ``boundary``, ``test`` or ``gate``.
        timer: Times the arms that have not failed.
        num_sessions: So many were taken in.
        failures: In the order in which they came.
        samples: Every pair of every session.
    """

    def __init__(self, arms: Sequence[Arm], indexes: Sequence[int], policy: Policy, stage: str) -> None:
        self.stage = stage
        self.timer = KeyTimer(arms, indexes, policy)
        self.num_sessions = 0
        self.failures: list[ArmFailure] = []
        self.samples: list[SessionSamples] = []
        self._arms = arms
        self._policy = policy
        self._evidence = {index: Evidence() for index in indexes}

    @property
    def open(self) -> bool:
        """Whether sessions are missing."""
        return bool(self.timer.active) and self.num_sessions < self._policy.fixed_sessions

    def add(self, turn: Turn) -> None:
        """Take in a session."""
        self.num_sessions += 1
        self.samples += turn.samples(self._arms)
        self.failures += turn.arm_failures(self._arms)
        self.timer.remove(self._arms[arm].candidate for arm in turn.failures)
        for arm in self.timer.active:
            self._evidence[arm].add(turn.pairs[arm])

    def estimates(self) -> dict[int, Estimate | None]:
        """Return the arms' estimates by index; None where an arm failed or has not all its sessions."""
        failed = {failure.arm for failure in self.failures}
        return {
            index: seen.estimate(self._arms[index], 1 - PUBLISHED_LEVEL)
            if len(seen.effects) == self._policy.fixed_sessions and self._arms[index] not in failed
            else None
            for index, seen in self._evidence.items()
        }

"""The turn of one key in one session: which pairs are timed, and in which order."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from fibc.bench import ArmFailed, ArmsFailed, Bench, Session
from fibc.errors import EvaluationError
from fibc.schema.evaluation import Arm, Pair, SessionSamples
from fibc.schema.evidence import ArmFailure
from fibc.schema.policy import Policy


@dataclass
class Turn:
    """The pairs of some arms of one key in one session.

    Attributes:
        stage: As in SessionSamples; ``index`` and ``seed`` alike.
        pairs: By index of the arm, in the order of their timing.
        failures: Arms whose candidate failed, in the session or when it was left.
    """

    stage: str
    index: int
    seed: int
    pairs: dict[int, list[Pair]] = field(default_factory=dict)
    failures: dict[int, ArmFailed] = field(default_factory=dict)

    def time(self, session: Session, arm: int, flip: bool) -> None:
        """Add a pair of ``arm``, or its failure."""
        pairs = self.pairs[arm]
        try:
            pairs.append(time_pair(session, arm, len(pairs), flip))
        except ArmFailed as error:
            self.failures[arm] = error

    def samples(self, arms: Sequence[Arm]) -> list[SessionSamples]:
        """Return the pairs for the record."""
        return [SessionSamples(arms[a], self.stage, self.index, self.seed, tuple(p)) for a, p in self.pairs.items()]

    def arm_failures(self, arms: Sequence[Arm]) -> list[ArmFailure]:
        """Return the failures for the record."""
        return [ArmFailure(arms[arm], error.status, error.log) for arm, error in self.failures.items()]


@contextmanager
def open_session(bench: Bench, seed: int, turns: Sequence[Turn]) -> Iterator[Session]:
    """Open a session for ``turns``; what is found wrong when it is left becomes a failure of its turn."""
    try:
        with bench.session(seed) as session:
            yield session
    except ArmsFailed as error:
        for failed in error.failures:
            for turn in turns:
                if failed.arm in turn.pairs:
                    turn.failures[failed.arm] = failed


class KeyTimer:
    """Times the arms of one key, with as many pairs a session as the key's cost allows.

    A session runs two pairs of every arm, one in each order, then the others. Whether these are too dear is decided by
    the first session, and anew when arms have left; a later session is never cut short by its own timings, which would
    let slow starts into the estimates.

    Attributes:
        active: Indexes of the arms that are still timed.
    """

    def __init__(self, arms: Sequence[Arm], indexes: Sequence[int], policy: Policy) -> None:
        self._arms = arms
        self._policy = policy
        self._num_pairs: int | None = None
        self.active = list(indexes)

    def remove(self, candidates: Iterable[str]) -> None:
        """Time these candidates no more, at any point."""
        gone = set(candidates)
        left = [arm for arm in self.active if self._arms[arm].candidate not in gone]
        if len(left) < len(self.active):
            self.active, self._num_pairs = left, None

    def run(self, session: Session, turn: Turn, rng: random.Random) -> Turn:
        """Fill ``turn`` with the pairs of this key in ``session``."""
        turn.pairs = {arm: [] for arm in self.active}
        flips = {arm: rng.random() < 0.5 for arm in self.active}
        self._blocks(session, turn, flips, self._policy.heavy_pairs, rng)
        if self._num_pairs is None:
            self._num_pairs = self._affordable(turn)
        self._blocks(session, turn, flips, self._num_pairs - self._policy.heavy_pairs, rng)
        return turn

    def _affordable(self, turn: Turn) -> int:
        round_s = sum(
            statistics.median(p.native_s + p.candidate_s for p in pairs) for pairs in turn.pairs.values() if pairs
        )
        heavy = round_s * self._policy.pairs_per_session > self._policy.heavy_s
        return self._policy.heavy_pairs if heavy else self._policy.pairs_per_session

    def _blocks(self, session: Session, turn: Turn, flips: Mapping[int, bool], count: int, rng: random.Random) -> None:
        """Run ``count`` blocks at each point in turn; a block is one pair of every finalist, in random order."""
        by_point: dict[int, list[int]] = {}
        for arm in self.active:
            by_point.setdefault(self._arms[arm].point, []).append(arm)
        for point in rng.sample(sorted(by_point), len(by_point)):
            for _ in range(count):
                lost = {self._arms[arm].candidate for arm in turn.failures}
                for arm in rng.sample(by_point[point], len(by_point[point])):
                    if self._arms[arm].candidate not in lost:
                        turn.time(session, arm, flips[arm])


def by_key(arms: Sequence[Arm]) -> dict[str, list[int]]:
    """Return the indexes of the arms of each key."""
    groups: dict[str, list[int]] = {}
    for index, arm in enumerate(arms):
        groups.setdefault(arm.key, []).append(index)
    return groups


def time_pair(session: Session, arm: int, turn: int, flip: bool) -> Pair:
    """Time a pair; turns alternate their order as ABBA, so that half are native-first and drift cancels."""
    native_first = (turn % 4 in {0, 3}) != flip
    native_s, candidate_s = session.pair(arm, native_first)
    if not (0 < native_s < math.inf and 0 < candidate_s < math.inf):
        raise EvaluationError(
            f"bench: a timing must be positive and finite, got native {native_s} s, candidate {candidate_s} s"
        )
    return Pair(native_s, candidate_s, native_first)

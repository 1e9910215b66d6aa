"""The sequential test of one key: evidence comes in session by session, bounds are looked at a few times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from fibc import stats
from fibc.schema.decision import Verdict
from fibc.schema.evaluation import Arm, Pair, SessionSamples
from fibc.schema.evidence import ArmFailure, Confirmation, Contender, Estimate, Fate
from fibc.schema.policy import PUBLISHED_LEVEL, Policy
from fibc.turn import KeyTimer, Turn


@dataclass
class Evidence:
    """What has been seen of one arm so far."""

    effects: list[float] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)

    def add(self, pairs: Sequence[Pair]) -> None:
        """Take in a session."""
        self.effects.append(stats.session_effect(pairs))
        self.pairs += pairs

    def estimate(self, arm: Arm, alpha: float) -> Estimate:
        """Return what all sessions so far say, with one-sided bounds that err with ``alpha`` each."""
        return Estimate(
            arm=arm,
            effects=tuple(self.effects),
            mean=stats.mean(self.effects),
            sd=stats.standard_deviation(self.effects),
            lower=stats.lower_bound(self.effects, alpha),
            upper=stats.upper_bound(self.effects, alpha),
            alpha=alpha,
            num_pairs=len(self.pairs),
            native_s=statistics.median(pair.native_s for pair in self.pairs),
            candidate_s=statistics.median(pair.candidate_s for pair in self.pairs),
        )


class Race:
    """The sequential test of one key's finalists.

    Attributes:
        key: ``str`` of the key's cell.
        timer: Times the arms of the finalists that are still in the race.
        num_sessions: So many were taken in.
    """

    stage = "confirm"

    def __init__(self, key: str, arms: Sequence[Arm], indexes: Sequence[int], policy: Policy) -> None:
        self.key = key
        self.timer = KeyTimer(arms, indexes, policy)
        self._arms = arms
        self._policy = policy
        self._places = _places(key, arms, indexes)
        self._alpha = policy.bound_alpha(len(self._places))
        self._contenders = {digest: Contender(digest, Fate.RUNNING, (), None) for digest in self._places}
        self._evidence = {arm: Evidence() for arm in indexes}
        self._samples: list[SessionSamples] = []
        self.num_sessions = 0
        self._last_look = 0

    @property
    def open(self) -> bool:
        """Whether another session would be of use."""
        return bool(self.timer.active) and self.num_sessions < self._policy.looks[-1]

    def add(self, turn: Turn) -> None:
        """Take in a session, and look where its number says so."""
        self._samples += turn.samples(self._arms)
        self.num_sessions += 1
        for failure in turn.arm_failures(self._arms):
            self._end(failure.arm.candidate, Fate.FAILED, failure)
        for arm in self.timer.active:
            self._evidence[arm].add(turn.pairs[arm])
        if self.num_sessions in self._policy.looks:
            self._look()

    def _end(self, candidate: str, fate: Fate, failure: ArmFailure | None = None) -> None:
        self._contenders[candidate] = Contender(candidate, fate, self._contenders[candidate].estimates, failure)
        self.timer.remove([candidate])

    def _with(self, fate: Fate) -> list[Contender]:
        return [contender for contender in self._contenders.values() if contender.fate is fate]

    def _look(self) -> None:
        self._last_look = self.num_sessions
        for contender in self._with(Fate.RUNNING):
            places = self._places[contender.candidate]
            estimates = tuple(self._evidence[arm].estimate(self._arms[arm], self._alpha) for arm in places)
            self._contenders[contender.candidate] = Contender(contender.candidate, Fate.RUNNING, estimates, None)
            if (fate := self._judge(estimates)) is not Fate.RUNNING:
                self._end(contender.candidate, fate)
        best = max((contender.mean for contender in self._with(Fate.ACCEPTED)), default=math.inf)
        for contender in self._with(Fate.RUNNING):
            if contender.mean <= best < math.inf:
                self._end(contender.candidate, Fate.OUTRUN)

    def _judge(self, estimates: Sequence[Estimate]) -> Fate:
        margin = self._policy.margin
        if any(estimate.upper < margin for estimate in estimates):
            return Fate.DROPPED
        if all(estimate.lower > margin for estimate in estimates):
            return Fate.ACCEPTED
        if any(self._out_of_reach(estimate) for estimate in estimates):
            return Fate.OUT_OF_REACH
        return Fate.RUNNING

    def _out_of_reach(self, estimate: Estimate) -> bool:
        """Whether the test has too few pairs even for the upper end of the effect's interval."""
        num_sessions = len(estimate.effects)
        pairs_each = estimate.num_pairs / num_sessions
        hope = stats.interval(estimate.effects, PUBLISHED_LEVEL)[1]
        sigma = stats.timing_sigma(estimate.sd, pairs_each)
        needed = stats.pairs_needed(sigma, hope, self._policy.margin, self._alpha)
        return needed > self._policy.patience * self._policy.looks[-1] * pairs_each

    def result(self) -> Confirmation:
        """End the test. Where time ran out between two looks, the next look is taken early."""
        partial = self.open
        if partial and self.num_sessions > max(self._last_look, self._policy.looks[0]):
            self._look()
        accepted = self._with(Fate.ACCEPTED)
        if accepted:
            verdict = Verdict.REPLACE
        elif all(contender.fate in {Fate.DROPPED, Fate.FAILED} for contender in self._contenders.values()):
            verdict = Verdict.KEEP_NATIVE
        else:
            verdict = Verdict.INCONCLUSIVE
        margin = self._policy.margin
        split = [c.candidate for c in self._with(Fate.DROPPED) if any(e.mean > margin for e in c.estimates)]
        return Confirmation(
            key=self.key,
            verdict=verdict,
            winner=max(accepted, key=lambda contender: contender.lower).candidate if accepted else "",
            contenders=tuple(sorted(self._contenders.values(), key=lambda contender: -contender.mean)),
            split=() if accepted else tuple(split),
            num_sessions=self.num_sessions,
            partial=partial,
            samples=tuple(self._samples),
        )


def _places(key: str, arms: Sequence[Arm], indexes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the arms of each candidate, one per point, by point."""
    grid: dict[str, dict[int, int]] = {}
    for index in indexes:
        grid.setdefault(arms[index].candidate, {})[arms[index].point] = index
    points = sorted({arms[index].point for index in indexes})
    if any(sorted(row) != points for row in grid.values()) or len(indexes) != len(points) * len(grid):
        raise ValueError(f"confirm: key {key}: needs every finalist at every point, once each")
    return {candidate: tuple(row[point] for point in points) for candidate, row in grid.items()}

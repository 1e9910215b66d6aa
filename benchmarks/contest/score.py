"""What the referee's sessions say about picks: pure functions from rows and effects to scores."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from contest.log import Log
from contest.pickers import PICKERS
from contest.rounds import Row
from fibc import stats
from fibc.schema.candidate import NATIVE
from fibc.schema.policy import PUBLISHED_LEVEL

WORTH = 1.01
"""A key has a winner where the referee finds a pick faster than this beyond doubt: what the worlds of
decision_quality.py call a winner too."""

Place = tuple[str, str]
"""A definition's name and the text of a key."""


@dataclass(frozen=True)
class Seen:
    """What the referee has seen of one candidate at one key.

    Attributes:
        effects: Log speedup of each session.
        native_us: Median latency of a native call.
    """

    effects: tuple[float, ...]
    native_us: float

    @property
    def mean(self) -> float:
        """Log speedup."""
        return stats.mean(self.effects)

    @property
    def speedup(self) -> float:
        return math.exp(self.mean)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return stats.standard_deviation(self.effects) / math.sqrt(len(self.effects))

    @property
    def interval(self) -> tuple[float, float]:
        """The speedup's 95 % interval."""
        low, high = stats.interval(self.effects, PUBLISHED_LEVEL)
        return math.exp(low), math.exp(high)

    @property
    def lower(self) -> float:
        """One-sided 95 % lower bound of the log speedup."""
        return stats.lower_bound(self.effects, 1 - PUBLISHED_LEVEL)

    @property
    def upper(self) -> float:
        """One-sided 95 % upper bound of the log speedup."""
        return stats.upper_bound(self.effects, 1 - PUBLISHED_LEVEL)


Refereed = Mapping[tuple[Place, str], Seen]
"""By place and candidate."""


def refereed(log: Log, board: str, num_sessions: int) -> dict[tuple[Place, str], Seen]:
    """Return what all parts of the referee saw of a board; without candidates whose parts are not all there."""
    effects: dict[tuple[Place, str], list[float]] = defaultdict(list)
    native_us: dict[tuple[Place, str], list[float]] = defaultdict(list)
    for record in log.of("judged", board=board):
        at = (record["definition"], record["key"]), record["candidate"]
        effects[at] += record["effects"]
        native_us[at].append(record["native_us"])
    return {
        at: Seen(tuple(seen), statistics.median(native_us[at]))
        for at, seen in effects.items()
        if len(seen) >= num_sessions
    }


@dataclass(frozen=True)
class Score:
    """One picker over all keys and repeats.

    Attributes:
        num_picks: Keys times repeats.
        num_replaced: Picks that replace native.
        num_unjudged: Of these, without the referee's estimate: not measured yet, or failed when they were.
        num_slower: Of these, slower than native by the referee's estimate.
        num_surely_slower: Beyond its 95 % upper bound, too.
        claim_bias: Mean of claimed over refereed speedup, less 1, over the replaced.
        worst_claim: Largest of them.
        num_winner: Picks at keys that have a winner.
        num_kept: Of these, a candidate that the referee finds faster than native.
        served: Geometric mean of the refereed speedup of what serves, over all picks.
        num_keys: Keys.
        num_other_verdict: Keys at which some repeats replace native and some do not.
        num_other_pick: Keys at which not all repeats pick the same.
        seconds: Of timings, per pick; ``num_timings`` alike.
        num_intervals: Picks that state an interval.
        num_contain: Intervals that hold the referee's estimate.
        num_agree: Intervals from which the referee's estimate lies no further away than the errors of both explain.
    """

    picker: str
    num_picks: int
    num_replaced: int
    num_unjudged: int
    num_slower: int
    num_surely_slower: int
    claim_bias: float
    worst_claim: float
    num_winner: int
    num_kept: int
    served: float
    num_keys: int
    num_other_verdict: int
    num_other_pick: int
    seconds: float
    num_timings: float
    num_intervals: int
    num_contain: int
    num_agree: int


@dataclass(frozen=True)
class Claim:
    """A pick that replaces native, beside what the referee saw of it."""

    row: Row
    seen: Seen

    @property
    def bias(self) -> float:
        """Claimed over refereed speedup, less 1."""
        return self.row.pick.claimed / self.seen.speedup - 1

    @property
    def contains(self) -> bool:
        """Whether the claim's interval holds the referee's estimate."""
        pick = self.row.pick
        assert pick.low is not None
        assert pick.high is not None
        return pick.low <= self.seen.speedup <= pick.high

    def agrees(self, claim_sessions: int) -> bool:
        """Whether claim and referee differ by no more than the 95 % interval of their difference (Welch).

        Args:
            claim_sessions: Sessions that the claim's interval is made of.
        """
        pick = self.row.pick
        assert pick.low is not None
        assert pick.high is not None
        degrees = claim_sessions - 1
        claim_error = math.log(pick.high / pick.low) / 2 / float(stdtrit(degrees, (1 + PUBLISHED_LEVEL) / 2))
        variances = (claim_error**2, self.seen.error**2)
        total = sum(variances)
        if total == 0:
            return math.isclose(math.log(pick.claimed), self.seen.mean)
        welch = total**2 / (variances[0] ** 2 / degrees + variances[1] ** 2 / (len(self.seen.effects) - 1))
        allowed = float(stdtrit(welch, (1 + PUBLISHED_LEVEL) / 2)) * math.sqrt(total)
        return abs(math.log(pick.claimed) - self.seen.mean) <= allowed


def claims(rows: Iterable[Row], seen: Refereed) -> list[Claim]:
    """Return the replacing picks that were refereed."""
    found = []
    for row in rows:
        at = (row.definition, row.key), row.pick.candidate
        if row.pick.replaces and at in seen:
            found.append(Claim(row, seen[at]))
    return found


def winners(seen: Refereed) -> set[Place]:
    """Return the keys that have a winner."""
    return {place for (place, candidate), item in seen.items() if candidate != NATIVE and item.lower > math.log(WORTH)}


def score(rows: Sequence[Row], seen: Refereed, claim_sessions: int) -> list[Score]:
    """Return every picker's score.

    Args:
        rows: Picks; replacing ones that were not refereed count in no column that needs the referee.
        seen: The referee's sessions.
        claim_sessions: Sessions behind the intervals of claims.
    """
    worth = winners(seen)
    return [_score(name, [row for row in rows if row.picker == name], seen, worth, claim_sessions) for name in PICKERS]


def _score(picker: str, rows: Sequence[Row], seen: Refereed, worth: set[Place], claim_sessions: int) -> Score:
    made = claims(rows, seen)
    num_replaced = sum(row.pick.replaces for row in rows)
    biases = [claim.bias for claim in made]
    stated = [claim for claim in made if claim.row.pick.low is not None]
    at_winners = [row for row in rows if (row.definition, row.key) in worth]
    picks: dict[Place, set[str]] = defaultdict(set)
    for row in rows:
        picks[row.definition, row.key].add(row.pick.candidate)
    return Score(
        picker=picker,
        num_picks=len(rows),
        num_replaced=num_replaced,
        num_unjudged=num_replaced - len(made),
        num_slower=sum(claim.seen.mean < 0 for claim in made),
        num_surely_slower=sum(claim.seen.upper < 0 for claim in made),
        claim_bias=statistics.fmean(biases) if biases else 0.0,
        worst_claim=max(biases, default=0.0),
        num_winner=len(at_winners),
        num_kept=sum(claim.seen.mean > 0 for claim in claims(at_winners, seen)),
        served=math.exp(math.fsum(claim.seen.mean for claim in made) / max(len(rows), 1)),
        num_keys=len(picks),
        num_other_verdict=sum(NATIVE in at_key and len(at_key) > 1 for at_key in picks.values()),
        num_other_pick=sum(len(at_key) > 1 for at_key in picks.values()),
        seconds=statistics.fmean(row.seconds for row in rows) if rows else 0.0,
        num_timings=statistics.fmean(row.num_timings for row in rows) if rows else 0.0,
        num_intervals=len(stated),
        num_contain=sum(claim.contains for claim in stated),
        num_agree=sum(claim.agrees(claim_sessions) for claim in stated),
    )


@dataclass(frozen=True)
class SelfCheck:
    """The referee on native against itself, which it must find equal.

    Attributes:
        num_keys: At so many keys.
        bias: Mean speedup, less 1.
        worst: Largest distance from 1 at a key.
    """

    num_keys: int
    bias: float
    worst: float


def self_check(seen: Refereed) -> SelfCheck:
    """Return what the referee saw of native."""
    own = [item.mean for (_, candidate), item in seen.items() if candidate == NATIVE]
    if not own:
        return SelfCheck(0, 0.0, 0.0)
    return SelfCheck(len(own), math.expm1(statistics.fmean(own)), max(abs(math.expm1(mean)) for mean in own))

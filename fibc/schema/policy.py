"""The constants of the measuring protocol."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fibc import settings
from fibc.errors import SchemaError

PUBLISHED_LEVEL = 0.95
"""Level of every published interval, and of the one-sided bounds of reconfirm, boundary, test and the gate."""


@dataclass(frozen=True)
class Policy:
    """What measuring and deciding go by. docs/measuring.md has the numbers that the defaults earn.

    Attributes:
        min_speedup: Margin that a lower bound must beat.
        alpha: Error per key, or over ``num_keys`` keys.
        num_keys: Divides ``alpha``; 1 unless one guarantee over a whole table is asked for.
        screen_rounds: Paired rounds of a trial's first rung; each further rung has twice as many.
        reduction_factor: One in so many candidates enters the next rung.
        finalists: Rungs end where no more are left.
        drop_below: Finalists whose log speedup is below are dropped.
        finalist_span: So are those further behind the best one, on a log scale: several times a screen's noise.
        promote_above: Candidates whose log speedup is below enter no further rung, whatever their rank.
        hopeless: Log speedups by round, the last one for all later rounds: a candidate leaves a rung early where its
            best round so far is below. One timing may be three times too long, one in each of two pairs hardly ever.
        looks: Numbers of sessions at which bounds are looked at; the last one ends the test.
        patience: A finalist is given up where, even at the upper end of its 95 % interval, it needs more than so many
            times the pairs that the test has (32 sessions of 8 pairs: 256).
        pairs_per_session: Pairs of an arm in a session; even, half of them native-first.
        heavy_pairs: The same where a key is heavy, and in the first rung of a trial that is.
        heavy_s: A key is heavy where ``pairs_per_session`` pairs of all its arms would take longer, in seconds; a trial
            where those of its candidate would.
        fixed_sessions: Sessions of reconfirm, boundary, test and the gate.
        gate_comparisons: Native-against-native comparisons of the gate.
        gate_allowed: So many of them may look faster. Each errs at 5 %: more than 5 of 40 happen once in 70 gates.
    """

    min_speedup: float = settings.DEFAULT_MIN_SPEEDUP_CPU
    alpha: float = settings.DEFAULT_ALPHA
    num_keys: int = 1
    screen_rounds: int = 4
    reduction_factor: int = 3
    finalists: int = 4
    drop_below: float = -0.03
    finalist_span: float = 0.15
    promote_above: float = -0.2
    hopeless: tuple[float, ...] = (math.log(0.25), math.log(0.7))
    looks: tuple[int, ...] = (8, 16, 32)
    patience: float = 1.0
    pairs_per_session: int = 8
    heavy_pairs: int = 2
    heavy_s: float = 0.5
    fixed_sessions: int = 8
    gate_comparisons: int = 40
    gate_allowed: int = 5

    def __post_init__(self) -> None:
        """Check the constants that others are computed from.

        Raises:
            SchemaError: With one problem per constant that is out of range.
        """
        laws = (
            ("min_speedup", self.min_speedup, self.min_speedup > 0, "more than 0"),
            ("alpha", self.alpha, 0 < self.alpha < 0.5, "more than 0, less than 0.5"),
            ("num_keys", self.num_keys, self.num_keys >= 1, "1 and more"),
            ("finalists", self.finalists, self.finalists >= 1, "1 and more"),
            ("reduction_factor", self.reduction_factor, self.reduction_factor >= 2, "2 and more"),
            ("hopeless", self.hopeless, len(self.hopeless) >= 1, "at least one round"),
            (
                "looks",
                self.looks,
                len(self.looks) > 0 and self.looks[0] >= 2 and list(self.looks) == sorted(set(self.looks)),
                "strictly increasing, from 2",
            ),
            (
                "pairs_per_session",
                (self.heavy_pairs, self.pairs_per_session),
                2 <= self.heavy_pairs <= self.pairs_per_session
                and self.heavy_pairs % 2 == 0
                and self.pairs_per_session % 2 == 0,
                "even, heavy_pairs no larger than pairs_per_session",
            ),
            ("fixed_sessions", self.fixed_sessions, self.fixed_sessions >= 2, "2 and more"),
        )
        problems = [
            f"policy: {name}: out of range, got {seen} (accepted: {accepted})"
            for name, seen, good, accepted in laws
            if not good
        ]
        if problems:
            raise SchemaError(problems)

    @property
    def margin(self) -> float:
        """Log of ``min_speedup``."""
        return math.log(self.min_speedup)

    @property
    def key_alpha(self) -> float:
        """Error of one key."""
        return self.alpha / self.num_keys

    def bound_alpha(self, num_finalists: int) -> float:
        """Return the error of one bound: all looks at all finalists share the key's error (Bonferroni)."""
        return self.key_alpha / (len(self.looks) * num_finalists)

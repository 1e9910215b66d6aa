"""Statistics of paired timings: session effects, their bounds, and what a comparison would take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from scipy.special import ndtri, stdtrit

from fibc.schema.evaluation import Pair

HODGES_LEHMANN_COST = math.pi / 3
"""Variance of the Hodges-Lehmann estimate over that of the mean, normal noise: 1.05."""


def hodges_lehmann(differences: Sequence[float]) -> float:
    """Return the Hodges-Lehmann estimate of location: the median of the Walsh averages ``(d_i + d_j) / 2``, i <= j.

    It keeps 95 % of the mean's precision under normal noise and shrugs off a quarter of the sample being outliers, so
    that no timing is ever deleted. Plain Python: for the 8 differences of a session it is twice as fast as numpy.

    Raises:
        ValueError: If there is no difference.
    """
    if not differences:
        raise ValueError("hodges_lehmann: needs at least 1 difference, got 0")
    sums = sorted(a + b for i, a in enumerate(differences) for b in differences[i:])
    middle, odd = divmod(len(sums), 2)
    return sums[middle] / 2 if odd else (sums[middle - 1] + sums[middle]) / 4


def log_ratios(pairs: Sequence[Pair]) -> list[float]:
    """Return ``ln(native / candidate)`` of each pair: positive where the candidate is faster."""
    return [math.log(pair.native_s / pair.candidate_s) for pair in pairs]


def session_effect(pairs: Sequence[Pair]) -> float:
    """Return the log speedup that one session shows."""
    return hodges_lehmann(log_ratios(pairs))


def mean(effects: Sequence[float]) -> float:
    """Return the mean of at least one effect."""
    return math.fsum(effects) / len(effects)


def standard_deviation(effects: Sequence[float]) -> float:
    """Return the sample standard deviation (divisor n - 1); infinite for one effect, whose spread nobody knows."""
    if len(effects) < 2:
        return math.inf
    centre = mean(effects)
    return math.sqrt(math.fsum((effect - centre) ** 2 for effect in effects) / (len(effects) - 1))


def lower_bound(effects: Sequence[float], alpha: float) -> float:
    """Return the one-sided lower confidence bound of the mean effect at level ``1 - alpha``.

    It is ``mean - t(1 - alpha, G - 1) sd / sqrt(G)`` over G sessions, which is
    ``scipy.stats.ttest_1samp(effects, 0, alternative="greater").confidence_interval(1 - alpha).low``. One session has
    no spread and bounds nothing (minus infinity); equal effects (a coarse timer) have the mean itself as their bound.
    """
    return mean(effects) - _half_width(effects, alpha)


def upper_bound(effects: Sequence[float], alpha: float) -> float:
    """Return the one-sided upper confidence bound of the mean effect at level ``1 - alpha``; see ``lower_bound``."""
    return mean(effects) + _half_width(effects, alpha)


def interval(effects: Sequence[float], level: float) -> tuple[float, float]:
    """Return the two-sided confidence interval of the mean effect at ``level``."""
    half = _half_width(effects, (1 - level) / 2)
    return mean(effects) - half, mean(effects) + half


def timing_sigma(session_sd: float, num_pairs: float) -> float:
    """Return the log noise of one timing that would explain the spread between sessions of ``num_pairs`` pairs each.

    A session's effect varies by ``1.05 * 2 sigma^2 / num_pairs``; offsets of whole sessions are counted as noise, too.
    """
    return session_sd * math.sqrt(num_pairs / (2 * HODGES_LEHMANN_COST))


def pairs_needed(sigma: float, effect: float, margin: float, alpha: float, power: float = 0.9) -> float:
    """Return how many pairs show, with probability ``power``, that ``effect`` exceeds ``margin``.

    ``1.05 * 2 sigma^2 (z(1 - alpha) + z(power))^2 / (effect - margin)^2``: the sample size of a one-sided z-test on
    differences of two timings. 33 at sigma 1 %, speedup 1.02, margin 1.01, alpha 0.05 / 12; 530 at sigma 4 %.

    Args:
        sigma: Log noise of one timing.
        effect: True log speedup.
        margin: Log of the least speedup that counts.
        alpha: One-sided error.
        power: Probability to succeed.

    Returns:
        Pairs, not rounded; infinite where the effect is no larger than the margin.
    """
    if effect <= margin:
        return math.inf
    return HODGES_LEHMANN_COST * 2 * (sigma * (_z(1 - alpha) + _z(power)) / (effect - margin)) ** 2


def detectable_effect(sigma: float, num_pairs: float, margin: float, alpha: float, power: float = 0.9) -> float:
    """Return the least true log speedup that ``num_pairs`` pairs would have shown: the inverse of ``pairs_needed``."""
    return margin + sigma * (_z(1 - alpha) + _z(power)) * math.sqrt(2 * HODGES_LEHMANN_COST / num_pairs)


def _half_width(effects: Sequence[float], alpha: float) -> float:
    count = len(effects)
    if count < 2:
        return math.inf
    return _t(1 - alpha, count - 1) * standard_deviation(effects) / math.sqrt(count)


@lru_cache(maxsize=256)
def _t(probability: float, degrees: int) -> float:
    return float(stdtrit(degrees, probability))


@lru_cache(maxsize=256)
def _z(probability: float) -> float:
    return float(ndtri(probability))

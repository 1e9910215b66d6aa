"""fast_p: the share of tasks answered correctly and more than p times as fast as native."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fibc.reporting.data import FastP

RANGE = (0.0, 2.0)
"""Range of the area under the curve, on a linear axis, the same for every report so that areas can be compared."""

POINTS = (0.0, 0.95, 1.0)
"""Answered correctly at all; no slower than native but for noise; faster than native."""


def fast_p(speedups: Sequence[float], p: float) -> float:
    """Return the share of ``speedups`` strictly above ``p``; 0 of nothing."""
    return sum(speedup > p for speedup in speedups) / len(speedups) if speedups else 0.0


def area(speedups: Sequence[float], low: float = RANGE[0], high: float = RANGE[1]) -> float:
    """Return the area under fast_p from ``low`` to ``high``, divided by the length of that range.

    fast_p is a step function that falls by 1/n at each speedup, so the area is the mean of the speedups, each cut to
    the range: nothing is integrated numerically.
    """
    if not speedups:
        return 0.0
    return sum(min(max(speedup, low), high) - low for speedup in speedups) / len(speedups) / (high - low)


def curve(family: str, group: str, about: str, speedups: Iterable[float]) -> FastP:
    """Return the fast_p of one group of tasks; a task that nothing answers correctly has speedup 0."""
    known = tuple(sorted(speedups))
    return FastP(
        family=family,
        group=group,
        about=about,
        speedups=known,
        points={f"{p:g}": fast_p(known, p) for p in POINTS},
        range_low=RANGE[0],
        range_high=RANGE[1],
        auc=area(known),
    )

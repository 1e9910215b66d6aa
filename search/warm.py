"""Warm start: the configs that won at the nearest key that is tuned already."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from fibc.schema.feature import Cell
from fibc.search.space import Config
from fibc.search.store import Trial
from fibc.search.study import LEFT_BEHIND, TRIALS_TO_LEAVE

NUM_WARM = 3
"""Configs taken over from a neighbour: its finalists but for the last, or one template could fill the design."""

LOST = math.log(0.4)
LOST_WITHIN = 1.5
"""A template that was 2.5 times slower than native at a key at most this far away (in powers of two) is not tried: a
gap of that size does not close so fast, and its trials are the longest of all."""


def distance(left: Cell, right: Cell) -> float:
    """Return how far two cells lie apart: between the middles of their bounds on a log scale, summed over features."""
    return sum(
        abs(math.log2(first * last) - math.log2(other_first * other_last)) / 2
        for (first, last), (other_first, other_last) in zip(left.bounds, right.bounds, strict=True)
    )


def nearest(cell: Cell, tuned: Iterable[Cell]) -> Cell | None:
    """Return the nearest of ``tuned``; of two equally near ones the smaller."""
    return min(sorted(tuned), key=lambda other: distance(cell, other), default=None)


def warm_start(cell: Cell, best: Mapping[Cell, Sequence[Trial]]) -> tuple[tuple[str, Config], ...]:
    """Return the configs to try first at ``cell``.

    Args:
        best: Of every tuned cell, its best trials, best first; may be empty.
    """
    neighbour = nearest(cell, (other for other, trials in best.items() if trials))
    if neighbour is None:
        return ()
    return tuple((trial.template, trial.config) for trial in best[neighbour][:NUM_WARM])


def trailing(cell: Cell, best: Mapping[Cell, Sequence[Trial]]) -> dict[str, int]:
    """Return the templates that the nearest tuned key left behind, with the trials at ``cell`` that this counts as.

    The best template of that key counts as one trial at most, so that something is tried everywhere.
    """
    neighbour = nearest(cell, (other for other, trials in best.items() if trials))
    if neighbour is None:
        return {}
    lead: dict[str, float] = {}
    for trial in best[neighbour]:
        if trial.value is not None:
            lead[trial.template] = max(trial.value, lead.get(trial.template, trial.value))
    near = distance(cell, neighbour) <= LOST_WITHIN
    top = max(lead.values(), default=0.0)
    return {
        template: TRIALS_TO_LEAVE if near and value < LOST and value < top else 1
        for template, value in lead.items()
        if value < max(top, 0.0) + LEFT_BEHIND
    }

"""Warm start: the configs that won at the nearest key that is tuned already."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from fibc.schema.feature import Cell
from fibc.search.space import Config
from fibc.search.store import Trial
from fibc.search.study import LEFT_BEHIND

NUM_WARM = 3
"""Configs taken over from a neighbour: its finalists but for the last, or one template could fill the design."""


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


def trailing(cell: Cell, best: Mapping[Cell, Sequence[Trial]]) -> frozenset[str]:
    """Return the templates whose best trial at the nearest tuned key was left behind."""
    neighbour = nearest(cell, (other for other, trials in best.items() if trials))
    if neighbour is None:
        return frozenset()
    lead: dict[str, float] = {}
    for trial in best[neighbour]:
        if trial.value is not None:
            lead[trial.template] = max(trial.value, lead.get(trial.template, trial.value))
    return frozenset(template for template, value in lead.items() if value < LEFT_BEHIND)

"""Figures of a results file, each beside what its raw samples give."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from fibc.reporting.data import Speedup


class Outcome(StrEnum):
    """What became of a figure."""

    SAME = "same"
    DIFFERS = "differs"
    NO_SAMPLES = "no samples"
    """Nothing is recorded that it could be made again from."""


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        where: ``cell 9..16``, ``search of 2``, ``test M=4``.
        name: ``speedup``, ``native us``.
        said: As the file has it.
        regenerated: From raw samples, written in the same way; empty where there are none.
    """

    where: str
    name: str
    said: str
    regenerated: str
    outcome: Outcome

    def __str__(self) -> str:
        shown = f", regenerated {self.regenerated}" if self.outcome is Outcome.DIFFERS else ""
        return f"{self.where}: {self.name} {self.said}: {self.outcome}{shown}"


@dataclass(frozen=True)
class Measured:
    """A speedup measured again, beside the published one.

    Attributes:
        agrees: The two differ by no more than both intervals explain.
    """

    cell: str
    published: Speedup
    again: Speedup
    agrees: bool


@dataclass(frozen=True)
class Reproduction:
    """A results file made again.

    Attributes:
        samples: Where its raw samples are.
        measured: Empty unless it was asked for and the device is at hand.
        notes: What could not be done, and why.
    """

    result: str
    samples: str
    figures: tuple[Figure, ...]
    measured: tuple[Measured, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> Counter[Outcome]:
        return Counter(figure.outcome for figure in self.figures)

    @property
    def holds(self) -> bool:
        """Whether nothing differs and something is the same."""
        counts = self.counts
        agree = all(item.agrees for item in self.measured)
        return counts[Outcome.SAME] > 0 and not counts[Outcome.DIFFERS] and agree


def figure(where: str, name: str, said: str, regenerated: str | None) -> Figure:
    """Return a figure with its outcome; None where there is nothing to make it again from."""
    if regenerated is None:
        return Figure(where, name, said, "", Outcome.NO_SAMPLES)
    return Figure(where, name, said, regenerated, Outcome.SAME if said == regenerated else Outcome.DIFFERS)

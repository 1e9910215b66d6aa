"""What was seen of a GPU while pairs were timed on it: how many of them were discarded, why, and its state."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Observed:
    """Counts of a run, or of a part of it.

    Attributes:
        timed: All pairs, with the discarded ones.
        capped: Pairs that were kept although the software power cap was on.
        discarded: How many were not kept, by reason: another process, a slowdown, a low clock, an ECC or XID event.
        facts: Clocks, power, temperature and driver, as they were read last.
        problem: Why nothing was observed; empty where it was.
        sessions: How many processes served fresh sessions, and what bounded how many were started at once.
    """

    timed: int = 0
    capped: int = 0
    discarded: dict[str, int] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    sessions: str = ""

    @property
    def num_discarded(self) -> int:
        return sum(self.discarded.values())

    def __add__(self, later: Observed) -> Observed:
        return Observed(
            self.timed + later.timed,
            self.capped + later.capped,
            dict(Counter(self.discarded) + Counter(later.discarded)),
            later.facts or self.facts,
            later.problem or self.problem,
            later.sessions or self.sessions,
        )

    def __str__(self) -> str:
        sessions = f"; {self.sessions}" if self.sessions else ""
        if self.problem:
            return f"not observed: {self.problem}{sessions}"
        why = ", ".join(f"{number} for {reason}" for reason, number in sorted(self.discarded.items()))
        return (
            f"{self.num_discarded} of {self.timed} timed pairs discarded{f' ({why})' if why else ''}, "
            f"{self.capped} under the software power cap{sessions}"
        )

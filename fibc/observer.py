"""Pairs timed on a GPU under observation: those that another cause than the kernels has bent are discarded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from fibc import supervisor
from fibc.errors import BrokenError
from fibc.nvml import HW_POWER_BRAKE, HW_SLOWDOWN, HW_THERMAL, SW_POWER_CAP, SW_THERMAL, Monitor, Reading, names_of

Timed = TypeVar("Timed")

MIN_CLOCK = 0.75
"""Least SM clock, as a part of its default."""

BENDING = HW_SLOWDOWN | SW_THERMAL | HW_THERMAL | HW_POWER_BRAKE
"""Reasons that discard a pair. Not idle and not applications clocks: so is a GPU left alone, and so is it set.

Not the software power cap either. It is how a GPU regulates itself within its power limit: whatever multiplies large
matrices runs under it in production too, both halves of a pair do so alike, and to discard for it would leave keys with
a large M without any pair. What it may do to a pair stays within bounds: a clock below ``MIN_CLOCK`` discards, and a
winner that draws more power than native is found by the sustained check. Pairs under it are counted (``facts``)."""

MAX_DISCARDS = 0.2
"""Part of all timed pairs that may be discarded."""

MIN_TIMED = 25
"""Pairs before that part is looked at, so that a single bad moment at the start ends nothing."""

LOOK_EVERY_S = 0.1
"""Between two looks at the processes, the dearest call. One that comes stays longer: a context alone takes as long. A
reading after one pair also serves as the one before the next, where no more time has passed."""

PAUSE_S = 0.05
MAX_PAUSES = 40
"""After a discarded pair: clocks and temperature have to come back, and a worker that ended has to leave the GPU. While
they have not, no pair is begun, for two seconds at most."""


@dataclass
class Discards:
    """How many pairs were timed, and why which were discarded.

    Attributes:
        timed: All, with the discarded ones.
        reasons: Their number by reason.
        capped: Pairs that were kept although the software power cap was on.
    """

    timed: int = 0
    capped: int = 0
    reasons: dict[str, int] | None = None

    @property
    def num(self) -> int:
        """Return how many were discarded."""
        return sum((self.reasons or {}).values())

    def add(self, reason: str) -> None:
        """Count one discarded pair.

        Raises:
            BrokenError: If that is one too many.
        """
        self.reasons = {**(self.reasons or {}), reason: (self.reasons or {}).get(reason, 0) + 1}
        if self.timed >= MIN_TIMED and self.num > MAX_DISCARDS * self.timed:
            raise BrokenError(f"gpu: at most {MAX_DISCARDS:.0%} of all pairs may be discarded, got {self}")

    def __str__(self) -> str:
        why = ", ".join(f"{number} for {reason}" for reason, number in sorted((self.reasons or {}).items()))
        return f"{self.num} of {self.timed}" + (f" ({why})" if why else "")


class Observer:
    """Repeats pairs until one is sound. One per session, in the process that times.

    Readings before and after each pair: clock, reasons, ECC and XID; and the processes every ``LOOK_EVERY_S``.
    """

    def __init__(
        self,
        monitor: Monitor,
        is_ours: Callable[[int], bool],
        *,
        own_pid: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Begin to observe. This process has a context on the GPU already.

        Args:
            is_ours: Whether a process belongs to this run (``OwnProcesses``).
            own_pid: Of this process.
            clock: In seconds.
            pause: Waits so many seconds.
        """
        self._monitor = monitor
        self._is_ours = is_ours
        self._clock = clock
        self._pause = pause
        present = monitor.processes()
        self.blind = (os.getpid() if own_pid is None else own_pid) not in present
        self._tolerated = present if self.blind else frozenset[int]()
        self._looked_s = clock()
        self._foreign = self._strangers(present)
        self._cost_s = 0.0
        self._last: tuple[float, Reading] | None = None
        self.discards = Discards()

    def pair(self, run: Callable[[], Timed]) -> Timed:
        """Return what ``run`` returns, from the first time that nothing bent it.

        Raises:
            BrokenError: If more than ``MAX_DISCARDS`` of all pairs had to be discarded, or another process stays.
        """
        if self._foreign:
            self._recover()
        while True:
            before = self._recent() or self._read()
            result = run()
            after = self._read()
            self.discards.timed += 1
            fault = find_fault(before, after, self._monitor.default_clock_mhz, self._look())
            if fault is None:
                self.discards.capped += bool(after.reasons & SW_POWER_CAP)
                return result
            self.discards.add(fault)
            self._recover()

    def facts(self) -> dict[str, str]:
        """Return what happened, for the session's record."""
        timed = self.discards.timed
        facts = {
            **self._monitor.facts(),
            "discarded pairs": str(self.discards),
            "pairs under the software power cap": f"{self.discards.capped} of {timed}",
            "cost of observing": f"{1e6 * self._cost_s / max(timed, 1):.0f} us a pair",
        }
        if self.blind:
            facts["processes"] = "numbered in another namespace: only those that come later are told apart"
        return facts

    def _recover(self) -> None:
        for _ in range(MAX_PAUSES):
            self._pause(PAUSE_S)
            if not self._read().reasons & BENDING and not self._look():
                return
        if self._foreign:
            raise BrokenError(
                f"gpu {self._monitor.uuid}: must be used by this run alone, and is by {_listed(self._foreign)} "
                "(end them, or choose another GPU with CUDA_VISIBLE_DEVICES)"
            )

    def _read(self) -> Reading:
        began = self._clock()
        reading = self._monitor.read()
        ended = self._clock()
        self._cost_s += ended - began
        self._last = ended, reading
        return reading

    def _recent(self) -> Reading | None:
        """Return the reading after the pair before, where little time has passed since."""
        if self._last is None or self._clock() - self._last[0] >= LOOK_EVERY_S:
            return None
        return self._last[1]

    def _look(self) -> frozenset[int]:
        """Return the strangers that are there, as of the last look."""
        began = self._clock()
        if self._foreign or began - self._looked_s >= LOOK_EVERY_S:
            self._foreign = self._strangers(self._monitor.processes())
            self._looked_s = self._clock()
            self._cost_s += self._looked_s - began
        return self._foreign

    def _strangers(self, present: Collection[int]) -> frozenset[int]:
        return frozenset(pid for pid in present if pid not in self._tolerated and not self._is_ours(pid))


def find_fault(before: Reading, after: Reading, default_clock_mhz: int, strangers: Collection[int]) -> str | None:
    """Return why a pair between two readings must be discarded, or None.

    The clock counts after the pair only: before it the GPU may have been idle.
    """
    if strangers:
        return f"another process on the GPU ({_listed(strangers)})"
    if after.xids:
        return f"an XID event ({', '.join(map(str, after.xids))})"
    if after.ecc_errors > before.ecc_errors:
        return "an uncorrected ECC error"
    if bent := (before.reasons | after.reasons) & BENDING:
        return names_of(bent)
    if after.sm_clock_mhz < MIN_CLOCK * default_clock_mhz:
        return f"an SM clock under {MIN_CLOCK:.0%} of {default_clock_mhz} MHz"
    return None


def _listed(pids: Collection[int]) -> str:
    return ", ".join(map(str, sorted(pids)))


class OwnProcesses:
    """Whether processes belong to the run whose first process is ``root``; asks /proc for unknown ones only."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._known = {root}

    def __call__(self, pid: int) -> bool:
        if pid not in self._known:
            self._known = {self._root, *supervisor.descendants(self._root)}
        return pid in self._known

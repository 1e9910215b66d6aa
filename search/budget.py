"""The time budget of a run: one hard bound, shared out to keys, with a part kept for what comes after the search."""

from __future__ import annotations

import time
from collections.abc import Callable

RESERVE_FRACTION = 0.6
"""Part of a budget that the search leaves to confirming, reconfirming, the boundary and test sets and the module.
That is 24 to 48 sessions for a table, each a process start of 1 to 2 s and some seconds of timing."""

GPU_RESERVE_FRACTION = 0.4
"""The same on a GPU without the starts of sessions' processes, which come on top: 40 of them took 25 s of 89 (H200)."""


class Budget:
    """Seconds from now. ``remaining`` bounds every step: none is begun that does not fit, and deadlines are cut to it.

    What was left out is noted with ``cut``; a run with a cut is partial, and says where.
    """

    def __init__(
        self,
        total_s: float,
        *,
        reserve_fraction: float = RESERVE_FRACTION,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_s = total_s
        self._reserve_s = total_s * reserve_fraction
        self._clock = clock
        self._began = clock()
        self._cuts: dict[str, None] = {}

    def reserve(self, fraction: float, more_s: float = 0.0) -> None:
        """Keep another part of the budget for what comes after the search, and ``more_s``.

        Both together are ``RESERVE_FRACTION`` at most, or a small budget would search nothing.
        """
        self._reserve_s = self.total_s * max(fraction, min(fraction + more_s / self.total_s, RESERVE_FRACTION))

    def elapsed(self) -> float:
        return self._clock() - self._began

    def remaining(self) -> float:
        """Return the seconds that are left, never less than 0."""
        return max(0.0, self.total_s - self.elapsed())

    def expired(self) -> bool:
        return self.remaining() <= 0.0

    def searchable(self) -> float:
        """Return the seconds that are left to the search."""
        return max(0.0, self.remaining() - self._reserve_s)

    def share_for_key(self, index: int, num_keys: int) -> float:
        """Return the seconds that key ``index`` of ``num_keys`` may search: an equal part of what the search has left.

        Time that earlier keys did not use goes to the later ones.
        """
        return self.searchable() / max(1, num_keys - index)

    def fits(self, step_s: float, *, within_s: float | None = None) -> bool:
        """Return whether a step of about ``step_s`` may begin, with ``within_s`` (by default ``remaining``) left."""
        left = self.remaining() if within_s is None else min(within_s, self.remaining())
        return left > 0.0 and step_s <= left

    def deadline_s(self, timeout_s: float) -> float:
        """Return the deadline of a child process: its own, cut to what remains."""
        return min(timeout_s, self.remaining())

    def release_reserve(self) -> None:
        """Let the steps after the search use all that remains."""
        self._reserve_s = 0.0

    def cut(self, what: str) -> None:
        """Note that ``what`` was left out or shortened for lack of time."""
        self._cuts[what] = None

    @property
    def partial(self) -> bool:
        return bool(self._cuts)

    @property
    def cuts(self) -> tuple[str, ...]:
        """What was cut, each once, in order."""
        return tuple(self._cuts)

"""Work that several threads may want at once, done by one of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from collections.abc import Set as AbstractSet


class Once:
    """The keys of work that is under way in this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: set[str] = set()

    @contextlib.contextmanager
    def claim(self, keys: AbstractSet[str]) -> Iterator[frozenset[str]]:
        """Hold those of ``keys`` that no other thread holds, waiting until there is one; the block gets them.

        Claim the others again after the block, and look first what is left to do: nobody holds and waits, so threads
        that claim each other's keys all end.
        """
        with self._changed:
            self._changed.wait_for(lambda: not keys <= self._held)
            mine = frozenset(keys - self._held)
            self._held |= mine
        try:
            yield mine
        finally:
            with self._changed:
                self._held -= mine
                self._changed.notify_all()

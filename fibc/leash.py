"""Commands that one thread runs, ended by another."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar


class CutError(Exception):
    """The thread's leash was cut: what it ran was ended, and nothing more is started."""


class Leash:
    """Holds the commands of the threads that wear it. Any thread may cut it, once and for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: set[Callable[[], None]] = set()
        self._cut = False

    @contextlib.contextmanager
    def worn(self) -> Iterator[None]:
        """Hold what this thread runs inside the block."""
        token = _WORN.set(self)
        try:
            yield
        finally:
            _WORN.reset(token)

    @contextlib.contextmanager
    def hold(self, end: Callable[[], None]) -> Iterator[None]:
        """Hold a command that runs as long as the block; ``end`` makes it end soon, and may be called afterwards too.

        Raises:
            CutError: If the leash is cut, before or during the block.
        """
        with self._lock:
            if self._cut:
                raise CutError
            self._ends.add(end)
        try:
            yield
        finally:
            with self._lock:
                self._ends.remove(end)
        if self._cut:
            raise CutError

    def cut(self) -> None:
        """End what is held, and whatever its threads would run later."""
        with self._lock:
            self._cut = True
            for end in self._ends:
                end()


_WORN: ContextVar[Leash | None] = ContextVar("leash", default=None)


def hold(end: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Hold a command by the leash that this thread wears, see ``Leash.hold``; without one nothing happens."""
    leash = _WORN.get()
    return contextlib.nullcontext() if leash is None else leash.hold(end)

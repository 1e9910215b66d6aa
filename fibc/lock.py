"""The lock on an ``--out`` directory: one run at a time works there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from fibc.errors import InputError
from fibc.paths import OutLayout


@contextmanager
def lock_out(layout: OutLayout, *, wait_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Hold ``layout.lock`` inside the block; first remove what killed runs left half-written.

    The kernel holds it for an open file (flock), so it dies with its owner however that ends; the file itself stays
    and means nothing. Python opens it close-on-exec: compilers and workers do not inherit it.

    Args:
        layout: Of a directory that exists and can be written.
        wait_s: Seconds to wait for another run; 0 refuses at once.
        say: Called once, with a sentence, where there is something to wait for.

    Raises:
        InputError: If another run still holds it after ``wait_s``.
    """
    lock = FileLock(layout.lock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if wait_s > 0:
            say(f"{layout.root}: another run works here; waiting up to {wait_s:.0f} s for it")
        try:
            lock.acquire(timeout=wait_s)
        except Timeout:
            raise InputError(
                f"--out: {layout.root} is in use by another run (wait until it has ended, or choose another directory)"
            ) from None
    try:
        layout.remove_unfinished()
        yield
    finally:
        lock.release()

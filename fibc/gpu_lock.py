"""The lock on a physical GPU: one run measures there, whoever runs it and from whichever directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fibc.errors import EvaluationError, InputError
from fibc.paths import safe_name
from fibc.schema.silicon import Gpu

DIRECTORIES = (Path("/run/lock"), Path("/tmp"))
"""Directories that every user may write, by the Filesystem Hierarchy Standard; TMPDIR is a user's own."""

POLL_S = 0.2

_held: set[tuple[int, Path]] = set()
"""Locks by the thread that holds them: what a run that holds one calls may ask for it again."""


@contextmanager
def lock_device(gpu: Gpu | None, *, wait_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of the physical GPU that ``gpu`` is, or is a slice of; None, a CPU, has none. See ``lock_gpu``."""
    if gpu is None:
        yield
        return
    with lock_gpu(gpu.physical, wait_s=wait_s, say=say):
        yield


@contextmanager
def lock_devices(gpus: Iterable[Gpu | None], *, wait_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of every physical GPU of ``gpus``, in one order for all runs: no two wait for each other."""
    by_name = {gpu.physical: gpu for gpu in gpus if gpu is not None}
    with contextlib.ExitStack() as stack:
        for name in sorted(by_name):
            stack.enter_context(lock_device(by_name[name], wait_s=wait_s, say=say))
        yield


@contextmanager
def lock_gpu(
    uuid: str, *, wait_s: float, say: Callable[[str], None], directories: tuple[Path, ...] = DIRECTORIES
) -> Iterator[None]:
    """Hold the lock of the GPU ``uuid`` inside the block.

    The kernel holds it for an open file (flock), so it dies with its owner however that ends; the file stays and means
    nothing. Python opens it close-on-exec: compilers and workers do not inherit it. A thread that holds it may take it
    again: a benchmark that measures beside a tune calls the tune.

    Args:
        uuid: Of the physical GPU (``Gpu.physical``): MIG slices share clocks and power with it.
        wait_s: Seconds to wait for another run; 0 refuses at once.
        say: Called once, with a sentence, where there is something to wait for.
        directories: The first that everybody may write has the file.

    Raises:
        InputError: If another run still holds it after ``wait_s``.
        EvaluationError: If no file can be opened.
    """
    path = _shared(directories) / safe_name(f"fibc-{uuid}", ".lock")
    mine = (threading.get_ident(), path)
    if mine in _held:
        yield
        return
    deadline = time.monotonic() + wait_s
    said = False
    with contextlib.ExitStack() as stack:
        while (handle := _try(path)) is None:
            if time.monotonic() >= deadline:
                raise InputError(f"gpu {uuid}: another run measures there (wait until it has ended, see {path})")
            if not said:
                say(f"gpu {uuid}: another run measures there; waiting up to {wait_s:.0f} s for it")
                said = True
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
        stack.callback(os.close, handle)
        _held.add(mine)
        stack.callback(_held.remove, mine)
        yield


def _shared(directories: tuple[Path, ...]) -> Path:
    """Return the first directory that every user may write, and in which nobody may remove another's files."""
    for directory in directories:
        with contextlib.suppress(OSError):
            mode = directory.stat().st_mode
            if stat.S_ISDIR(mode) and mode & stat.S_IWOTH and mode & stat.S_ISVTX:
                return directory
    raise EvaluationError(
        f"gpu lock: needs a directory that every user may write (mode 1777), got {', '.join(map(str, directories))}"
    )


def _try(path: Path) -> int | None:
    """Return a descriptor that holds the lock, or None where another one does."""
    handle = _open(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_ino == path.stat().st_ino:
            return handle
    except BlockingIOError:
        pass
    except FileNotFoundError:
        pass  # it was removed meanwhile: the next attempt makes another
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


def _open(path: Path) -> int:
    """Open the lock file for reading, which is enough for flock; make it where it is not there.

    In a directory like /tmp Linux lets nobody open another user's file with O_CREAT (fs.protected_regular), and a
    symbolic link there may be anybody's.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        for _ in range(3):
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, flags)
            with contextlib.suppress(FileExistsError):
                made = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o444)
                os.fchmod(made, 0o444)  # for every user, whatever the umask
                return made
    except OSError as error:
        raise EvaluationError(f"gpu lock: {path} must be a file that can be read: {error.strerror}") from error
    raise EvaluationError(f"gpu lock: {path} must be a file that can be read: {os.strerror(errno.ENOENT)}")

"""The memory of this machine, and how many compilers fit into what is free of it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")

_lock = threading.Lock()
_held_bytes: list[int] = []
"""What compilers of this process were allowed to take. Those that have taken it count twice: it is free no more."""


def total_bytes(*, cgroup: Path = CGROUP) -> int:
    """Return the memory of this machine, or of its container where that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        return min(total, int((cgroup / "memory.max").read_text()))
    return total


@contextlib.contextmanager
def room(jobs: int, bytes_each: int, *, meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> Iterator[int]:
    """Hold memory for compilers while the block runs; it gets how many fit beside those of other threads, see below."""
    with _lock:
        num = jobs_that_fit(jobs, bytes_each, held_bytes=sum(_held_bytes), meminfo=meminfo, cgroup=cgroup)
        _held_bytes.append(num * bytes_each)
    try:
        yield num
    finally:
        with _lock:
            _held_bytes.remove(num * bytes_each)


def jobs_that_fit(
    jobs: int, bytes_each: int, *, held_bytes: int = 0, meminfo: Path = MEMINFO, cgroup: Path = CGROUP
) -> int:
    """Return how many of ``jobs`` compilers run side by side without more memory than is free; at least 1.

    Args:
        bytes_each: What one compiler needs.
        held_bytes: Of what is free, for others.
        meminfo: A file like ``/proc/meminfo``. Where it cannot be read, memory is no limit.
        cgroup: The root of this process's cgroup v2 tree; a limit of the container counts as well.
    """
    free = min((size for size in (_available(meminfo), _left_in_cgroup(cgroup)) if size is not None), default=None)
    return jobs if free is None else max(1, min(jobs, (free - held_bytes) // bytes_each))


def _available(meminfo: Path) -> int | None:
    for line in (_read(meminfo) or "").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _left_in_cgroup(cgroup: Path) -> int | None:
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit is None or used is None or not limit.strip().isdecimal():
        return None
    return max(0, int(limit) - int(used))


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None

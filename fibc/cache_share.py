"""How much of a CPU's last cache this machine can use: a virtual one has a part of what it is told."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable

import torch

from fibc.backends.memory import total_bytes
from fibc.cache import Cache
from fibc.environment import Environment
from fibc.schema.digest import digest_json

Read = Callable[[int], float]
"""Returns the seconds that reading so many bytes again takes."""

SMALLEST_BYTES = 16 << 20
"""A cache up to this size is taken as it is told: copies of four times as much cost nothing."""

BEYOND = 2
"""The largest size read, in caches: whatever the share, most of it comes from memory."""

STEP = math.sqrt(2)
"""Between two sizes."""

READS = 5
READ_BYTES = 64 << 20
"""Reads of a size, of which the median counts, and how much one reads at least."""

MEMORY_FRACTION = 0.125
"""Of the memory, what may be read."""

LEAST_GAP = 1.25
"""Reading from the cache is at least so many times as fast as from memory, or else nothing can be told apart."""


def find(environment: Environment, cache: Cache) -> int | None:
    """Return the bytes of the last cache that reads of this machine find, or None where that is not known to be less.

    Measured once per environment, in about 1.5 s for a cache of 480 MB, and kept in ``cache``.
    """
    digest = digest_json([environment.digest, "reading bandwidth"])
    known = cache.get_json("cache-share", digest)
    if known is None:
        if BEYOND * environment.l3_bytes > MEMORY_FRACTION * total_bytes():
            return None
        known = {"bytes": measure(environment.l3_bytes, reader(environment))}
        cache.put_json("cache-share", digest, known)
    found = known["bytes"]
    return found if isinstance(found, int) else None


def measure(cache_bytes: int, read_s: Read) -> int | None:
    """Return the smallest size whose reads are nearer to memory than to the cache; the share is no larger.

    Args:
        cache_bytes: What the machine is told.
        read_s: Reads.

    Returns:
        None where cache and memory look alike, or no size below ``cache_bytes`` comes from memory.
    """
    if cache_bytes <= SMALLEST_BYTES:
        return None
    largest = BEYOND * cache_bytes
    num = math.floor(math.log(largest / SMALLEST_BYTES, STEP))
    sizes = [round(largest / STEP**step) // 4096 * 4096 for step in range(num, -1, -1)]
    speeds = [size / read_s(size) for size in sizes]
    fast, slow = max(speeds[: len(speeds) // 2]), speeds[-1]
    if fast < LEAST_GAP * slow:
        return None
    middle = math.sqrt(fast * slow)
    share = next(size for size, speed in zip(sizes, speeds, strict=True) if speed <= middle)
    return share if share < cache_bytes else None


def reader(environment: Environment) -> Read:
    """Return what reads memory with the environment's threads."""
    memory: list[torch.Tensor] = []

    def read_s(size: int) -> float:
        if not memory:
            memory.append(torch.ones(BEYOND * environment.l3_bytes // 4))
        part = memory[0][: size // 4]
        times = -(-READ_BYTES // size)
        part.sum()
        seconds = []
        for _ in range(READS):
            began = time.perf_counter()
            for _ in itertools.repeat(None, times):
                part.sum()
            seconds.append((time.perf_counter() - began) / times)
        return statistics.median(seconds)

    return read_s

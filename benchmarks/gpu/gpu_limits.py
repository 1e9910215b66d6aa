"""What no kernel can be faster than: a cold read of the weights, and the arithmetic."""

from __future__ import annotations

from bisect import bisect_left

READ_US: tuple[tuple[float, float], ...] = (
    (0.5e6, 3.94),
    (1.0e6, 4.26),
    (3.7e6, 5.31),
    (8.4e6, 6.78),
    (33.6e6, 12.96),
    (50e6, 17.25),
    (117e6, 32.99),
    (235e6, 62.91),
)
"""Bytes and microseconds of the best pure-read kernel, cold, one flushed launch at a time: one H200, driver 580.159.04,
CUDA 13.0, 2026-11-29. A graph of many calls has no gaps between them and is faster, so a part measures its own."""

PEAK_FLOPS = 790e12
"""bfloat16, dense: what 8192^3 runs at through torch.mm on an H200 (same date)."""

COPY_BYTES_PER_S = 4.24e12
"""A device copy, read and written bytes together (same date)."""


def recorded_read_us(num_bytes: float) -> float:
    """Return the recorded time of a cold read, between the recorded sizes on a straight line."""
    sizes = [size for size, _ in READ_US]
    index = min(max(1, bisect_left(sizes, num_bytes)), len(sizes) - 1)
    (left, left_us), (right, right_us) = READ_US[index - 1], READ_US[index]
    return left_us + (right_us - left_us) * (num_bytes - left) / (right - left)


def gemm_limit_us(m: int, n: int, k: int, read_us: float) -> tuple[float, str]:
    """Return the least time of a GEMM and what sets it, ``read`` or ``compute``.

    Args:
        read_us: A cold read of the weight. A and C, which a call finds in the cache or leaves there, are left out.
    """
    compute_us = 2 * m * n * k / PEAK_FLOPS * 1e6
    return (read_us, "read") if read_us >= compute_us else (compute_us, "compute")

"""What a kernel takes of a multiprocessor, and whether it can run there at all."""

from __future__ import annotations

from fibc.schema.arch import REGISTERS_PER_THREAD, WARP_SIZE, Arch

_REGISTER_UNIT = 256
"""Registers are handed out to warps in units of so many."""

_SHARED_UNIT = 128
"""Bytes of shared memory alike, to blocks."""


def blocks_per_sm(arch: Arch, *, registers: int, num_warps: int, shared_bytes: int) -> int:
    """Return how many blocks a multiprocessor holds at once; 0 where a block cannot run.

    The rule of the CUDA programming guide and the occupancy calculator.

    Args:
        registers: Of a thread.
        shared_bytes: Of a block, static and dynamic.
    """
    if shared_bytes > arch.shared_bytes_max or registers > REGISTERS_PER_THREAD:
        return 0
    per_warp = _rounded(registers * WARP_SIZE, _REGISTER_UNIT)
    per_block = _rounded(shared_bytes + arch.shared_bytes_reserved, _SHARED_UNIT)
    limits = (
        arch.blocks_per_sm,
        arch.warps_per_sm // num_warps,
        arch.registers_max // (per_warp * num_warps) if per_warp else arch.blocks_per_sm,
        arch.shared_bytes_per_sm // per_block,
    )
    return min(limits)


def shortage(arch: Arch, *, registers: int, num_warps: int, shared_bytes: int) -> str | None:
    """Return why no multiprocessor can hold a block, ``resource: law, got``, or None where one can."""
    if shared_bytes > arch.shared_bytes_max:
        return (
            f"shared memory: needs {shared_bytes} bytes, {arch.name} has {arch.shared_bytes_max} "
            "(fewer stages or a smaller tile need less)"
        )
    if blocks_per_sm(arch, registers=registers, num_warps=num_warps, shared_bytes=shared_bytes) == 0:
        return (
            f"occupancy: {num_warps} warps of {registers} registers a thread need more than the "
            f"{arch.registers_max} registers of {arch.name} (fewer warps or a smaller maxnreg need less)"
        )
    return None


def _rounded(value: int, unit: int) -> int:
    return -(-value // unit) * unit

"""The levels of x86-64 instruction sets that CPU kernels are compiled for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class IsaLevel:
    """A level that includes all levels before it.

    Attributes:
        name: ``avx512``; the arch of a ``Target`` of kind ``cpu``.
        cpu_flags: What it adds, as ``/proc/cpuinfo`` spells it. Linux lists a flag only where it also saves the
            registers that the flag needs.
        compiler_flags: What it adds to the command line of GCC and Clang.
        lanes: float32 elements in a vector.
        vector_registers: Architectural vector registers.
    """

    name: str
    cpu_flags: tuple[str, ...]
    compiler_flags: tuple[str, ...]
    lanes: int
    vector_registers: int


ISA_LEVELS: tuple[IsaLevel, ...] = (
    IsaLevel("avx2", ("avx2", "fma", "f16c"), ("-mavx2", "-mfma", "-mf16c"), 8, 16),
    IsaLevel(
        "avx512",
        ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
        ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
        16,
        32,
    ),
    IsaLevel("avx512_bf16", ("avx512_bf16",), ("-mavx512bf16",), 16, 32),
    IsaLevel("amx_bf16", ("amx_tile", "amx_bf16"), ("-mamx-tile", "-mamx-bf16"), 16, 32),
)
"""In rising order: a CPU of one level runs the code of all levels before it."""

ISA_NAMES: tuple[str, ...] = tuple(level.name for level in ISA_LEVELS)


def available_levels(cpu_flags: Collection[str]) -> tuple[str, ...]:
    """Return the names of the levels that a CPU with ``cpu_flags`` runs, in rising order; empty below AVX2."""
    names = []
    for level in ISA_LEVELS:
        if not set(level.cpu_flags) <= set(cpu_flags):
            break
        names.append(level.name)
    return tuple(names)


def compiler_flags(name: str) -> tuple[str, ...]:
    """Return the flags that compile for level ``name`` and nothing above it.

    Raises:
        ValueError: If there is no such level.
    """
    last = ISA_NAMES.index(name)
    return tuple(flag for level in ISA_LEVELS[: last + 1] for flag in level.compiler_flags)


def isa_level(name: str) -> IsaLevel:
    """Return level ``name``.

    Raises:
        ValueError: If there is no such level.
    """
    return ISA_LEVELS[ISA_NAMES.index(name)]

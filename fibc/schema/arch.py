"""The NVIDIA architectures that GPU kernels are compiled for, with the limits that prune configs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """An architecture; the sizes are those of the CUDA programming guide's table of compute capabilities.

    Attributes:
        name: ``sm_90a``; the arch of a ``Target`` of kind ``cuda``.
        capability: Compute capability, ``90``.
        shared_bytes_max: Largest dynamic shared memory of a block.
        shared_bytes_per_sm: Shared memory of a multiprocessor.
        shared_bytes_reserved: What the system takes of it for each block.
        registers_max: Registers of a multiprocessor, of 32 bits; also the most that a block can have.
        warps_per_sm: Warps that a multiprocessor holds.
        blocks_per_sm: Blocks that a multiprocessor holds.
        num_sms: Multiprocessors of the product that stands for the architecture where no device is asked.
        l2_bytes: Its L2 cache.
    """

    name: str
    capability: int
    shared_bytes_max: int
    shared_bytes_per_sm: int
    shared_bytes_reserved: int
    registers_max: int
    warps_per_sm: int
    blocks_per_sm: int
    num_sms: int
    l2_bytes: int

    @property
    def has_tensor_maps(self) -> bool:
        """Whether blocks are copied through tensor maps (TMA)."""
        return self.capability >= 90


ARCHES: tuple[Arch, ...] = (
    Arch("sm_80", 80, 166_912, 167_936, 1024, 65_536, 64, 32, 108, 40 << 20),
    Arch("sm_86", 86, 101_376, 102_400, 1024, 65_536, 48, 16, 84, 6 << 20),
    Arch("sm_89", 89, 101_376, 102_400, 1024, 65_536, 48, 24, 142, 96 << 20),
    Arch("sm_90a", 90, 232_448, 233_472, 1024, 65_536, 64, 32, 132, 50 << 20),
)
"""In rising order. The products are A100, A40, L40 and H100/H200 SXM."""

ARCH_NAMES: tuple[str, ...] = tuple(arch.name for arch in ARCHES)

REGISTERS_PER_THREAD = 255
"""Most registers that a thread can address."""

WARP_SIZE = 32


def arch(name: str) -> Arch:
    """Return the architecture ``name``.

    Raises:
        ValueError: If there is no such architecture.
    """
    return ARCHES[ARCH_NAMES.index(name)]

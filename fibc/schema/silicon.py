"""GPUs as silicon: what evidence is bound to, and what people read about them."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_STEP_BYTES = 8 << 30
"""A GPU reports somewhat less memory than it has, and how much less changes with the driver (an H200: 139.8 GiB, of 141
GB by its name). Rounded up to this step a size is an identity, and NVIDIA's parts of one chip differ."""

ARCH_SPECIFIC_FROM = 90
"""From Hopper on there is code that one architecture alone runs (``sm_90a``), and it is what kernels are built for."""


@dataclass(frozen=True)
class CudaValidity:
    """The silicon for which a GPU table's rows hold, as the driver describes it.

    Every value can be read without a context (``cuDeviceGetAttribute``, ``cuDeviceTotalMem``). A MIG slice is what it
    shows of itself: its own SMs and memory. Neither ordinal nor product name belongs to it: both change while the
    silicon stays.

    Attributes:
        arch: What the code is compiled for, ``arch_of(compute_capability)``.
        compute_capability: ``10 * major + minor``, 90.
        num_sms: Streaming multiprocessors (attribute 16).
        l2_bytes: Attribute 38.
        memory_bytes: Total memory; drivers keep different amounts for themselves, so a 32nd part more or less is alike.
    """

    arch: str
    compute_capability: int
    num_sms: int
    l2_bytes: int
    memory_bytes: int

    @property
    def identity(self) -> tuple[str, int, int, int, int]:
        """Return what is equal for equal silicon, for digests."""
        return self.arch, self.compute_capability, self.num_sms, self.l2_bytes, rounded_memory(self.memory_bytes)


@dataclass(frozen=True)
class Gpu:
    """A device that CUDA shows a process.

    Attributes:
        ordinal: Among those that are visible.
        uuid: ``GPU-...``, or ``MIG-...`` of a slice.
        pci_bus_id: Of the physical GPU, ``0000:1b:00.0``; a slice has its parent's.
        name: For people only: one chip is sold under several names.
        mig: Profile of a MIG slice (``1g.18gb``); empty for a whole GPU.
        driver: Version of the kernel driver, ``580.159.04``; where nothing tells it the CUDA version that it serves.
        shared_bytes_max: Shared memory that a block may ask for (attribute 97).
    """

    ordinal: int
    uuid: str
    pci_bus_id: str
    name: str
    mig: str
    driver: str
    shared_bytes_max: int
    validity: CudaValidity

    @property
    def physical(self) -> str:
        """Return a name of the physical GPU: its UUID, of a MIG slice the bus that it shares with its parent."""
        return self.pci_bus_id if self.mig else self.uuid

    def __str__(self) -> str:
        held = self.validity
        return (
            f"{self.name} ({held.arch}, {held.num_sms} SMs, {held.l2_bytes / (1 << 20):g} MiB of L2, "
            f"{held.memory_bytes / (1 << 30):.1f} GiB)"
        )


def arch_of(compute_capability: int) -> str:
    """Return the arch that kernels for this silicon are compiled for: ``sm_90a``, ``sm_86``."""
    return f"sm_{compute_capability}" + ("a" if compute_capability >= ARCH_SPECIFIC_FROM else "")


def rounded_memory(total_bytes: int) -> int:
    """Return ``total_bytes`` as an identity keeps it: rounded up to ``MEMORY_STEP_BYTES``."""
    return -(-total_bytes // MEMORY_STEP_BYTES) * MEMORY_STEP_BYTES

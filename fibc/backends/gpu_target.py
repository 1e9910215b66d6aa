"""The GPU that kernels are compiled for: an architecture, with the sizes of one product of it."""

from __future__ import annotations

from dataclasses import dataclass

from fibc.errors import InputError
from fibc.schema.arch import ARCH_NAMES, Arch, arch

KIND = "cuda"
DEFAULT_ARCH = "sm_90a"


@dataclass(frozen=True)
class GpuTarget:
    """See the module."""

    arch: Arch
    num_sms: int
    l2_bytes: int

    @property
    def names(self) -> dict[str, int]:
        """What it fixes of the names that laws may use, see ``schema.template.TARGET_NAMES``."""
        return {
            "shared_bytes_max": self.arch.shared_bytes_max,
            "registers_max": self.arch.registers_max,
            "num_sms": self.num_sms,
            "l2_bytes": self.l2_bytes,
        }


def gpu_target(arch_name: str, num_sms: int | None, l2_bytes: int | None) -> GpuTarget:
    """Return the target of an architecture, also of one that is not here.

    Args:
        num_sms: Multiprocessors of the GPU; None takes the architecture's usual ones. Alike ``l2_bytes``.

    Raises:
        InputError: If ``arch_name`` is no architecture.
    """
    if arch_name not in ARCH_NAMES:
        raise InputError(f"arch: must be known, got {arch_name!r} (accepted: {', '.join(ARCH_NAMES)})")
    found = arch(arch_name)
    return GpuTarget(found, num_sms or found.num_sms, l2_bytes or found.l2_bytes)

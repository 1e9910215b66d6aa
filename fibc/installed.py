"""What is installed and set on this machine beside its silicon: the facts that call for measuring again. No torch."""

from __future__ import annotations

import functools
import os
from importlib import metadata
from pathlib import Path

from fibc import toolchain
from fibc.errors import ToolchainError
from fibc.nvml import NvmlError, open_monitor
from fibc.schema.facts import ABSENT
from fibc.schema.silicon import Gpu

CLOCK_MAX = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")

PACKAGES = {
    "flashinfer": ("flashinfer-python",),
    "triton": ("triton",),
    "nvcc": ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12"),
    "cublas package": ("nvidia-cublas", "nvidia-cublas-cu12"),
}
"""Facts and the distributions that may tell them, first found first. Versions of what torch has loaded itself need
torch; these do not."""

GPU_FACTS = ("power limit", "sm clock default", "sm clock max")
"""Of ``nvml``'s facts, those that stay as somebody has set them."""


def cpu_facts() -> dict[str, str]:
    """Return the CPUs that this process may use, their highest clock where Linux tells, and the compiler."""
    try:
        compiler = toolchain.find().version
    except ToolchainError:
        compiler = ABSENT
    try:
        clock = f"{int(CLOCK_MAX.read_text()) // 1000} MHz"
    except (OSError, ValueError):  # virtual machines have none
        clock = ""
    return {"cpus": str(len(os.sched_getaffinity(0))), "cpu clock max": clock, "compiler": compiler}


@functools.cache
def package_facts() -> dict[str, str]:
    """Return the versions of packages that timings or builds depend on."""
    return {fact: _first_version(names) for fact, names in PACKAGES.items()}


def gpu_facts(gpu: Gpu) -> dict[str, str]:
    """Return power limit and clocks; nothing where there is no NVML, or no device (``gpus.stand_in``)."""
    if not gpu.pci_bus_id:
        return {}
    try:
        facts = open_monitor(gpu).facts()
    except (NvmlError, OSError):
        return {}
    return {name: facts[name] for name in GPU_FACTS}


def _first_version(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ABSENT

"""The GPUs that CUDA shows this process, found without touching them."""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fibc import gpu_probe, isolation
from fibc.errors import InputError
from fibc.schema.arch import arch
from fibc.schema.silicon import CudaValidity, Gpu, arch_of

PROBE_TIMEOUT_S = 60.0
"""The first ``cuInit`` on a machine of eight GPUs without persistence mode takes over ten seconds."""

DRIVER_VERSION = Path("/sys/module/nvidia/version")

_CUBLAS = re.compile(r"(/\S*libcublasLt\.so\S*)$")


@dataclass(frozen=True)
class Found:
    """What was found.

    Attributes:
        gpus: By ordinal: as CUDA_VISIBLE_DEVICES names and orders them (ordinals, UUIDs, MIG slices).
        problem: Why there are none, where the driver or its absence says so; else empty.
    """

    gpus: tuple[Gpu, ...]
    problem: str = ""

    def first(self) -> Gpu:
        """Return the one that a run uses.

        Raises:
            InputError: If there is none.
        """
        if not self.gpus:
            why = self.problem or "CUDA shows no device (look at CUDA_VISIBLE_DEVICES)"
            raise InputError(f"target cuda: needs an NVIDIA GPU, and {why} (accepted without one: --compile-only)")
        return self.gpus[0]


def stand_in(arch_name: str) -> Gpu:
    """Return what kernels are compiled for where no device is asked: the usual product of an architecture."""
    usual = arch(arch_name)
    validity = CudaValidity(usual.name, usual.capability, usual.num_sms, usual.l2_bytes, memory_bytes=0)
    return Gpu(-1, "", "", f"no device, {usual.name}", "", "", usual.shared_bytes_max, validity)


def find(*, driver_version: Path = DRIVER_VERSION) -> Found:
    """Return the visible GPUs. A child asks the driver: this process stays free to fork, and has no context."""
    command = [sys.executable, "-S", "-I", gpu_probe.__file__]
    done = isolation.run(command, timeout_s=PROBE_TIMEOUT_S)
    if done.timed_out:
        return Found((), f"the NVIDIA driver did not answer within {PROBE_TIMEOUT_S:.0f} s")
    if not done.ok:
        tail = (done.stderr_tail.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return Found((), f"asking the NVIDIA driver failed: {tail}")
    seen = json.loads(done.stdout)
    if "problem" in seen:
        return Found((), seen["problem"])
    return Found(tuple(gpu_of(entry, _driver(driver_version, seen["cuda"])) for entry in seen["gpus"]))


def gpu_of(entry: Mapping[str, Any], driver: str) -> Gpu:
    """Return the GPU that an entry of ``gpu_probe.read`` describes."""
    major, minor = entry["compute_capability"]
    validity = CudaValidity(
        arch=arch_of(10 * major + minor),
        compute_capability=10 * major + minor,
        num_sms=entry["num_sms"],
        l2_bytes=entry["l2_bytes"],
        memory_bytes=entry["memory_bytes"],
    )
    return Gpu(
        ordinal=entry["ordinal"],
        uuid=entry["uuid"],
        pci_bus_id=entry["pci_bus_id"],
        name=entry["name"],
        mig=entry["mig"],
        driver=driver,
        shared_bytes_max=entry["shared_bytes_max"],
        validity=validity,
    )


def cublas_library(maps: Path = Path("/proc/self/maps")) -> Path | None:
    """Return the cuBLASLt that this process has loaded (with torch); None without one."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return None
    return next((Path(found[1]) for line in lines if (found := _CUBLAS.search(line))), None)


def cublas_version(maps: Path = Path("/proc/self/maps")) -> str:
    """Return the version of the cuBLASLt that this process has loaded (with torch), ``13.0.2``; empty without one."""
    path = cublas_library(maps)
    if path is None:
        return ""
    library = ctypes.CDLL(str(path))  # it is loaded: this is the same one
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return split_version(int(library.cublasLtGetVersion()))


def split_version(number: int) -> str:
    """Return cuBLAS's version number (major * 10000 + minor * 100 + patch) as text."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def join_version(text: str) -> int:
    """Return the number of the version that ``split_version`` made ``text`` of.

    Raises:
        ValueError: If it is none.
    """
    major, minor, patch = (int(part) for part in text.split("."))
    number = major * 10000 + minor * 100 + patch
    if split_version(number) != text:
        raise ValueError(f"no version of cuBLAS: {text!r}")
    return number


def _driver(path: Path, cuda: int) -> str:
    """Return the kernel driver's version, or the CUDA version that it serves where the file is not there."""
    try:
        return path.read_text().strip()
    except OSError:
        return f"CUDA {cuda // 1000}.{cuda % 1000 // 10}"

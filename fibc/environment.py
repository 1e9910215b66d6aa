"""The machine that measurements are made on: its silicon, threads, and the versions that timings depend on."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from fibc import gpus
from fibc.errors import InputError
from fibc.schema.digest import digest_json
from fibc.schema.isa import available_levels
from fibc.schema.silicon import CudaValidity, Gpu
from fibc.schema.table import CpuValidity

CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

_UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3}


@dataclass(frozen=True)
class Environment:
    """Where evidence holds.

    Attributes:
        model: The CPU's brand string.
        isa: Levels of ``fibc.schema.isa`` that the CPU runs, in rising order; empty below AVX2.
        l2_bytes: Of CPU 0; 0 where Linux does not say. Alike ``l3_bytes``.
        num_threads: Threads that torch computes with.
        versions: What else belongs to a record: python, torch, kernel; with a GPU the driver and cublas.
        gpu: The GPU that evidence is collected on; None where it is the CPU.
    """

    model: str
    isa: tuple[str, ...]
    l2_bytes: int
    l3_bytes: int
    num_threads: int
    versions: Mapping[str, str] = field(default_factory=dict)
    gpu: Gpu | None = None

    @property
    def digest(self) -> str:
        """Identity of what timings depend on.

        On a CPU the silicon, the threads and torch's version (native is torch's code). On a GPU its silicon, the
        driver, torch and cuBLAS; the CPU beside it enters timings of the eager mode only, and is recorded with those.
        """
        if self.gpu is not None:
            versions = [self.versions.get(name, "") for name in ("driver", "torch", "cublas")]
            return digest_json([self.gpu.validity.identity, *versions])
        validity = self.cpu_validity()
        return digest_json(
            [
                validity.model,
                validity.isa,
                validity.l2_bytes,
                validity.l3_bytes,
                validity.num_threads,
                self.versions.get("torch", ""),
            ]
        )

    def cpu_validity(self) -> CpuValidity:
        """Return what a table's rows are bound to."""
        return CpuValidity(self.model, self.isa, self.l2_bytes, self.l3_bytes, self.num_threads)

    def cuda_validity(self) -> CudaValidity:
        """Return what a CUDA table's rows are bound to.

        Raises:
            InputError: If this is no GPU's environment.
        """
        if self.gpu is None:
            raise InputError("target cuda: needs an NVIDIA GPU, and this environment has none")
        return self.gpu.validity

    def validity(self) -> CpuValidity | CudaValidity:
        """Return what a table's rows are bound to."""
        return self.cpu_validity() if self.gpu is None else self.gpu.validity

    @property
    def hardware(self) -> str:
        """What people call it."""
        return self.model if self.gpu is None else self.gpu.name

    def facts(self) -> dict[str, str]:
        """Return everything as printable text."""
        gpu = {} if self.gpu is None else {"gpu": str(self.gpu), "mig": self.gpu.mig or "no"}
        return {
            **gpu,
            "cpu": self.model,
            "isa": " ".join(self.isa) or "below avx2",
            "l2": f"{self.l2_bytes // 1024} KiB",
            "l3": f"{self.l3_bytes // 1024} KiB",
            "threads": str(self.num_threads),
            **self.versions,
        }


def detect(
    num_threads: int | None = None, *, gpu: Gpu | None = None, cpuinfo: Path = CPUINFO, caches: Path = CACHES
) -> Environment:
    """Return the environment of this process.

    Args:
        num_threads: Threads that torch computes with; None asks torch, which imports it.
        gpu: Of a CUDA target (``fibc.gpus``).
        cpuinfo: A file like ``/proc/cpuinfo``. One that cannot be read is a CPU without any known level.
        caches: A directory like that of CPU 0's caches in sysfs.
    """
    if num_threads is None:
        import torch

        num_threads = torch.get_num_threads()
    cuda = {} if gpu is None else {"driver": gpu.driver, "cublas": gpus.cublas_version()}
    model, flags = _read_cpuinfo(cpuinfo)
    return Environment(
        model=model,
        isa=available_levels(flags),
        l2_bytes=_cache_bytes(caches, level=2),
        l3_bytes=_cache_bytes(caches, level=3),
        num_threads=num_threads,
        versions={
            "python": platform.python_version(),
            "torch": metadata.version("torch"),
            "kernel": f"{os.uname().sysname} {os.uname().release}",
            **cuda,
        },
        gpu=gpu,
    )


def memory_bytes() -> int:
    """Return the memory of this machine, or of its container where that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def _read_cpuinfo(path: Path) -> tuple[str, frozenset[str]]:
    """Return the model name and the flags of the first CPU in ``path``."""
    fields: dict[str, str] = {}
    for line in (_read(path) or "").splitlines():
        name, separator, value = line.partition(":")
        if separator:
            fields.setdefault(name.strip(), value.strip())
    return fields.get("model name", "unknown"), frozenset(fields.get("flags", "").split())


def _cache_bytes(caches: Path, level: int) -> int:
    """Return the size of the data or unified cache of ``level``, 0 where there is none."""
    for index in sorted(caches.glob("index*")):
        if _read(index / "level") == str(level) and _read(index / "type") != "Instruction":
            size = _read(index / "size") or ""
            digits, unit = (size[:-1], size[-1]) if size[-1:] in _UNITS else (size, "")
            return int(digits) * _UNITS.get(unit, 1) if digits.isdecimal() else 0
    return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None

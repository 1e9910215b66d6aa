"""A worker for a GPU on a CPU: kernels run on the host, a library says when the context is lost, NVML is faked."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import torch

from fibc import gpu_worker, nvml
from fibc.nvml import NvmlError, Reading
from fibc.schema.silicon import Gpu
from fibc.timing import Timer
from fibc.worker import Worker, main

WORKERS = Path(os.environ["FIBC_TEST_WORKERS"])

BENT_EVERY = 12
"""One reading in so many shows a hot GPU: it costs a pair."""


class StandinMonitor:
    """A GPU that is hot now and then."""

    uuid = "GPU-stand-in"
    default_clock_mhz = 1980

    num_opened = 0

    def __init__(self) -> None:
        StandinMonitor.num_opened += 1
        self._num_reads = 0

    def read(self) -> Reading:
        self._num_reads += 1
        return Reading(1980, nvml.HW_THERMAL if self._num_reads % BENT_EVERY == 0 else 0, 0, ())

    def processes(self) -> frozenset[int]:
        """Return every worker that has begun and not ended."""
        begun = {int(path.name) for path in WORKERS.iterdir()}
        return frozenset(pid for pid in begun if Path(f"/proc/{pid}").exists())

    def facts(self) -> dict[str, str]:
        return {"gpu uuid": self.uuid, "monitors opened": str(self.num_opened)}


class StandinGpuWorker(gpu_worker.GpuWorker):
    """The worker with everything of a device replaced."""

    def do_setup(self, setup: dict[str, Any]) -> None:
        super().do_setup(setup | {"device": "cpu"})

    def make_timer(self) -> Timer:
        return Worker.make_timer(self)


def open_monitor(gpu: Gpu) -> StandinMonitor:
    if "FIBC_TEST_NO_NVML" in os.environ:
        raise NvmlError("nvmlInit_v2", 9)
    return StandinMonitor()


def synchronize() -> None:
    """Fail where a kernel has lost the context, as every call does from then on."""
    library = ctypes.CDLL(os.environ["FIBC_TEST_LIBRARY"])
    if ctypes.c_int32.in_dll(library, "context_lost").value:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


if __name__ == "__main__":
    (WORKERS / str(os.getpid())).touch()
    free_bytes = int(os.environ.get("FIBC_TEST_FREE_BYTES", str(1 << 33)))
    vars(torch.cuda).update(init=lambda: None, synchronize=synchronize, mem_get_info=lambda: (free_bytes, 1 << 33))
    vars(gpu_worker).update(open_monitor=open_monitor)
    main(StandinGpuWorker, sys.argv[1:])

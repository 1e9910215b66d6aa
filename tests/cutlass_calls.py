"""Calls a CUTLASS kernel's library in a process of its own, with no driver or with one that prints what it is asked.

    python cutlass_calls.py library symbol m n k

prints what the driver was asked, then a JSON object: workspace, prepared, and the status of a call.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import kernel_abi as abi

A, B, C = 0x10000000, 0x20000000, 0x30000000
"""Addresses of the tensors; nothing reads them."""

COUNTERS, SCRATCH, STREAM = 0x40000000, 0x50000000, 0x77


@dataclass(frozen=True)
class Said:
    """What came of a call.

    Attributes:
        workspace: Bytes.
        prepared: Status of ``_prepare``; alike ``status`` of the entry.
        asked: What the driver printed, a line each.
    """

    workspace: int
    prepared: int
    status: int
    asked: tuple[str, ...]


def call(library: str | Path, symbol: str, m: int, n: int, k: int, *, driver: Path | None, **variables: str) -> Said:
    """Prepare GPU 0 and call once.

    Args:
        driver: Directory of a libcuda.so.1; None leaves the machine's own.
        variables: Of the environment.
    """
    environment = {**os.environ, **variables, "PYTHONPATH": str(Path(abi.__file__).parent)}
    if driver is not None:
        environment |= {"LD_LIBRARY_PATH": str(driver)}
    done = subprocess.run(
        [
            sys.executable,
            "-u",
            "-S",
            __file__,
            str(library),
            symbol,
            str(m),
            str(n),
            str(k),
            str(int(driver is not None)),
        ],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=60,
    )
    *asked, last = done.stdout.splitlines()
    return Said(**json.loads(last), asked=tuple(asked))


def _main(path: str, symbol: str, m: int, n: int, k: int, has_driver: int) -> None:
    kernel = abi.entries(path, symbol)
    if has_driver:
        driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        driver.cuCtxPushCurrent_v2(context)
    inputs = abi.array([abi.tensor(A, (m, k), (k, 1)), abi.tensor(B, (n, k), (k, 1))])
    call = abi.Call(inputs, abi.array([abi.tensor(C, (m, n), (n, 1))]), None, None, None, 1, None)
    needed = kernel.workspace(ctypes.byref(call))
    prepared = kernel.prepare(0)
    cuda = abi.Cuda(STREAM, 0, 0, COUNTERS if needed else None, SCRATCH if needed else None)
    call.cuda = ctypes.pointer(cuda)
    status = kernel.call(ctypes.byref(call))
    ctypes.CDLL(None).fflush(None)
    print(json.dumps({"workspace": needed, "prepared": prepared, "status": status}))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))

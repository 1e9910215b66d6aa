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
    environment = {**os.environ, **variables}
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


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )


class _Cuda(ctypes.Structure):
    _fields_ = (
        ("stream", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("capturing", ctypes.c_int32),
        ("counters", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.POINTER(_Tensor)),
        ("outputs", ctypes.POINTER(_Tensor)),
        ("scalars", ctypes.c_void_p),
        ("axes", ctypes.c_void_p),
        ("parallel", ctypes.c_void_p),
        ("num_threads", ctypes.c_int32),
        ("cuda", ctypes.POINTER(_Cuda)),
    )


def _tensor(data: int, rows: int, columns: int) -> _Tensor:
    pair = ctypes.c_int64 * 2
    return _Tensor(data, pair(rows, columns), pair(columns, 1))


def _main(path: str, symbol: str, m: int, n: int, k: int, has_driver: int) -> None:
    library = ctypes.CDLL(path)
    workspace = getattr(library, f"{symbol}_workspace")
    workspace.restype = ctypes.c_int64
    if has_driver:
        driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        driver.cuCtxPushCurrent_v2(context)
    inputs, outputs = (_Tensor * 2)(_tensor(A, m, k), _tensor(B, n, k)), (_Tensor * 1)(_tensor(C, m, n))
    call = _Call(inputs, outputs, None, None, None, 1, None)
    needed = workspace(ctypes.byref(call))
    prepared = getattr(library, f"{symbol}_prepare")(0)
    cuda = _Cuda(STREAM, 0, 0, COUNTERS if needed else None, SCRATCH if needed else None)
    call.cuda = ctypes.pointer(cuda)
    status = getattr(library, symbol)(ctypes.byref(call))
    ctypes.CDLL(None).fflush(None)
    print(json.dumps({"workspace": needed, "prepared": prepared, "status": status}))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))

"""Prebuilt candidates called through fibc's C interface, with torch's tensors and streams."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

COUNTER_BYTES = 65536
OK = 0


class Tensor(ctypes.Structure):
    """``fibc_tensor``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    ]


class Cuda(ctypes.Structure):
    """``fibc_cuda``."""

    _fields_ = [
        ("stream", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("capturing", ctypes.c_int32),
        ("counters", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    ]


class Call(ctypes.Structure):
    """``fibc_call``."""

    _fields_ = [
        ("inputs", ctypes.POINTER(Tensor)),
        ("outputs", ctypes.POINTER(Tensor)),
        ("scalars", ctypes.c_void_p),
        ("axes", ctypes.POINTER(ctypes.c_int64)),
        ("parallel", ctypes.c_void_p),
        ("num_threads", ctypes.c_int32),
        ("cuda", ctypes.POINTER(Cuda)),
    ]


def view(tensor: torch.Tensor) -> Tensor:
    """Return ``tensor`` as a kernel sees it."""
    ints = ctypes.c_int64 * tensor.dim()
    return Tensor(tensor.data_ptr(), ints(*tensor.shape), ints(*tensor.stride()))


class WrongError(Exception):
    """What a candidate did wrong."""


class Kernel:
    """A candidate's library.

    Attributes:
        keys: (M, N, K) where it is to be timed.
        any_shape: It takes every N and K, and every M; else those of its keys, and every M.
    """

    def __init__(self, entry: dict[str, Any], folder: Path) -> None:
        self.name = str(entry["name"])
        self.dtype = getattr(torch, entry["dtype"])
        self.keys = [tuple(key) for key in entry["keys"]]
        self.any_shape = bool(entry.get("any_shape", True))
        library = ctypes.CDLL(str(folder / entry["library"]))
        self._entry = getattr(library, entry["symbol"])
        self._workspace = getattr(library, entry["symbol"] + "_workspace")
        self._workspace.restype = ctypes.c_int64
        self.prepare = getattr(library, entry["symbol"] + "_prepare")
        self.counters = torch.zeros(COUNTER_BYTES, dtype=torch.uint8, device="cuda")
        self._scratch = torch.empty(256, dtype=torch.uint8, device="cuda")

    def bind(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Callable[[], int]:
        """Return a function that launches on torch's current stream and returns the status."""
        inputs, outputs = (Tensor * 2)(view(a), view(b)), (Tensor * 1)(view(c))
        axes = (ctypes.c_int64 * 3)(a.shape[0], b.shape[0], a.shape[1])  # M, N, K as the definition has them
        call = Call(inputs, outputs, None, axes, None, 1, None)
        needed = self._workspace(ctypes.byref(call))
        if needed > self._scratch.numel():
            torch.cuda.synchronize()
            self._scratch = torch.empty(needed, dtype=torch.uint8, device="cuda")
        scratch = self._scratch  # kept by the closure, like the tensors
        cuda = Cuda(None, 0, 0, self.counters.data_ptr(), scratch.data_ptr())
        call.cuda = ctypes.pointer(cuda)
        kept = (a, b, c, inputs, outputs, axes, cuda, scratch)

        def launch() -> int:
            cuda.stream = torch.cuda.current_stream().cuda_stream
            return int(self._entry(ctypes.byref(call))) if kept else -1

        return launch


def checked(status: int) -> None:
    """Raise WrongError unless ``status`` is success."""
    if status != OK:
        raise WrongError(f"returned {status}")

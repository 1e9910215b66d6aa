"""Prebuilt candidates called through fibc's C interface, with torch's tensors and streams."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernel_abi as abi
import torch


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
        self._entries = abi.entries(folder / entry["library"], entry["symbol"])
        self.prepare = self._entries.prepare
        self.counters = torch.zeros(abi.COUNTER_BYTES, dtype=torch.uint8, device="cuda")
        self._scratch = torch.empty(256, dtype=torch.uint8, device="cuda")

    def bind(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Callable[[], int]:
        """Return a function that launches on torch's current stream and returns the status."""
        inputs, outputs = abi.views((a, b)), abi.views((c,))
        axes = abi.int64s((a.shape[0], b.shape[0], a.shape[1]))  # M, N, K as the definition has them
        call = abi.Call(inputs, outputs, None, axes, None, 1, None)
        needed = self._entries.workspace(ctypes.byref(call))
        if needed > self._scratch.numel():
            torch.cuda.synchronize()
            self._scratch = torch.empty(needed, dtype=torch.uint8, device="cuda")
        scratch = self._scratch  # kept by the closure, like the tensors
        cuda = abi.Cuda(None, 0, 0, self.counters.data_ptr(), scratch.data_ptr())
        call.cuda = ctypes.pointer(cuda)
        kept = (a, b, c, inputs, outputs, axes, cuda, scratch)

        def launch() -> int:
            cuda.stream = torch.cuda.current_stream().cuda_stream
            return int(self._entries.call(ctypes.byref(call))) if kept else -1

        return launch


def checked(status: int) -> None:
    """Raise WrongError unless ``status`` is success."""
    if status != abi.OK:
        raise WrongError(f"returned {status}")

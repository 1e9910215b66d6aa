"""The harness's functions over ctypes, so that tests of isolation compile no extension. One thread, no checks."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fibc.schema import codec
from fibc.schema.callspec import CallSpec

sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "gpu"))  # a worker has not the path of the tests
import kernel_abi as abi


def _run_serially(task: Any, context: Any, num_threads: int) -> None:
    for thread in range(num_threads):
        task(context, thread, num_threads)


_serial = abi.Parallel(_run_serially)


class Candidate:
    """A kernel without scalars, bound to its contract."""

    def __init__(self, library_path: str, symbol: str, spec: CallSpec) -> None:
        self._kernel = ctypes.CDLL(library_path)[symbol]
        self._kernel.restype = ctypes.c_int32
        self._spec = spec

    def run_out(self, *arguments: torch.Tensor) -> None:
        count = len(self._spec.inputs)
        inputs, outputs = arguments[:count], arguments[count:]
        axes = self._sizes(inputs)
        scalars = (ctypes.c_double * count)()
        parallel = ctypes.cast(_serial, ctypes.c_void_p)
        call = abi.Call(abi.views(inputs), abi.views(outputs), scalars, abi.int64s(axes), parallel, 1)
        if self._kernel(ctypes.byref(call)) != 0:
            raise RuntimeError(f"{self._spec.definition}: run_out: the kernel did nothing")

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        axes = self._sizes(inputs)
        outputs = tuple(
            torch.empty([axes[axis] for axis in output.axes], dtype=getattr(torch, output.dtype))
            if output.alias is None
            else inputs[output.alias]
            for output in self._spec.outputs
        )
        self.run_out(*inputs, *outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def _sizes(self, inputs: Sequence[torch.Tensor]) -> list[int]:
        sizes = [axis.value or 0 for axis in self._spec.axes]
        for argument, tensor in zip(self._spec.inputs, inputs, strict=True):
            for axis, size in zip(argument.axes, tensor.shape, strict=True):
                sizes[axis] = size
        return sizes


def bind(library_path: str, symbol: str, spec: bytes, device: str = "cpu") -> Candidate:
    """Return the candidate that ``symbol`` of a shared library is."""
    return Candidate(library_path, symbol, codec.decode(CallSpec, spec))


def time_calls(callable: Callable[..., Any], calls: Sequence[tuple[Any, ...]], start: int, inner: int) -> float:
    """Return seconds per call."""
    began = time.perf_counter()
    for index in range(inner):
        callable(*calls[(start + index) % len(calls)])
    return (time.perf_counter() - began) / inner


def set_num_threads(num_threads: int) -> None:
    """The stand-in has one thread."""


def fill_allocations(fills: bool) -> None:
    """Nothing is to be done: candidates allocate with ``torch.empty``, which torch fills where it is asked to."""

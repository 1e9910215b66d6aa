"""What workers call in place of a candidate: served modules, peers, and kernels that only move bytes.

Imported in a worker by the source of a ``gpu_measure.Call``. What takes long to make (a compiled graph, an autotuned
kernel) is made once per process and kept over its sessions. A call that computes what native computes is compared with
native the first time.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fibc.runtime import load

Call = Callable[..., Any]

TOLERANCE = 2e-2
"""Relative, in the norm: bfloat16 results differ by roundings and orders of sums, wrong ones by far more."""


def served(package: str) -> Call:
    """Return the ``run`` of a generated module, as a caller has it."""
    module = _module(package)
    module.prepare()
    return _compared(module.run)


@functools.cache
def _module(package: str) -> ModuleType:
    return load(package)


def gemm_compiled() -> Call:
    """Return ``torch.compile`` of the same product with max-autotune, compiled for each size on its own."""
    return _compared(_by_size(_compile_gemm))


@functools.cache
def _compile_gemm(*_: int) -> Call:
    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.matmul(a, b.T)

    return torch.compile(gemm, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True)


def autotuned(kernel_file: str) -> Call:
    """Return the kernel that ``gpu_autotune`` wrote into a file, behind ``triton.autotune``."""
    return _compared(_load_file(kernel_file).call)


def read(block: int, num_warps: int, programs_per_sm: int) -> Call:
    """Return a kernel that reads the second argument and keeps one number per program."""
    import gpu_kernels

    return functools.partial(gpu_kernels.read, block=block, num_warps=num_warps, programs_per_sm=programs_per_sm)


def copy(num_bytes: int) -> Call:
    """Return a device copy that reads and writes ``num_bytes`` together."""
    source, target = _copied(num_bytes)
    return lambda *_: target.copy_(source)


def copy_twice(num_bytes: int) -> Call:
    """Return the same copy as a call with two outputs."""
    source, target = _copied(num_bytes)
    return lambda *_: (target.copy_(source), target)


@functools.lru_cache(maxsize=4)
def _copied(num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.randn(num_bytes // 4, dtype=torch.bfloat16, device="cuda")
    return source, torch.empty_like(source)


def flashinfer_norm(eps: float) -> Call:
    """Return FlashInfer's fused norm as it is: it writes both of its arguments."""
    import flashinfer.norm

    def norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flashinfer.norm.fused_add_rmsnorm(x, residual, weight, eps=eps)
        return x, residual

    return norm


def _by_size(make: Callable[..., Call]) -> Call:
    """Return a call that has one made for each shape of its first argument."""

    def call(first: torch.Tensor, *others: torch.Tensor) -> Any:
        return make(*first.shape, *others[-1].shape)(first, *others)

    return call


def _compared(call: Call) -> Call:
    """Return ``call`` such that its first result is compared with what torch computes for these inputs.

    Only calls of two matrices are; validation holds the others to their reference.
    """
    checked: set[tuple[int, ...]] = set()

    def compared(*inputs: Any) -> Any:
        result = call(*inputs)
        shape = tuple(inputs[0].shape)
        if shape not in checked and len(inputs) == 2 and not _capturing():
            checked.add(shape)
            expected = torch.matmul(inputs[0], inputs[1].T).float()
            error = (result.float() - expected).norm() / expected.norm()
            if not error <= TOLERANCE:
                raise ValueError(f"must agree with torch.matmul within {TOLERANCE}, is off by {float(error):.3g}")
        return result

    return compared


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@functools.cache
def _load_file(path: str) -> ModuleType:
    name = f"fibc_bench_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

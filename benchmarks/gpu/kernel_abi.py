"""``fibc/kernel_abi.h`` for ctypes, so that Python can call a kernel as a module does. Needs neither torch nor fibc."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

COUNTER_BYTES = 65536
OK = 0

Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
Parallel = ctypes.CFUNCTYPE(None, Task, ctypes.c_void_p, ctypes.c_int32)


class Tensor(ctypes.Structure):
    """``fibc_tensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )


class Cuda(ctypes.Structure):
    """``fibc_cuda``."""

    _fields_ = (
        ("stream", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("capturing", ctypes.c_int32),
        ("counters", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    )


class Call(ctypes.Structure):
    """``fibc_call``; ``parallel`` is a ``Parallel`` that the caller keeps, cast to ``c_void_p``."""

    _fields_ = (
        ("inputs", ctypes.POINTER(Tensor)),
        ("outputs", ctypes.POINTER(Tensor)),
        ("scalars", ctypes.POINTER(ctypes.c_double)),
        ("axes", ctypes.POINTER(ctypes.c_int64)),
        ("parallel", ctypes.c_void_p),
        ("num_threads", ctypes.c_int32),
        ("cuda", ctypes.POINTER(Cuda)),
    )


class Strided(Protocol):
    """What is asked of a ``torch.Tensor``."""

    @property
    def shape(self) -> Sequence[int]: ...

    def stride(self) -> Sequence[int]: ...

    def data_ptr(self) -> int: ...


@dataclass(frozen=True)
class Entries:
    """A library's kernel: ``call`` and ``workspace`` take a ``Call`` by reference, ``prepare`` a device."""

    call: Any
    workspace: Any
    prepare: Any


def entries(library: Path | str, symbol: str) -> Entries:
    """Load the kernel of a GPU that ``symbol`` names.

    Raises:
        OSError: If the library cannot be loaded.
        AttributeError: If it lacks one of the three entries.
    """
    loaded = ctypes.CDLL(str(library))
    call, workspace, prepare = (getattr(loaded, symbol + suffix) for suffix in ("", "_workspace", "_prepare"))
    workspace.restype = ctypes.c_int64
    return Entries(call, workspace, prepare)


def int64s(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def tensor(data: int, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Return a tensor at an address; ctypes keeps alive what its fields point to."""
    return Tensor(data, int64s(shape), int64s(strides))


def array(tensors: Sequence[Tensor]) -> Any:
    return (Tensor * len(tensors))(*tensors)


def views(tensors: Iterable[Strided]) -> Any:
    """Return an array of torch's tensors as a kernel sees them; the caller keeps the tensors."""
    return array([tensor(item.data_ptr(), item.shape, item.stride()) for item in tensors])

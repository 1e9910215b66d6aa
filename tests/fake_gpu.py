"""Tensors on a GPU that does not exist, in a torch for CPUs: addresses without memory, a stream, an allocator.

Torch's exchange table is patched in place: this is for processes that end soon.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

CUDA = 2  # DLPack's kDLCUDA
FLOAT32 = (2, 32, 1)

STREAM_OFFSET = 48
ALLOCATOR_OFFSET = 16
"""Of ``current_work_stream`` and ``managed_tensor_allocator`` in DLPackExchangeAPI."""


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("index", ctypes.c_int))


class _DType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("rank", ctypes.c_int),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):  # DLManagedTensorVersioned
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
_ALLOCATOR = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(_Tensor),
    ctypes.POINTER(ctypes.POINTER(_Managed)),
    ctypes.c_void_p,
    ctypes.c_void_p,
)


class FakeGpu:
    """What torch says of GPUs from here on.

    Attributes:
        stream: The current stream, on every GPU.
        allocated: Bytes of each tensor that a module has asked for.
        num_freed: Of those.
    """

    def __init__(self) -> None:
        torch.cuda._lazy_init = lambda: None
        self.stream = 7
        self.allocated: list[int] = []
        self.num_freed = 0
        self._addresses = count(1 << 44, 1 << 30)
        self._kept: list[Any] = []
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        table = pointer(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
        replaced = {STREAM_OFFSET: _STREAM(self._stream), ALLOCATOR_OFFSET: _ALLOCATOR(self._allocate)}
        self._kept.append(replaced)
        for offset, function in replaced.items():
            ctypes.c_void_p.from_address(table + offset).value = ctypes.cast(function, ctypes.c_void_p).value

    def tensor(self, *shape: int, index: int = 0) -> torch.Tensor:
        """Return a contiguous float32 tensor on GPU ``index``."""
        managed = self._manage(shape, FLOAT32, index, _DELETER(lambda _: None))
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return torch.utils.dlpack.from_dlpack(capsule(ctypes.addressof(managed), b"dltensor_versioned", None))

    def _manage(self, shape: Sequence[int], dtype: tuple[int, int, int], index: int, deleter: Any) -> _Managed:
        rank = len(shape)
        strides = [1] * rank
        for axis in reversed(range(rank - 1)):
            strides[axis] = strides[axis + 1] * shape[axis + 1]
        of_shape, of_strides = (ctypes.c_int64 * rank)(*shape), (ctypes.c_int64 * rank)(*strides)
        tensor = _Tensor(next(self._addresses), _Device(CUDA, index), rank, _DType(*dtype), of_shape, of_strides, 0)
        managed = _Managed(1, 1, None, deleter, 0, tensor)
        self._kept.append((managed, of_shape, of_strides, deleter))
        return managed

    def _stream(self, _type: int, _index: int, out: Any) -> int:
        out[0] = self.stream
        return 0

    def _allocate(self, prototype: Any, out: Any, _context: Any, _error: Any) -> int:
        wanted = prototype[0]
        shape = [wanted.shape[axis] for axis in range(wanted.rank)]
        dtype = (wanted.dtype.code, wanted.dtype.bits, wanted.dtype.lanes)
        self.allocated.append(torch.Size(shape).numel() * wanted.dtype.bits // 8)
        out[0] = ctypes.pointer(self._manage(shape, dtype, wanted.device.index, _DELETER(self._free)))
        return 0

    def _free(self, _managed: Any) -> None:
        self.num_freed += 1

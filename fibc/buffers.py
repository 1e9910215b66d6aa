"""Buffers that show who wrote where: guard bytes around a tensor, poison inside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fibc.schema.candidate import TensorGuard

GUARD_BYTES = 4096
"""Bytes on either side: a page, more than a vector or a tile row that runs past an end."""

DEVICE_GUARD_BYTES = 256 << 10
"""The same on a GPU, where a tile of many rows may run past an end."""

_FLOAT_GUARD = 0xFF
"""NaN in every floating-point dtype, and not the one that arithmetic makes: what is read past an end shows in the
output."""

_INTEGER_GUARD = 0xA5
"""No -1, which pads outputs."""

SLICE_ELEMS = 64
"""Columns on either side of a slice: 64 bytes and more in every dtype."""

_FINITE_POISON = 0x5A
_INTEGER_POISON = 0x7F


Device = torch.device | str


@dataclass(frozen=True)
class Buffer:
    """A tensor inside a larger storage whose other bytes must stay as they are.

    Attributes:
        tensor: The view that a kernel is given.
        storage: The whole storage, uint8.
    """

    tensor: Tensor
    storage: Tensor

    def intact(self) -> bool:
        """Return whether every byte outside the tensor is untouched, gaps between its rows included."""
        guard = _guard_byte(self.tensor.dtype)
        first = self.tensor.storage_offset() * self.tensor.element_size()
        if self.tensor.is_contiguous():
            last = first + self.tensor.numel() * self.tensor.element_size()
            return bool((self.storage[:first] == guard).all() & (self.storage[last:] == guard).all())
        outside = self.storage.clone()
        raw = _raw(self.tensor)
        outside.as_strided(raw.shape, raw.stride(), first).fill_(guard)
        return bool((outside == guard).all())

    def poison(self, *, finite: bool = False) -> None:
        """Fill the tensor with what no right output holds: NaN, or a number where NaN is right; integers 0x7f..."""
        if not self.tensor.is_floating_point():
            _raw(self.tensor).fill_(_INTEGER_POISON)
        elif finite:
            _raw(self.tensor).fill_(_FINITE_POISON)
        else:
            self.tensor.fill_(math.nan)


def _raw(tensor: Tensor) -> Tensor:
    """Return the bytes of ``tensor``, a view with one more axis."""
    return tensor.unsqueeze(-1).view(torch.uint8)


def _guard_byte(dtype: torch.dtype) -> int:
    return _FLOAT_GUARD if dtype.is_floating_point else _INTEGER_GUARD


class Layout(Protocol):
    """Makes a buffer of one layout; its contents are guard bytes."""

    def __call__(self, shape: Sequence[int], dtype: torch.dtype, device: Device = "cpu") -> Buffer: ...


def _placed(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: Device, offset: int = 0
) -> Buffer:
    """Return a buffer whose tensor begins ``offset`` elements after a boundary of 64 bytes, on a GPU of 256."""
    size = dtype.itemsize
    guard = GUARD_BYTES if torch.device(device).type == "cpu" else DEVICE_GUARD_BYTES
    span = 0 if 0 in shape else 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    num_bytes = 2 * guard + (offset + span) * size
    storage = torch.full((-(-num_bytes // 64) * 64,), _guard_byte(dtype), dtype=torch.uint8, device=device)
    tensor = storage.view(dtype).as_strided(tuple(shape), tuple(strides), guard // size + offset)
    return Buffer(tensor, storage)


def _row_major(shape: Sequence[int], row_padding: int = 0) -> list[int]:
    strides = [1]
    for axis, n in enumerate(reversed(shape[1:])):
        strides.append(strides[-1] * max(n, 1) + (row_padding if axis == 0 else 0))
    return strides[::-1] if shape else []


def contiguous(shape: Sequence[int], dtype: torch.dtype, device: Device = "cpu") -> Buffer:
    """Return a row-major buffer, aligned to 64 bytes, on a GPU to 256; its contents are guard bytes."""
    return _placed(shape, _row_major(shape), dtype, device)


def row_sliced(shape: Sequence[int], dtype: torch.dtype, device: Device = "cpu") -> Buffer:
    """Return rows that are one element further apart than they are long (``base[:, :-1]``): no row but the first is
    aligned."""
    return _placed(shape, _row_major(shape, row_padding=1), dtype, device)


def column_sliced(shape: Sequence[int], dtype: torch.dtype, device: Device = "cpu") -> Buffer:
    """Return columns of a wider tensor (``base[:, 64:-64]``): rows are as well aligned as in a tensor of their own."""
    return _placed(shape, _row_major(shape, row_padding=2 * SLICE_ELEMS), dtype, device, offset=SLICE_ELEMS)


def offset(shape: Sequence[int], dtype: torch.dtype, device: Device = "cpu") -> Buffer:
    """Return a row-major buffer that begins one element after an aligned address (``base[1:]``)."""
    return _placed(shape, _row_major(shape), dtype, device, offset=1)


def transposed(shape: Sequence[int], dtype: torch.dtype, device: Device = "cpu") -> Buffer:
    """Return a buffer whose last two axes lie the other way round in memory (``base.T``)."""
    if len(shape) < 2:
        return contiguous(shape, dtype, device)
    *outer, rows, columns = shape
    strides = _row_major([*outer, columns, rows])
    strides[-2:] = strides[-1], strides[-2]
    return _placed(shape, strides, dtype, device)


def degenerate(shape: Sequence[int], dtype: torch.dtype, device: Device = "cpu") -> Buffer:
    """Return a row-major buffer whose axes of size 1 have strides that mean nothing."""
    strides = [7 if n == 1 else stride for n, stride in zip(shape, _row_major(shape), strict=True)]
    return _placed(shape, strides, dtype, device)


LAYOUTS: Mapping[str, Layout] = {
    "row-sliced": row_sliced,
    "column-sliced": column_sliced,
    "offset": offset,
    "transposed": transposed,
    "degenerate": degenerate,
}
"""Layouts, beside the row-major one, that callers have."""


def refused(guard: TensorGuard, max_offset_elems: int, tensor: Tensor) -> str | None:
    """Return why a variant with this guard must not be given ``tensor``, or None."""
    if tensor.numel() == 0:
        return None
    if guard.layout == "contiguous" and not tensor.is_contiguous():
        return f"must be contiguous, has strides {list(tensor.stride())}"
    if guard.layout == "rows" and tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return f"the last axis must have stride 1, has {tensor.stride(-1)}"
    if tensor.data_ptr() % guard.alignment_bytes:
        return f"must be aligned to {guard.alignment_bytes} bytes"
    if guard.layout == "rows" and not tensor.is_contiguous():
        outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        if any(size > 1 and stride * tensor.element_size() % guard.alignment_bytes for size, stride in outer):
            return f"rows must be aligned to {guard.alignment_bytes} bytes, has strides {list(tensor.stride())}"
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if last > max_offset_elems:
        return f"offsets must be at most {max_offset_elems} elements, has {last}"
    return None

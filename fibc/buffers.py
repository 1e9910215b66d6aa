"""Buffers that show who wrote where: guard bytes around a tensor, poison inside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fibc.schema.candidate import TensorGuard

GUARD_BYTES = 4096
"""Bytes on either side: a page, more than a vector or a tile row that runs past an end."""

_GUARD = 0xA5
_FINITE_POISON = 0x5A
_INTEGER_POISON = 0x7F


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
        first = self.tensor.storage_offset() * self.tensor.element_size()
        if self.tensor.is_contiguous():
            last = first + self.tensor.numel() * self.tensor.element_size()
            return bool((self.storage[:first] == _GUARD).all()) and bool((self.storage[last:] == _GUARD).all())
        outside = self.storage.clone()
        raw = _raw(self.tensor)
        outside.as_strided(raw.shape, raw.stride(), first).fill_(_GUARD)
        return bool((outside == _GUARD).all())

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


def _placed(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Buffer:
    """Return a buffer whose tensor begins ``offset`` elements after a 64-byte boundary."""
    size = dtype.itemsize
    span = 0 if 0 in shape else 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    num_bytes = 2 * GUARD_BYTES + (offset + span) * size
    storage = torch.full((-(-num_bytes // 64) * 64,), _GUARD, dtype=torch.uint8)
    tensor = storage.view(dtype).as_strided(tuple(shape), tuple(strides), GUARD_BYTES // size + offset)
    return Buffer(tensor, storage)


def _row_major(shape: Sequence[int], row_padding: int = 0) -> list[int]:
    strides = [1]
    for axis, n in enumerate(reversed(shape[1:])):
        strides.append(strides[-1] * max(n, 1) + (row_padding if axis == 0 else 0))
    return strides[::-1] if shape else []


def contiguous(shape: Sequence[int], dtype: torch.dtype) -> Buffer:
    """Return a row-major buffer, aligned to 64 bytes; its contents are guard bytes."""
    return _placed(shape, _row_major(shape), dtype)


def row_sliced(shape: Sequence[int], dtype: torch.dtype) -> Buffer:
    """Return rows that are one element further apart than they are long (``base[:, :-1]``): no row but the first is
    aligned."""
    return _placed(shape, _row_major(shape, row_padding=1), dtype)


def offset(shape: Sequence[int], dtype: torch.dtype) -> Buffer:
    """Return a row-major buffer that begins one element after an aligned address (``base[1:]``)."""
    return _placed(shape, _row_major(shape), dtype, offset=1)


def transposed(shape: Sequence[int], dtype: torch.dtype) -> Buffer:
    """Return a buffer whose last two axes lie the other way round in memory (``base.T``)."""
    if len(shape) < 2:
        return contiguous(shape, dtype)
    *outer, rows, columns = shape
    strides = _row_major([*outer, columns, rows])
    strides[-2:] = strides[-1], strides[-2]
    return _placed(shape, strides, dtype)


def degenerate(shape: Sequence[int], dtype: torch.dtype) -> Buffer:
    """Return a row-major buffer whose axes of size 1 have strides that mean nothing."""
    strides = [7 if n == 1 else stride for n, stride in zip(shape, _row_major(shape), strict=True)]
    return _placed(shape, strides, dtype)


LAYOUTS: Mapping[str, Callable[[Sequence[int], torch.dtype], Buffer]] = {
    "row-sliced": row_sliced,
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
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if last > max_offset_elems:
        return f"offsets must be at most {max_offset_elems} elements, has {last}"
    return None

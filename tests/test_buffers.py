"""Buffers show who wrote outside of a tensor and who read there; guards refuse what they exclude."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fibc import buffers
from fibc.schema.candidate import TensorGuard

SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool])
LAYOUTS = st.sampled_from([buffers.contiguous, *buffers.LAYOUTS.values()])


@given(shape=SHAPES, dtype=DTYPES, layout=LAYOUTS, byte=st.integers(0), at_end=st.booleans())
def test_any_byte_outside_of_a_tensor_is_guarded(
    shape: tuple[int, ...], dtype: torch.dtype, layout: Callable[..., buffers.Buffer], byte: int, at_end: bool
) -> None:
    buffer = layout(shape, dtype)
    assert buffer.tensor.shape == shape
    assert buffer.tensor.dtype == dtype
    assert buffer.intact()
    buffer.poison()
    buffer.tensor.copy_(torch.ones(shape, dtype=dtype))
    assert buffer.intact()
    inside = torch.zeros_like(buffer.storage)
    size = dtype.itemsize
    for index in (
        torch.cartesian_prod(*(torch.arange(n) for n in shape)).reshape(-1, len(shape)).tolist() if shape else [[]]
    ):
        first = buffer.tensor.storage_offset() + sum(i * s for i, s in zip(index, buffer.tensor.stride(), strict=True))
        inside[first * size : (first + 1) * size] = 1
    outside = (inside == 0).nonzero().flatten()
    near = outside[(outside - buffers.GUARD_BYTES).abs() < 200] if at_end else outside
    chosen = int(near[byte % len(near)])
    buffer.storage[chosen] ^= 1
    assert not buffer.intact()


def test_poison_is_what_no_right_output_holds() -> None:
    floats = buffers.contiguous((4, 4), torch.bfloat16)
    floats.poison()
    assert bool(floats.tensor.isnan().all())
    floats.poison(finite=True)
    assert bool(floats.tensor.isfinite().all())
    assert float(floats.tensor.float().abs().min()) > 1e6
    integers = buffers.contiguous((4,), torch.int32)
    integers.poison()
    assert integers.tensor.tolist() == [0x7F7F7F7F] * 4


@pytest.mark.parametrize(
    ("layout", "contiguous", "rows"),
    [
        ("row-sliced", False, True),
        ("column-sliced", False, True),
        ("offset", True, True),
        ("transposed", False, False),
        ("degenerate", True, True),
    ],
)
def test_guards_refuse_the_layouts_that_they_exclude(layout: str, contiguous: bool, rows: bool) -> None:
    tensor = buffers.LAYOUTS[layout]((5, 8), torch.float32).tensor
    assert (buffers.refused(TensorGuard("contiguous"), 2**31, tensor) is None) == contiguous
    assert (buffers.refused(TensorGuard("rows"), 2**31, tensor) is None) == rows
    assert buffers.refused(TensorGuard("any"), 2**31, tensor) is None


def test_guards_refuse_misaligned_addresses_and_far_offsets_and_ignore_strides_of_size_one() -> None:
    shifted = buffers.offset((4, 8), torch.bfloat16).tensor
    assert buffers.refused(TensorGuard(alignment_bytes=16), 2**31, shifted) == "must be aligned to 16 bytes"
    assert buffers.refused(TensorGuard(alignment_bytes=2), 2**31, shifted) is None
    assert buffers.refused(TensorGuard(), 30, shifted) == "offsets must be at most 30 elements, has 31"
    assert buffers.refused(TensorGuard(), 31, shifted) is None
    one_row = torch.zeros(100).as_strided((1, 8), (0, 1))
    assert buffers.refused(TensorGuard(), 2**31, one_row) is None


@pytest.mark.parametrize(("stride", "taken"), [(64, True), (72, True), (65, False), (0, True)])
def test_rows_at_a_callers_distance_must_be_as_aligned_as_the_first(stride: int, taken: bool) -> None:
    storage = torch.zeros(4096, dtype=torch.bfloat16)
    storage = storage[(-storage.data_ptr() // 2) % 8 :]
    view = storage.as_strided((4, 64), (stride, 1))
    assert (buffers.refused(TensorGuard("rows", 16), 2**31, view) is None) == taken
    assert buffers.refused(TensorGuard("rows", 16), 2**31, view[:1]) is None, "there is one row"
    row_major = storage.as_strided((4, 63), (63, 1))
    assert buffers.refused(TensorGuard("rows", 16), 2**31, row_major) is None, "the definition's sizes decide"
    assert buffers.degenerate((1, 8), torch.float32).tensor.stride() == (7, 1)


def test_what_is_read_past_an_end_is_nan_in_every_float_and_no_index() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        buffer = buffers.contiguous((3, 5), dtype)
        beyond = buffer.tensor.as_strided((16,), (1,), buffer.tensor.storage_offset())
        assert bool(beyond[15:].float().isnan().all())
    integers = buffers.contiguous((3, 5), torch.int32)
    assert int(integers.tensor.as_strided((16,), (1,), integers.tensor.storage_offset())[15]) not in (-1, 0)


def test_a_nan_that_arithmetic_makes_is_told_from_the_guards() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        buffer = buffers.contiguous((4,), dtype)
        computed = torch.tensor(float("inf"), dtype=dtype) - torch.tensor(float("inf"), dtype=dtype)
        buffer.tensor.as_strided((5,), (1,), buffer.tensor.storage_offset()).copy_(computed.expand(5))
        assert not buffer.intact()


@pytest.mark.parametrize(
    ("layout", "strides", "offset_elems"),
    [
        ("row-sliced", (65, 1), 0),  # 130 bytes from row to row
        ("column-sliced", (192, 1), 64),
        ("offset", (64, 1), 1),
        ("transposed", (1, 64), 0),
    ],
)
def test_layouts_are_those_that_callers_have(layout: str, strides: tuple[int, int], offset_elems: int) -> None:
    tensor = buffers.LAYOUTS[layout]((64, 64), torch.bfloat16).tensor
    assert tensor.stride() == strides
    assert tensor.data_ptr() % 64 == offset_elems * 2 % 64


@pytest.mark.parametrize(("last", "taken"), [(2**31 - 1, True), (2**31, False)])
def test_offsets_are_counted_beyond_what_32_bits_address(last: int, taken: bool) -> None:
    """The stride and batch of a public report, on a tensor without memory."""
    rows, stride = 274, 7_864_320
    columns = last - (rows - 1) * stride + 1
    tensor = torch.empty(1, device="meta").as_strided((rows, columns), (stride, 1))
    assert (buffers.refused(TensorGuard("rows"), 2**31 - 1, tensor) is None) == taken
    assert buffers.refused(TensorGuard("rows"), 2**63 - 1, tensor) is None


def test_a_gpus_buffers_have_wider_guards() -> None:
    far = buffers.contiguous((4, 4), torch.float32, "meta")
    assert far.storage.numel() == 2 * buffers.DEVICE_GUARD_BYTES + 64
    assert far.tensor.storage_offset() * 4 % 256 == 0

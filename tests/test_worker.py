"""What a worker does inside its process: messages, guarded buffers, validation and paired timings."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fibc import buffers, check, inputs
from fibc.check import Oracle, Weights
from fibc.rpc import Channel, ChannelClosedError
from fibc.schema.candidate import Guards, TensorGuard
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Status
from fibc.schema.feature import Point
from fibc.timing import NativeFailedError, Side, Timer
from fibc.validation import Case, Judge, Validation, place, same_bits
from fibc.worker import load_text

# Messages -------------------------------------------------------------------------------------------------------------


def test_a_message_arrives_as_it_was_sent_and_so_do_file_descriptors() -> None:
    ours, raw = Channel.pair()
    theirs = Channel(raw)
    message = {"op": "pair", "values": [1, 2.5, None, "x" * 100_000], "raw": b"\x00\xff"}
    ours.send(message)
    assert theirs.receive(5.0) == message
    read_fd, write_fd = os.pipe()
    theirs.send("here it comes")
    theirs.send_fds([write_fd])
    os.close(write_fd)
    assert ours.receive(5.0) == "here it comes"
    (passed,) = ours.receive_fds(1)
    os.write(passed, b"through")
    os.close(passed)
    assert os.read(read_fd, 100) == b"through"
    os.close(read_fd)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("sent", [b"", b"\x01", b"\xff" * 8, b"\x05\0\0\0\0\0\0\0ab"])
def test_a_channel_whose_other_end_dies_or_talks_nonsense_is_closed(sent: bytes) -> None:
    ours, raw = Channel.pair()
    raw.sendall(sent)
    raw.close()
    with pytest.raises(ChannelClosedError):
        ours.receive(5.0)
    ours.close()


def test_a_message_that_does_not_come_times_out() -> None:
    ours, raw = Channel.pair()
    with pytest.raises(TimeoutError):
        ours.receive(0.01)
    raw.close()
    ours.close()


def test_a_long_message_does_not_block_its_sender_for_good() -> None:
    left, right = (Channel(end) for end in socket.socketpair())
    sender = threading.Thread(target=left.send, args=(b"x" * 5_000_000,))
    sender.start()
    assert len(right.receive(30.0)) == 5_000_000
    sender.join()
    left.close()
    right.close()


# Buffers --------------------------------------------------------------------------------------------------------------

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
    [("row-sliced", False, True), ("offset", True, True), ("transposed", False, False), ("degenerate", True, True)],
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
    assert buffers.degenerate((1, 8), torch.float32).tensor.stride() == (7, 1)


# Validation -----------------------------------------------------------------------------------------------------------


def contract(*, in_place: bool = False) -> Definition:
    output = {"shape": ["rows", "columns"], "dtype": "float32"}
    return Definition.model_validate(
        {
            "name": "doubled",
            "op_type": "elementwise",
            "axes": {"rows": {"type": "var"}, "columns": {"type": "const", "value": 16}},
            "inputs": {"x": {"shape": ["rows", "columns"], "dtype": "float32"}},
            "outputs": {"y": {**output, "param": "x"} if in_place else output},
            "reference": "def run(x):\n    return x + x\n",
        }
    )


class Kernel:
    """A kernel in Python: ``write(x, y)``; by value it allocates, or writes in place."""

    def __init__(self, write: Callable[[Tensor, Tensor], None], *, in_place: bool = False) -> None:
        self.write = write
        self.in_place = in_place
        self.num_calls = 0

    def run_out(self, x: Tensor, y: Tensor) -> None:
        self.num_calls += 1
        self.write(x, y)

    def __call__(self, x: Tensor) -> Tensor:
        y = x if self.in_place else torch.empty_like(x, memory_format=torch.contiguous_format)
        self.run_out(x, y)
        return y


def judge(kernel: Kernel, *, layout: str = "", guard: TensorGuard | None = None, in_place: bool = False) -> Validation:
    definition = contract(in_place=in_place)
    axes = {"rows": 3}
    values = inputs.make(definition, axes, 0)
    reference = load_text("reference", definition.reference).run
    oracle = Oracle(definition, reference, check.probe(definition, reference, values), Weights(definition))
    placed = place(values, buffers.LAYOUTS.get(layout, buffers.contiguous))
    expected = oracle.expect(values, axes, independent=True)
    case = Case("dense", axes, layout, values, placed, expected)
    chosen = guard or TensorGuard()
    judged = Judge(definition, definition.call_spec(), kernel, Guards((chosen,), (chosen,)))
    return judged.judge(case) or judged.finish()


def double(x: Tensor, y: Tensor) -> None:
    y.copy_(x + x)


def test_a_right_kernel_passes_with_outputs_in_every_layout_that_its_guards_take() -> None:
    for layout in ("", *buffers.LAYOUTS):
        outcome = judge(Kernel(double), layout=layout, guard=TensorGuard("any"))
        assert outcome.status is Status.PASSED, outcome.message
        assert outcome.correctness is not None
        assert (outcome.correctness.num_cases, outcome.num_refused) == (1, 0)


def test_an_input_that_breaks_a_guard_is_never_given_to_the_kernel() -> None:
    kernel = Kernel(double)
    outcome = judge(kernel, layout="transposed")
    assert outcome.status is Status.PASSED
    assert kernel.num_calls == 0
    assert outcome.num_refused == 1


def test_an_operator_in_place_starts_from_pristine_inputs_each_time() -> None:
    outcome = judge(Kernel(double, in_place=True), in_place=True)
    assert outcome.status is Status.PASSED, outcome.message
    assert outcome.correctness is not None
    assert outcome.correctness.deterministic
    assert judge(Kernel(lambda x, y: None, in_place=True), in_place=True).status is Status.INCORRECT_NUMERICAL


def test_a_kernel_that_writes_between_rows_is_caught() -> None:
    def dense_rows(x: Tensor, y: Tensor) -> None:
        double(x, y)
        y.as_strided((1,), (1,), y.storage_offset() + y.shape[1]).fill_(1.0)

    outcome = judge(Kernel(dense_rows), layout="row-sliced", guard=TensorGuard("any"))
    assert outcome.status is Status.INCORRECT_NUMERICAL
    assert "bytes outside of the tensor" in outcome.message


def test_a_result_by_value_of_another_form_is_caught() -> None:
    class Wide(Kernel):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x).double()

    assert judge(Wide(double)).status is Status.INCORRECT_DTYPE


def test_a_result_by_value_that_is_left_over_memory_is_caught() -> None:
    class Lazy(Kernel):
        def __call__(self, x: Tensor) -> Tensor:
            return torch.empty_like(x)

    assert judge(Lazy(double)).status is Status.INCORRECT_NUMERICAL


def test_same_bits_tells_zeros_apart_and_knows_a_nan_again() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(3))


# Timing ---------------------------------------------------------------------------------------------------------------

GEMM = Definition.model_validate(
    {
        "name": "gemm",
        "op_type": "gemm",
        "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 8}, "K": {"type": "const", "value": 16}},
        "inputs": {"A": {"shape": ["M", "K"], "dtype": "float32"}, "B": {"shape": ["N", "K"], "dtype": "float32"}},
        "outputs": {"C": {"shape": ["M", "N"], "dtype": "float32"}},
        "reference": "def run(A, B):\n    return A @ B.T\n",
    }
)


class FakeHarness:
    """Notes what is timed; a native call takes 30 us, a candidate's 10 us."""

    def __init__(self) -> None:
        self.timed: list[tuple[str, int, list[tuple[int, int]]]] = []

    def bind(self, library_path: str, symbol: str, spec: bytes) -> Any:
        raise NotImplementedError

    def set_num_threads(self, num_threads: int) -> None:
        raise NotImplementedError

    def time_calls(
        self, callable: Callable[..., Any], calls: Sequence[tuple[Any, ...]], start: int, inner: int
    ) -> float:
        chosen = [calls[(start + index) % len(calls)] for index in range(inner)]
        for call in chosen:
            callable(*call)
        name = "native" if callable is native else "candidate"
        self.timed.append((name, inner, [(a.data_ptr(), b.data_ptr()) for a, b in chosen]))
        return 30e-6 if name == "native" else 10e-6


def native(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.T


def point(m: int) -> Point:
    return Point((("M", m),), "tune")


def timer(call: Callable[..., Any] = native, *, keep_bytes: int = 1 << 30, copies: int = 3) -> Timer:
    def make(chosen: Point, made: Mapping[str, Any] | None) -> Mapping[str, Any]:
        return inputs.make(GEMM, dict(chosen.axes), 0, made=made)

    return Timer(GEMM, GEMM.call_spec(), call, make, num_copies=copies, keep_bytes=keep_bytes, seed=0)


def test_a_pair_times_both_halves_in_the_order_asked_for_with_equal_inner_counts() -> None:
    harness = FakeHarness()
    sides = {4: Side(point(2), lambda a, b: a @ b.T, True)}
    timed = timer()
    assert timed.inner(harness, point(2)) == 4  # 100 us of native at 30 us a call
    harness.timed.clear()
    assert timed.pair(harness, 4, sides, native_first=True, inner=4) == (30e-6, 10e-6)
    assert timed.pair(harness, 4, sides, native_first=False, inner=4) == (30e-6, 10e-6)
    samples = [(name, inner) for name, inner, _ in harness.timed if inner == 4]
    assert samples == [("native", 4), ("candidate", 4), ("candidate", 4), ("native", 4)]
    warm_ups = [name for name, inner, _ in harness.timed if inner == 1]
    assert sorted(warm_ups) == ["candidate"] * 2 + ["native"] * 2


def test_weights_rotate_over_all_copies_and_activations_stay() -> None:
    harness = FakeHarness()
    timed = timer(copies=3)
    timed.pair(harness, 0, {0: Side(point(2), lambda a, b: a @ b.T, True)}, native_first=True, inner=5)
    used = [addresses for _, _, calls in harness.timed for addresses in calls]
    weights = [b for _, b in used]
    assert len(set(weights)) == 3
    assert all(weights[i] != weights[i + 1] and weights[i] == weights[i + 3] for i in range(len(weights) - 3))
    assert len({a for a, _ in used}) == 1


def test_points_share_the_weights_and_are_dropped_when_memory_is_short() -> None:
    harness = FakeHarness()
    timed = timer(keep_bytes=0)
    sides = {m: Side(point(m), lambda a, b: a @ b.T, True) for m in (1, 2, 3)}
    for m in (1, 2, 3, 1):
        timed.pair(harness, m, sides, native_first=True, inner=1)
    assert len({b for _, _, calls in harness.timed for _, b in calls}) == 3
    assert all(timed.recheck(m, sides) is None for m in sides)


def test_an_output_that_changes_while_it_is_timed_is_noticed() -> None:
    calls = {"count": 0}

    def drifting(a: Tensor, b: Tensor) -> Tensor:
        calls["count"] += 1
        return a @ b.T + (calls["count"] > 5)

    sides = {0: Side(point(2), drifting, True), 1: Side(point(2), lambda a, b: a @ b.T, True)}
    timed = timer()
    for arm in (0, 1):
        timed.pair(FakeHarness(), arm, sides, native_first=True, inner=8)
    message = timed.recheck(0, sides)
    assert message is not None
    assert message.startswith("output C at M=2: must be as before it was timed")
    assert timed.recheck(1, sides) is None


def test_a_non_deterministic_output_may_change_by_roundings_only() -> None:
    calls = {"count": 0}

    def wavering(by: float) -> Callable[[Tensor, Tensor], Tensor]:
        def call(a: Tensor, b: Tensor) -> Tensor:
            calls["count"] += 1
            return a @ b.T * (1 + by * (calls["count"] % 2))

        return call

    for by, accepted in ((1e-7, True), (1e-2, False)):
        calls["count"] = 0
        sides = {0: Side(point(2), wavering(by), False)}
        timed = timer()
        timed.pair(
            FakeHarness(), 0, sides, native_first=True, inner=2
        )  # with the warm-up 5 calls: the next one differs
        assert (timed.recheck(0, sides) is None) == accepted


def test_a_native_that_raises_is_told_apart_from_a_candidate_that_raises() -> None:
    def broken(a: Tensor, b: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(NativeFailedError, match="native raised ValueError: no"):
        timer(broken).inner(FakeHarness(), point(2))
    with pytest.raises(ValueError, match=r"^no$"):
        timer().pair(FakeHarness(), 0, {0: Side(point(2), broken, True)}, native_first=True, inner=1)


def test_text_is_loaded_as_a_module_whose_tracebacks_show_its_lines() -> None:
    module = load_text("shown", "def run(x):\n    return x.no_such_attribute\n")
    with pytest.raises(AttributeError) as raised:
        module.run(1)
    assert "return x.no_such_attribute" in str(raised.getrepr(style="long"))

"""What a worker does inside its process: messages and paired timings."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from timing_harness import TimingHarness
from torch import Tensor

from fibc import inputs
from fibc.rpc import Channel, ChannelClosedError
from fibc.schema.definition import Definition
from fibc.schema.feature import Point
from fibc.timing import NativeFailedError, Side, Timer
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


class FakeHarness(TimingHarness):
    """Notes what is timed; a native call takes 30 us, a candidate's 10 us."""

    def __init__(self) -> None:
        self.timed: list[tuple[str, int, list[tuple[int, int]]]] = []

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


def test_a_long_call_that_was_just_made_is_warm_up_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fibc.timing.WARM_S", 0.01)

    def slow(a: Tensor, b: Tensor) -> Tensor:
        time.sleep(0.02)
        return a @ b.T

    harness = FakeHarness()
    timer().pair(harness, 0, {0: Side(point(2), slow, True)}, native_first=True, inner=3)
    assert [name for name, inner, _ in harness.timed if inner == 1] == ["native"] * 2


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
    assert all(timed.check_outputs(m, sides) is None for m in sides)


def test_outputs_that_are_kept_for_comparison_count_as_memory_of_their_point() -> None:
    inputs_bytes = (2 + 3) * GEMM.const_axes["K"] * 4
    for room, held in ((inputs_bytes, [3]), (1 << 30, [2, 3])):
        timed = timer(keep_bytes=room)
        for m in (2, 3):
            side = Side(point(m), lambda a, b: a @ b.T, True)
            timed.pair(FakeHarness(), m, {2: side, 3: side}, native_first=True, inner=1)
        assert [place.axes[0][1] for place in timed._places._places] == held


def test_an_output_that_changes_while_it_is_timed_is_noticed() -> None:
    calls = {"count": 0}

    def drifting(a: Tensor, b: Tensor) -> Tensor:
        calls["count"] += 1
        return a @ b.T + (calls["count"] > 5)

    sides = {0: Side(point(2), drifting, True), 1: Side(point(2), lambda a, b: a @ b.T, True)}
    timed = timer()
    for arm in (0, 1):
        timed.pair(FakeHarness(), arm, sides, native_first=True, inner=8)
    message = timed.check_outputs(0, sides)
    assert message is not None
    assert message.startswith("output C at M=2: must be as before it was timed")
    assert timed.check_outputs(1, sides) is None


@pytest.mark.parametrize("again", [Timer.forget, lambda timed: timed.fresh(1)])
def test_what_was_said_of_an_arm_is_not_said_of_the_next_one_of_its_number(again: Callable[[Timer], object]) -> None:
    calls = {"count": 0}

    def drifting(a: Tensor, b: Tensor) -> Tensor:
        calls["count"] += 1
        return a @ b.T + (calls["count"] > 5)

    timed = timer()
    sides = {0: Side(point(2), drifting, True)}
    timed.pair(FakeHarness(), 0, sides, native_first=True, inner=8)
    assert timed.check_outputs(0, sides) is not None
    again(timed)
    sides = {0: Side(point(2), lambda a, b: a @ b.T, True)}
    timed.pair(FakeHarness(), 0, sides, native_first=True, inner=8)
    assert timed.check_outputs(0, sides) is None


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
        assert (timed.check_outputs(0, sides) is None) == accepted


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

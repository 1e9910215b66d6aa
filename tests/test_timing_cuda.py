"""A GPU is timed while the host is ahead of it, on equal terms for both halves; shown on a simulated queue."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from timing_harness import TimingHarness
from torch import Tensor

from fibc import inputs
from fibc.cuda_queue import Mark
from fibc.errors import BrokenError, InputError
from fibc.schema.definition import Definition
from fibc.schema.feature import Point
from fibc.sustained import Sustained, check_sustained
from fibc.timing import NativeFailedError, Side, Timer
from fibc.timing_cuda import MAX_SPIN_S, MIN_SPIN_S, GraphMeter, HostAhead, make_meter

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

LAUNCH_S = 10e-6
"""What the simulated host needs to queue one call."""


class FakeMark:
    def __init__(self, queue: FakeQueue, at_s: float) -> None:
        self._queue = queue
        self._at_s = at_s

    def reached(self) -> bool:
        return self._queue.host_s >= self._at_s

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, FakeMark)
        return self._at_s - earlier._at_s


class FakeQueue:
    """A host and a device with a clock each; the device does what is queued in order, and not before it is queued."""

    def __init__(self, hiccups: Sequence[float] = ()) -> None:
        self.host_s = 0.0
        self.device_s = 0.0
        self.log: list[str] = []
        self.capturing: list[float] | None = None
        self.hiccups = list(hiccups)

    def host_clock(self) -> float:
        return self.host_s

    def queue(self, seconds: float) -> None:
        if self.capturing is not None:
            self.capturing.append(seconds)
            return
        self.device_s = max(self.device_s, self.host_s) + seconds

    def call(self, seconds: float, count: int = 1) -> None:
        for _ in range(count):
            self.host_s += LAUNCH_S
            self.queue(seconds)

    def spin(self, seconds: float) -> None:
        self.log.append("spin")
        self.queue(seconds)

    def flush(self) -> None:
        self.log.append("flush")
        self.queue(60e-6)

    def mark(self) -> Mark:
        self.log.append("mark")
        mark = FakeMark(self, max(self.device_s, self.host_s))
        if self.hiccups:
            self.host_s += self.hiccups.pop(0)
        return mark

    def wait(self) -> None:
        self.log.append("wait")
        self.host_s = max(self.host_s, self.device_s)

    def capture(self, enqueue: Callable[[], object]) -> Callable[[], None]:
        self.log.append("capture")
        self.capturing = []
        try:
            enqueue()
        finally:
            captured, self.capturing = self.capturing, None

        def replay() -> None:
            self.log.append("replay")
            self.call(sum(captured))

        return replay

    def shed(self) -> None:
        self.log.append("shed")

    def scatter(self, rng: random.Random) -> None:
        self.log.append(f"scatter {rng.random():.3f}")


class FakeHarness(TimingHarness):
    """Calls take the device 20 us where they are native's, else 10 us."""

    def __init__(self, queue: FakeQueue) -> None:
        self.queue = queue
        self.calls: list[tuple[str, int, int]] = []
        self.fault: Exception | None = None

    def time_calls(
        self, callable: Callable[..., Any], calls: Sequence[tuple[Any, ...]], start: int, inner: int
    ) -> float:
        name = "native" if callable is native else "candidate"
        if self.fault is not None:
            raise self.fault
        for index in range(inner):
            _, weight = calls[(start + index) % len(calls)]
            self.calls.append((name, weight.data_ptr(), inner))
            self.queue.call(20e-6 if name == "native" else 10e-6)
        return LAUNCH_S


def native(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.T


def candidate(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.T


def point(m: int = 2) -> Point:
    return Point((("M", m),), "tune")


SIDES = {0: Side(point(), candidate, True), 1: Side(point(), lambda a, b: a @ b.T, True)}


def timer(queue: FakeQueue, mode: str, *, copies: int = 3, keep_bytes: int = 1 << 30, flush: bool = False) -> Timer:
    def make(chosen: Point, made: Mapping[str, Any] | None) -> Mapping[str, Any]:
        return inputs.make(GEMM, dict(chosen.axes), 0, made=made)

    meter = make_meter(mode, queue, flush=flush, host_clock=queue.host_clock)
    return Timer(GEMM, GEMM.call_spec(), native, make, num_copies=copies, keep_bytes=keep_bytes, seed=0, meter=meter)


# The host is ahead


def test_the_devices_time_is_measured_and_not_the_hosts() -> None:
    queue = FakeQueue()
    clock = HostAhead(queue, queue.host_clock)
    seconds = clock.time(lambda: None, lambda: queue.call(5e-6, 8))
    assert seconds == pytest.approx(40e-6)  # queueing takes 80 us
    assert clock.num_repeated == 0


def test_without_a_spin_the_same_work_would_read_the_hosts_time() -> None:
    queue = FakeQueue()
    begin = queue.mark()
    queue.call(5e-6, 8)
    assert queue.mark().seconds_since(begin) > 80e-6


def test_a_sample_that_the_host_was_late_for_is_repeated_behind_a_longer_spin() -> None:
    queue = FakeQueue(hiccups=[3 * MIN_SPIN_S])
    clock = HostAhead(queue, queue.host_clock)
    assert clock.time(lambda: None, lambda: queue.call(5e-6)) == pytest.approx(5e-6)
    assert clock.num_repeated == 1
    assert queue.log.count("spin") == 2


def test_the_spin_follows_what_queueing_takes_so_that_repeats_stay_rare() -> None:
    queue = FakeQueue()
    clock = HostAhead(queue, queue.host_clock)
    for _ in range(20):
        assert clock.time(lambda: None, lambda: queue.call(1e-6, 50)) == pytest.approx(50e-6)  # 500 us of queueing
    assert 1 <= clock.num_repeated <= 3  # all in the first sample


def test_a_host_that_stays_behind_is_an_error_that_says_so() -> None:
    queue = FakeQueue(hiccups=[2 * MAX_SPIN_S] * 100)
    with pytest.raises(BrokenError, match="must be queued before the device begins"):
        HostAhead(queue, queue.host_clock).time(lambda: None, lambda: queue.call(5e-6))


# Halves


@pytest.mark.parametrize("mode", ["graph", "device"])
def test_a_pair_is_the_devices_seconds_per_call_of_both(mode: str) -> None:
    queue = FakeQueue()
    timed = timer(queue, mode)
    harness = FakeHarness(queue)
    inner = timed.inner(harness, point())
    assert inner in (10, 11)  # 200 us of native
    for native_first in (True, False):
        times = timed.pair(harness, 0, SIDES, native_first=native_first, inner=inner)
        assert times == pytest.approx((20e-6, 10e-6))


def test_a_graph_holds_equal_numbers_of_calls_of_each_side_over_every_copy() -> None:
    queue = FakeQueue()
    timed = timer(queue, "graph", copies=24)
    harness = FakeHarness(queue)
    inner = timed.inner(harness, point())
    assert inner == 24  # 10 calls are 200 us, but a replay begins with the first copy again
    for _ in range(3):
        timed.pair(harness, 0, SIDES, native_first=True, inner=inner)
    for name in ("native", "candidate"):
        captured = [weight for side, weight, count in harness.calls if side == name and count == inner]
        assert len(captured) % 24 == 0
        assert len(set(captured[-24:])) == 24


def test_each_arm_has_a_graph_and_one_of_native_captured_once_in_a_session() -> None:
    queue = FakeQueue()
    timed = timer(queue, "graph")
    harness = FakeHarness(queue)
    for _ in range(3):
        for arm in SIDES:
            timed.pair(harness, arm, SIDES, native_first=True, inner=4)
    assert queue.log.count("capture") == 4
    timed.fresh(7)
    assert queue.log[-1].startswith("scatter")
    timed.pair(harness, 0, SIDES, native_first=True, inner=4)
    assert queue.log.count("capture") == 6


def test_nothing_is_captured_between_the_halves_of_a_pair() -> None:
    queue = FakeQueue()
    timed = timer(queue, "graph")
    timed.pair(FakeHarness(queue), 0, SIDES, native_first=True, inner=4)
    timing = queue.log[queue.log.index("spin") :]
    assert timing == ["spin", "mark", "replay", "mark", "wait"] * 2


@pytest.mark.parametrize("mode", ["graph", "device"])
def test_both_halves_are_run_once_as_they_are_timed_before_the_first_pair_of_an_arm(mode: str) -> None:
    queue = FakeQueue()
    timed = timer(queue, mode)
    harness = FakeHarness(queue)
    done: list[float] = []
    for _ in range(3):
        before = queue.device_s
        timed.pair(harness, 0, SIDES, native_first=True, inner=4)
        done.append(round((queue.device_s - before) * 1e6))
    timed_us = 4 * (20 + 10) + 2 * MIN_SPIN_S * 1e6
    assert done[1] == done[2]
    assert done[1] == pytest.approx(timed_us, rel=0.5)
    warm_us = 2 * (20 + 10)
    assert done[0] == pytest.approx(done[1] + 4 * (20 + 10) + warm_us, rel=0.2)


def test_which_half_is_captured_first_is_random() -> None:
    first = set()
    for seed in range(12):
        queue = FakeQueue()
        timed = timer(queue, "graph")
        timed.fresh(seed)
        harness = FakeHarness(queue)
        timed.pair(harness, 0, SIDES, native_first=True, inner=4)
        first.add(next(side for side, _, count in harness.calls if count == 4))
    assert first == {"native", "candidate"}


def test_graphs_make_room_when_too_many_calls_are_kept_and_die_with_their_place() -> None:
    queue = FakeQueue()
    meter = GraphMeter(queue, max_kept_calls=8)
    timed = timer(queue, "graph", keep_bytes=0)
    timed._meter = meter
    harness = FakeHarness(queue)
    for arm in (0, 1, 0):
        timed.pair(harness, arm, SIDES, native_first=True, inner=4)
    assert queue.log.count("capture") == 6  # the first arm's graphs had to go
    assert len(meter._graphs) == 2
    timed.pair(harness, 2, {**SIDES, 2: Side(point(3), candidate, True)}, native_first=True, inner=4)
    assert len({place for place, *_ in meter._graphs}) == 1  # the other point was dropped
    timed.forget()
    assert not meter._graphs


def test_activations_are_written_after_a_flush_and_before_the_spin() -> None:
    queue = FakeQueue()
    timed = timer(queue, "device", flush=True)
    harness = FakeHarness(queue)
    timed.pair(harness, 0, SIDES, native_first=True, inner=2)
    queue.log.clear()
    place = timed._places.find(point())
    assert place is not None
    activation = place.calls[0][0]
    wanted = activation.clone()
    activation.zero_()
    timed.pair(harness, 0, SIDES, native_first=True, inner=2)
    assert queue.log == ["flush", "spin", "mark", "mark", "wait"] * 2
    assert torch.equal(activation, wanted)


def test_in_device_mode_calls_go_on_through_the_rotation() -> None:
    queue = FakeQueue()
    timed = timer(queue, "device", copies=3)
    harness = FakeHarness(queue)
    for _ in range(3):
        timed.pair(harness, 0, SIDES, native_first=True, inner=2)
    weights = [weight for _, weight, _ in harness.calls]
    assert all(a != b for a, b in pairwise(weights))
    assert len(set(weights)) == 3


def test_eager_mode_is_the_hosts_time_with_the_wait() -> None:
    queue = FakeQueue()
    timed = timer(queue, "eager")
    harness = FakeHarness(queue)
    native_s, candidate_s = timed.pair(harness, 0, SIDES, native_first=True, inner=50)
    assert native_s == pytest.approx(20e-6 + LAUNCH_S / 50)  # the device is behind the host
    assert candidate_s == pytest.approx(10e-6 + LAUNCH_S / 50)
    assert queue.log.count("spin") == 0


def test_a_mode_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match=r"--mode: no such mode, got warm \(accepted: graph, device, eager\)"):
        make_meter("warm", FakeQueue())


# Sessions and blame


def test_a_fresh_session_makes_weights_and_activations_anew() -> None:
    queue = FakeQueue()
    timed = timer(queue, "graph")
    harness = FakeHarness(queue)
    timed.pair(harness, 0, SIDES, native_first=True, inner=3)
    kept = timed.first_inputs()["B"]
    timed.fresh(1)
    assert timed.first_inputs() == {}
    timed.pair(harness, 0, SIDES, native_first=True, inner=3)
    made = timed.first_inputs()["B"]
    assert isinstance(made, Tensor) and isinstance(kept, Tensor)
    assert made.data_ptr() != kept.data_ptr()


def test_equal_seeds_scatter_alike_and_others_do_not() -> None:
    logs = []
    for seed in (1, 1, 2):
        queue = FakeQueue()
        timer(queue, "graph").fresh(seed)
        logs.append(queue.log[-1])
    assert logs[0] == logs[1] != logs[2]


def test_an_error_of_the_device_is_blamed_on_the_half_that_it_came_with() -> None:
    queue = FakeQueue()
    timed = timer(queue, "device")
    harness = FakeHarness(queue)
    timed.pair(harness, 0, SIDES, native_first=True, inner=3)
    harness.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(NativeFailedError, match="native raised RuntimeError: CUDA error"):
        timed.pair(harness, 0, SIDES, native_first=True, inner=3)
    with pytest.raises(RuntimeError, match=r"^CUDA error"):
        timed.pair(harness, 0, SIDES, native_first=False, inner=3)


def test_a_clock_that_does_not_work_is_nobodys_fault() -> None:
    queue = FakeQueue()
    timed = timer(queue, "device")
    harness = FakeHarness(queue)
    timed.pair(harness, 0, SIDES, native_first=True, inner=2)
    queue.hiccups = [2 * MAX_SPIN_S] * 100
    with pytest.raises(BrokenError) as raised:
        timed.pair(harness, 0, SIDES, native_first=False, inner=2)
    assert not isinstance(raised.value, NativeFailedError)


# The sustained check


def test_a_candidate_that_throttles_when_it_runs_alone_does_not_hold() -> None:
    order = []

    def block(native_runs: bool, seconds: float) -> float:
        order.append((native_runs, seconds))
        return 10e-6 if native_runs else 11e-6

    outcome = check_sustained(block)
    assert order == [(True, 1.0), (False, 1.0), (False, 1.0), (True, 1.0)]
    assert outcome.speedup == pytest.approx(10 / 11)
    assert not outcome.holds
    assert str(outcome) == "does not hold in blocks of a second and more: 0.909x"


def test_a_steady_drift_cancels_in_the_sustained_check() -> None:
    outcome = Sustained(native_s=(1.00, 1.06), candidate_s=(1.02, 1.04))
    assert outcome.speedup == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("mode", ["graph", "device", "eager"])
def test_a_block_lasts_about_as_long_as_asked_for(mode: str) -> None:
    queue = FakeQueue()
    timed = timer(queue, mode)
    harness = FakeHarness(queue)
    timed.pair(harness, 0, SIDES, native_first=True, inner=5)
    before = queue.device_s
    seconds = timed.block(harness, 0, SIDES, native=True, inner=5, seconds=0.01)
    assert seconds == pytest.approx(20e-6, rel=0.1)
    assert queue.device_s - before == pytest.approx(0.01, rel=0.2)

"""Making, judging and timing on a real GPU. ``pytest -m gpu -s`` prints what was measured."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from kernel_calls import gemm, rmsnorm
from timing_harness import TimingHarness
from torch import Tensor

from fibc import cuda_queue, environment, gpus, inputs
from fibc.backends import native as native_kernels
from fibc.buffers import LAYOUTS
from fibc.case_book import CaseBook
from fibc.cases import Drafter
from fibc.check import Oracle, Weights, probe
from fibc.cuda_queue import CudaQueue
from fibc.gpu_lock import lock_device
from fibc.nvml import open_monitor
from fibc.observer import Observer, OwnProcesses
from fibc.schema.candidate import Guards, TensorGuard
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Status
from fibc.schema.feature import Point
from fibc.schema.silicon import Gpu
from fibc.sustained import check_sustained
from fibc.timing import Side, Timer
from fibc.timing_cuda import HostAhead, make_meter
from fibc.validation import Judge, Validation
from fibc.worker import load_text

pytestmark = pytest.mark.gpu

MIB = 1 << 20
ANY = TensorGuard("any")


def say(text: str) -> None:
    print(f"\n    {text}", end="")


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return gpus.find().first()


@pytest.fixture(scope="module")
def queue() -> Iterator[CudaQueue]:
    before = torch.cuda.current_stream()
    made = CudaQueue("cuda:0")
    yield made
    torch.cuda.set_stream(before)


class PythonHarness(TimingHarness):
    """Calls in a Python loop."""

    def time_calls(
        self, callable: Callable[..., Any], calls: Sequence[tuple[Any, ...]], start: int, inner: int
    ) -> float:
        began = time.perf_counter()
        for index in range(inner):
            callable(*calls[(start + index) % len(calls)])
        return (time.perf_counter() - began) / inner


def point(axis: str, size: int) -> Point:
    return Point(((axis, size),), "tune")


# Silicon


def test_the_driver_and_torch_agree_on_the_silicon_and_no_context_was_made(gpu: Gpu) -> None:
    seen = torch.cuda.get_device_properties(0)
    held = gpu.validity
    assert (held.compute_capability, held.num_sms) == (10 * seen.major + seen.minor, seen.multi_processor_count)
    assert held.l2_bytes == seen.L2_cache_size
    assert held.memory_bytes == seen.total_memory
    assert str(seen.uuid) in gpu.uuid
    program = "from fibc import gpus; f = gpus.find(); import torch; print(len(f.gpus), torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(torch.cuda.device_count()), "False"]
    say(f"{gpu} driver {gpu.driver}")


@pytest.mark.parametrize("visible", ["", "0", "uuid", "-1"])
def test_cuda_visible_devices_is_followed_whatever_it_names(gpu: Gpu, visible: str) -> None:
    chosen = gpu.uuid if visible == "uuid" else visible
    program = "from fibc import gpus; print([g.uuid for g in gpus.find().gpus])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": chosen},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == ("[]" if visible in ("", "-1") else f"['{gpu.uuid}']")


def test_the_environment_knows_the_cublas_that_torch_has_loaded(gpu: Gpu) -> None:
    torch.mm(torch.ones(16, 16, device="cuda"), torch.ones(16, 16, device="cuda"))
    found = environment.detect(gpu=gpu)
    major = (torch.version.cuda or "").split(".")[0]
    assert found.versions["cublas"].split(".")[0] == major
    say(f"{found.facts()}")


# Inputs and judgement


def test_a_large_weight_is_made_in_milliseconds_and_equal_seeds_give_equal_bits() -> None:
    contract = gemm(4096, 14336, "bfloat16")
    first = inputs.make(contract, {"M": 8}, 3, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    again = inputs.make(contract, {"M": 8}, 3, device="cuda")
    torch.cuda.synchronize()
    took_s = time.perf_counter() - began
    for name in ("A", "B"):
        a, b = first[name], again[name]
        assert isinstance(a, Tensor) and isinstance(b, Tensor)
        assert torch.equal(a, b)
    weight = again["B"]
    assert isinstance(weight, Tensor)
    assert weight.float().std().item() == pytest.approx(1 / math.sqrt(14336), rel=0.01)
    say(f"4096 x 14336 and its activations were made in {took_s * 1e3:.2f} ms")
    assert took_s < 0.02


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_gpus_oracle_agrees_with_the_cpus(dtype: str) -> None:
    contract = gemm(256, 1536, dtype)
    values = inputs.make(contract, {"M": 9}, 0)
    moved = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in values.items()}
    reference = load_text("reference", contract.reference).run
    expected = []
    for given in (values, moved):
        oracle = Oracle(contract, reference, probe(contract, reference, given), Weights(contract))
        expected.append(oracle.expect(given, {"M": 9}, independent=True)[0])
    here, there = expected
    assert here.bound is not None and there.bound is not None
    torch.testing.assert_close(there.values.double().cpu(), here.values.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(there.bound.cpu(), here.bound, rtol=1e-2, atol=1e-6)


class TorchKernel:
    """torch's own kernel with the interface of a candidate; ``spoil`` may do harm after it."""

    def __init__(self, call: Callable[..., Tensor], spoil: Callable[[Tensor], None] = lambda y: None) -> None:
        self.call = call
        self.spoil = spoil

    def run_out(self, *arguments: Any) -> None:
        *values, y = arguments
        y.copy_(self.call(*values))
        self.spoil(y)

    def __call__(self, *values: Any) -> Tensor:
        return self.call(*values)


def judged(contract: Definition, axis: str, size: int, kernel: TorchKernel, kind: str = "adversarial") -> Validation:
    def make(p: Point) -> Mapping[str, Any]:
        return inputs.make(contract, dict(p.axes), 0, device="cuda")

    reference = load_text("reference", contract.reference).run
    book = CaseBook(contract, reference, kernel.call, Drafter(contract, {}, 0, make, "cuda"))
    low = point(axis, size)
    began = time.perf_counter()
    natives = book.prepare(kind, [low], low, kind)
    prepared_s = time.perf_counter() - began
    assert {native["status"] for native in natives} == {Status.PASSED}, natives
    guards = Guards((ANY,) * len(contract.inputs), (ANY,) * len(contract.outputs))
    judge = Judge(contract, contract.call_spec(), kernel, guards)
    began = time.perf_counter()
    failures = [failure for case in book[kind] if (failure := judge.judge(case)) is not None]
    outcome = failures[0] if failures else judge.finish()
    say(
        f"{len(book[kind])} cases of {contract.name} at {low}: prepared in {prepared_s:.3f} s, judged in "
        f"{time.perf_counter() - began:.3f} s, {outcome.status}, bound ratio "
        f"{outcome.correctness.max_bound_ratio if outcome.correctness else math.nan:.3f}"
    )
    assert book.broken() is None
    return outcome


@pytest.mark.parametrize("k", [511, 512, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_torchs_gemm_passes_every_case_in_every_layout(k: int, dtype: str) -> None:
    outcome = judged(gemm(384, k, dtype), "M", 33, TorchKernel(lambda a, b: a @ b.T))
    assert outcome.status is Status.PASSED, outcome.message
    assert outcome.correctness is not None
    assert outcome.correctness.num_cases >= 8 + len(LAYOUTS)


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_norms_pass_every_case(fused: bool) -> None:
    def norm(x: Tensor, *rest: Tensor) -> Tensor:
        *residual, weight = rest
        total = x + residual[0] if residual else x
        return torch.nn.functional.rms_norm(total, weight.shape, weight, 1e-5)

    outcome = judged(rmsnorm(4096, "bfloat16", fused=fused), "rows", 17, TorchKernel(norm))
    assert outcome.status is Status.PASSED, outcome.message


def test_harm_on_the_device_is_found() -> None:
    def past_the_end(y: Tensor) -> None:
        y.as_strided((1,), (1,), y.storage_offset() + y.numel()).fill_(1.0)

    def no_first_row(y: Tensor) -> None:
        y[0].zero_()

    spoilers = {"bytes outside of the tensor": past_the_end, "must be within": no_first_row}
    for message, spoil in spoilers.items():
        outcome = judged(gemm(64, 256, "bfloat16"), "M", 5, TorchKernel(lambda a, b: a @ b.T, spoil), "trial")
        assert outcome.status is Status.INCORRECT_NUMERICAL
        assert message in outcome.message


def test_a_device_that_is_lost_is_known_to_be_and_a_healthy_one_is_not() -> None:
    assert not cuda_queue.is_lost()
    program = """
import torch
from fibc.cuda_queue import is_lost
x = torch.zeros(4, device="cuda")
index = torch.tensor([1 << 40], device="cuda")
try:
    x[index]
    torch.cuda.synchronize()
except RuntimeError:
    pass
print(is_lost())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True"


# The clock


def test_a_spin_lasts_as_long_as_it_is_told_to(queue: CudaQueue) -> None:
    for seconds in (100e-6, 1e-3):
        begin = queue.mark()
        queue.spin(seconds)
        end = queue.mark()
        queue.wait()
        assert end.seconds_since(begin) == pytest.approx(seconds, rel=0.3, abs=60e-6)


def test_work_behind_a_spin_is_timed_without_the_hosts_gaps(queue: CudaQueue) -> None:
    small = torch.zeros(1024, device="cuda")

    def work() -> None:
        for _ in range(20):
            small.add_(1)

    clock = HostAhead(queue)
    for _ in range(5):
        work()
    ahead_s = statistics.median(clock.time(lambda: None, work) for _ in range(20)) / 20
    times = []
    for _ in range(20):
        queue.wait()
        begin = queue.mark()
        work()
        end = queue.mark()
        queue.wait()
        times.append(end.seconds_since(begin) / 20)
    say(f"a small kernel: {ahead_s * 1e6:.2f} us with the host ahead, {statistics.median(times) * 1e6:.2f} us without")
    assert ahead_s < statistics.median(times)
    assert clock.num_repeated <= 3


def make_timer(contract: Definition, call: Callable[..., Any], mode: str, queue: CudaQueue, copies: int) -> Timer:
    def make(p: Point, made: Mapping[str, Any] | None) -> Mapping[str, Any]:
        return inputs.make(contract, dict(p.axes), 0, made=made, device="cuda")

    meter = make_meter(mode, queue)
    return Timer(contract, contract.call_spec(), call, make, num_copies=copies, keep_bytes=1 << 33, seed=0, meter=meter)


def native(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.T


@pytest.mark.parametrize("mode", ["graph", "device", "eager"])
@pytest.mark.parametrize("m", [1, 64])
def test_native_is_as_fast_as_itself(mode: str, m: int, queue: CudaQueue) -> None:
    contract = gemm(4096, 4096, "bfloat16")
    copies = inputs.num_copies(contract, 60 * MIB, 1 << 37)
    timed = make_timer(contract, native, mode, queue, copies)
    sides = {0: Side(point("M", m), lambda a, b: a @ b.T, True)}
    harness = PythonHarness()
    inner = timed.inner(harness, point("M", m))
    effects, natives = [], []
    for session in range(4):
        timed.fresh(session)
        began = time.perf_counter()
        first = timed.pair(harness, 0, sides, native_first=True, inner=inner)
        opened_s = time.perf_counter() - began
        pairs = [first, *(timed.pair(harness, 0, sides, native_first=i % 2 == 1, inner=inner) for i in range(7))]
        effects.append(statistics.median(math.log(n / c) for n, c in pairs))
        natives += [n for n, _ in pairs]
        assert timed.check_outputs(0, sides) is None
    native_s = statistics.median(natives)
    say(
        f"{mode} M={m}: native {native_s * 1e6:.2f} us, inner {inner}, {copies} copies, A/A by session "
        f"{[f'{100 * e:+.2f}%' for e in effects]}, a session opens in {opened_s * 1e3:.0f} ms"
    )
    assert abs(statistics.fmean(effects)) < 0.02
    assert 33.5e6 / 4.8e12 < native_s < 100e-6  # no faster than the memory, no slower than a host's launch allows


def test_rotated_weights_are_cold(queue: CudaQueue) -> None:
    contract = gemm(4096, 2048, "bfloat16")  # 16 MiB stay in the cache where nothing rotates
    seconds = {}
    for copies in (1, inputs.num_copies(contract, 60 * MIB, 1 << 37)):
        timed = make_timer(contract, native, "graph", queue, copies)
        sides = {0: Side(point("M", 8), lambda a, b: a @ b.T, True)}
        harness = PythonHarness()
        inner = timed.inner(harness, point("M", 8))
        pairs = [timed.pair(harness, 0, sides, native_first=True, inner=inner) for _ in range(8)]
        seconds[copies] = statistics.median(n for n, _ in pairs)
    hot, cold = seconds.values()
    say(f"16 MiB of weights: hot {hot * 1e6:.2f} us, cold {cold * 1e6:.2f} us")
    assert cold > 1.1 * hot


def test_fresh_sessions_lie_at_other_addresses(queue: CudaQueue) -> None:
    contract = gemm(4096, 4096, "bfloat16")
    timed = make_timer(contract, native, "graph", queue, 8)
    seen = set()
    for session in range(6):
        timed.fresh(session)
        timed.hold(point("M", 64))
        weight = timed.first_inputs()["B"]
        assert isinstance(weight, Tensor)
        seen.add(weight.data_ptr())
    say(f"{len(seen)} addresses of the first weight in 6 sessions")
    assert len(seen) >= 3


def test_the_sustained_check_of_native_against_itself_holds_about_equal(queue: CudaQueue) -> None:
    contract = gemm(4096, 4096, "bfloat16")
    timed = make_timer(contract, native, "graph", queue, 8)
    sides = {0: Side(point("M", 1024), lambda a, b: a @ b.T, True)}
    harness = PythonHarness()
    inner = timed.inner(harness, point("M", 1024))

    def block(runs_native: bool, seconds: float) -> float:
        return timed.block(harness, 0, sides, native=runs_native, inner=inner, seconds=seconds)

    outcome = check_sustained(block, block_s=0.5)
    say(f"{outcome}, {outcome.native_s[0] * 1e6:.1f} us")
    assert outcome.speedup == pytest.approx(1.0, abs=0.02)


# Observation


def test_pairs_are_observed_cheaply_and_own_processes_are_known(gpu: Gpu, queue: CudaQueue) -> None:
    monitor = open_monitor(gpu)
    contract = gemm(4096, 4096, "bfloat16")
    timed = make_timer(contract, native, "graph", queue, 8)
    sides = {0: Side(point("M", 16), lambda a, b: a @ b.T, True)}
    harness = PythonHarness()
    inner = timed.inner(harness, point("M", 16))
    observer = Observer(monitor, OwnProcesses(os.getppid()))
    for native_first in (True, False) * 50:
        observer.pair(partial(timed.pair, harness, 0, sides, native_first=native_first, inner=inner))
    say(f"{observer.facts()}, processes {sorted(monitor.processes())}, own {os.getpid()}")
    assert observer.discards.num <= 20
    assert monitor.read().sm_clock_mhz > 0


def test_the_physical_gpu_is_locked_by_its_uuid(gpu: Gpu) -> None:
    assert gpu.mig or gpu.physical == open_monitor(gpu).uuid
    with lock_device(gpu, wait_s=0, say=say):
        pass


def test_flashinfers_norm_is_native_where_it_imports() -> None:
    contract = Definition.model_validate(
        {**rmsnorm(4096, "bfloat16", fused=True).to_json(), "tags": ["fi_api:flashinfer.norm.fused_add_rmsnorm"]}
    )
    found = native_kernels.resolve(contract, target_kind="cuda")
    say(f"native is {found.name} ({found.origin}) {found.note}")
    values = inputs.make(contract, {"rows": 16}, 0, device="cuda")
    result = load_text("native", found.source).call(*values.values())
    assert result.shape == (16, 4096)

"""Sessions as processes on a real GPU. ``pytest -m gpu tests/test_gpu_processes.py -s`` prints what was measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import pytest
from kernel_calls import gemm
from test_gpu_evaluate import say

from fibc import environment, gpus, session_pool, stats, supervisor
from fibc.backends import native as native_kernels
from fibc.cache import Cache
from fibc.child import START_TIMEOUT_S, Child, Exec
from fibc.evaluate import Evaluator
from fibc.evaluators import evaluator_on
from fibc.gpu_lock import lock_device
from fibc.gpu_processes import GpuProcesses
from fibc.nvml import open_monitor
from fibc.schema.feature import Cell, FeatureKey, Point
from fibc.schema.silicon import Gpu
from fibc.session_pool import AT_ONCE, CONTEXT_BYTES
from fibc.turn import time_pair

pytestmark = pytest.mark.gpu

KEY = FeatureKey(Cell(((64, 64),)), (Point((("M", 64),), "end"),), screen_point=0, synthetic=True)
PAIRS = 8


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return gpus.find().first()


@pytest.fixture
def running(gpu: Gpu) -> Iterator[Evaluator]:
    contract = gemm(256, 7168, "bfloat16")
    native = native_kernels.resolve(contract, target_kind="cuda")
    with (
        lock_device(gpu, wait_s=60, say=say),
        evaluator_on(environment.detect(gpu=gpu), contract, native, Cache(), seed=1, mode="", timeout_s=60) as made,
    ):
        yield made
    assert supervisor.descendants() == []


def worker_of(child: Child) -> int:
    """Return the id of the worker below its supervisor."""
    assert isinstance(child._process, Exec)
    (pid,) = supervisor.descendants(child._process.supervised.pid)
    return pid


def free_bytes(running: Evaluator) -> int:
    return int(running._processes.keeper().call("rest", START_TIMEOUT_S))


def test_sessions_of_a_stage_are_processes_of_their_own(running: Evaluator, gpu: Gpu) -> None:
    processes = running._processes
    assert isinstance(processes, GpuProcesses)
    assert running.native_check((KEY,)) == ()
    monitor = open_monitor(gpu)
    before = free_bytes(running)
    bench, _ = running.aa_bench((KEY,), 1)
    seen: dict[int, float] = {}
    took: list[float] = []
    for seed in range(AT_ONCE + 1):
        began = time.monotonic()
        with bench.session(seed) as session:
            session.pair(0, True)
            child = session._child  # type: ignore[attr-defined]
            pid = worker_of(child)
            assert pid not in seen, "a process serves once"
            effects = [time_pair(session, 0, turn, flip=False) for turn in range(PAIRS)]
            seen[pid] = stats.session_effect(effects)
        took.append(time.monotonic() - began)
        if seed == AT_ONCE - 1:
            waiting_bytes = (before - free_bytes(running)) / AT_ONCE
            present = monitor.processes()
            say(f"on the GPU: {len(present)} processes; ours {sorted(seen)}, NVML's {sorted(present)}")
    assert worker_of(processes.keeper()) not in seen
    observed = running.observed
    assert observed is not None
    say(f"{observed}")
    say(f"sessions took {[f'{seconds:.2f}' for seconds in took]} s, the first and the last with a start")
    say(f"one that has served keeps {waiting_bytes / 2**20:.0f} MiB; counted are {CONTEXT_BYTES >> 20}")
    say(f"A/A by process {[f'{100 * effect:+.3f}%' for effect in seen.values()]}")
    assert observed.timed - observed.num_discarded == (AT_ONCE + 1) * (PAIRS + 1)
    assert "another process" not in str(observed)
    assert 0 < waiting_bytes < CONTEXT_BYTES
    assert statistics.median(took[1:-1]) < 0.5 * took[0], "the start is paid once"
    assert max(map(abs, seen.values())) < 0.05
    began = time.monotonic()
    processes.stop()
    say(f"all ended in {time.monotonic() - began:.2f} s")
    assert supervisor.descendants() == []
    assert not {*seen} & monitor.processes()


def test_processes_that_wait_slow_nothing_down(running: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    def native_s() -> float:
        bench, _ = running.aa_bench((KEY,), 1)
        with bench.session(0) as session:
            return statistics.median(session.pair(0, turn % 2 == 0)[0] for turn in range(40))

    processes = running._processes
    assert isinstance(processes, GpuProcesses)
    among = native_s()
    processes.stop()
    monkeypatch.setattr(session_pool, "AT_ONCE", 1)
    alone = native_s()
    say(f"native beside {AT_ONCE - 1} that wait {among * 1e6:.3f} us, alone {alone * 1e6:.3f} us")
    assert among == pytest.approx(alone, rel=0.03)

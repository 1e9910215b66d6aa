"""One worker stays for a run on a GPU: what a candidate does to it costs that candidate, and what it saw is told."""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from test_evaluate import KEY, NATIVE_SOURCE, REFERENCE, artifact, candidate, definition

from fibc import child, gpu_processes, gpus, session_pool, supervisor, sustained
from fibc.bench import ArmFailed
from fibc.evaluate import Evaluator
from fibc.evaluators import GPU_TIMEOUT_S
from fibc.gpu_processes import GpuProcesses
from fibc.process_bench import ProcessBench
from fibc.schema.evaluation import Arm, Status
from fibc.schema.observed import Observed
from fibc.schema.table import NativeSource

HERE = Path(__file__).parent
H200 = gpus.stand_in("sm_90a")
GPU = replace(H200, validity=replace(H200.validity, memory_bytes=1 << 33))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "hostile.so"
    include = HERE.parent / "csrc" / "include"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", f"-I{include}", HERE / "hostile.c", "-o", path], check=True)
    return path


@pytest.fixture
def running(
    library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Evaluator]:
    """An evaluator for a GPU whose worker is the stand-in."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FIBC_TEST_LIBRARY", str(library))
    monkeypatch.setenv("FIBC_TEST_WORKERS", str(tmp_path_factory.mktemp("workers")))
    monkeypatch.setattr(gpu_processes, "spawn", lambda module, *rest: child.spawn("standin_gpu_worker", *rest))
    monkeypatch.setattr(session_pool, "AT_ONCE", 1)
    native = NativeSource("x + x", NATIVE_SOURCE, "option", "digest")
    harness = HERE / "standin_harness.py"
    with Evaluator(
        definition(REFERENCE),
        native,
        GPU,
        harness,
        timeout_s=GPU_TIMEOUT_S,
        seed=1,
        workloads=(),
        num_threads=1,
        mode="",
        cache_share_bytes=None,
    ) as made:
        yield made
    assert supervisor.descendants() == []


def num_keepers(running: Evaluator) -> int:
    return running._processes.epoch


def num_for_sessions(running: Evaluator) -> int:
    assert isinstance(running._processes, GpuProcesses)
    return running._processes._pool.num_started


def observed(running: Evaluator) -> Observed:
    seen = running.observed
    assert seen is not None
    return seen


def test_an_error_that_sticks_costs_its_candidate_and_other_candidates_pass(running: Evaluator, library: Path) -> None:
    for symbol in ("good_on_device", "loses_context", "good_on_device"):
        with running.trial(candidate(symbol), artifact(library, symbol), KEY) as trial:
            if symbol == "good_on_device":
                assert trial.status is Status.PASSED, trial.log
                assert all(seconds > 0 for seconds in trial.session.pair(0, True))
            else:
                assert trial.status is Status.RUNTIME_ERROR
                assert "exited with status 70" in trial.log
                assert "illegal memory access" in trial.log
    assert num_keepers(running) == 3, "it was tried once more in a clean worker, then blamed"
    assert num_for_sessions(running) == 0


def test_an_error_that_sticks_in_a_session_costs_one_restart_and_other_samples_stay_valid(
    running: Evaluator, library: Path
) -> None:
    symbols = ("good_on_device", "loses_context_later")
    built = {symbol: artifact(library, symbol) for symbol in symbols}
    arms = [Arm(str(KEY), 1, symbol) for symbol in symbols]
    bench = running.bench(arms, built, [KEY], fresh_process=True)
    effects: list[float] = []
    with bench.session(5) as session:
        for _ in range(10):
            effects.append(math.log(session.pair(0, True)[0]))
        assert num_for_sessions(running) == 1
        with pytest.raises(ArmFailed) as failed:
            for _ in range(400):
                session.pair(1, False)
        assert (failed.value.arm, failed.value.status) == (1, Status.RUNTIME_ERROR)
        restarts = num_for_sessions(running) - 1
        assert restarts == 1, "once pardoned, then blamed; the next pair starts another worker"
        for _ in range(10):
            effects.append(math.log(session.pair(0, True)[0]))
        assert num_for_sessions(running) == 3
    assert all(math.isfinite(effect) for effect in effects)
    assert isinstance(bench, ProcessBench)
    assert set(bench.failed) == {1}
    with running.bench(arms[:1], built, [KEY], fresh_process=True).session(6) as session:
        assert all(seconds > 0 for seconds in session.pair(0, True))
    assert num_for_sessions(running) == 4, "another session is another process"


def test_one_monitor_watches_in_every_process_and_discards_are_summed(running: Evaluator, library: Path) -> None:
    bench = running.bench([Arm(str(KEY), 1, "good")], {"good": artifact(library, "good")}, [KEY], fresh_process=True)
    for seed in range(3):
        with bench.session(seed) as session:
            for _ in range(20):
                session.pair(0, True)
    seen = observed(running)
    assert seen.facts["monitors opened"] == "1"
    assert seen.timed - seen.num_discarded == 60
    assert seen.num_discarded == 3, "one of twelve readings, 23 of them in each process"
    assert set(seen.discarded) == {"hardware thermal slowdown"}
    assert re.fullmatch(
        r"3 of 63 timed pairs discarded \(3 for hardware thermal slowdown\), 0 under the software power cap; "
        r"3 processes for sessions, 1 at once \(bound: the sessions of a look\), started in \d+\.\d s",
        str(seen),
    )
    running._processes.stop()
    assert observed(running).timed == seen.timed, "what a worker saw outlives it"
    with bench.session(9) as session:
        session.pair(0, True)
    assert observed(running).timed == seen.timed + 1


def test_a_winner_is_run_alone_in_blocks_and_one_that_fails_there_is_blamed(
    running: Evaluator, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fibc.process_bench.check_sustained", partial(sustained.check_sustained, block_s=0.05))
    point = KEY.points[1]
    seen = running.sustained("good_on_device", artifact(library, "good_on_device"), point)
    assert 0.001 < seen.speedup < 1, "the stand-in calls a kernel through ctypes"
    assert not seen.holds
    with pytest.raises(ArmFailed) as failed:
        running.sustained("loses_context_later", artifact(library, "loses_context_later"), point)
    assert failed.value.status is Status.RUNTIME_ERROR
    assert running.sustained("good_on_device", artifact(library, "good_on_device"), point).speedup > 0.001


def test_a_gpu_that_cannot_be_observed_is_measured_and_the_result_says_so(
    running: Evaluator, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIBC_TEST_NO_NVML", "1")
    with running.trial(candidate("good"), artifact(library, "good"), KEY) as trial:
        assert trial.status is Status.PASSED, trial.log
        assert all(seconds > 0 for seconds in trial.session.pair(0, True))
    assert str(observed(running)) == "not observed: NVML: nvmlInit_v2: NVML status 9"
    assert num_for_sessions(running) == 0, "the session of a trial is the keeper's"

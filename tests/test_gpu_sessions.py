"""Each fresh session on a GPU is a process of its own, started with others while nothing is timed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from test_evaluate import KEY, NATIVE_SOURCE, REFERENCE, artifact, candidate, definition
from test_gpu_worker import GPU, HERE, library

from fibc import child, gpu_processes, session_pool, supervisor
from fibc.bench import ArmFailed
from fibc.child import Child, close_all
from fibc.decide import DESIGN
from fibc.environment import Environment
from fibc.errors import EvaluationError
from fibc.evaluate import Evaluator
from fibc.gate import gate_digest
from fibc.gpu_processes import GpuProcesses
from fibc.schema.decision import SESSION
from fibc.schema.evaluation import Arm, Status
from fibc.schema.table import NativeSource
from fibc.session_pool import AT_ONCE, START_S, Room, SessionPool, find_room
from fibc.task import _timed

__all__ = ["library"]

GIB = 1 << 30
ROOMY: Mapping[str, int] = {"num_cores": 16, "host": 8}
TWO = 2


# How many at once


@pytest.mark.parametrize(
    ("free_gib", "total_gib", "num_cores", "host", "room"),
    [
        (139, 140, 16, 8, Room(8, "the sessions of a look")),
        (139, 140, 4, 8, Room(4, "cores")),
        (139, 140, 16, 3, Room(3, "the host's memory")),
        (16, 24, 16, 8, Room(4, "the GPU's memory")),
        (9, 24, 16, 8, Room(1, "the GPU's memory")),
    ],
)
def test_what_there_is_least_of_bounds_the_processes_that_start_at_once(
    free_gib: int, total_gib: int, num_cores: int, host: int, room: Room
) -> None:
    assert AT_ONCE == 8
    assert find_room(free_gib * GIB, total_gib * GIB, num_cores=num_cores, host=host) == room


# Evidence


def test_evidence_of_a_gpu_says_what_a_session_is() -> None:
    on_cpu, on_gpu = (Environment("", (), 0, 0, 1, gpu=gpu) for gpu in (None, GPU))
    assert _timed(on_cpu, "eager") == []
    assert [_timed(on_gpu, mode)[:2] for mode in ("graph", "device")] == [["process"], ["process", "device"]]
    assert gate_digest("e", "graph", "cuda_event", SESSION) != gate_digest("e", "graph", "cuda_event")
    assert DESIGN == "paired-abba-processes"


# The pool, without processes


class FakeChild:
    """Says when it is ended."""

    def __init__(self, number: int, log: list[str]) -> None:
        self.number = number
        self.open = True
        self._log = log

    def hang_up(self) -> None:
        self._log.append(f"hang up {self.number}")

    def close(self) -> None:
        self.open = False
        self._log.append(f"close {self.number}")


class FakePool(SessionPool):
    """A pool of them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fault: BaseException | None = None
        super().__init__(self._made, self._get_ready)

    def _made(self) -> Any:
        number = sum(entry.startswith("spawn") for entry in self.log)
        self.log.append(f"spawn {number}")
        return FakeChild(number, self.log)

    def _get_ready(self, children: list[Child]) -> None:
        self.log.append(f"wait for {len(children)}")
        if self.fault is not None:
            raise self.fault


def two() -> Room:
    return Room(TWO, "cores")


def test_all_are_spawned_before_one_is_waited_for_and_those_that_served_end_before_others_come() -> None:
    pool = FakePool()
    assert not pool
    served = []
    for _ in range(3):
        if not pool:
            pool.start(two)
        served.append(pool.take())
    assert [served_by.number for served_by in served] == [0, 1, 2]  # type: ignore[attr-defined]
    assert pool.log == [
        *("spawn 0", "spawn 1", "wait for 2"),
        *("hang up 0", "hang up 1", "close 0", "close 1"),
        *("spawn 2", "spawn 3", "wait for 2"),
    ]
    pool.stop()
    assert pool.log[-4:] == ["hang up 2", "close 2", "hang up 3", "close 3"]
    assert (pool.num_started, pool.num_batches) == (4, 2)


def test_a_start_that_is_interrupted_leaves_none() -> None:
    pool = FakePool()
    pool.fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        pool.start(two)
    assert not pool
    assert pool.log[-4:] == ["hang up 0", "hang up 1", "close 0", "close 1"]
    assert pool.num_started == 0


def test_starts_to_come_are_estimated_from_those_that_were() -> None:
    pool = FakePool()
    assert pool.starting_s(1) == START_S
    assert pool.starting_s(3 * AT_ONCE) == 3 * START_S
    assert str(pool) == ""
    pool.start(two)
    pool.started_s = 6.0
    assert [pool.starting_s(num) for num in (1, 2, 3, 4, 5)] == [0.0, 0.0, 6.0, 6.0, 12.0]
    pool.take()
    assert pool.starting_s(2) == 6.0
    assert str(pool) == "2 processes for sessions, 2 at once (bound: cores), started in 6.0 s"


# The processes


@pytest.fixture
def spawned() -> list[Child]:
    """Every worker in the order of its start, the keeper too."""
    return []


@pytest.fixture
def running(
    library: Path, spawned: list[Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Evaluator]:
    """An evaluator for a GPU with stand-ins, of which two start at once."""

    def spawn(module: str, *rest: Any) -> Child:
        spawned.append(child.spawn("standin_gpu_worker", *rest))
        return spawned[-1]

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FIBC_TEST_LIBRARY", str(library))
    (tmp_path / "workers").mkdir()
    monkeypatch.setenv("FIBC_TEST_WORKERS", str(tmp_path / "workers"))
    monkeypatch.setattr(gpu_processes, "spawn", spawn)
    monkeypatch.setattr(gpu_processes, "host_room", lambda: ROOMY)
    monkeypatch.setattr(session_pool, "AT_ONCE", TWO)
    native = NativeSource("x + x", NATIVE_SOURCE, "option", "digest")
    with Evaluator(
        definition(REFERENCE),
        native,
        GPU,
        HERE / "standin_harness.py",
        timeout_s=30,
        seed=1,
        workloads=(),
        num_threads=1,
        mode="",
        cache_share_bytes=None,
    ) as made:
        yield made
    assert supervisor.descendants() == []


def hold_sessions(running: Evaluator, library: Path, seeds: range, pairs: int = 1) -> list[Child]:
    """Hold sessions of one arm; return the process of each."""
    bench = running.bench([Arm(str(KEY), 1, "good")], {"good": artifact(library, "good")}, [KEY], fresh_process=True)
    used = []
    for seed in seeds:
        with bench.session(seed) as session:
            for _ in range(pairs):
                assert all(seconds > 0 for seconds in session.pair(0, True))
            used.append(session._child)  # type: ignore[attr-defined]
    return used


def test_every_session_of_every_stage_is_a_process_that_served_no_other(
    running: Evaluator, library: Path, spawned: list[Child]
) -> None:
    keeper = running._processes.keeper()
    first = hold_sessions(running, library, range(3))
    assert first == spawned[1:4], "in the order of their start"
    assert [one.open for one in spawned] == [True, False, False, True, True], "the first two ended before the next two"
    second = hold_sessions(running, library, range(3, 5))
    assert second == spawned[4:6], "one was left, and is as fresh for another stage"
    assert len({*first, *second}) == 5
    assert keeper not in {*first, *second}
    seen = running.observed
    assert seen is not None
    assert seen.sessions.startswith("6 processes for sessions, 2 at once (bound: the sessions of a look), started in ")
    with running.trial(candidate("good"), artifact(library, "good"), KEY) as trial:
        assert trial.status is Status.PASSED, trial.log
        assert trial.session.pair(0, True)[0] > 0
    assert [one.open for one in spawned] == [True, False, False, False, False, False, True], (
        "where the keeper works again those that have served are gone; one waits"
    )
    assert running.started_s > 0
    assert running.starting_s(1) == 0.0 < running.starting_s(2)


def test_processes_of_the_run_are_no_strangers_and_what_all_saw_is_summed(
    running: Evaluator, library: Path, spawned: list[Child]
) -> None:
    with running.trial(candidate("good"), artifact(library, "good"), KEY) as trial:
        for _ in range(20):
            trial.session.pair(0, True)
    hold_sessions(running, library, range(3), pairs=20)
    seen = running.observed
    assert seen is not None
    assert seen.timed - seen.num_discarded == 80
    assert set(seen.discarded) == {"hardware thermal slowdown"}, "nobody was taken for another run's"
    assert spawned[0].open


def test_a_process_that_an_arm_kills_is_replaced_by_the_next_and_other_samples_stay(
    running: Evaluator, library: Path, spawned: list[Child]
) -> None:
    symbols = ("good_on_device", "loses_context_later")
    arms = [Arm(str(KEY), 1, symbol) for symbol in symbols]
    bench = running.bench(arms, {symbol: artifact(library, symbol) for symbol in symbols}, [KEY], fresh_process=True)
    with bench.session(5) as session:
        assert session.pair(0, True)[0] > 0
        with pytest.raises(ArmFailed) as failed:
            for _ in range(400):
                session.pair(1, False)
        assert failed.value.status is Status.RUNTIME_ERROR
        assert session.pair(0, True)[0] > 0
        assert session._child is spawned[2]  # type: ignore[attr-defined]
    assert [one.open for one in spawned[:2]] == [False, False], "pardoned once, then blamed"
    assert set(bench.failed) == {1}  # type: ignore[attr-defined]


def test_one_that_died_while_it_waited_costs_nothing(running: Evaluator, library: Path, spawned: list[Child]) -> None:
    hold_sessions(running, library, range(1))
    spawned[1]._process.end(kill=True)
    assert hold_sessions(running, library, range(1, 2)) == [spawned[2]]
    assert not spawned[1].open


def test_a_worker_that_does_not_start_is_said_and_none_is_left(
    running: Evaluator, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_processes, "spawn", lambda module, *rest: child.spawn("no_such_worker", *rest))
    with pytest.raises(EvaluationError, match=r"(?s)a worker must start, and did not:.*no_such_worker"):
        hold_sessions(running, library, range(1))
    assert supervisor.descendants() == []


def test_a_small_gpu_has_fewer_at_once_and_says_so(
    running: Evaluator, library: Path, spawned: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIBC_TEST_FREE_BYTES", str(5 * GIB))
    running._processes.keeper()
    hold_sessions(running, library, range(2))
    assert len(spawned) == 3
    seen = running.observed
    assert seen is not None
    assert "1 at once (bound: the GPU's memory)" in seen.sessions


def test_a_winner_runs_alone_in_the_keeper(running: Evaluator, library: Path, spawned: list[Child]) -> None:
    processes = running._processes
    assert isinstance(processes, GpuProcesses)
    child = processes.session(3, fresh=False)
    assert [child] == spawned
    processes.end(child)


def test_children_are_ended_at_once(running: Evaluator, spawned: list[Child]) -> None:
    processes = running._processes
    assert isinstance(processes, GpuProcesses)
    processes.session(3, fresh=True)
    close_all(spawned)
    assert not any(one.open for one in spawned)
    assert supervisor.descendants() == []

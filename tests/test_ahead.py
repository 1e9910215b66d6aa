"""Builds ahead of a search: in order, within bounds, each once, and never beside a measurement on a CPU."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from simulation import BLOCKS, Machine, SimulatedBackend, SimulatedEvaluator, write_definition

import fibc
import fibc.explore
from fibc import isolation, supervisor
from fibc.ahead import Ahead, Plan, compilers_ahead, overlaps
from fibc.backends.base import Backend, BuildFailure
from fibc.errors import ToolchainError
from fibc.paths import OutLayout
from fibc.records import RecordLog
from fibc.schema.candidate import Artifact, Candidate, Guards, Target
from fibc.schema.definition import Definition
from fibc.schema.result import BuildCounts

GPU = Target("cuda", "sm_90a")
PATIENCE_S = 60.0


def candidate(number: int) -> Candidate:
    return Candidate("fake", "toy/kernel", (("block", number),), str(number), GPU)


def number_of(one: Candidate) -> int:
    value = dict(one.config)["block"]
    assert isinstance(value, int)
    return value


class FakeBackend:
    """Builds as ``make`` says, and notes who built what, when, and how many compilers ran at once.

    A build takes ``build_s``; one ahead of the search ends when ``let_go`` is set.
    """

    name = "fake"
    target = GPU

    def __init__(self, make: Callable[[int], Artifact | BuildFailure] | None = None, *, build_s: float = 0.0) -> None:
        self._make = make or (lambda number: Artifact(str(number), "", "", "", 1, "", Guards((), ())))
        self._build_s = build_s
        self.let_go = threading.Event()
        self.let_go.set()
        self._lock = threading.Lock()
        self.order: list[int] = []
        self.by_search: list[int] = []
        self.jobs: list[tuple[str, int, int]] = []
        self.running = 0
        self.most_running = 0

    def build(
        self, definition: object, candidates: Sequence[Candidate], *, timeout_s: float, jobs: int
    ) -> dict[str, Artifact | BuildFailure]:
        thread = threading.current_thread().name
        with self._lock:
            self.order += map(number_of, candidates)
            self.jobs.append((thread, jobs, len(candidates)))
            if thread != "fibc-ahead":
                self.by_search += map(number_of, candidates)
            mine = min(jobs, len(candidates))
            self.running += mine
            self.most_running = max(self.most_running, self.running)
        try:
            time.sleep(self._build_s)
            if thread == "fibc-ahead":
                assert self.let_go.wait(PATIENCE_S)
            return {one.digest: self._make(number_of(one)) for one in candidates}
        finally:
            with self._lock:
                self.running -= mine

    @property
    def counts(self) -> Counter[int]:
        return Counter(self.order)


def ahead_of(backend: Any, keys: Iterable[Iterable[int]], *, jobs: int = 8, **options: Any) -> Ahead:
    """Return builds whose plans ask ``backend`` for the numbers of each key."""

    def plan_of(numbers: Iterable[int]) -> Plan:
        return lambda: [(backend, candidate(number)) for number in numbers]

    options = {"compilers": jobs // 2, "timeout_s": lambda _: 60.0, "may_begin": lambda: True, **options}
    definition: Any = None
    return Ahead(definition, [plan_of(numbers) for numbers in keys], jobs=jobs, **options)


def build(ahead: Ahead, backend: Any, *numbers: int) -> dict[str, Artifact | BuildFailure]:
    return ahead.build(backend, [candidate(number) for number in numbers])


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# Where ----------------------------------------------------------------------------------------------------------------


def test_nothing_is_compiled_beside_a_measurement_of_the_hosts_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    assert {mode: overlaps(GPU, mode) for mode in ("graph", "device", "eager")} == {
        "graph": True,
        "device": True,
        "eager": False,
    }
    for mode in ("graph", "device", "eager"):
        assert not overlaps(Target("cpu", "avx2"), mode)
        assert compilers_ahead(Target("cpu", "avx2"), mode, jobs=16) == 0
    assert compilers_ahead(GPU, "eager", jobs=16) == 0


def test_half_of_the_jobs_work_ahead_and_cores_are_left_for_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, jobs, compilers in ((16, 16, 8), (16, 4, 2), (16, 64, 14), (4, 4, 2), (3, 3, 1), (2, 2, 0), (16, 1, 0)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: range(cores))
        assert compilers_ahead(GPU, "graph", jobs) == compilers, (cores, jobs)


# What -----------------------------------------------------------------------------------------------------------------


def test_keys_are_built_in_the_order_of_tuning_and_each_candidate_once() -> None:
    backend = FakeBackend()
    with ahead_of(backend, [(3, 1, 2, 7, 8), (2, 5, 3), (6,)]):
        wait_for(lambda: len(backend.order) == 7)
    assert backend.order == [3, 1, 2, 7, 8, 5, 6]


def test_what_was_built_ahead_is_answered_and_the_rest_is_built_when_asked() -> None:
    backend = FakeBackend()
    with ahead_of(backend, [(1, 2)]) as ahead:
        wait_for(lambda: len(backend.order) == 2)
        wait_for(lambda: not ahead._making)
        built = build(ahead, backend, 1, 9)
        assert set(built) == {candidate(1).digest, candidate(9).digest}
    assert backend.by_search == [9]
    counts = ahead.counts
    assert (counts.ready, counts.awaited, counts.built, counts.unused) == (1, 0, 1, 1)


def test_a_candidate_whose_build_is_under_way_is_waited_for_and_not_built_twice() -> None:
    backend = FakeBackend()
    backend.let_go.clear()
    with ahead_of(backend, [(1, 2, 3, 4)]) as ahead:
        wait_for(lambda: backend.order)
        with ThreadPoolExecutor(1) as search:
            answer = search.submit(build, ahead, backend, 1, 4)
            wait_for(lambda: len(ahead._asked) == 2)
            time.sleep(0.2)  # what is waited for is counted
            assert not answer.done()
            backend.let_go.set()
            built = answer.result(PATIENCE_S)
    assert isinstance(built[candidate(1).digest], Artifact)
    assert backend.by_search == []
    assert ahead.counts.awaited == 2
    assert ahead.counts.waited_s >= 0.2


def test_what_is_only_planned_is_built_by_the_search_and_not_again_by_the_thread() -> None:
    backend = FakeBackend(build_s=0.02)
    with ahead_of(backend, [range(20), range(30)], jobs=4) as ahead:
        for start in range(19, 30):
            build(ahead, backend, start)
        for start in range(0, 19):
            build(ahead, backend, start)
    assert set(backend.counts.values()) == {1}
    assert set(backend.counts) == set(range(30))


def test_no_more_compilers_run_at_once_than_jobs_allow() -> None:
    backend = FakeBackend(build_s=0.02)
    with ahead_of(backend, [range(100)], jobs=6) as ahead:
        for start in range(0, 100, 9):
            build(ahead, backend, *range(start, min(100, start + 9)))
    assert backend.most_running <= 6
    assert all(jobs == 3 and num <= 3 for thread, jobs, num in backend.jobs if thread == "fibc-ahead")
    assert all(jobs >= 3 for thread, jobs, _ in backend.jobs if thread != "fibc-ahead")
    assert set(backend.counts.values()) == {1}


def test_what_a_key_did_not_ask_for_is_forgotten_when_the_next_one_is_reached() -> None:
    backend = FakeBackend()
    backend.let_go.clear()
    with ahead_of(backend, [range(100), (100, 5)], jobs=2) as ahead:
        wait_for(lambda: backend.order)
        ahead.reach(1)
        backend.let_go.set()
        wait_for(lambda: 100 in backend.order and 5 in backend.order)
    assert backend.order == [0, 100, 5]


def test_a_failure_found_ahead_is_the_answer_but_not_one_that_a_deadline_ended() -> None:
    late = iter([True, False])
    backend = FakeBackend(
        lambda number: BuildFailure(timed_out=number == 2 and next(late), log=f"error {number}"),
    )
    with ahead_of(backend, [(1, 2)]) as ahead:
        wait_for(lambda: len(backend.order) == 2)
        built = build(ahead, backend, 1, 2)
    assert built[candidate(1).digest] == BuildFailure(timed_out=False, log="error 1")
    assert built[candidate(2).digest] == BuildFailure(timed_out=False, log="error 2")
    assert backend.by_search == [2]


def test_what_a_build_ahead_raises_is_raised_where_it_is_asked_for_and_not_before() -> None:
    def make(number: int) -> Artifact | BuildFailure:
        if number == 2:
            raise ToolchainError("nvcc: gone")
        return BuildFailure(timed_out=False, log="")

    backend = FakeBackend(make)
    with ahead_of(backend, [(1,), (2,)], jobs=2) as ahead:
        wait_for(lambda: len(backend.order) == 2)
        ahead.reach(1)
        build(ahead, backend, 1)
        with pytest.raises(ToolchainError, match="nvcc: gone"):
            build(ahead, backend, 2)


def test_what_a_plan_raises_is_raised_when_its_key_is_reached() -> None:
    def plan() -> list[tuple[Backend, Candidate]]:
        raise ToolchainError("triton: gone")

    backend: Any = FakeBackend()
    definition: Any = None
    plans: list[Plan] = [lambda: [(backend, candidate(1))], plan]
    with Ahead(definition, plans, jobs=4, compilers=2, timeout_s=lambda _: 60.0, may_begin=lambda: True) as ahead:
        wait_for(lambda: not ahead._thread.is_alive())
        ahead.reach(0)
        with pytest.raises(ToolchainError, match="triton: gone"):
            ahead.reach(1)


def test_builds_of_two_backends_are_not_mixed() -> None:
    one, other = FakeBackend(), FakeBackend()
    definition: Any = None
    mixed: list[tuple[Any, Candidate]] = [((one, other)[number % 2], candidate(number)) for number in range(8)]
    with Ahead(definition, [lambda: mixed], jobs=8, compilers=4, timeout_s=lambda _: 60.0, may_begin=lambda: True):
        wait_for(lambda: len(one.order) + len(other.order) == 8)
    assert (one.order, other.order) == ([0, 2, 4, 6], [1, 3, 5, 7])


# The end --------------------------------------------------------------------------------------------------------------


class HangingBackend:
    """Its compilers never end."""

    name = "hanging"
    target = GPU

    def __init__(self, pids: Path) -> None:
        self._pids = pids

    def build(
        self, definition: Definition, candidates: Sequence[Candidate], *, timeout_s: float, jobs: int
    ) -> dict[str, Artifact | BuildFailure]:
        code = "import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()} '); time.sleep(600)"
        isolation.run([sys.executable, "-S", "-c", code, str(self._pids)], timeout_s=600)
        raise AssertionError("it has ended")


def test_compilers_ahead_end_with_the_search_and_leave_no_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    backend = HangingBackend(pids)
    with pytest.raises(KeyboardInterrupt), ahead_of(backend, [(1,)]) as ahead:
        wait_for(lambda: pids.is_file() and " " in pids.read_text())
        raise KeyboardInterrupt
    assert not ahead._thread.is_alive()
    assert int(pids.read_text()) not in supervisor.descendants()


def test_after_the_end_builds_go_on_without_a_thread() -> None:
    backend = FakeBackend()
    with ahead_of(backend, [(1,)]) as ahead:
        wait_for(lambda: backend.order)
    assert set(build(ahead, backend, 1, 2)) == {candidate(1).digest, candidate(2).digest}
    assert backend.by_search == [2]


def test_nothing_begins_when_the_time_of_the_search_is_over() -> None:
    backend = FakeBackend()
    with ahead_of(backend, [(1, 2)], may_begin=lambda: False) as ahead:
        wait_for(lambda: not ahead._thread.is_alive())
        build(ahead, backend, 1)
    assert backend.order == [1]


# In a search ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    # Speedups lie further apart than noise, so that what is tried follows from them and not from the gate's draws.
    made = Machine(tmp_path, lambda block, rows: 1.3 if block == 3 else 0.8 + block / 50, unbuildable=frozenset({5}))
    made.install(monkeypatch)
    return made


def tune(tmp_path: Path, out: str, **options: Any) -> tuple[list[tuple[str, str]], BuildCounts]:
    """Return the trials of a run in their order, and its builds."""
    path = write_definition(tmp_path / "defs", (1, 2, 4))
    result = fibc.tune(path, out=tmp_path / out, target="cpu", split=(1.0, 0.0, 0.0), jobs=2, **options)
    log = RecordLog(OutLayout(tmp_path / out).records("toy"), definition="", environment="")
    tried = [(r.value["key"], r.value["candidate"]) for r in log.read() if r.kind == "evaluation"]
    return tried, result.builds


def test_a_search_that_builds_ahead_tries_the_same_candidates_in_the_same_order(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, alone = tune(tmp_path, "plain")
    assert (alone.ready, alone.awaited) == (0, 0)
    assert alone.built >= len(BLOCKS)
    machine.asked.clear()
    monkeypatch.setattr(fibc.explore, "compilers_ahead", lambda *_: 1)
    overlapped, beside = tune(tmp_path, "overlapped")
    assert overlapped == plain
    assert beside.ready + beside.awaited + beside.built == alone.built
    assert beside.ready + beside.awaited > 0
    assert machine.asked["built"] == len(BLOCKS) - 1


def test_a_search_on_a_cpu_starts_no_thread(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def watched(thread: threading.Thread) -> None:
        assert thread.name != "fibc-ahead", "nothing may run beside a measurement"
        start(thread)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr(SimulatedEvaluator, "facts", {**SimulatedEvaluator.facts, "mode": "graph"})
    assert SimulatedBackend.target.kind == "cpu"
    monkeypatch.setattr(threading.Thread, "start", watched)
    tried, builds = tune(tmp_path, "out")
    assert tried
    assert (builds.ready, builds.awaited) == (0, 0)


def test_a_search_held_to_a_store_takes_what_was_unpacked_ahead(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_definition(tmp_path / "defs", (1, 2, 4))
    fibc.compile_only(path, out=tmp_path / "out", split=(1.0, 0.0, 0.0), target="cpu")
    machine.asked.clear()
    monkeypatch.setattr(fibc.explore, "compilers_ahead", lambda *_: 1)
    tried, builds = tune(tmp_path, "out", compiled_only=True)
    assert len(tried) == 3 * (len(BLOCKS) - 1)
    assert builds.ready + builds.awaited > 0
    assert machine.asked["built"] == 0

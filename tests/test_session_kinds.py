"""Where processes differ, sessions that share one are too sure, and a process each is as sure as it says."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import session_kinds
from session_kinds import BETWEEN, GPU, KINDS, WITHIN, coverage, replaces
from worlds import SimulatedBench, World

from fibc.schema.evaluation import Arm
from fibc.schema.policy import Policy

ONE, IN_TURN, EACH = KINDS.values()
NUM_RUNS = 300
CALM = World("calm", jitter=0.0, drift=0.0, outliers=0.0)


def test_a_process_has_an_offset_that_its_sessions_share() -> None:
    world = replace(CALM, process=0.006 / math.sqrt(2))
    bench = SimulatedBench(world, [Arm("k", 0, "a")], [1.0], seed=0, process_of=lambda session: session // 2)
    seen = []
    for index in range(800):
        with bench.session(index) as session:
            native, candidate = session.pair(0, True)
            seen.append(math.log(native / candidate))
    assert seen[::2] == pytest.approx(seen[1::2])
    assert statistics.stdev(seen[::2]) == pytest.approx(0.006, rel=0.1)


def test_the_simulated_gpu_differs_by_six_permille_between_processes() -> None:
    assert (BETWEEN, WITHIN) == (0.006, 0.002)
    assert math.hypot(GPU.process, GPU.process) == pytest.approx(0.006)


def test_intervals_of_processes_cover_and_those_of_one_process_do_not() -> None:
    assert coverage(GPU, EACH, 8, NUM_RUNS) >= 0.90
    assert coverage(GPU, ONE, 8, NUM_RUNS) <= 0.40


def test_more_sessions_of_the_same_eight_processes_are_too_sure() -> None:
    assert coverage(GPU, EACH, 32, NUM_RUNS) >= 0.90
    assert coverage(GPU, IN_TURN, 32, NUM_RUNS) <= 0.80


def test_a_tie_wins_in_one_process_by_that_processs_luck() -> None:
    policy = Policy(min_speedup=1.0)
    rates = [
        sum(replaces(GPU, process_of, 1.0, policy, seed) for seed in range(NUM_RUNS)) / NUM_RUNS
        for process_of in (EACH, ONE)
    ]
    assert rates[0] <= policy.alpha
    assert rates[1] >= 4 * policy.alpha


def test_the_published_table_is_of_this_world() -> None:
    assert session_kinds.SPEEDUP == 1.07
    assert session_kinds.POLICY.fixed_sessions == 8

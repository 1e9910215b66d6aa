"""Simulated machines have the noise that they are said to have, and the truth that they are given."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import worlds
from worlds import MACHINES, WORLDS, SimulatedBench, World

from fibc.schema.evaluation import Arm

CALM = World("calm", jitter=0.0, drift=0.0, outliers=0.0)
QUIET, TYPICAL, HOSTILE, SHARED = MACHINES


def noise(world: World, chunks: int = 200) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.array([worlds._log_noise(world, rng, worlds.CHUNK_SAMPLES) for _ in range(chunks)])


def ratios(bench: SimulatedBench, arm: int, sessions: int, pairs: int) -> list[list[float]]:
    seen = []
    for index in range(sessions):
        with bench.session(index) as session:
            timed = [session.pair(arm, bool(turn % 2)) for turn in range(pairs)]
            seen.append([math.log(native / candidate) for native, candidate in timed])
    return seen


def test_there_are_four_machines_and_three_layout_offsets() -> None:
    assert [(world.jitter, world.drift) for world in MACHINES] == [
        (0.003, 0.01),
        (0.01, 0.03),
        (0.03, 0.05),
        (0.04, 0.05),
    ]
    assert {world.layout for world in WORLDS} == {0.0, 0.005, 0.01}
    assert len(set(WORLDS)) == 12


def test_a_calm_world_shows_the_true_speedups() -> None:
    bench = SimulatedBench(CALM, [Arm("k", 0, "a"), Arm("k", 0, "b")], [1.25, 0.8], seed=0, native_s=1e-3)
    with bench.session(0) as session:
        assert session.pair(0, True) == pytest.approx((1e-3, 8e-4))
        assert session.pair(1, False) == pytest.approx((1e-3, 1.25e-3))
    assert bench.num_pairs == 2


@pytest.mark.parametrize("world", MACHINES, ids=lambda world: world.name)
def test_no_machine_prefers_a_side(world: World) -> None:
    bench = SimulatedBench(world, [Arm("k", 0, "a")], [1.1], seed=1)
    seen = [ratio for session in ratios(bench, 0, sessions=40, pairs=200) for ratio in session]
    assert statistics.median(seen) == pytest.approx(math.log(1.1), abs=4 * world.jitter * 1.8 / math.sqrt(len(seen)))


def test_jitter_and_drift_have_their_sizes() -> None:
    drift = noise(replace(CALM, drift=0.03))
    assert drift.std() == pytest.approx(0.015, rel=0.1)
    lagged = np.mean(drift[:, : -worlds.DRIFT_SAMPLES] * drift[:, worlds.DRIFT_SAMPLES :]) / drift.var()
    assert lagged == pytest.approx(math.exp(-1), abs=0.12)
    assert noise(replace(CALM, jitter=0.04)).std() == pytest.approx(0.04, rel=0.02)


def test_outliers_have_their_share_and_size() -> None:
    seen = noise(replace(CALM, outliers=0.03))
    slow = seen[seen > 0]
    assert slow.size / seen.size == pytest.approx(0.03, rel=0.05)
    assert np.expm1(slow).min() >= 0.1
    assert np.expm1(slow).max() <= 2.0
    assert np.expm1(slow).mean() == pytest.approx(1.05, rel=0.05)


def test_bursts_have_their_share_dwell_and_height() -> None:
    seen = noise(replace(CALM, bursts=True))
    burst = seen > 0
    starts = np.sum(burst[:, 1:] & ~burst[:, :-1])
    assert burst.mean() == pytest.approx(0.06, rel=0.1)
    assert burst.sum() / starts == pytest.approx(15, rel=0.1)
    assert seen.max() == pytest.approx(math.log(1.5))


def test_the_clock_of_a_hostile_machine_has_two_states_six_percent_apart() -> None:
    seen = noise(replace(CALM, two_states=True))
    assert set(np.unique(seen)) == {0.0, 0.06}
    jumps = np.sum(seen[:, 1:] != seen[:, :-1])
    assert seen.size / jumps == pytest.approx(400, rel=0.1)


def test_a_session_warms_up() -> None:
    bench = SimulatedBench(replace(CALM, drift=1e-9), [Arm("k", 0, "a")], [1.0], seed=0)
    bench._ramp = [2.0, 1.5]
    with bench.session(0) as session:
        assert session.pair(0, True) == pytest.approx((1e-4, 7.5e-5))
        assert session.pair(0, True) == pytest.approx((5e-5, 5e-5))


def test_layout_offsets_hold_for_a_session_and_change_with_it() -> None:
    bench = SimulatedBench(replace(CALM, layout=0.01), [Arm("k", 0, "a")], [1.0], seed=0)
    seen = ratios(bench, 0, sessions=400, pairs=2)
    assert all(first == pytest.approx(second) for first, second in seen)
    assert statistics.stdev(first for first, _ in seen) == pytest.approx(0.01 * math.sqrt(2), rel=0.1)


def test_native_has_one_offset_for_all_candidates_of_a_session() -> None:
    bench = SimulatedBench(replace(CALM, layout=0.01), [Arm("k", 0, "a"), Arm("k", 0, "b")], [1.0, 1.0], seed=0)
    with bench.session(3) as session:
        assert session.pair(0, True)[0] == pytest.approx(session.pair(1, True)[0])


def test_equal_seeds_give_equal_machines_and_others_do_not() -> None:
    def run(seed: int) -> list[list[float]]:
        return ratios(SimulatedBench(WORLDS[-1], [Arm("k", 0, "a")], [1.0], seed), 0, sessions=2, pairs=5)

    assert run(1) == run(1)
    assert run(1) != run(2)

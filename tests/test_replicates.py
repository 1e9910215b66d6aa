"""Devices as replicates: one decision over all of them, and those that stand apart are named."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from simulation import QUIET, Machine, SimulatedEvaluator, write_definition
from worlds import SimulatedBench

from fibc import measure, stats
from fibc.replicates import pool
from fibc.schema.evaluation import Arm
from fibc.schema.evidence import Assessment
from fibc.schema.policy import Policy
from fibc.shop import Shop

POLICY = Policy(min_speedup=1.01)
ARMS = (Arm("1", 0, "a"), Arm("2", 0, "b"))


def on_device(number: int, speedups: Sequence[float]) -> tuple[str, Assessment]:
    bench = SimulatedBench(QUIET, ARMS, list(speedups), number)
    return f"gpu {number}", measure.reconfirm(bench, ARMS, POLICY, seed=number)


def test_one_device_is_taken_as_it_is() -> None:
    name, seen = on_device(0, (1.2, 0.9))
    assert pool([(name, seen)], POLICY).assessment is seen


def test_a_bound_over_devices_is_over_their_means_and_not_over_their_sessions() -> None:
    truth = [1.20, 1.10, 1.15, 1.25, 1.05, 1.30]
    devices = [on_device(number, (speedup, 1.0)) for number, speedup in enumerate(truth)]
    pooled = pool(devices, POLICY)
    estimate = pooled.assessment.estimates[0]
    assert estimate is not None
    means = [item.estimates[0].mean for _, item in devices if item.estimates[0] is not None]
    assert estimate.effects == tuple(means)
    assert estimate.lower == stats.lower_bound(means, estimate.alpha)
    assert math.exp(estimate.mean) == pytest.approx(math.exp(sum(map(math.log, truth)) / 6), rel=0.01)
    assert estimate.num_pairs == 6 * 64
    within = max(math.exp(item.estimates[0].sd) for _, item in devices if item.estimates[0] is not None)
    assert math.exp(estimate.sd) > within, "devices differ by more than sessions"


def test_a_few_devices_are_as_many_sessions() -> None:
    pooled = pool([on_device(0, (1.2, 1.0)), on_device(1, (1.2, 1.0))], POLICY)
    estimate = pooled.assessment.estimates[0]
    assert estimate is not None
    assert len(estimate.effects) == 16
    assert estimate.lower > math.log(1.18)


def test_a_device_that_stands_apart_is_named_and_counts() -> None:
    truth = [1.20] * 7 + [0.90]
    rng = random.Random(1)
    devices = [on_device(number, (speedup * rng.uniform(0.999, 1.001), 1.1)) for number, speedup in enumerate(truth)]
    pooled = pool(devices, POLICY)
    assert len(pooled.outliers) == 1
    assert pooled.outliers[0].startswith("gpu 7: 0.9")
    assert "in 1, point 0" in pooled.outliers[0]
    estimate = pooled.assessment.estimates[0]
    assert estimate is not None
    assert estimate.mean == pytest.approx((7 * math.log(1.2) + math.log(0.9)) / 8, abs=0.01)


def test_an_arm_that_a_device_had_no_time_for_has_no_estimate() -> None:
    name, whole = on_device(0, (1.2, 1.0))
    bench = SimulatedBench(QUIET, ARMS, [1.2, 1.0], 1)
    cut = measure.reconfirm(bench, ARMS, POLICY, seed=1, time_left=lambda: False)
    assert pool([(name, whole), ("gpu 1", cut)], POLICY).assessment.estimates == (None, None)


@pytest.fixture
def machine(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[int, int], float]], Machine]:
    def make(speedup: Callable[[int, int], float]) -> Machine:
        made = Machine(tmp_path, speedup)
        made.install(monkeypatch)
        return made

    return make


def test_a_winner_that_does_not_hold_over_all_devices_is_demoted_and_the_odd_device_named(
    machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven devices agree with the first on cell 2; on cell 1 all of them but the first are slower than native."""
    import fibc.retuning
    from fibc.recheck import Recheck, recheck

    machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    path = write_definition(tmp_path / "defs", (1, 2))
    fibc.tune(path, out=tmp_path / "out", target="cpu", split=(1.0, 0.0, 0.0))

    def over_all(shop: Shop, rows: object, salt: str, _: object) -> Recheck:
        others = []
        for number in range(1, 8):
            elsewhere = Machine(tmp_path, lambda block, rows: 0.85 if rows == 1 else 1.3)
            others.append((f"gpu {number}", SimulatedEvaluator(elsewhere, shop.task.definition)))
        return recheck(shop, rows, salt, others)  # type: ignore[arg-type]

    monkeypatch.setattr(fibc.retuning, "recheck", over_all)
    (result,) = fibc.retune(tmp_path / "out", salt="tonight", max_age_s=0.0, check=True)
    assert [flip.cell for flip in result.flips] == ["1"]
    assert result.num_held == 1
    odd = [note for note in result.notes if note.startswith("the first device: ")]
    assert odd, result.notes
    for note in odd:
        own, pooled = (float(number) for number in re.findall(r"(\d\.\d+)x", note))
        assert own == pytest.approx(1.3, rel=0.01), note
        assert pooled == pytest.approx(0.85, rel=0.01), note

"""fast_p, traffic and the estimate end to end against their definitions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fibc.errors import InputError
from fibc.reporting.data import Traffic
from fibc.reporting.fast_p import area, curve, fast_p
from fibc.reporting.worth import Served, end_to_end, read_dispatch_ns, traffic

SPEEDUPS = st.lists(st.floats(0, 4), min_size=1, max_size=20)


def test_fast_p_counts_what_is_strictly_faster() -> None:
    found = curve("set", "tune", "", [1.0, 1.0, 2.0, 0.0, 0.96])
    assert found.points == {"0": 0.8, "0.95": 0.8, "1": 0.2}


@given(SPEEDUPS)
def test_the_area_is_that_of_the_curve(speedups: list[float]) -> None:
    steps = 20_000
    heights = [fast_p(speedups, 2.0 * (step + 0.5) / steps) for step in range(0, steps, 100)]
    assert area(speedups) == pytest.approx(sum(heights) / len(heights), abs=0.03)
    assert 0 <= area(speedups) <= 1


def test_the_area_of_known_tasks() -> None:
    assert area([1.0]) == 0.5
    assert area([2.0, 9.0]) == 1.0
    assert area([0.0, 2.0]) == 0.5
    assert area([]) == 0.0


def test_traffic_is_time_over_time_and_not_the_mean_of_ratios() -> None:
    """A frequent long call that gains nothing, and a rare short one that is twice as fast."""
    found = traffic("tune", [Served(9, 100.0, 100.0, 1.0), Served(1, 10.0, 5.0, 2.0)], 20.0)
    assert found is not None
    assert found.weighted == pytest.approx(910 / 905)
    assert found.mean_of_ratios == pytest.approx(1.5)
    assert found.covered == pytest.approx(0.5)
    assert found.native_us == pytest.approx(91.0)


def test_equal_weights_are_no_traffic() -> None:
    found = traffic("tune", [Served(1, 100.0, 50.0, 2.0), Served(1, 10.0, 10.0, 1.0)], None)
    assert found is not None
    assert (found.weighted, found.reason, found.mean_of_ratios) == (None, "all weights are equal", 1.5)
    unknown = traffic("tune", [Served(0, 100.0, 50.0, 2.0)], None)
    assert unknown is not None
    assert unknown.reason == "no weights are recorded"
    assert traffic("tune", [], None) is None


def gained(speedup: float, native_us: float) -> Traffic:
    return Traffic("tune", speedup, 1.0, 1, None, native_us, "")


def test_the_gate_holds_where_the_gain_is_more_than_dispatch_costs() -> None:
    good = end_to_end(0.4, gained(2.0, 10.0), 100.0)
    assert good.gain == pytest.approx(0.2)
    assert good.delta == pytest.approx(0.004)
    assert good.worth_it
    assert good.estimate == pytest.approx(1 / (1 - 0.2 + 0.004))
    bad = end_to_end(0.4, gained(1.005, 10.0), 100.0)
    assert bad.worth_it is False
    assert bad.estimate < 1
    with pytest.raises(InputError, match="--fraction"):
        end_to_end(1.5, gained(2.0, 10.0), None)


def test_the_dispatch_cost_is_the_worst_hit_from_raw_samples(tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    results = [
        {"name": "hit, plain", "samples_ns": [[300, 10], [310, 12], [900, 11]]},
        {"name": "hit, a Parameter", "samples_ns": [[320, 10]]},
        {"name": "native", "samples_ns": [[999, 0]]},
    ]
    file.write_text(json.dumps({"results": results}))
    assert read_dispatch_ns(file) == 310
    file.write_text("{}")
    with pytest.raises(InputError, match="--dispatch"):
        read_dispatch_ns(file)

"""Statistics agree with scipy and with what they promise."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, ttest_1samp, wilcoxon

from fibc import stats
from fibc.schema.evaluation import Pair

EFFECTS = st.lists(st.floats(-2, 2).map(lambda x: round(x, 6)), min_size=2, max_size=32)


@given(st.lists(st.integers(-10_000, 10_000), min_size=1, max_size=12))
def test_hodges_lehmann_is_the_median_of_the_walsh_averages(numbers: list[int]) -> None:
    averages = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(numbers, 2))
    middle = len(averages) // 2
    expected = averages[middle] if len(averages) % 2 else (averages[middle - 1] + averages[middle]) / 2
    assert stats.hodges_lehmann([float(n) for n in numbers]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("size", [5, 8, 13])
def test_hodges_lehmann_is_the_shift_at_which_the_signed_rank_test_is_balanced(size: int) -> None:
    rng = random.Random(size)
    for _ in range(20):
        differences = [rng.gauss(0.02, 0.05) for _ in range(size)]
        estimate = stats.hodges_lehmann(differences)
        balance = size * (size + 1) / 4

        def rank_sum(shift: float, d: list[float] = differences) -> float:
            return float(wilcoxon([x - shift for x in d], alternative="greater", method="exact").statistic)

        assert rank_sum(estimate - 1e-9) >= balance >= rank_sum(estimate + 1e-9)


def test_hodges_lehmann_shrugs_off_an_outlier() -> None:
    clean = [0.01, 0.011, 0.009, 0.010, 0.012, 0.008, 0.010]
    assert stats.hodges_lehmann([*clean, 5.0]) == pytest.approx(0.01, abs=0.002)


def test_hodges_lehmann_of_two_differences_is_their_mean() -> None:
    assert stats.hodges_lehmann([0.1, 0.3]) == pytest.approx(0.2)


def test_hodges_lehmann_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 difference"):
        stats.hodges_lehmann([])


def test_the_session_effect_is_positive_where_the_candidate_is_faster() -> None:
    pairs = [Pair(2.0, 1.0, True), Pair(2.2, 1.1, False), Pair(1.8, 0.9, True)]
    assert stats.session_effect(pairs) == pytest.approx(math.log(2))


@given(EFFECTS, st.sampled_from([0.05, 0.05 / 3, 0.05 / 12]))
def test_bounds_are_those_of_the_one_sample_t_test(effects: list[float], alpha: float) -> None:
    if stats.standard_deviation(effects) < 1e-6:
        return  # scipy warns that it cannot tell rounding from spread
    greater = ttest_1samp(effects, 0.0, alternative="greater").confidence_interval(1 - alpha)
    less = ttest_1samp(effects, 0.0, alternative="less").confidence_interval(1 - alpha)
    both = ttest_1samp(effects, 0.0).confidence_interval(1 - alpha)
    assert stats.lower_bound(effects, alpha) == pytest.approx(greater.low, abs=1e-9, rel=1e-9)
    assert stats.upper_bound(effects, alpha) == pytest.approx(less.high, abs=1e-9, rel=1e-9)
    assert stats.interval(effects, 1 - alpha) == pytest.approx((both.low, both.high), abs=1e-9, rel=1e-9)


def test_equal_effects_are_their_own_bounds() -> None:
    effects = [0.25] * 8
    assert stats.standard_deviation(effects) == 0
    assert stats.lower_bound(effects, 0.01) == stats.upper_bound(effects, 0.01) == 0.25


def test_one_effect_bounds_nothing() -> None:
    assert stats.standard_deviation([0.3]) == math.inf
    assert stats.lower_bound([0.3], 0.05) == -math.inf
    assert stats.upper_bound([0.3], 0.05) == math.inf


def test_the_lower_bound_errs_as_often_as_its_alpha_says() -> None:
    rng = random.Random(1)
    errors = sum(stats.lower_bound([rng.gauss(0, 0.02) for _ in range(8)], 0.05) > 0 for _ in range(4000))
    assert binomtest(errors, 4000, 0.05).pvalue > 0.01


def test_pairs_needed_reproduces_the_documented_examples() -> None:
    alpha = 0.05 / 12
    assert stats.pairs_needed(0.01, math.log(1.02), math.log(1.01), alpha) == pytest.approx(33, abs=1)
    assert stats.pairs_needed(0.04, math.log(1.02), math.log(1.01), alpha) == pytest.approx(530, abs=10)


def test_no_number_of_pairs_shows_an_effect_that_is_no_larger_than_the_margin() -> None:
    assert stats.pairs_needed(0.01, 0.01, 0.01, 0.05) == math.inf
    assert stats.pairs_needed(0.01, -0.5, 0.01, 0.05) == math.inf


@given(st.floats(0.001, 0.2), st.integers(2, 1000), st.floats(0, 0.1), st.floats(0.001, 0.2))
def test_the_detectable_effect_needs_exactly_the_pairs_that_were_spent(
    sigma: float, num_pairs: int, margin: float, alpha: float
) -> None:
    effect = stats.detectable_effect(sigma, num_pairs, margin, alpha)
    assert stats.pairs_needed(sigma, effect, margin, alpha) == pytest.approx(num_pairs, rel=1e-6)


def test_as_many_pairs_as_needed_show_the_effect_nine_times_in_ten() -> None:
    sigma, effect, margin, alpha = 0.02, math.log(1.03), math.log(1.01), 0.05
    sessions = round(stats.pairs_needed(sigma, effect, margin, alpha) / 2)
    rng = random.Random(2)

    def session() -> float:
        return stats.hodges_lehmann([effect + rng.gauss(0, sigma) - rng.gauss(0, sigma) for _ in range(2)])

    shown = sum(stats.lower_bound([session() for _ in range(sessions)], alpha) > margin for _ in range(600))
    assert 0.85 < shown / 600 < 0.95


def test_timing_sigma_recovers_the_noise_of_one_timing() -> None:
    rng = random.Random(3)
    effects = [stats.hodges_lehmann([rng.gauss(0, 0.03) - rng.gauss(0, 0.03) for _ in range(8)]) for _ in range(3000)]
    assert stats.timing_sigma(stats.standard_deviation(effects), 8) == pytest.approx(0.03, rel=0.05)

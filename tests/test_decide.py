"""Decisions follow from evidence, and say why in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fibc import decide, stats
from fibc.schema.decision import Conditions, Decision, Verdict
from fibc.schema.evaluation import Arm, Status
from fibc.schema.evidence import ArmFailure, Confirmation, Contender, Estimate, Fate
from fibc.schema.feature import Cell, FeatureKey, Point
from fibc.schema.policy import Policy

POLICY = Policy(min_speedup=1.02)
ALPHA = POLICY.bound_alpha(1)
CONDITIONS = Conditions(residency="A=hot B=cold", mode="eager", timer="steady_clock", num_threads=2)
POINTS = tuple(Point((("M", size),), "end") for size in (33, 64))
KEY = FeatureKey(Cell(((33, 64),)), POINTS, screen_point=1, synthetic=False)


def estimate(
    speedup: float, *, spread: float = 0.001, point: int = 0, candidate: str = "a", alpha: float = ALPHA
) -> Estimate:
    """Return eight sessions around ``speedup`` whose log effects alternate by ``spread``."""
    effects = [math.log(speedup) + (spread if index % 2 else -spread) for index in range(8)]
    return Estimate(
        arm=Arm(str(KEY), point, candidate),
        effects=tuple(effects),
        mean=stats.mean(effects),
        sd=stats.standard_deviation(effects),
        lower=stats.lower_bound(effects, alpha),
        upper=stats.upper_bound(effects, alpha),
        alpha=alpha,
        num_pairs=64,
        native_s=2e-3,
        candidate_s=2e-3 / speedup,
    )


def contender(speedups: Sequence[float], fate: Fate, candidate: str = "a", spread: float = 0.001) -> Contender:
    seen = tuple(estimate(s, point=p, candidate=candidate, spread=spread) for p, s in enumerate(speedups))
    return Contender(candidate, fate, seen, None)


def confirmation(
    verdict: Verdict, *contenders: Contender, winner: str = "", split: tuple[str, ...] = (), partial: bool = False
) -> Confirmation:
    return Confirmation(str(KEY), verdict, winner, contenders, split, 8, partial, ())


def decided(outcome: Decision | decide.Split) -> Decision:
    assert isinstance(outcome, Decision)
    return outcome


def replacement() -> Decision:
    return decided(
        decide.decide(
            KEY,
            confirmation(Verdict.REPLACE, contender([1.5, 1.3], Fate.ACCEPTED), winner="a"),
            POLICY,
            CONDITIONS,
        )
    )


def test_a_comparison_is_published_with_its_interval_and_conditions() -> None:
    seen = estimate(1.3, spread=0.01)
    comparison = decide.compare(seen, POINTS[0], "reconfirm", CONDITIONS)
    low, high = stats.interval(seen.effects, 0.95)
    assert comparison.speedup == pytest.approx(1.3)
    assert (comparison.ci_low, comparison.ci_high) == pytest.approx((math.exp(low), math.exp(high)))
    assert (comparison.n_sessions, comparison.n_pairs, comparison.confidence_level) == (8, 64, 0.95)
    assert (comparison.native_us, comparison.candidate_us) == pytest.approx((2000, 2000 / 1.3))
    assert (comparison.stage, comparison.estimator, comparison.design) == (
        "reconfirm",
        "hodges-lehmann",
        "paired-abba-processes",
    )
    assert (comparison.residency, comparison.mode, comparison.timer, comparison.num_threads) == (
        "A=hot B=cold",
        "eager",
        "steady_clock",
        2,
    )


def test_an_accepted_finalist_gets_the_cell_with_evidence_at_every_point() -> None:
    decision = replacement()
    assert (decision.verdict, decision.candidate, decision.revoked) == (Verdict.REPLACE, "a", False)
    assert [comparison.point for comparison in decision.confirm] == list(POINTS)
    assert "1.29" in decision.reason
    assert "M=64 is the weakest" in decision.reason


def test_the_decision_speaks_of_the_winner_and_not_of_the_largest_mean() -> None:
    louder = contender([1.9, 1.9], Fate.RUNNING, "b", spread=1.0)
    outcome = decide.decide(
        KEY,
        confirmation(Verdict.REPLACE, louder, contender([1.5, 1.3], Fate.ACCEPTED), winner="a"),
        POLICY,
        CONDITIONS,
    )
    assert decided(outcome).confirm[0].speedup == pytest.approx(1.5)


def test_native_is_kept_with_the_best_that_was_seen() -> None:
    outcome = decide.decide(
        KEY, confirmation(Verdict.KEEP_NATIVE, contender([0.9, 0.8], Fate.DROPPED)), POLICY, CONDITIONS
    )
    decision = decided(outcome)
    assert (decision.verdict, decision.candidate) == (Verdict.KEEP_NATIVE, "")
    assert decision.reason == "no finalist is 1.02x everywhere: the best is at most 0.801x at M=64"


def test_a_key_whose_finalists_failed_says_how() -> None:
    failure = ArmFailure(Arm(str(KEY), 0, "a"), Status.CRASH, "signal 11")
    outcome = decide.decide(
        KEY,
        confirmation(Verdict.KEEP_NATIVE, Contender("a", Fate.FAILED, (), failure)),
        POLICY,
        CONDITIONS,
    )
    assert decided(outcome).reason == "every finalist failed while it was timed: CRASH"


def test_inconclusive_says_what_it_would_take() -> None:
    seen = contender([1.5, 1.03], Fate.OUT_OF_REACH, spread=0.05)
    decision = decided(decide.decide(KEY, confirmation(Verdict.INCONCLUSIVE, seen), POLICY, CONDITIONS))
    worst = seen.estimates[1]
    sigma = stats.timing_sigma(worst.sd, 8)
    needed = stats.pairs_needed(sigma, worst.mean, POLICY.margin, ALPHA)
    visible = math.exp(stats.detectable_effect(sigma, 64, POLICY.margin, ALPHA))
    assert decision.verdict is Verdict.INCONCLUSIVE
    assert decision.reason == (
        f"1.030x at M=64 is not shown to beat 1.02x: at {sigma:.1%} noise a timing it takes about {needed:.0f} pairs; "
        f"64 were spent, which show {visible:.3f}x"
    )


def test_an_effect_below_the_margin_needs_more_pairs_than_any() -> None:
    seen = contender([1.5, 1.0], Fate.RUNNING, spread=0.1)
    decision = decided(decide.decide(KEY, confirmation(Verdict.INCONCLUSIVE, seen), POLICY, CONDITIONS))
    assert "it takes more pairs than any" in decision.reason


def test_a_test_without_a_look_says_how_far_it_came() -> None:
    outcome = decide.decide(
        KEY,
        confirmation(Verdict.INCONCLUSIVE, Contender("a", Fate.RUNNING, (), None), partial=True),
        POLICY,
        CONDITIONS,
    )
    decision = decided(outcome)
    assert decision.reason == "the budget ended after 8 of 8 sessions"
    assert decision.partial
    assert decision.confirm == ()


# ---- splits


def lost_half() -> Confirmation:
    return confirmation(
        Verdict.KEEP_NATIVE,
        contender([1.4, 0.9], Fate.DROPPED, "half"),
        contender([0.9, 0.9], Fate.DROPPED, "slow"),
        Contender("broken", Fate.FAILED, (), None),
        split=("half",),
    )


def test_a_cell_won_in_part_is_split_and_its_finalists_go_on() -> None:
    outcome = decide.decide(KEY, lost_half(), POLICY, CONDITIONS, num_splits=1)
    assert isinstance(outcome, decide.Split)
    assert (outcome.key, outcome.num_splits, outcome.candidates) == (KEY, 2, ("half", "slow"))
    assert outcome.decision.verdict is Verdict.KEEP_NATIVE
    assert outcome.reason == "split: a finalist has 1.400x at M=33 and at most 0.901x at M=64, margin 1.02x"


def test_a_cell_is_split_three_times_at_most() -> None:
    assert isinstance(decide.decide(KEY, lost_half(), POLICY, CONDITIONS, num_splits=2), decide.Split)
    assert isinstance(decide.decide(KEY, lost_half(), POLICY, CONDITIONS, num_splits=3), Decision)


def test_a_cell_of_one_size_is_not_split() -> None:
    single = replace(KEY, cell=Cell(((33, 33),)))
    assert isinstance(decide.decide(single, lost_half(), POLICY, CONDITIONS), Decision)


# ---- after the fresh sessions


def settle(first: Estimate | None, second: Estimate | None, failures: Sequence[ArmFailure] = ()) -> Decision:
    return decide.settle(replacement(), KEY, [first, second], failures, CONDITIONS)


def test_what_is_published_comes_from_the_fresh_sessions() -> None:
    decision = settle(estimate(1.45, alpha=0.05), estimate(1.25, point=1, alpha=0.05))
    assert decision.verdict is Verdict.REPLACE
    assert [comparison.speedup for comparison in decision.reconfirm] == pytest.approx([1.45, 1.25])
    assert {comparison.stage for comparison in decision.reconfirm} == {"reconfirm"}
    assert decision.reason.startswith("1.250x (1.249 to 1.251) at its weakest point, M=64, in 8 fresh sessions")


def test_a_winner_that_is_not_faster_again_is_revoked_with_its_evidence() -> None:
    decision = settle(estimate(1.45, alpha=0.05), estimate(1.01, point=1, spread=0.05, alpha=0.05))
    assert (decision.verdict, decision.candidate, decision.revoked) == (Verdict.KEEP_NATIVE, "", True)
    assert len(decision.reconfirm) == 2
    assert "1.010x" in decision.reason
    assert "M=64" in decision.reason


def test_a_lower_bound_of_exactly_one_is_revoked() -> None:
    assert settle(estimate(1.0, spread=0.0), estimate(1.3, point=1)).revoked


def test_a_winner_is_judged_where_its_lower_bound_is_least_and_not_its_speedup() -> None:
    slowest, doubtful = estimate(1.05, alpha=0.05), estimate(1.1, point=1, spread=0.2, alpha=0.05)
    assert slowest.lower > 0.0 > doubtful.lower
    decision = settle(slowest, doubtful)
    assert decision.revoked
    low = math.exp(stats.lower_bound(doubtful.effects, 0.05))
    assert f"(1.100x, at least {low:.3f}x, at M=64)" in decision.reason


def test_a_winner_that_fails_in_fresh_sessions_is_revoked() -> None:
    failure = ArmFailure(Arm(str(KEY), 1, "a"), Status.TIMEOUT, "60 s")
    decision = settle(estimate(1.4), None, [failure])
    assert decision.revoked
    assert decision.reason == "revoked: the winner failed in fresh sessions at M=64: TIMEOUT"


def test_the_failure_of_another_key_revokes_nothing() -> None:
    failure = ArmFailure(Arm("1..32", 0, "a"), Status.TIMEOUT, "60 s")
    assert settle(estimate(1.4), estimate(1.3, point=1), [failure]).verdict is Verdict.REPLACE


def test_a_winner_without_all_its_fresh_sessions_is_inconclusive_and_partial() -> None:
    decision = settle(estimate(1.4), None)
    assert (decision.verdict, decision.candidate, decision.partial, decision.revoked) == (
        Verdict.INCONCLUSIVE,
        "",
        True,
        False,
    )


# ---- boundary and test sets


BOUNDARY = (Point((("M", 40),), "recorded"), Point((("M", 50),), "recorded"))


def test_a_boundary_workload_that_is_slower_beyond_doubt_revokes() -> None:
    slow = estimate(0.97, point=1, alpha=0.05)
    decision = decide.check_boundary(replacement(), BOUNDARY, [estimate(1.2), slow], [])
    assert (decision.verdict, decision.revoked) == (Verdict.KEEP_NATIVE, True)
    assert "boundary workload (M=50: 0.970x" in decision.reason


def test_a_boundary_workload_that_may_be_equal_or_was_not_measured_revokes_nothing() -> None:
    doubtful = estimate(0.99, spread=0.05, alpha=0.05)
    assert decide.check_boundary(replacement(), BOUNDARY, [doubtful, None], []) == replacement()


def test_a_winner_that_fails_on_a_boundary_workload_is_revoked() -> None:
    failure = ArmFailure(Arm(str(KEY), 1, "a"), Status.INCORRECT_NUMERICAL, "off by 3")
    decision = decide.check_boundary(replacement(), BOUNDARY, [estimate(1.2), None], [failure])
    assert decision.reason == "revoked: the winner failed on a boundary workload (M=50): INCORRECT_NUMERICAL"


@pytest.mark.parametrize(("speedup", "slower"), [(0.97, True), (0.99, False), (1.2, False)])
def test_a_test_workload_is_slower_where_it_is_below_the_margin_beyond_doubt(speedup: float, slower: bool) -> None:
    assert decide.is_slower(estimate(speedup, alpha=0.05), POLICY) is slower


def test_false_replacements_are_expected_of_every_key_that_was_tested() -> None:
    assert decide.expected_false_replacements(20, Policy(alpha=0.05)) == pytest.approx(1.0)
    assert decide.expected_false_replacements(20, Policy(alpha=0.05, num_keys=20)) == pytest.approx(0.05)


# ---- what is settled already


def native_at(*bounds: tuple[int, int]) -> Decision:
    return Decision(Cell(bounds), Verdict.KEEP_NATIVE, "", (), (), "slower")


def test_a_cell_is_covered_by_its_own_decision_or_by_those_of_all_its_parts_and_by_nothing_less() -> None:
    low, high, beyond, one = native_at((33, 48)), native_at((49, 64)), native_at((65, 96)), native_at((1, 1))
    every = [one, low, high, beyond]
    assert decide.covering(every, Cell(((33, 64),))) == [low, high]
    assert decide.covering(every, Cell(((1, 1),))) == [one]
    assert decide.covering(every, Cell(((65, 96),))) == [beyond]
    assert decide.covering([one, low, beyond], Cell(((33, 64),))) == [], "a half is not decided"
    assert decide.covering([low, native_at((50, 64))], Cell(((33, 64),))) == [], "nor is one size between two parts"
    assert decide.covering(every, Cell(((34, 48),))) == [], "a decision of more than the cell is another cell's"
    assert decide.covering([], Cell(((1, 1),))) == []


def test_a_box_is_covered_where_its_parts_fill_it_in_both_features() -> None:
    parts = [native_at((1, 4), (1, 8)), native_at((1, 4), (9, 16)), native_at((5, 8), (1, 16))]
    assert decide.covering(parts, Cell(((1, 8), (1, 16)))) == parts
    assert decide.covering(parts[1:], Cell(((1, 8), (1, 16)))) == []

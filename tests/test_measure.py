"""The protocol asks a Bench for the right pairs in the right order, and concludes what they show."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import MACHINES, SimulatedBench

from fibc import measure, stats
from fibc.errors import EvaluationError, SchemaError
from fibc.schema.decision import Verdict
from fibc.schema.evaluation import Arm, Pair, Status
from fibc.schema.evidence import Fate, Screening
from fibc.schema.policy import Policy

POLICY = Policy(min_speedup=1.02)


@dataclass(frozen=True)
class Asked:
    """One call of ``pair``."""

    session: int
    arm: int
    native_first: bool


class ScriptedBench:
    """Answers with exact latencies and writes down what it is asked."""

    def __init__(
        self,
        speedups: Sequence[float],
        native_s: float = 1e-4,
        noise: Callable[[int, int], float] = lambda session, arm: 0.0,
        failing: Callable[[int, int], bool] = lambda session, arm: False,
        wrong_after: Callable[[int, int], bool] = lambda session, arm: False,
    ) -> None:
        self.asked: list[Asked] = []
        self.seeds: list[int] = []
        self._speedups = speedups
        self._native_s = native_s
        self._noise = noise
        self._failing = failing
        self._wrong_after = wrong_after
        self._open = False

    @contextmanager
    def session(self, seed: int) -> Iterator[ScriptedBench]:
        assert not self._open, "one session is open at a time"
        self.seeds.append(seed)
        self._open = True
        yield self
        self._open = False
        index = len(self.seeds) - 1
        timed = sorted({ask.arm for ask in self.asked if ask.session == index})
        wrong = [arm for arm in timed if self._wrong_after(index, arm)]
        if wrong:
            raise measure.ArmsFailed([measure.ArmFailed(arm, Status.INCORRECT_NUMERICAL, "stale") for arm in wrong])

    def pair(self, candidate: int, native_first: bool) -> tuple[float, float]:
        assert self._open
        session = len(self.seeds) - 1
        if self._failing(session, candidate):
            raise measure.ArmFailed(candidate, Status.CRASH, "signal 11")
        self.asked.append(Asked(session, candidate, native_first))
        return self._native_s, self._native_s / self._speedups[candidate] * math.exp(-self._noise(session, candidate))


def arms_of(*candidates: str, key: str = "1..8", points: int = 1) -> list[Arm]:
    return [Arm(key, point, candidate) for candidate in candidates for point in range(points)]


def wobble(size: float) -> Callable[[int, int], float]:
    """Return noise that alternates between sessions, +size and -size."""
    return lambda session, arm: size if session % 2 else -size


# ---- policy


def test_a_policy_out_of_range_names_every_constant() -> None:
    with pytest.raises(SchemaError) as caught:
        Policy(alpha=0.7, looks=(8, 8), pairs_per_session=7)
    assert [problem.split(":")[1].strip() for problem in caught.value.problems] == [
        "alpha",
        "looks",
        "pairs_per_session",
    ]


def test_the_error_of_a_bound_is_shared_by_looks_finalists_and_keys() -> None:
    assert Policy(alpha=0.05).bound_alpha(4) == pytest.approx(0.05 / 12)
    assert Policy(alpha=0.05, num_keys=10).bound_alpha(2) == pytest.approx(0.05 / 60)


# ---- first rung


def first_rung(bench: ScriptedBench, policy: Policy = POLICY) -> tuple[Pair, ...]:
    with bench.session(0) as session:
        return measure.first_rung(session, 0, policy, random.Random(0))


def test_a_first_rung_is_four_rounds_in_abba_order() -> None:
    pairs = first_rung(ScriptedBench([0.95]))
    order = [pair.native_first for pair in pairs]
    assert order in ([True, False, False, True], [False, True, True, False])
    assert measure.screen_value(pairs) == pytest.approx(math.log(0.95))


@pytest.mark.parametrize(("speedup", "rounds"), [(0.2, 1), (0.5, 2), (0.75, 4), (3.0, 4)])
def test_a_hopeless_candidate_ends_its_first_rung_early(speedup: float, rounds: int) -> None:
    assert len(first_rung(ScriptedBench([speedup]))) == rounds


@pytest.mark.parametrize(("native_s", "rounds"), [(0.031, 4), (0.032, 2)])
def test_a_first_rung_of_long_calls_is_one_pair_in_each_order(native_s: float, rounds: int) -> None:
    pairs = first_rung(ScriptedBench([1.0], native_s=native_s))
    assert [pair.native_first for pair in pairs].count(True) == rounds // 2
    assert len(pairs) == rounds


def test_one_outlier_ends_no_first_rung() -> None:
    bench = ScriptedBench([1.1])
    slow_first: Iterator[float] = iter([-math.log(3), 0.0, 0.0, 0.0])
    bench._noise = lambda session, arm: next(slow_first)
    assert len(first_rung(bench)) == 4


def test_a_failing_candidate_leaves_its_first_rung_with_its_status() -> None:
    with pytest.raises(measure.ArmFailed, match="CRASH: signal 11") as caught:
        first_rung(ScriptedBench([1.0], failing=lambda session, arm: True))
    assert caught.value.status is Status.CRASH


@pytest.mark.parametrize("native_s", [0.0, -1.0, math.nan, math.inf])
def test_a_timing_that_is_none_is_the_fault_of_the_bench(native_s: float) -> None:
    with pytest.raises(EvaluationError, match="positive and finite"):
        first_rung(ScriptedBench([1.0], native_s=native_s))


@pytest.mark.parametrize("noise", [math.inf, -math.inf, math.nan])  # a candidate of 0 s, of infinitely many, of none
def test_a_candidates_timing_that_is_none_never_becomes_a_speedup(noise: float) -> None:
    with pytest.raises(EvaluationError, match=r"positive and finite, got native 0\.0001 s, candidate (0\.0|inf|nan) s"):
        first_rung(ScriptedBench([1.0], noise=lambda session, arm: noise))


# ---- screen


def screen(speedups: Sequence[float], bench: ScriptedBench | None = None) -> tuple[Screening, ScriptedBench]:
    bench = bench or ScriptedBench(speedups)
    arms = arms_of(*(f"c{i}" for i in range(len(speedups))))
    return measure.screen(bench, arms, [math.log(speedup) for speedup in speedups], POLICY, seed=7), bench


def test_rungs_keep_the_best_third_and_double_their_rounds() -> None:
    speedups = [1.0 + i / 1000 for i in range(100)]
    screening, bench = screen(speedups)
    counts = [Counter(ask.arm for ask in bench.asked if ask.session == rung) for rung in range(len(bench.seeds))]
    assert [(len(count), set(count.values())) for count in counts] == [(34, {8}), (12, {16})]
    assert [arm.candidate for arm in screening.finalists] == ["c99", "c98", "c97", "c96"]
    assert screening.num_pairs == len(bench.asked) == 34 * 8 + 12 * 16


def test_each_round_of_a_rung_is_a_permutation_of_its_own() -> None:
    _, bench = screen([1.0 + i / 1000 for i in range(30)])
    rung = [ask.arm for ask in bench.asked if ask.session == 0]
    rounds = [tuple(rung[begin : begin + 10]) for begin in range(0, len(rung), 10)]
    assert all(sorted(order) == list(range(20, 30)) for order in rounds)
    assert len(set(rounds)) > 1


def test_half_of_a_rungs_rounds_are_native_first_for_every_candidate() -> None:
    _, bench = screen([1.0 + i / 1000 for i in range(30)])
    assert set(Counter((ask.arm, ask.native_first) for ask in bench.asked).values()) == {4}


def test_a_few_trials_need_no_rung() -> None:
    screening, bench = screen([1.1, 0.99, 1.05, 0.98, 1.12])
    assert bench.asked == []
    assert [arm.candidate for arm in screening.finalists] == ["c4", "c0", "c2", "c1"]


def test_finalists_behind_native_are_dropped() -> None:
    screening, _ = screen([0.96, 0.98, 0.5])
    assert [arm.candidate for arm in screening.finalists] == ["c1"]


def test_finalists_far_behind_the_best_one_are_dropped() -> None:
    screening, _ = screen([1.3, 1.13, 1.11, 1.0])
    assert [arm.candidate for arm in screening.finalists] == ["c0", "c1"]


def test_a_screen_without_a_hope_measures_nothing() -> None:
    screening, bench = screen([0.6] * 60)
    assert screening.finalists == ()
    assert bench.asked == []


def test_a_value_is_the_mean_of_all_rungs_weighted_by_their_rounds() -> None:
    speedups = [0.99] * 20 + [1.05]
    first_rungs = [0.1] * 6 + [-0.1] * 14 + [0.07]
    screening = measure.screen(ScriptedBench(speedups), arms_of(*(f"c{i}" for i in range(21))), first_rungs, POLICY, 0)
    assert screening.values[20] == pytest.approx((4 * 0.07 + 8 * math.log(1.05)) / 12)
    assert screening.values[0] == pytest.approx((4 * 0.1 + 8 * math.log(0.99)) / 12)
    assert screening.values[10] == -0.1
    assert screening.finalists[0].candidate == "c20"


def test_a_candidate_that_fails_in_a_rung_is_reported_and_out() -> None:
    speedups = [1.0 + i / 1000 for i in range(30)]
    screening, _ = screen(speedups, ScriptedBench(speedups, failing=lambda session, arm: arm == 29))
    assert [(failure.arm.candidate, failure.status) for failure in screening.failures] == [("c29", Status.CRASH)]
    assert [arm.candidate for arm in screening.finalists] == ["c28", "c27", "c26", "c25"]


# ---- confirm


def test_a_session_has_eight_adjacent_pairs_of_each_finalist_half_of_them_native_first() -> None:
    bench = ScriptedBench([1.2, 1.1, 1.0], noise=wobble(0.001))
    measure.confirm(bench, arms_of("a", "b", "c"), POLICY, seed=0)
    first = Counter((ask.arm, ask.native_first) for ask in bench.asked if ask.session == 0)
    assert first == {(arm, native_first): 4 for arm in range(3) for native_first in (True, False)}


def test_finalists_are_in_random_order_within_blocks() -> None:
    bench = ScriptedBench([1.2, 1.1, 1.0], noise=wobble(0.001))
    measure.confirm(bench, arms_of("a", "b", "c"), POLICY, seed=0)
    order = [ask.arm for ask in bench.asked if ask.session == 0]
    blocks = [tuple(order[begin : begin + 3]) for begin in range(0, 24, 3)]
    assert all(sorted(block) == [0, 1, 2] for block in blocks)
    assert len(set(blocks)) > 1


def test_which_side_is_timed_first_in_a_session_is_drawn_for_each_finalist() -> None:
    bench = ScriptedBench([1.2, 1.2, 1.2, 1.2], noise=wobble(0.001))
    measure.confirm(bench, arms_of("a", "b", "c", "d"), POLICY, seed=0)
    firsts: dict[tuple[int, int], list[bool]] = {}
    for ask in bench.asked:
        firsts.setdefault((ask.session, ask.arm), []).append(ask.native_first)
    assert {tuple(order) for order in firsts.values()} == {
        (True, False, False, True) * 2,
        (False, True, True, False) * 2,
    }
    assert len({firsts[0, arm][0] for arm in range(4)}) == 2, "all of a session begin alike"
    assert len({firsts[session, 0][0] for session in range(8)}) == 2, "a finalist begins alike in all sessions"


def test_one_session_serves_all_keys_and_no_seed_comes_twice() -> None:
    bench = ScriptedBench([1.2, 1.3], noise=wobble(0.001))
    arms = [Arm("1..8", 0, "a"), Arm("9..16", 0, "a")]
    confirmations = measure.confirm(bench, arms, POLICY, seed=0)
    assert set(confirmations) == {"1..8", "9..16"}
    assert len(bench.seeds) == len(set(bench.seeds)) == 8
    assert all({ask.arm for ask in bench.asked if ask.session == index} == {0, 1} for index in range(8))


def test_the_same_seed_asks_for_the_same_pairs() -> None:
    asked = []
    for _ in range(2):
        bench = ScriptedBench([1.2, 1.0], noise=wobble(0.01))
        measure.confirm(bench, arms_of("a", "b"), POLICY, seed=5)
        asked.append((bench.seeds, bench.asked))
    assert asked[0] == asked[1]


def test_a_candidate_is_accepted_where_its_lower_bound_beats_the_margin() -> None:
    bench = ScriptedBench([1.2], noise=wobble(0.01))
    result = measure.confirm(bench, arms_of("a"), POLICY, seed=0)["1..8"]
    (estimate,) = result.contenders[0].estimates
    effects = [math.log(1.2) + (0.01 if index % 2 else -0.01) for index in range(8)]
    assert estimate.effects == pytest.approx(effects)
    assert estimate.lower == pytest.approx(stats.lower_bound(effects, 0.05 / 3))
    assert estimate.num_pairs == 64
    assert (result.verdict, result.winner, result.num_sessions) == (Verdict.REPLACE, "a", 8)


def test_a_candidate_below_the_margin_beyond_doubt_keeps_native() -> None:
    result = measure.confirm(ScriptedBench([1.01], noise=wobble(0.001)), arms_of("a"), POLICY, seed=0)["1..8"]
    assert (result.verdict, result.winner, result.num_sessions) == (Verdict.KEEP_NATIVE, "", 8)
    assert result.contenders[0].fate is Fate.DROPPED


def test_a_gain_that_noise_may_explain_is_looked_at_again_after_sixteen_and_thirty_two_sessions() -> None:
    size = 0.045
    bench = ScriptedBench([1.04], noise=wobble(size))
    result = measure.confirm(bench, arms_of("a"), POLICY, seed=0)["1..8"]
    assert result.num_sessions == 32
    needed = [
        stats.lower_bound([math.log(1.04) + (size if i % 2 else -size) for i in range(n)], 0.05 / 3)
        for n in (8, 16, 32)
    ]
    assert needed[0] < needed[1] < POLICY.margin < needed[2], "the example is one that the last look decides"
    assert result.verdict is Verdict.REPLACE


def test_a_candidate_out_of_reach_is_given_up_at_the_first_look() -> None:
    bench = ScriptedBench([0.98], noise=wobble(0.1))
    result = measure.confirm(bench, arms_of("a"), POLICY, seed=0)["1..8"]
    assert (result.verdict, result.contenders[0].fate) == (Verdict.INCONCLUSIVE, Fate.OUT_OF_REACH)
    assert result.num_sessions == 8
    patient = replace(POLICY, patience=math.inf)
    assert (
        measure.confirm(ScriptedBench([0.98], noise=wobble(0.1)), arms_of("a"), patient, 0)["1..8"].num_sessions == 32
    )


def test_after_an_acceptance_only_finalists_with_a_larger_mean_go_on() -> None:
    noises = {0: 0.001, 1: 0.12, 2: 0.08}
    bench = ScriptedBench([1.10, 1.16, 1.08], noise=lambda session, arm: noises[arm] * (1 if session % 2 else -1))
    result = measure.confirm(bench, arms_of("sure", "better", "worse"), POLICY, seed=0)["1..8"]
    fates = {contender.candidate: contender.fate for contender in result.contenders}
    assert fates["sure"] is Fate.ACCEPTED
    assert fates["worse"] is Fate.OUTRUN
    assert fates["better"] is Fate.ACCEPTED
    assert {ask.arm for ask in bench.asked if ask.session >= 8} == {1}
    assert result.winner == max(result.contenders, key=lambda contender: contender.lower).candidate


def test_a_candidate_must_beat_the_margin_at_every_point() -> None:
    bench = ScriptedBench([1.3, 1.3, 1.0], noise=wobble(0.001))
    result = measure.confirm(bench, arms_of("a", points=3), POLICY, seed=0)["1..8"]
    assert (result.verdict, result.split) == (Verdict.KEEP_NATIVE, ("a",))
    assert [round(math.exp(estimate.mean), 2) for estimate in result.contenders[0].estimates] == [1.3, 1.3, 1.0]


@settings(max_examples=25)
@given(st.lists(st.sampled_from([0.8, 1.0, 1.019, 1.021, 1.5]), min_size=6, max_size=6))
def test_without_noise_a_cell_goes_to_a_candidate_above_the_margin_at_every_point(speedups: list[float]) -> None:
    result = measure.confirm(ScriptedBench(speedups), arms_of("a", "b", points=3), POLICY, seed=0)["1..8"]
    whole = {name for name, part in (("a", speedups[:3]), ("b", speedups[3:])) if min(part) > 1.02}
    assert result.verdict is (Verdict.REPLACE if whole else Verdict.KEEP_NATIVE)
    assert result.winner in (whole or {""})
    assert result.num_sessions == 8


def test_a_lower_bound_of_exactly_the_margin_does_not_beat_it() -> None:
    policy = Policy(min_speedup=1.0)
    assert policy.margin == 0.0
    result = measure.confirm(ScriptedBench([1.0]), arms_of("equal"), policy, seed=0)["1..8"]
    (estimate,) = result.contenders[0].estimates
    assert (estimate.lower, estimate.upper) == (0.0, 0.0), "a coarse timer shows equal times"
    assert (result.verdict, result.winner) == (Verdict.INCONCLUSIVE, "")


def test_a_candidate_that_loses_everywhere_gives_no_reason_to_split() -> None:
    bench = ScriptedBench([0.9, 0.8], noise=wobble(0.001))
    assert measure.confirm(bench, arms_of("a", points=2), POLICY, seed=0)["1..8"].split == ()


def test_a_candidate_that_gets_the_whole_cell_leaves_no_reason_to_split() -> None:
    bench = ScriptedBench([1.1, 1.1, 1.5, 0.8], noise=wobble(0.001))
    result = measure.confirm(bench, arms_of("whole", "half", points=2), POLICY, seed=0)["1..8"]
    assert (result.winner, result.split) == ("whole", ())


def test_a_winner_at_one_point_and_noise_at_the_other_is_inconclusive() -> None:
    bench = ScriptedBench([1.5, 1.02], noise=lambda session, arm: (0.001, 0.1)[arm] * (1 if session % 2 else -1))
    result = measure.confirm(bench, arms_of("a", points=2), POLICY, seed=0)["1..8"]
    assert (result.verdict, result.split) == (Verdict.INCONCLUSIVE, ())


def test_a_heavy_key_has_two_pairs_a_session_one_in_each_order_and_no_fewer_sessions() -> None:
    bench = ScriptedBench([1.5, 1.4], native_s=0.02, noise=wobble(0.001))
    result = measure.confirm(bench, arms_of("a", "b"), POLICY, seed=0)["1..8"]
    per_session = Counter((ask.session, ask.arm, ask.native_first) for ask in bench.asked)
    assert set(per_session.values()) == {1}
    assert len(per_session) == 8 * 2 * 2
    assert (result.verdict, result.num_sessions) == (Verdict.REPLACE, 8)


def test_a_key_that_lost_arms_may_afford_eight_pairs_again() -> None:
    bench = ScriptedBench([1.10, 0.8, 0.8], native_s=0.012, noise=lambda session, arm: 0.08 if session % 2 else -0.08)
    measure.confirm(bench, arms_of("noisy", "slow", "slower"), POLICY, seed=0)
    pairs = Counter((ask.session, ask.arm) for ask in bench.asked)
    assert pairs[0, 0] == pairs[7, 0] == 2
    assert pairs[8, 0] == 8


def test_a_candidate_that_fails_at_one_point_is_out_and_the_others_go_on() -> None:
    bench = ScriptedBench(
        [1.3, 1.3, 1.2, 1.2], noise=wobble(0.001), failing=lambda session, arm: session == 2 and arm == 1
    )
    result = measure.confirm(bench, arms_of("crashing", "sound", points=2), POLICY, seed=0)["1..8"]
    failed = next(contender for contender in result.contenders if contender.candidate == "crashing")
    assert failed.fate is Fate.FAILED
    assert failed.failure is not None
    assert (failed.failure.status, failed.failure.arm.point) == (Status.CRASH, 1)
    assert result.winner == "sound"
    assert not {0, 1} & {ask.arm for ask in bench.asked if ask.session > 2}


def test_a_candidate_found_wrong_after_the_last_session_is_not_accepted() -> None:
    bench = ScriptedBench([1.3, 1.2], noise=wobble(0.001), wrong_after=lambda session, arm: (session, arm) == (7, 0))
    result = measure.confirm(bench, arms_of("wrong", "sound"), POLICY, seed=0)["1..8"]
    fates = {contender.candidate: contender.fate for contender in result.contenders}
    assert fates == {"wrong": Fate.FAILED, "sound": Fate.ACCEPTED}


def test_a_winner_found_wrong_after_its_last_fresh_session_has_no_estimate() -> None:
    bench = ScriptedBench([1.3, 1.2], wrong_after=lambda session, arm: (session, arm) == (7, 0))
    seen = measure.reconfirm(bench, [Arm("k", 0, "wrong"), Arm("l", 0, "sound")], POLICY, seed=0)
    assert seen.estimates[0] is None
    assert seen.estimates[1] is not None
    assert [failure.status for failure in seen.failures] == [Status.INCORRECT_NUMERICAL]


def test_a_candidate_found_wrong_after_a_rung_is_out() -> None:
    speedups = [1.0 + i / 1000 for i in range(30)]
    screening, _ = screen(speedups, ScriptedBench(speedups, wrong_after=lambda session, arm: arm == 29))
    assert "c29" not in [arm.candidate for arm in screening.finalists]
    assert [failure.arm.candidate for failure in screening.failures] == ["c29"]


def test_a_key_whose_finalists_all_fail_keeps_native() -> None:
    bench = ScriptedBench([1.3], failing=lambda session, arm: True)
    result = measure.confirm(bench, arms_of("a"), POLICY, seed=0)["1..8"]
    assert (result.verdict, result.num_sessions, result.partial) == (Verdict.KEEP_NATIVE, 1, False)


def sessions_then_stop(bench: ScriptedBench, sessions: int) -> Callable[[], bool]:
    return lambda: len(bench.seeds) < sessions or (len(bench.seeds) == sessions and bench._open)


def test_a_test_that_is_stopped_before_its_first_look_shows_nothing() -> None:
    bench = ScriptedBench([2.0], noise=wobble(0.001))
    result = measure.confirm(bench, arms_of("a"), POLICY, 0, time_left=sessions_then_stop(bench, 5))["1..8"]
    assert (result.verdict, result.partial, result.num_sessions) == (Verdict.INCONCLUSIVE, True, 5)
    assert result.contenders[0].estimates == ()


def test_a_test_that_is_stopped_between_two_looks_takes_the_next_one_early() -> None:
    size = 0.045
    bench = ScriptedBench([1.06], noise=wobble(size))
    result = measure.confirm(bench, arms_of("a"), POLICY, 0, time_left=sessions_then_stop(bench, 14))["1..8"]
    bounds = [
        stats.lower_bound([math.log(1.06) + (size if i % 2 else -size) for i in range(n)], 0.05 / 3) for n in (8, 14)
    ]
    assert bounds[0] < POLICY.margin < bounds[1], "the example is one that the early look decides"
    assert (result.verdict, result.partial, result.num_sessions) == (Verdict.REPLACE, True, 14)


def test_time_may_run_out_between_the_keys_of_a_session() -> None:
    bench = ScriptedBench([2.0, 2.0], noise=wobble(0.001))
    arms = [Arm("a", 0, "x"), Arm("b", 0, "x")]
    results = measure.confirm(bench, arms, POLICY, 0, time_left=lambda: len(bench.asked) < 15 * 8)
    assert sorted(result.num_sessions for result in results.values()) == [7, 8]
    assert {result.num_sessions: result.verdict for result in results.values()} == {
        7: Verdict.INCONCLUSIVE,
        8: Verdict.REPLACE,
    }


def test_progress_names_each_session_and_the_open_keys() -> None:
    bench = ScriptedBench([1.2, 1.05], noise=lambda session, arm: (0.001, 0.05)[arm] * (1 if session % 2 else -1))
    told: list[tuple[int, int]] = []
    arms = [Arm("a", 0, "x"), Arm("b", 0, "x")]
    measure.confirm(bench, arms, POLICY, 0, on_session=lambda session, left: told.append((session, left)))
    assert told[:8] == [(index, 2) for index in range(7)] + [(7, 1)]


def test_a_key_without_every_finalist_at_every_point_is_refused() -> None:
    arms = [Arm("k", 0, "a"), Arm("k", 1, "a"), Arm("k", 0, "b")]
    with pytest.raises(ValueError, match="key k: needs every finalist at every point"):
        measure.confirm(ScriptedBench([1.0] * 3), arms, POLICY, 0)


def test_recorded_samples_give_the_recorded_confirmations() -> None:
    arms = [
        *arms_of("a", "b", "c", key="k", points=2),
        *arms_of("a", "b", key="l", points=1),
    ]
    bench = SimulatedBench(MACHINES[1], arms, [1.1, 1.1, 1.03, 0.9, 1.2, 1.2, 1.02, 1.01], seed=4)
    recorded = measure.confirm(bench, arms, POLICY, 0)
    samples = [sample for confirmation in recorded.values() for sample in confirmation.samples]
    assert measure.replay(samples, [], POLICY) == recorded


def test_recorded_failures_are_replayed_where_they_happened() -> None:
    bench = ScriptedBench(
        [1.3, 1.3, 1.2, 1.2], noise=wobble(0.001), failing=lambda session, arm: session == 2 and arm == 1
    )
    recorded = measure.confirm(bench, arms_of("crashing", "sound", points=2), POLICY, seed=0)
    (confirmation,) = recorded.values()
    failures = [contender.failure for contender in confirmation.contenders if contender.failure is not None]
    assert measure.replay(confirmation.samples, failures, POLICY) == recorded


# ---- fixed-size stages


def test_reconfirm_runs_eight_fresh_sessions_with_bounds_at_95_percent() -> None:
    bench = ScriptedBench([1.2, 1.1], noise=wobble(0.01))
    arms = [Arm("k", 0, "a"), Arm("l", 0, "b")]
    seen = measure.reconfirm(bench, arms, POLICY, seed=0)
    assert len(bench.seeds) == 8
    for estimate, speedup in zip(seen.estimates, (1.2, 1.1), strict=True):
        assert estimate is not None
        effects = [math.log(speedup) + (0.01 if index % 2 else -0.01) for index in range(8)]
        assert estimate.effects == pytest.approx(effects)
        assert estimate.lower == pytest.approx(stats.lower_bound(effects, 0.05))
        assert estimate.num_pairs == 64
    assert seen.of("l") == (seen.estimates[1],)


def test_stages_never_share_a_session_seed() -> None:
    seeds = set()
    for stage in ("boundary", "test"):
        bench = ScriptedBench([1.2])
        measure.assess(bench, arms_of("a"), POLICY, 0, stage)
        seeds |= set(bench.seeds)
    for run in (measure.reconfirm, measure.confirm):
        bench = ScriptedBench([1.2])
        run(bench, arms_of("a"), POLICY, 0)
        seeds |= set(bench.seeds)
    assert len(seeds) == 32


def test_an_arm_that_fails_has_no_estimate_and_harms_no_other() -> None:
    bench = ScriptedBench([1.2, 1.1], failing=lambda session, arm: session == 3 and arm == 0)
    seen = measure.assess(bench, arms_of("a", "b"), POLICY, 0, "boundary")
    assert seen.estimates[0] is None
    assert seen.estimates[1] is not None
    assert [(failure.arm.candidate, failure.status) for failure in seen.failures] == [("a", Status.CRASH)]


def test_a_stage_that_runs_out_of_time_has_no_estimates() -> None:
    bench = ScriptedBench([1.2])
    seen = measure.assess(bench, arms_of("a"), POLICY, 0, "test", time_left=sessions_then_stop(bench, 7))
    assert seen.estimates == (None,)
    assert len(seen.samples) == 7


# ---- gate


def gate_bench(bias: float, seed: int = 0) -> SimulatedBench:
    arms = measure.gate_arms(POLICY)
    return SimulatedBench(replace(MACHINES[1], layout=0.005), arms, [1.0 + bias] * len(arms), seed)


def test_the_gate_passes_a_sound_bench() -> None:
    result = measure.aa_gate(gate_bench(0.0), POLICY, seed=0)
    assert result.passed
    assert (result.num_comparisons, result.replaces_at_margin, result.repeated) == (40, 0, False)
    assert len({sample.session for sample in result.samples}) == 8


def test_the_gate_refuses_a_biased_bench_after_one_repetition() -> None:
    result = measure.aa_gate(gate_bench(0.02), POLICY, seed=0)
    assert not result.passed
    assert result.repeated
    assert result.replaces_at_zero > 5
    assert str(result).startswith("A/A gate failed (second attempt):")
    assert len(result.samples) == 2 * 8 * 40


def test_the_gate_forgives_one_unlucky_attempt() -> None:
    bench = ScriptedBench([1.0] * 40, noise=lambda session, arm: 0.1 if session < 8 else 0.0)
    result = measure.aa_gate(bench, POLICY, seed=0)
    assert result.passed
    assert result.repeated


def test_a_native_that_fails_against_itself_is_an_error() -> None:
    bench = ScriptedBench([1.0] * 40, failing=lambda session, arm: arm == 3)
    with pytest.raises(EvaluationError, match="native failed against itself: CRASH"):
        measure.aa_gate(bench, POLICY, seed=0)

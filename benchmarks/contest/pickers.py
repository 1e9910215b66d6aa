"""The pickers: four rules over timings that are taken kernel by kernel, as other tools take them, and fibc's policy.

What the tools do, as their sources of 2026 have it (Triton 3.6, torch 2.13, FlashInfer and flashinfer-bench at their
main branches):

* ``triton.autotune``: config by config, 25 ms of warm-up and 100 ms of launches with the L2 written over before each;
  the config with the least median serves. Outputs are not looked at.
* Inductor (``max-autotune`` on a GPU): choice by choice, ATen's among them, 5 and up to 100 launches in at most 25 ms,
  L2 written over before each; the choice with the least minimum serves. Outputs are compared only where a user asks.
* FlashInfer's autotuner: tactic by tactic, 3 calls of warm-up, then 10 between two events; the least mean serves.
  flashinfer-bench: solution by solution, three times the mean of 50 launches after 10, against the reference's; of the
  solutions that are within its tolerance the one with the largest speedup serves.
* A fixed margin: what people do who know that a few percent are noise.

Here all of them get what fibc gets: fibc's timer (batches of calls on cold weights, the host ahead of a GPU), native
among the choices, kernels that are known to be right, and as many timings as fibc's protocol takes when it goes on to
its end: for 20 candidates on a GPU about 25 ms of each kernel, what Inductor allows itself, and more than FlashInfer's
ten calls. (Of triton.autotune's 100 ms most writes over the cache where kernels are short.) What differs is the rule,
and whether a claim comes from the timings that made the choice.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from contest.field import Field, Meter, Spent
from fibc import decide, measure
from fibc.bench import ArmFailed, ArmsFailed, session_seed
from fibc.schema.candidate import NATIVE
from fibc.schema.decision import Decision, Verdict
from fibc.schema.evaluation import Arm
from fibc.schema.feature import FeatureKey
from fibc.schema.policy import Policy

FIBC = "fibc"

Timings = Mapping[str, Sequence[float]]
"""Seconds per call by kernel, native's under ``NATIVE``."""


@dataclass(frozen=True)
class Pick:
    """What a picker serves at a key, and what it says about it.

    Attributes:
        candidate: ``NATIVE`` where it keeps native.
        claimed: Native latency / candidate latency as the picker states it; 1 where it keeps native.
        low: Lower end of the claim's 95 % interval; None where the picker states none. Alike ``high``.
        reason: A sentence, where the picker gives one.
    """

    candidate: str
    claimed: float
    low: float | None = None
    high: float | None = None
    reason: str = ""

    @property
    def replaces(self) -> bool:
        """Whether native is replaced."""
        return self.candidate != NATIVE


@dataclass(frozen=True)
class Rule:
    """A rule over timings.

    Attributes:
        as_in: Whose rule it is.
        statistic: Of one kernel's timings; the least serves.
        margin: Native serves unless it is slower by more than this factor.
    """

    name: str
    as_in: str
    statistic: Callable[[Sequence[float]], float]
    margin: float = 1.0

    def pick(self, timings: Timings) -> Pick:
        """Return what the rule picks."""
        values = {kernel: self.statistic(seconds) for kernel, seconds in timings.items()}
        best = min(values, key=values.__getitem__)
        speedup = values[NATIVE] / values[best]
        return Pick(best, speedup) if best != NATIVE and speedup > self.margin else Pick(NATIVE, 1.0)


RULES = (
    Rule("min of medians", "triton.autotune", statistics.median),
    Rule("min of mins", "Inductor", min),
    Rule("mean argmin", "FlashInfer, flashinfer-bench", statistics.fmean),
    Rule("5 % margin", "medians, a rule of thumb", statistics.median, margin=1.05),
)

PICKERS = (*(rule.name for rule in RULES), FIBC)


def most_pairs(policy: Policy, num_candidates: int) -> int:
    """Return the pairs that fibc's protocol takes for a key where nothing ends early: the budget of every picker."""
    pairs = num_candidates * policy.screen_rounds
    left, rung = num_candidates, 1
    while (left := math.ceil(left / policy.reduction_factor)) > policy.finalists:
        pairs += left * policy.screen_rounds * 2**rung
        rung += 1
    finalists = min(policy.finalists, num_candidates)
    return pairs + (policy.looks[-1] * finalists + policy.fixed_sessions) * policy.pairs_per_session


def timings_each(policy: Policy, num_candidates: int) -> int:
    """Return how many timings of each kernel, native too, the budget pays."""
    return 2 * most_pairs(policy, num_candidates) // (num_candidates + 1)


def time_in_turn(
    field: Field, key: FeatureKey, candidates: Sequence[str], policy: Policy, seed: int
) -> tuple[dict[str, list[float]], Spent]:
    """Time native and the candidates one after another, in one process.

    A kernel's timings are its halves of pairs; native's halves between them are neither used nor counted. The order of
    the kernels is random: by the tools' fixed order, what a machine does first would favour the same one every time.

    Returns:
        Timings, without kernels that failed, and what they cost.
    """
    arms = [Arm(str(key), 0, name) for name in (NATIVE, *candidates)]
    meter = Meter(field.calls_per_timing)
    bench = field.bench(arms, fresh=True)
    count = timings_each(policy, len(candidates))
    timings: dict[str, list[float]] = {}
    with suppress(ArmsFailed), bench.session(seed) as session:  # none of the tools looks at outputs after timing
        for index in random.Random(seed).sample(range(len(arms)), len(arms)):
            with suppress(ArmFailed):
                seconds = [session.pair(index, native_first=True)[1] for _ in range(count)]
                timings[arms[index].candidate] = seconds
                meter.add(arms[index], seconds)
    return timings, meter.spent[str(key)]


def pick_as_fibc(
    field: Field, contested: Mapping[FeatureKey, Sequence[str]], policy: Policy, seed: int
) -> dict[str, tuple[Pick, Decision, Spent]]:
    """Take the keys of one definition through fibc's stages, in sessions that they share.

    Args:
        contested: Digests of the candidates of each key, validated before.

    Returns:
        By ``str`` of the key: the pick, the decision that it stands for, and what the key cost.
    """
    meter = Meter(field.calls_per_timing)
    finalists: dict[FeatureKey, tuple[Arm, ...]] = {}
    for key, candidates in contested.items():
        field.hold(key)
        finalists[key] = _screen(field, meter, key, candidates, policy, session_seed(seed, str(key), 0))
    decisions = _prove(field, meter, finalists, policy, seed)
    return {key: (_as_pick(decision), decision, meter.spent[key]) for key, decision in decisions.items()}


def _screen(
    field: Field, meter: Meter, key: FeatureKey, candidates: Sequence[str], policy: Policy, seed: int
) -> tuple[Arm, ...]:
    """Run the first rung of every candidate, each in a session of its own, and reduce them to finalists."""
    arms = [Arm(str(key), 0, name) for name in candidates]
    bench = meter.around(field.bench(arms, fresh=False), arms)
    rng = random.Random(seed)
    values: dict[int, float] = {}
    for index in range(len(arms)):
        with suppress(ArmFailed, ArmsFailed), bench.session(session_seed(seed, "trial", index)) as session:
            values[index] = measure.screen_value(measure.first_rung(session, index, policy, rng))
    passed = [arms[index] for index in values]
    bench = meter.around(field.bench(passed, fresh=False), passed)
    return measure.screen(bench, passed, list(values.values()), policy, seed).finalists


def _prove(
    field: Field, meter: Meter, finalists: Mapping[FeatureKey, Sequence[Arm]], policy: Policy, seed: int
) -> dict[str, Decision]:
    """Confirm the finalists of all keys, decide, and reconfirm the winners."""
    keys = {str(key): key for key in finalists}
    decisions = {name: decide.keep_native(key, "no finalist") for name, key in keys.items()}
    arms = [arm for racing in finalists.values() for arm in racing]
    bench = meter.around(field.bench(arms, fresh=True), arms)
    for name, confirmation in measure.confirm(bench, arms, policy, seed).items():
        decision = decide.decide(keys[name], confirmation, policy, field.conditions)
        assert isinstance(decision, Decision), "a cell of one size cannot be split"
        decisions[name] = decision
    winners = [Arm(name, 0, d.candidate) for name, d in decisions.items() if d.verdict is Verdict.REPLACE]
    if winners:
        bench = meter.around(field.bench(winners, fresh=True), winners)
        fresh = measure.reconfirm(bench, winners, policy, seed)
        for arm in winners:
            decisions[arm.key] = decide.settle(
                decisions[arm.key], keys[arm.key], fresh.of(arm.key), fresh.failures, field.conditions
            )
    return decisions


def _as_pick(decision: Decision) -> Pick:
    if decision.verdict is not Verdict.REPLACE:
        return Pick(NATIVE, 1.0, reason=decision.reason)
    shown = decision.reconfirm[0]
    return Pick(decision.candidate, shown.speedup, shown.ci_low, shown.ci_high, decision.reason)

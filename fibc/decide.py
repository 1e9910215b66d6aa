"""From evidence to decisions: what a cell serves, why, and where a cell must be split. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fibc import stats
from fibc.bench import ArmFailed
from fibc.schema.decision import Comparison, Conditions, Decision, Verdict
from fibc.schema.evidence import ArmFailure, Confirmation, Contender, Estimate, Fate
from fibc.schema.feature import Cell, FeatureKey, Point
from fibc.schema.policy import PUBLISHED_LEVEL, Policy
from fibc.sustained import Sustained

ESTIMATOR = "hodges-lehmann"
DESIGN = "paired-abba-processes"

MAX_SPLITS = 3
"""A cell is split at most so often: an eighth of a cell is as narrow as evidence for one crossover needs."""


@dataclass(frozen=True)
class Split:
    """A cell that no finalist gets as a whole, though one leads in a part of it.

    Attributes:
        key: The key to cut at its middle (``schema.cells.split_key``).
        num_splits: How often the cells of the new keys will have been split.
        candidates: Digests of the finalists worth testing in the halves, best first.
        reason: A sentence.
        decision: What holds for a half that is not tested any more.
    """

    key: FeatureKey
    num_splits: int
    candidates: tuple[str, ...]
    reason: str
    decision: Decision


def compare(estimate: Estimate, point: Point, stage: str, conditions: Conditions) -> Comparison:
    """Return ``estimate`` as it is published, with its two-sided 95 % interval."""
    low, high = stats.interval(estimate.effects, PUBLISHED_LEVEL)
    return Comparison(
        point=point,
        speedup=math.exp(estimate.mean),
        ci_low=math.exp(low),
        ci_high=math.exp(high),
        confidence_level=PUBLISHED_LEVEL,
        n_sessions=len(estimate.effects),
        n_pairs=estimate.num_pairs,
        session_sd=estimate.sd,
        native_us=estimate.native_s * 1e6,
        candidate_us=estimate.candidate_s * 1e6,
        stage=stage,
        estimator=ESTIMATOR,
        design=DESIGN,
        residency=conditions.residency,
        mode=conditions.mode,
        timer=conditions.timer,
        num_threads=conditions.num_threads,
    )


def keep_native(key: FeatureKey, reason: str, *, partial: bool = False) -> Decision:
    """Return the decision of a cell without finalists; ``reason`` says why there is none."""
    return Decision(key.cell, Verdict.KEEP_NATIVE, "", (), (), reason, synthetic=key.synthetic, partial=partial)


def inconclusive(key: FeatureKey, reason: str, *, partial: bool = False) -> Decision:
    """Return the decision of a cell that nothing was shown about; ``reason`` says why."""
    return Decision(key.cell, Verdict.INCONCLUSIVE, "", (), (), reason, synthetic=key.synthetic, partial=partial)


def decide(
    key: FeatureKey, confirmation: Confirmation, policy: Policy, conditions: Conditions, *, num_splits: int = 0
) -> Decision | Split:
    """Return what the confirm sessions decide about the cell of ``key``, or that it must be split first.

    A replacement is provisional until ``settle`` has seen the reconfirm sessions.

    Args:
        key: Whose points the estimates of ``confirmation`` belong to, in their order.
        confirmation: How the test ended.
        policy: Constants that it went by.
        conditions: How it was timed.
        num_splits: How often the cell has been split.
    """
    best = _spokesman(confirmation)
    reasons = {
        Verdict.REPLACE: _replace_reason,
        Verdict.KEEP_NATIVE: _keep_reason,
        Verdict.INCONCLUSIVE: _inconclusive_reason,
    }
    decision = Decision(
        cell=key.cell,
        verdict=confirmation.verdict,
        candidate=confirmation.winner,
        confirm=tuple(
            compare(estimate, point, "confirm", conditions)
            for estimate, point in zip(best.estimates, key.points, strict=False)
        ),
        reconfirm=(),
        reason=reasons[confirmation.verdict](key, confirmation, best, policy),
        synthetic=key.synthetic,
        partial=confirmation.partial,
    )
    divisible = any(first < last for first, last in key.cell.bounds)
    if confirmation.split and divisible and num_splits < MAX_SPLITS:
        alive = [c.candidate for c in confirmation.contenders if c.fate is not Fate.FAILED and c.estimates]
        return Split(key, num_splits + 1, tuple(alive), _split_reason(key, confirmation, policy), decision)
    return decision


def settle(
    decision: Decision,
    key: FeatureKey,
    estimates: Sequence[Estimate | None],
    failures: Sequence[ArmFailure],
    conditions: Conditions,
) -> Decision:
    """Return ``decision`` with the winner's fresh evidence, or revoked by it.

    It is revoked where a one-sided 95 % lower bound of the speedup is at or below 1 at a point and where the winner
    failed; where time ran out before the fresh sessions were done, it is inconclusive.

    Args:
        decision: A replacement.
        key: Its key.
        estimates: The winner's, one per point of ``key``, from the reconfirm sessions.
        failures: Of the reconfirm sessions; those of other keys are ignored.
        conditions: How it was timed.
    """
    failure = next((failure for failure in failures if failure.arm.key == str(key)), None)
    if failure is not None:
        return _revoke(
            decision, f"revoked: the winner failed in fresh sessions at {_at(key, failure.arm.point)}: {failure.status}"
        )
    seen = [estimate for estimate in estimates if estimate is not None]
    if len(seen) < len(key.points):
        reason = "the budget ended before fresh sessions could confirm the winner again"
        return replace(decision, verdict=Verdict.INCONCLUSIVE, candidate="", reason=reason, partial=True)
    published = tuple(compare(e, p, "reconfirm", conditions) for e, p in zip(seen, key.points, strict=True))
    decision = replace(decision, reconfirm=published)
    worst = min(range(len(seen)), key=lambda index: seen[index].lower)
    if seen[worst].lower <= 0:
        shown = (
            f"{math.exp(seen[worst].mean):.3f}x, at least {math.exp(seen[worst].lower):.3f}x, at {key.points[worst]}"
        )
        return _revoke(decision, f"revoked: fresh sessions did not show the winner faster than native ({shown})")
    return replace(decision, reason=_published_reason(published))


def check_sustained(decision: Decision, seen: Sustained | ArmFailed) -> Decision:
    """Return ``decision``, revoked where the winner fails or is slower than native when it runs alone for long."""
    if isinstance(seen, ArmFailed):
        return _revoke(decision, f"revoked: the winner failed when it ran alone for long: {seen.status}")
    return decision if seen.holds else _revoke(decision, f"revoked: the winner {seen}")


def check_boundary(
    decision: Decision, points: Sequence[Point], estimates: Sequence[Estimate | None], failures: Sequence[ArmFailure]
) -> Decision:
    """Return ``decision``, revoked where the winner fails or is slower than native beyond doubt at a boundary workload.

    Args:
        decision: A settled replacement.
        points: The boundary workloads of its cell.
        estimates: The winner's, one per workload; None where it failed or time ran out.
        failures: Of these workloads.
    """
    for failure in failures:
        where = points[failure.arm.point] if failure.arm.point < len(points) else f"workload {failure.arm.point}"
        rejected = _revoke(decision, f"revoked: the winner failed on a boundary workload ({where}): {failure.status}")
        return replace(rejected, boundary_rejected=True)
    for point, estimate in zip(points, estimates, strict=True):
        if estimate is not None and estimate.upper < 0:
            shown = f"{math.exp(estimate.mean):.3f}x, at most {math.exp(estimate.upper):.3f}x"
            rejected = _revoke(decision, f"revoked: slower than native on a boundary workload ({point}: {shown})")
            return replace(rejected, boundary_rejected=True)
    return decision


def is_slower(estimate: Estimate, policy: Policy) -> bool:
    """Whether a test workload is slower than native by more than the margin, beyond doubt."""
    return estimate.upper < -policy.margin


def covering(decisions: Sequence[Decision], cell: Cell) -> list[Decision]:
    """Return those of ``decisions`` that together cover ``cell``, or nothing where a part is missing."""
    inside = [decision for decision in decisions if _within(decision.cell, cell)]
    return inside if sum(_volume(decision.cell) for decision in inside) == _volume(cell) else []


def _within(inner: Cell, outer: Cell) -> bool:
    pairs = zip(inner.bounds, outer.bounds, strict=True)
    return all(outer_first <= first and last <= outer_last for (first, last), (outer_first, outer_last) in pairs)


def _volume(cell: Cell) -> int:
    return math.prod(last - first + 1 for first, last in cell.bounds)


def expected_false_replacements(num_tested: int, policy: Policy) -> float:
    """Return an upper bound of the expected number of cells replaced without a reason.

    Args:
        num_tested: Keys that were confirmed, whatever their verdict: each could err with the key's alpha.
    """
    return num_tested * policy.key_alpha


def _spokesman(confirmation: Confirmation) -> Contender:
    """Return the contender that a decision speaks of: the winner, else the best."""
    named = {contender.candidate: contender for contender in confirmation.contenders}
    return named.get(confirmation.winner, confirmation.contenders[0])


def _replace_reason(key: FeatureKey, confirmation: Confirmation, best: Contender, policy: Policy) -> str:
    worst = min(best.estimates, key=lambda estimate: estimate.lower)
    return (
        f"at least {math.exp(worst.lower):.3f}x at every point ({_at(key, worst.arm.point)} is the weakest), "
        f"margin {policy.min_speedup:g}x; {confirmation.num_sessions} sessions"
    )


def _keep_reason(key: FeatureKey, confirmation: Confirmation, best: Contender, policy: Policy) -> str:
    if not best.estimates:
        failure = best.failure
        detail = f": {failure.status}" if failure is not None else ""
        return f"every finalist failed while it was timed{detail}"
    worst = min(best.estimates, key=lambda estimate: estimate.upper)
    return (
        f"no finalist is {policy.min_speedup:g}x everywhere: the best is at most {math.exp(worst.upper):.3f}x "
        f"at {_at(key, worst.arm.point)}"
    )


def _inconclusive_reason(key: FeatureKey, confirmation: Confirmation, best: Contender, policy: Policy) -> str:
    if not best.estimates:
        return f"the budget ended after {confirmation.num_sessions} of {policy.looks[0]} sessions"
    worst = min(best.estimates, key=lambda estimate: estimate.lower)
    sigma = stats.timing_sigma(worst.sd, worst.num_pairs / len(worst.effects))
    needed = stats.pairs_needed(sigma, worst.mean, policy.margin, worst.alpha)
    visible = math.exp(stats.detectable_effect(sigma, worst.num_pairs, policy.margin, worst.alpha))
    effort = f"about {needed:.0f} pairs" if math.isfinite(needed) else "more pairs than any"
    return (
        f"{math.exp(worst.mean):.3f}x at {_at(key, worst.arm.point)} is not shown to beat {policy.min_speedup:g}x: at "
        f"{sigma:.1%} noise a timing it takes {effort}; {worst.num_pairs} were spent, which show {visible:.3f}x"
    )


def _split_reason(key: FeatureKey, confirmation: Confirmation, policy: Policy) -> str:
    contender = next(c for c in confirmation.contenders if c.candidate in confirmation.split)
    won = max(contender.estimates, key=lambda estimate: estimate.mean)
    lost = min(contender.estimates, key=lambda estimate: estimate.upper)
    return (
        f"split: a finalist has {math.exp(won.mean):.3f}x at {_at(key, won.arm.point)} and at most "
        f"{math.exp(lost.upper):.3f}x at {_at(key, lost.arm.point)}, margin {policy.min_speedup:g}x"
    )


def _published_reason(published: Sequence[Comparison]) -> str:
    worst = min(published, key=lambda comparison: comparison.ci_low)
    return (
        f"{worst.speedup:.3f}x ({worst.ci_low:.3f} to {worst.ci_high:.3f}) at its weakest point, {worst.point}, "
        f"in {worst.n_sessions} fresh sessions"
    )


def _revoke(decision: Decision, reason: str) -> Decision:
    return replace(decision, verdict=Verdict.KEEP_NATIVE, candidate="", reason=reason, revoked=True)


def _at(key: FeatureKey, point: int) -> str:
    return str(key.points[point])

"""The serving winners measured against native anew, as they are: validated, then timed in fresh sessions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fibc import decide, measure
from fibc.evaluate import Evaluator
from fibc.replicates import Pooled, pool
from fibc.schema.decision import Comparison, Decision, Verdict
from fibc.schema.digest import digest_text
from fibc.schema.evaluation import Arm, Status
from fibc.schema.evidence import ArmFailure, Assessment
from fibc.schema.feature import Cell, FeatureKey
from fibc.schema.policy import Policy
from fibc.schema.upkeep import Shown
from fibc.shop import Shop

STAGE = "recheck"

FIRST_SESSIONS = 4
"""Half of a reconfirm's, and enough for most: with 1 % between sessions the bound lies 1.2 % below the mean."""


class Standing(StrEnum):
    """How a winner stands in fresh sessions."""

    HOLDS = "holds"
    """Shown faster than native at every point, and by the margin on average."""
    VANISHED = "vanished"
    """Shown faster, and no longer by the margin at a point: another candidate, or native, may be better."""
    FLIPPED = "flipped"
    """It failed, or fresh sessions do not show it faster than native."""
    UNCHECKED = "unchecked"
    """Time ran out."""


@dataclass(frozen=True)
class Rechecked:
    """A serving row after its winner was measured again.

    Attributes:
        row: As published.
        key: Its cell with the points of its evidence.
        settled: The row with fresh evidence; revoked where that does not show it.
    """

    row: Decision
    key: FeatureKey
    standing: Standing
    settled: Decision
    why: str


def key_of(row: Decision) -> FeatureKey:
    """Return the cell of ``row`` as a key, with the points at which its evidence was collected."""
    evidence = row.reconfirm or row.confirm
    points = tuple(dict.fromkeys(comparison.point for comparison in evidence))
    heaviest = max(range(len(points)), key=lambda index: (points[index].weight, points[index].axes), default=0)
    return FeatureKey(row.cell, points, heaviest, synthetic=row.synthetic)


def serving(rows: Iterable[Decision]) -> tuple[Decision, ...]:
    """Return the rows that a variant serves."""
    return tuple(row for row in rows if row.verdict is Verdict.REPLACE and not row.revoked)


@dataclass(frozen=True)
class Recheck:
    """What a night saw of the serving winners.

    Attributes:
        outliers: Sentences about devices that stand apart from the others.
    """

    rows: tuple[Rechecked, ...]
    outliers: tuple[str, ...] = ()


def recheck(shop: Shop, rows: Sequence[Decision], salt: str, others: Sequence[tuple[str, Evaluator]] = ()) -> Recheck:
    """Measure the winner of every row of ``rows`` against native in fresh sessions, at every point of its key.

    ``FIRST_SESSIONS`` do for a winner whose lower bound in them beats the margin at every point. Any other is asked
    again in ``fixed_sessions`` sessions, as many as a reconfirm has, and judged from those alone.

    Args:
        rows: That a variant serves; their candidates are in ``shop.artifacts``.
        salt: Makes the seeds of this night others than those of the last.
        others: Further devices of the same silicon, by name: each measures everything, and one decision follows.
    """
    policy = shop.task.policy
    keys = {row.cell: key_of(row) for row in rows}
    shop.progress.stage(STAGE, FIRST_SESSIONS * (1 + len(others)) if rows else 0)
    failures = _invalid(shop, rows, keys)
    devices = (("the first device", shop.evaluator), *others)
    fewer = replace(policy, fixed_sessions=FIRST_SESSIONS)
    first = _measure(shop, devices, rows, keys, failures, fewer, f"{salt} first")
    doubtful = [row for row in rows if not _is_clear(first.assessment, keys[row.cell], policy)]
    shop.progress.stage(f"{STAGE} of the doubtful", policy.fixed_sessions * len(devices) if doubtful else 0)
    again = _measure(shop, devices, doubtful, keys, failures, policy, f"{salt} again")
    settled = tuple(
        _settle(shop, row, keys[row.cell], failures, (again if row in doubtful else first).assessment) for row in rows
    )
    return Recheck(settled, (*first.outliers, *again.outliers))


def _measure(
    shop: Shop,
    devices: Sequence[tuple[str, Evaluator]],
    rows: Sequence[Decision],
    keys: Mapping[Cell, FeatureKey],
    failures: Mapping[Cell, ArmFailure],
    policy: Policy,
    salt: str,
) -> Pooled:
    arms = [
        Arm(str(keys[row.cell]), point, row.candidate)
        for row in rows
        if row.cell not in failures
        for point in range(len(keys[row.cell].points))
    ]
    if not arms:
        return Pooled(Assessment(STAGE, (), (), (), ()), ())
    seen = []
    for name, evaluator in devices:
        fits = shop.budget.fits(evaluator.starting_s(policy.fixed_sessions))
        bench = evaluator.bench(arms, shop.artifacts, list(keys.values()), fresh_process=True)
        assessment = measure.assess(
            bench,
            arms,
            policy,
            int(digest_text(str(shop.task.options.seed), salt, name)[:8], 16),
            STAGE,
            time_left=shop.time_left if fits else _never,
            on_session=lambda session, num: shop.progress.step(f"session {session + 1}: {num} winners"),
        )
        shop.keep_samples(assessment.samples)
        seen.append((name, assessment))
    return pool(seen, policy)


def _never() -> bool:
    return False


def _is_clear(seen: Assessment, key: FeatureKey, policy: Policy) -> bool:
    estimates = seen.of(str(key))
    return bool(estimates) and all(item is not None and item.lower > policy.margin for item in estimates)


def _settle(
    shop: Shop, row: Decision, key: FeatureKey, failures: Mapping[Cell, ArmFailure], seen: Assessment
) -> Rechecked:
    known = [failures[row.cell]] if row.cell in failures else []
    late = shop.evaluator.late_failures.get(row.candidate)
    if late is not None:
        known.append(ArmFailure(Arm(str(key), 0, row.candidate), late.status, late.log))
    settled = decide.settle(row, key, seen.of(str(key)), [*known, *seen.failures], shop.conditions)
    fresh = () if settled.reconfirm == row.reconfirm else settled.reconfirm  # one that failed still carries the old
    settled = replace(settled, reconfirm=tuple(replace(item, stage=STAGE) for item in fresh), partial=row.partial)
    return _judge(row, key, settled, shop.task.policy.min_speedup)


def weakest(comparisons: Sequence[Comparison]) -> Shown | None:
    """Return the comparison with the least lower end of its interval, as it is printed; None where there is none."""
    if not comparisons:
        return None
    found = min(comparisons, key=lambda item: item.ci_low)
    return Shown(str(found.point), found.speedup, found.ci_low, found.ci_high)


def _judge(row: Decision, key: FeatureKey, settled: Decision, min_speedup: float) -> Rechecked:
    if settled.verdict is Verdict.INCONCLUSIVE:
        return Rechecked(row, key, Standing.UNCHECKED, row, "the budget ended before its winner was measured again")
    if settled.revoked:
        return Rechecked(row, key, Standing.FLIPPED, settled, settled.reason.removeprefix("revoked: "))
    lowest = min(settled.reconfirm, key=lambda item: item.speedup, default=None)
    if lowest is not None and math.log(lowest.speedup) < math.log(min_speedup):
        why = f"{lowest.speedup:.3f}x at {lowest.point} is no longer {min_speedup:g}x"
        return Rechecked(row, key, Standing.VANISHED, settled, why)
    return Rechecked(row, key, Standing.HOLDS, settled, settled.reason)


def _invalid(shop: Shop, rows: Sequence[Decision], keys: Mapping[Cell, FeatureKey]) -> dict[Cell, ArmFailure]:
    """Return the winners that fail validation now, by cell."""
    failed: dict[Cell, ArmFailure] = {}
    for row in rows:
        if not shop.time_left():
            break
        outcome = shop.evaluator.validate(shop.candidates[row.candidate], shop.artifacts[row.candidate], keys[row.cell])
        if outcome.status is not Status.PASSED:
            failed[row.cell] = ArmFailure(Arm(str(keys[row.cell]), 0, row.candidate), outcome.status, outcome.log)
    return failed

"""Decisions made again from raw samples alone: the same test, the same rules, no device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fibc import decide, measure, stats
from fibc.reporting.contenders import ByPoint, estimates, last_runs
from fibc.reporting.recorded import Recorded
from fibc.schema.decision import Conditions, Decision, Verdict
from fibc.schema.evaluation import Evaluation, SessionSamples, Status
from fibc.schema.evidence import Estimate
from fibc.schema.feature import Cell, FeatureKey
from fibc.schema.policy import PUBLISHED_LEVEL, Policy


@dataclass(frozen=True)
class Search:
    """One key's search: what a run prints of it.

    Attributes:
        num_finalists: Those that raced.
    """

    num_trials: int
    num_failed: int
    best: float | None
    num_finalists: int


class Regenerator:
    """What a run's raw samples say, by the rules of today."""

    def __init__(self, recorded: Recorded, policy: Policy) -> None:
        self.recorded = recorded
        self.policy = policy
        self._races = last_runs(recorded.samples, "confirm")
        self._fresh = estimates(recorded.samples, "reconfirm")
        self._boundary = estimates(recorded.samples, "boundary")
        self._trials: dict[str, dict[str, Evaluation]] = {}
        for evaluation in recorded.evaluations:
            self._trials.setdefault(evaluation.key, {})[evaluation.candidate] = evaluation

    def decision(self, cell: Cell) -> Decision | None:
        """Return the decision of ``cell``; None where it has no samples of every finalist at every point.

        The sizes of its points and what the search was stopped by are no samples: they are the record's.
        """
        known = next((decision for decision in self.recorded.decisions if decision.cell == cell), None)
        samples = self._races.get(str(cell), [])
        if known is None or not known.confirm or not _is_whole(samples):
            return None
        first = known.confirm[0]
        conditions = Conditions(first.residency, first.mode, first.timer, first.num_threads)
        key = FeatureKey(cell, tuple(item.point for item in known.confirm), 0, known.synthetic)
        confirmation = measure.replay(samples, (), self.policy)[str(cell)]
        made = decide.decide(key, confirmation, self.policy, conditions, num_splits=decide.MAX_SPLITS)
        assert isinstance(made, Decision)  # it may not be split again
        if made.verdict is not Verdict.REPLACE:
            return made
        fresh = self._fresh.get(str(cell), {}).get(made.candidate, {})
        made = decide.settle(made, key, [self._whole(fresh, n) for n in range(len(key.points))], (), conditions)
        return self._held_to_boundary(made)

    def _held_to_boundary(self, decision: Decision) -> Decision:
        """Return the decision after the boundary workloads of its cell."""
        seen = self._boundary.get(f"{decision.cell} boundary", {}).get(decision.candidate, {})
        if not seen or decision.verdict is not Verdict.REPLACE:
            return decision
        table = self.recorded.table
        items = (
            [] if table is None else [i for i in table.boundary if _within(self.recorded, decision.cell, i.point.axes)]
        )
        if len(items) != len(seen):  # the record has no sizes of them: they matter for a message alone
            points = tuple(decision.confirm[0].point for _ in seen)
        else:
            points = tuple(item.point for item in items)
        return decide.check_boundary(decision, points, [self._whole(seen, n) for n in sorted(seen)], ())

    def _whole(self, by_point: ByPoint, point: int) -> Estimate | None:
        """Return an estimate that has all its sessions."""
        estimate = by_point.get(point)
        return estimate if estimate is not None and len(estimate.effects) == self.policy.fixed_sessions else None

    def search(self, key: str) -> Search:
        """Return what the trials of a key come to."""
        trials = self._trials.get(key, {})
        values = [measure.screen_value(item.pairs) for item in trials.values() if item.pairs]
        finalists = {sample.arm.candidate for sample in self._races.get(key, ())}
        failed = sum(item.status is not Status.PASSED for item in trials.values())
        best = math.exp(max(values)) if values else None
        return Search(len(trials), failed, best, len(finalists))

    def statuses(self) -> dict[str, int]:
        """Return how many trials ended in each way."""
        counts: dict[str, int] = {}
        for trials in self._trials.values():
            for item in trials.values():
                counts[item.status.value] = counts.get(item.status.value, 0) + 1
        return dict(sorted(counts.items()))

    def num_tested(self) -> int:
        """Return how many cells raced, halves and those that were split included."""
        return len(self._races)

    def gate(self) -> str | None:
        """Return what native against itself came to; None without samples of it."""
        seen = [
            by_point[0] for found in estimates(self.recorded.samples, "gate").values() for by_point in found.values()
        ]
        if not seen:
            return None
        faster = sum(stats.lower_bound(item.effects, 1 - PUBLISHED_LEVEL) > 0 for item in seen)
        return f"{faster} of {len(seen)}"

    def set_estimates(self, stage: str) -> dict[str, list[Estimate | None]]:
        """Return the estimates of a set's workloads by cell, in the order of its points; None without all sessions."""
        found: dict[str, list[Estimate | None]] = {}
        for key, by_candidate in estimates(self.recorded.samples, stage).items():
            by_point: Mapping[int, Estimate] = next(iter(by_candidate.values()))
            found[key.removesuffix(f" {stage}")] = [self._whole(by_point, point) for point in sorted(by_point)]
        return found


def _is_whole(samples: Sequence[SessionSamples]) -> bool:
    """Whether every finalist was timed at every point: one that failed at its first pairs left no samples there."""
    places = {(sample.arm.candidate, sample.arm.point) for sample in samples}
    candidates, points = {candidate for candidate, _ in places}, {point for _, point in places}
    return len(places) == len(candidates) * len(points) > 0


def _within(recorded: Recorded, cell: Cell, axes: tuple[tuple[str, int], ...]) -> bool:
    assert recorded.table is not None
    sizes = dict(axes)
    return cell.holds(tuple(feature.value(sizes) for feature in recorded.table.features))

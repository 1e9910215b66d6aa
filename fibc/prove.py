"""The proof of keys: confirm finalists in fresh processes, split cells, reconfirm winners, ask the boundary set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fibc import decide, measure
from fibc.explore import Explored
from fibc.schema.cells import split_key
from fibc.schema.decision import Comparison, Decision, Verdict
from fibc.schema.evaluation import Arm, Status
from fibc.schema.evidence import ArmFailure, Assessment
from fibc.schema.feature import Cell, FeatureKey, Point, feature_values
from fibc.schema.policy import Policy
from fibc.schema.workload import Workload
from fibc.shop import Shop

RECONFIRM_SHARE = 0.5
"""A reconfirm session's time as a part of a confirm session's: one candidate a key in place of up to four, but the same
process start (confirm 5.4 s of timing in a session, reconfirm 2.0 s, each with 2 to 3 s of starting, gemm bf16)."""

PUBLISH_S = 10.0
"""A module's build on two cores; 6.8 s on an Intel Xeon (Emerald Rapids), g++ 12.2, 2026-11-30."""


@dataclass(frozen=True)
class Proof:
    """What the evidence says about every cell.

    Attributes:
        decisions: Sorted by cell; together they cover every key.
        boundary: Evidence of the boundary workloads in cells that were to be replaced.
        num_boundary_rejected: Rows that the boundary set took back.
        num_tested: Cells that were confirmed, whatever their verdict.
    """

    decisions: tuple[Decision, ...]
    boundary: tuple[Comparison, ...]
    num_boundary_rejected: int
    num_tested: int


@dataclass(frozen=True)
class _Contest:
    """A key with the finalists that are tested on it."""

    key: FeatureKey
    finalists: tuple[str, ...]
    num_splits: int
    partial: bool

    def arms(self) -> list[Arm]:
        return [Arm(str(self.key), point, digest) for digest in self.finalists for point in range(len(self.key.points))]


def prove(shop: Shop, explored: Sequence[Explored]) -> Proof:
    """Return the decision of every cell, from data that the search has not seen.

    Cells that an earlier run with the same fingerprint settled are answered from the record.
    """
    recorded = shop.verdicts.decisions()
    settled: list[Decision] = []
    contests: list[_Contest] = []
    keys: dict[Cell, FeatureKey] = {}
    for item in explored:
        known = _covering(recorded, item.key.cell)
        if known:
            settled += known
        elif item.finalists:
            contests.append(_Contest(item.key, item.finalists, 0, item.partial))
        else:
            settled.append(_without_finalists(item))
    num_tested = len(contests) + _num_tested(settled)

    replaced: list[Decision] = []
    pace = _Pace(shop)
    while contests:
        decisions, contests_next = _confirm(shop, contests, pace)
        keys |= {contest.key.cell: contest.key for contest in contests}
        num_tested += len(contests_next)
        replaced += [decision for decision in decisions if decision.verdict is Verdict.REPLACE]
        settled += [decision for decision in decisions if decision.verdict is not Verdict.REPLACE]
        contests = contests_next

    checked, boundary, num_rejected = _reconfirm(shop, replaced, keys)
    final = sorted([*settled, *checked], key=lambda decision: decision.cell)
    for decision in final:
        if not decision.partial and decision not in recorded:
            shop.verdicts.append("decision", decision)
        if decision.partial:
            shop.budget.cut(f"evidence of {decision.cell}")
    return Proof(tuple(final), boundary, num_rejected, num_tested)


def recorded_proof(shop: Shop) -> Proof | None:
    """Return what is settled already, for a run that was interrupted; None where nothing would be replaced."""
    keys = [key.cell for key in shop.task.keys]
    recorded = shop.verdicts.decisions()
    settled = [decision for cell in keys for decision in _covering(recorded, cell)]
    if not any(decision.verdict is Verdict.REPLACE for decision in settled):
        return None
    open_keys = [key for key in shop.task.keys if not _covering(recorded, key.cell)]
    settled += [decide.inconclusive(key, "the run was interrupted", partial=True) for key in open_keys]
    num_rejected = sum(decision.revoked for decision in settled)
    return Proof(tuple(sorted(settled, key=lambda d: d.cell)), (), num_rejected, _num_tested(settled))


def read_test_set(shop: Shop, decisions: Sequence[Decision]) -> tuple[tuple[Comparison, ...], tuple[str, ...]]:
    """Measure the test workloads that fall into replaced cells, once; return them, and a line for each slower one."""
    keys = _keys_of(shop, decisions, shop.task.sets.test, "test")
    seen = _assess(shop, decisions, [keys], "test")
    comparisons: list[Comparison] = []
    slower: list[str] = [f"{failure.arm.key}: {failure.status}: {failure.log}" for failure in seen.failures]
    for cell, key in keys.items():
        for point, estimate in zip(key.points, seen.of(str(key)), strict=True):
            if estimate is None:
                shop.budget.cut(f"test workload {point} of {cell}")
                continue
            comparisons.append(decide.compare(estimate, point, "test", shop.conditions))
            if decide.is_slower(estimate, shop.task.policy):
                slower.append(f"{point}: {math.exp(estimate.mean):.3f}x, at most {math.exp(estimate.upper):.3f}x")
    return tuple(comparisons), tuple(slower)


def _confirm(shop: Shop, contests: Sequence[_Contest], pace: _Pace) -> tuple[list[Decision], list[_Contest]]:
    """Run one round of the test; return decisions, and the halves of cells that no finalist gets as a whole."""
    arms = [arm for contest in contests for arm in contest.arms()]
    depth = max(contest.num_splits for contest in contests)
    shop.progress.stage("confirm" if depth == 0 else f"confirm, split {depth}", shop.task.policy.looks[-1])
    bench = shop.evaluator.bench(arms, shop.artifacts, [contest.key for contest in contests], fresh_process=True)
    policy = _policy_at(shop, depth)
    pace.begins()
    results = measure.confirm(
        bench,
        arms,
        policy,
        shop.task.options.seed + depth,
        time_left=pace.leaves_enough,
        on_session=lambda session, num_open: pace.ended(f"session {session + 1}, {num_open} keys open"),
    )
    decisions: list[Decision] = []
    halves: list[_Contest] = []
    for contest in contests:
        confirmation = results[str(contest.key)]
        shop.keep_samples(confirmation.samples)
        outcome = decide.decide(
            contest.key, confirmation, shop.task.policy, shop.conditions, num_splits=contest.num_splits
        )
        if isinstance(outcome, Decision):
            decisions.append(outcome)
            continue
        parts = _halves(shop, contest.key) if shop.time_left() else ()
        if parts:
            halves += [_Contest(part, outcome.candidates, outcome.num_splits, contest.partial) for part in parts]
        else:
            decisions.append(outcome.decision)
    return decisions, halves


class _Pace:
    """Ends confirm while there is time left for what an acceptance is worth nothing without: the reconfirm.

    One for all rounds: the first has every key, as the reconfirm has every winner, and so the longest sessions.
    """

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._began = shop.budget.elapsed()
        self._longest_s = 0.0
        self._num_sessions = 0

    def ended(self, text: str) -> None:
        """A session has ended."""
        now = self._shop.budget.elapsed()
        self._longest_s = max(self._longest_s, now - self._began)
        self._began = now
        self._num_sessions += 1
        self._shop.progress.step(text)

    def begins(self) -> None:
        """Another round of confirm begins."""
        self._began = self._shop.budget.elapsed()
        self._num_sessions = 0

    def leaves_enough(self) -> bool:
        """Whether the reconfirm's sessions and the module's build still fit.

        A round that has begun goes on to its first look while there is any time: less than that decides nothing.
        """
        policy = self._shop.task.policy
        if 0 < self._num_sessions < policy.looks[0]:
            return not self._shop.budget.expired()
        needed_s = policy.fixed_sessions * RECONFIRM_SHARE * self._longest_s + PUBLISH_S
        return self._shop.budget.fits(needed_s)


def _policy_at(shop: Shop, depth: int) -> Policy:
    """Return the policy of cells that were split ``depth`` times.

    One guarantee over the table has to pay for halves too: whole cells get one half of alpha, and each of the three
    depths, with at most 2^depth times as many cells, a third of the other half.
    """
    policy = shop.task.policy
    if not shop.task.options.alpha_table:
        return policy
    shares = 2 if depth == 0 else 2 * decide.MAX_SPLITS * 2**depth
    return replace(policy, num_keys=policy.num_keys * shares)


def _halves(shop: Shop, key: FeatureKey) -> tuple[FeatureKey, ...]:
    return split_key(key, shop.task.features, shop.task.sets.tune, shop.task.definition)


def _reconfirm(
    shop: Shop, replaced: Sequence[Decision], keys: Mapping[Cell, FeatureKey]
) -> tuple[list[Decision], tuple[Comparison, ...], int]:
    """Measure winners anew, at the points of their keys and at the boundary workloads of their cells.

    Both in the same fresh sessions: the boundary set judges only rows that the reconfirm leaves standing.
    """
    boundary_keys = _keys_of(shop, replaced, shop.task.sets.boundary, "boundary")
    wrong = _wrong_outputs(shop, replaced, boundary_keys)
    timed = {cell: key for cell, key in boundary_keys.items() if cell not in wrong}
    seen = _assess(shop, replaced, [{d.cell: keys[d.cell] for d in replaced}, timed], "reconfirm")
    checked: list[Decision] = []
    comparisons: list[Comparison] = []
    num_rejected = 0
    for decision in replaced:
        cell, key = decision.cell, keys[decision.cell]
        failures = _failures(shop, seen, key, decision.candidate)
        settled = decide.settle(decision, key, seen.of(str(key)), failures, shop.conditions)
        if cell in boundary_keys and settled.verdict is Verdict.REPLACE:
            asked = boundary_keys[cell]
            estimates = seen.of(str(asked))
            failures = _failures(shop, seen, asked, decision.candidate)
            failures += [wrong[cell]] if cell in wrong else []
            settled = decide.check_boundary(settled, asked.points, estimates, failures)
            num_rejected += settled.revoked
            comparisons += [
                decide.compare(estimate, point, "boundary", shop.conditions)
                for point, estimate in zip(asked.points, estimates, strict=False)
                if estimate is not None
            ]
        checked.append(settled)
    return checked, tuple(comparisons), num_rejected


def _failures(shop: Shop, seen: Assessment, key: FeatureKey, winner: str) -> list[ArmFailure]:
    """Return what failed at ``key``, and also an output of the winner that was found wrong after its last session."""
    failures = [failure for failure in seen.failures if failure.arm.key == str(key)]
    late = shop.evaluator.late_failures.get(winner)
    return failures if late is None else [*failures, ArmFailure(Arm(str(key), 0, winner), late.status, late.log)]


def _wrong_outputs(
    shop: Shop, decisions: Sequence[Decision], keys: Mapping[Cell, FeatureKey]
) -> dict[Cell, ArmFailure]:
    """Return the winners that are wrong on a boundary workload, by cell."""
    wrong: dict[Cell, ArmFailure] = {}
    for decision in decisions:
        if decision.cell in keys and shop.time_left():
            winner = decision.candidate
            outcome = shop.evaluator.validate(shop.candidates[winner], shop.artifacts[winner], keys[decision.cell])
            if outcome.status is not Status.PASSED:
                arm = Arm(str(keys[decision.cell]), 0, winner)
                wrong[decision.cell] = ArmFailure(arm, outcome.status, outcome.log)
    return wrong


def _assess(
    shop: Shop, decisions: Sequence[Decision], groups: Sequence[Mapping[Cell, FeatureKey]], stage: str
) -> Assessment:
    """Measure the winners at every point of every key of ``groups``, in fresh sessions."""
    arms = [
        Arm(str(keys[decision.cell]), point, decision.candidate)
        for keys in groups
        for decision in decisions
        if decision.cell in keys
        for point in range(len(keys[decision.cell].points))
    ]
    shop.progress.stage(stage, shop.task.policy.fixed_sessions if arms else 0)
    if not arms:
        return Assessment(stage, (), (), (), ())
    every_key = [key for keys in groups for key in keys.values()]
    bench = shop.evaluator.bench(arms, shop.artifacts, every_key, fresh_process=True)
    seen = measure.assess(
        bench,
        arms,
        shop.task.policy,
        shop.task.options.seed,
        stage,
        time_left=shop.time_left,
        on_session=lambda session, num_keys: shop.progress.step(f"session {session + 1}, {num_keys} keys"),
    )
    shop.keep_samples(seen.samples)
    return seen


def _keys_of(
    shop: Shop, decisions: Iterable[Decision], workloads: Sequence[Workload], role: str
) -> dict[Cell, FeatureKey]:
    """Return, for every replaced cell that holds some of ``workloads``, a key whose points are these workloads."""
    keys: dict[Cell, FeatureKey] = {}
    for decision in decisions:
        if decision.verdict is not Verdict.REPLACE:
            continue
        inside = [w for w in workloads if decision.cell.holds(feature_values(shop.task.features, w.axes))]
        points = tuple(
            Point(tuple((axis, w.axes[axis]) for axis in shop.task.definition.var_axes), "recorded", w.weight, w.uuid)
            for w in inside
        )
        if points:
            keys[decision.cell] = FeatureKey(decision.cell, points, 0, synthetic=False, role=role)
    return keys


def _num_tested(decisions: Iterable[Decision]) -> int:
    return sum(bool(decision.confirm) for decision in decisions)


def _covering(recorded: Sequence[Decision], cell: Cell) -> list[Decision]:
    """Return the recorded decisions that together cover ``cell``, or nothing where a part is missing."""
    inside = [decision for decision in recorded if _within(decision.cell, cell)]
    return inside if sum(_volume(decision.cell) for decision in inside) == _volume(cell) else []


def _within(inner: Cell, outer: Cell) -> bool:
    pairs = zip(inner.bounds, outer.bounds, strict=True)
    return all(outer_first <= first and last <= outer_last for (first, last), (outer_first, outer_last) in pairs)


def _volume(cell: Cell) -> int:
    return math.prod(last - first + 1 for first, last in cell.bounds)


def _without_finalists(item: Explored) -> Decision:
    if item.partial:
        return decide.inconclusive(item.key, item.ended, partial=True)
    return decide.keep_native(item.key, f"no finalist: {item.ended}")

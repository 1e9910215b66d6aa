"""The proof of keys: finalists race in fresh processes, cells are split, winners have to show it again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fibc import decide, measure
from fibc.key_search import Explored
from fibc.pace import Pace
from fibc.race import Race
from fibc.ride import Entrant, ride
from fibc.schema.cells import split_key
from fibc.schema.decision import Comparison, Decision, Verdict
from fibc.schema.evaluation import Arm, Status
from fibc.schema.evidence import ArmFailure, Assessment, Estimate
from fibc.schema.feature import Cell, FeatureKey, Point, feature_values
from fibc.schema.policy import Policy
from fibc.schema.workload import Workload
from fibc.series import Series
from fibc.shop import Shop
from fibc.sustain import sustain

HEAVY_CALL_S = 0.2
"""Keys whose native call takes longer are proven when the others are settled: one of them can take a minute of a
session (5 s a call, 5 points, 4 finalists), and every other key would wait for it."""


def usual_sessions(policy: Policy) -> int:
    """Return how many sessions a table takes where every race ends at the first look, test set included."""
    return policy.looks[0] + 2 * policy.fixed_sessions


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


def prove(shop: Shop, explored: Sequence[Explored]) -> Proof:
    """Return the decision of every cell, from data that the search has not seen.

    Cells that an earlier run with the same fingerprint settled are answered from the record.
    """
    recorded = shop.verdicts.decisions()
    settled: list[Decision] = []
    proving = _Proving(shop)
    for item in explored:
        known = decide.covering(recorded, item.key.cell)
        if known:
            settled += known
        elif item.finalists:
            proving.admit(item.key, item.finalists, heavy=item.native_s > HEAVY_CALL_S)
        else:
            settled.append(_without_finalists(item))
            proving.keep(settled[-1])
    num_tested = _num_tested(settled)
    proving.run()
    final = sorted([*settled, *proving.decisions], key=lambda decision: decision.cell)
    num_rejected = sum(decision.boundary_rejected for decision in final)
    return Proof(tuple(final), tuple(proving.boundary), num_rejected, num_tested + proving.num_tested)


def recorded_proof(shop: Shop) -> Proof | None:
    """Return what is settled already, for a run that was interrupted; None where nothing would be replaced."""
    keys = [key.cell for key in shop.task.keys]
    recorded = shop.verdicts.decisions()
    settled = [decision for cell in keys for decision in decide.covering(recorded, cell)]
    if not any(decision.verdict is Verdict.REPLACE for decision in settled):
        return None
    open_keys = [key for key in shop.task.keys if not decide.covering(recorded, key.cell)]
    settled += [decide.inconclusive(key, "the run was interrupted", partial=True) for key in open_keys]
    num_rejected = sum(decision.boundary_rejected for decision in settled)
    return Proof(tuple(sorted(settled, key=lambda d: d.cell)), (), num_rejected, _num_tested(settled))


def read_test_set(shop: Shop, decisions: Sequence[Decision]) -> tuple[tuple[Comparison, ...], tuple[str, ...]]:
    """Measure the test workloads that fall into replaced cells, once; return them, and a line for each slower one."""
    keys = _keys_of(shop, decisions, shop.task.sets.test, "test")
    seen = _assess(shop, decisions, keys, "test")
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


@dataclass
class _CellProof:
    """One cell on its way to a decision: a race of its finalists, then a series of the winner.

    Attributes:
        race: The confirm sessions.
        accepted: A replacement that fresh sessions have to show again; None while the race goes on.
        series: Its reconfirm sessions.
        asked: The boundary workloads of the cell as a key; None where there are none.
        boundary: Their sessions.
        wrong: An output of the winner that was wrong on a boundary workload.
        sustained: How the winner did alone for long; empty where that was not looked at.
    """

    key: FeatureKey
    finalists: tuple[str, ...]
    num_splits: int
    race: Race
    accepted: Decision | None = None
    series: Series | None = None
    asked: FeatureKey | None = None
    boundary: Series | None = None
    wrong: list[ArmFailure] = field(default_factory=list)
    sustained: str = ""

    def entrants(self) -> list[Entrant]:
        """Return what rides in the next session."""
        return [rider for rider in (self.series or self.race, self.boundary) if rider is not None and rider.open]


class _Proving:
    """The sessions of a proof. Cells at every stage ride in the same ones, so that no stage waits for another's last.

    Attributes:
        decisions: Of the cells that are settled.
        boundary: Evidence of the boundary workloads of cells that were to be replaced.
        num_tested: Cells that were confirmed, whatever their verdict.
    """

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._pace = Pace(shop)
        self._arms: list[Arm] = []
        self._keys: list[FeatureKey] = []
        self._cells: list[_CellProof] = []
        self._waiting: list[tuple[FeatureKey, tuple[str, ...]]] = []
        self.decisions: list[Decision] = []
        self.boundary: list[Comparison] = []
        self.num_tested = 0

    def admit(self, key: FeatureKey, finalists: tuple[str, ...], num_splits: int = 0, *, heavy: bool = False) -> None:
        """Let the finalists of a key race, those of a heavy one when the others are settled."""
        if heavy:
            self._waiting.append((key, finalists))
            return
        indexes = self._add_arms(key, finalists)
        race = Race(str(key), self._arms, indexes, _policy_at(self._shop, num_splits))
        self._cells.append(_CellProof(key, finalists, num_splits, race))
        self.num_tested += 1

    def run(self) -> None:
        """Hold sessions until every cell is settled or time runs out."""
        shop, seed = self._shop, self._shop.task.options.seed
        policy = shop.task.policy
        shop.progress.stage("prove", policy.looks[-1] + policy.fixed_sessions if self._cells or self._waiting else 0)
        self._pace.begins()
        index = 0
        while self._cells or self._waiting:
            if not self._cells:
                self._admit_waiting()
            num_races = sum(cell.accepted is None for cell in self._cells)
            self._conclude_races(may_go_on=self._pace.leaves_enough(index, num_races))
            riders = [rider for cell in self._cells for rider in cell.entrants()]
            if not shop.time_left():
                break
            if not riders:
                continue
            if not shop.time_to_start():
                break
            bench = shop.evaluator.bench(self._arms, shop.artifacts, self._keys, fresh_process=True)
            ride(bench, riders, measure.session_seed(seed, "prove", index), shop.time_left)
            index += 1
            num_racing = sum(cell.accepted is None for cell in self._cells)
            self._pace.ended(
                f"session {index}: {num_racing} keys in confirm, {len(self._cells) - num_racing} in reconfirm"
            )
            self._conclude_series()
        self._conclude_races(may_go_on=False)  # where time ran out meanwhile
        for cell in self._cells:
            self._settle(cell)
        for key, _ in self._waiting:
            self._end(decide.inconclusive(key, "the budget ended before its calls could be timed", partial=True))

    def _admit_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for key, finalists in waiting:
            self.admit(key, finalists)

    def keep(self, decision: Decision) -> None:
        """Record a decision that is final, or say that its evidence is cut short."""
        if decision.partial:
            self._shop.budget.cut(f"evidence of {decision.cell}")
        else:
            self._shop.verdicts.append("decision", decision)

    def _add_arms(self, key: FeatureKey, candidates: Sequence[str]) -> list[int]:
        first = len(self._arms)
        self._arms += [Arm(str(key), point, digest) for digest in candidates for point in range(len(key.points))]
        self._keys.append(key)
        return list(range(first, len(self._arms)))

    def _end(self, decision: Decision) -> None:
        self.keep(decision)
        self.decisions.append(decision)

    def _conclude_races(self, *, may_go_on: bool) -> None:
        """Decide the cells whose race is over, or all where races must end; let halves race and winners go on."""
        over = [cell for cell in self._cells if cell.accepted is None and not (cell.race.open and may_go_on)]
        self._cells = [cell for cell in self._cells if cell not in over]
        accepted: list[_CellProof] = []
        for cell in over:
            confirmation = cell.race.result()
            self._shop.keep_samples(confirmation.samples)
            task = self._shop.task
            outcome = decide.decide(
                cell.key, confirmation, task.policy, self._shop.conditions, num_splits=cell.num_splits
            )
            if isinstance(outcome, decide.Split):
                halves = self._halves(outcome)
                for half in halves:
                    self.admit(half, outcome.candidates, outcome.num_splits)
                if not halves:
                    self._end(outcome.decision)
            elif outcome.verdict is Verdict.REPLACE:
                cell.accepted = self._sustained(cell, outcome)
                if cell.accepted.revoked:
                    self._end(cell.accepted)
                else:
                    accepted.append(cell)
            else:
                self._end(outcome)
        self._reconfirm(accepted)

    def _sustained(self, cell: _CellProof, accepted: Decision) -> Decision:
        """Return an acceptance, or what it is revoked for: on a GPU a winner must hold when it runs alone for long."""
        seen = sustain(self._shop, accepted.candidate, cell.key)
        if seen is None:
            return accepted
        cell.sustained = str(seen)
        return decide.check_sustained(accepted, seen)

    def _halves(self, split: decide.Split) -> tuple[FeatureKey, ...]:
        policy, task = self._shop.task.policy, self._shop.task
        if not self._pace.fits(policy.looks[0] + policy.fixed_sessions):
            return ()
        return split_key(split.key, task.features, task.sets.tune, task.definition)

    def _reconfirm(self, cells: Sequence[_CellProof]) -> None:
        """Let winners ride anew, at the points of their keys and at the boundary workloads of their cells."""
        shop = self._shop
        policy = shop.task.policy
        accepted = {cell.key.cell: cell.accepted for cell in cells if cell.accepted is not None}
        boundary = _keys_of(shop, accepted.values(), shop.task.sets.boundary, "boundary")
        wrong = _wrong_outputs(shop, accepted.values(), boundary)
        for cell in cells:
            winner = accepted[cell.key.cell].candidate
            indexes = self._add_arms(cell.key, [winner])
            cell.series = Series(self._arms, indexes, policy, "reconfirm")
            cell.asked = boundary.get(cell.key.cell)
            if cell.key.cell in wrong:
                cell.wrong.append(wrong[cell.key.cell])
            elif cell.asked is not None:
                cell.boundary = Series(self._arms, self._add_arms(cell.asked, [winner]), policy, "boundary")
        self._cells += cells

    def _conclude_series(self) -> None:
        done = [cell for cell in self._cells if cell.accepted is not None and not cell.entrants()]
        self._cells = [cell for cell in self._cells if cell not in done]
        for cell in done:
            self._settle(cell)

    def _settle(self, cell: _CellProof) -> None:
        """Publish or revoke a replacement, from its fresh sessions alone."""
        assert cell.accepted is not None
        assert cell.series is not None
        shop, decision = self._shop, cell.accepted
        late = shop.evaluator.late_failures.get(decision.candidate)
        known = [] if late is None else [ArmFailure(Arm(str(cell.key), 0, decision.candidate), late.status, late.log)]
        shop.keep_samples(cell.series.samples)
        estimates = list(cell.series.estimates().values())
        settled = decide.settle(decision, cell.key, estimates, [*cell.series.failures, *known], shop.conditions)
        if cell.asked is not None and settled.verdict is Verdict.REPLACE:
            seen: list[Estimate | None] = [None] * len(cell.asked.points)
            failures = list(cell.wrong)
            if cell.boundary is not None:
                shop.keep_samples(cell.boundary.samples)
                seen = list(cell.boundary.estimates().values())
                failures += cell.boundary.failures
            settled = decide.check_boundary(settled, cell.asked.points, seen, failures)
            self.boundary += [
                decide.compare(estimate, point, "boundary", shop.conditions)
                for point, estimate in zip(cell.asked.points, seen, strict=True)
                if estimate is not None
            ]
        if cell.sustained and settled.verdict is Verdict.REPLACE:
            settled = replace(settled, reason=f"{settled.reason}; {cell.sustained}")
        self._end(settled)


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


def _wrong_outputs(
    shop: Shop, decisions: Iterable[Decision], keys: Mapping[Cell, FeatureKey]
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


def _assess(shop: Shop, decisions: Sequence[Decision], keys: Mapping[Cell, FeatureKey], stage: str) -> Assessment:
    """Measure the winners at every point of ``keys``, in fresh sessions."""
    arms = [
        Arm(str(keys[decision.cell]), point, decision.candidate)
        for decision in decisions
        if decision.cell in keys
        for point in range(len(keys[decision.cell].points))
    ]
    num_sessions = shop.task.policy.fixed_sessions
    shop.progress.stage(stage, num_sessions if arms else 0)
    if not arms:
        return Assessment(stage, (), (), (), ())
    bench = shop.evaluator.bench(arms, shop.artifacts, list(keys.values()), fresh_process=True)
    fits = shop.time_to_start(num_sessions)
    seen = measure.assess(
        bench,
        arms,
        shop.task.policy,
        shop.task.options.seed,
        stage,
        time_left=lambda: fits and shop.time_left(),
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


def _without_finalists(item: Explored) -> Decision:
    if item.partial:
        return decide.inconclusive(item.key, item.ended, partial=True)
    return decide.keep_native(item.key, f"no finalist: {item.ended}")

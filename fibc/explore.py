"""The search of keys: ask for configs, build and try them, tell the study, and reduce what passed to finalists."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from fibc import decide, measure
from fibc.ahead import Ahead, Plan, compilers_ahead
from fibc.backends.base import Backend, BuildFailure
from fibc.clock import now
from fibc.process_bench import Outcome
from fibc.sanitize import recall, sanitize
from fibc.schema.candidate import Artifact, Candidate
from fibc.schema.digest import digest_text
from fibc.schema.evaluation import Arm, Evaluation, Pair, Status
from fibc.schema.feature import Cell, FeatureKey
from fibc.schema.space import Space
from fibc.search.store import StudyStore, Trial
from fibc.search.study import KeyStudy, Proposal, open_study
from fibc.search.warm import trailing, warm_start
from fibc.settings import compile_timeout_s
from fibc.shop import Shop

LONG_TRIAL_S = 0.3
LEAST_PART = 4
"""Where a key's shortest trial takes longer, the key gets fewer trials in proportion, a quarter of them in any case:
its neighbour's best configs come first and are close. Without it six keys of long calls of defs/gemm.json (0.03 to
0.15 s a call) take half of the search."""

PATIENCE_PART = 3
"""A key is done when its design is, and a third of all trials found nothing faster: finalists are the best four, and
what comes next is another of the configs that differ by less than a trial's noise."""

STAYS_BROKEN = frozenset(
    {
        Status.COMPILE_ERROR,
        Status.RESOURCE,
        Status.INCORRECT_SHAPE,
        Status.INCORRECT_DTYPE,
        Status.INCORRECT_NUMERICAL,
    }
)
"""Failures that belong to a candidate's binary, whatever driver or torch it met; after a crash or a timeout in another
environment it is tried again."""

BATCH_PER_JOB = 2
BATCHES = 4
"""Configs asked for at once: so many per compiler, as builds and measurements alternate and both want every core; and
no more than a quarter of the trials, or the study would learn nothing on a machine of many cores."""


@dataclass(frozen=True)
class Explored:
    """One key after its search.

    Attributes:
        finalists: Digests of the candidates that go on to confirm, best first.
        ended: Why the search ended.
        partial: The budget ended it.
        native_s: Native's shortest call that was seen at the screening point; 0 where none was timed.
    """

    key: FeatureKey
    finalists: tuple[str, ...]
    ended: str
    partial: bool
    native_s: float = 0.0


def explore(shop: Shop, store: StudyStore, keys: Sequence[FeatureKey]) -> tuple[Explored, ...]:
    """Search every key in the order given; a later key starts from the best of its nearest neighbour.

    A key whose search was finished, or whose cell was decided, by an earlier run with the same fingerprint is answered
    from the record.

    Raises:
        KeyboardInterrupt: As the user asks; what was recorded stays.
    """
    if shop.task.sanitizer is not None:
        recall(shop, shop.task.sanitizer)
    ahead = _ahead(shop, store, keys)
    try:
        with ahead:
            explored = _explore(shop, store, keys, ahead)
        return _with_artifacts(shop, ahead, explored)
    finally:
        shop.builds = ahead.counts


def _explore(shop: Shop, store: StudyStore, keys: Sequence[FeatureKey], ahead: Ahead) -> list[Explored]:
    done = _recorded_finalists(shop)
    decided = shop.verdicts.decisions()
    earlier = shop.log.earlier_evaluations()
    best: dict[Cell, Sequence[Trial]] = _shown_earlier(shop, keys, earlier)
    explored: list[Explored] = []
    for index, key in enumerate(keys):
        if known := decide.covering(decided, key.cell):
            winners = tuple(dict.fromkeys(decision.candidate for decision in known if decision.candidate))
            explored.append(Explored(key, winners, "decided by an earlier run", partial=False))
            shop.progress.step(f"{key}: decided by an earlier run")
            continue
        if str(key) in done:
            explored.append(Explored(key, done[str(key)], "answered from the record", partial=False))
            shop.progress.step(f"{key}: {len(done[str(key)])} finalists, answered from the record")
            continue
        share_s = shop.budget.share_for_key(index, len(keys))
        ahead.reach(index)
        result = _KeySearch(shop, store, key, best, earlier, ahead).run(share_s)
        best[key.cell] = result.trials
        explored.append(result.explored)
        if result.explored.partial:
            shop.budget.cut(f"search of {key}")
        else:
            shop.verdicts.append("finalists", {"key": str(key), "candidates": list(result.explored.finalists)})
        shop.progress.step(result.line)
    return explored


@dataclass(frozen=True)
class _Outcome:
    explored: Explored
    trials: tuple[Trial, ...]
    line: str


class _KeySearch:
    """The search of one key."""

    def __init__(
        self,
        shop: Shop,
        store: StudyStore,
        key: FeatureKey,
        best: Mapping[Cell, Sequence[Trial]],
        earlier: Sequence[Evaluation],
        ahead: Ahead,
    ) -> None:
        self._shop = shop
        self._ahead = ahead
        self._key = key
        self._owner, spaces = _spaces(shop, key)
        self._cut = False
        self._recorded = shop.log.evaluations()
        self._broken = {
            **_broken(item for item in earlier if item.status in STAYS_BROKEN),
            **_broken(self._recorded.values()),
        }
        self._by_binary: dict[str, Evaluation] = {}
        self._seed = _key_seed(shop.task.options.seed, key)
        self._rng = random.Random(self._seed)
        self._study = _open_study(shop, store, key, spaces, best, fresh=shop.task.options.fresh)

    def run(self, share_s: float) -> _Outcome:
        """Search until trials, configs, hope or time run out, then screen."""
        shop = self._shop
        ends = time.monotonic() + share_s
        options = shop.task.options
        batch = max(1, min(options.jobs * BATCH_PER_JOB, shop.task.trials // BATCHES))
        while time.monotonic() < ends and (proposals := self._study.ask_batch(batch)):
            self._try_batch(proposals, ends)
        finalists = self._screen() if shop.time_left() else ()
        partial = self._study.stopped is None or self._cut
        trials = self._study.best(len(self._study.finished))
        failed = sum(trial.value is None for trial in self._study.finished)
        lead = f"best {math.exp(trials[0].value or 0.0):.2f}x" if trials else "none passed"
        ended = self._study.stopped or "the budget of the search ended"
        line = f"{self._key}: {len(self._study.finished)} trials, {failed} failed, {lead}, {len(finalists)} finalists"
        return _Outcome(Explored(self._key, finalists, ended, partial), trials, line)

    def _try_batch(self, proposals: Sequence[Proposal], ends: float) -> None:
        shop = self._shop
        chosen = {p.number: shop.introduce(self._owner[p.template], p.template, dict(p.config)) for p in proposals}
        unknown = [c for c in chosen.values() if self._known(c) is None]
        built = _build(shop, self._ahead, self._owner, unknown)
        for proposal in proposals:
            candidate = chosen[proposal.number]
            over = time.monotonic() >= ends and (bool(self._study.finished) or not shop.time_left())
            if over or self._study.is_left_behind(proposal.template):
                self._study.forget(proposal.number)
                continue
            evaluation = self._known(candidate)
            if evaluation is None:
                evaluation = self._evaluate(candidate, built[candidate.digest])
                shop.log.append("evaluation", evaluation)
                self._recorded[str(self._key), candidate.digest] = evaluation
                if evaluation.status is not Status.PASSED:
                    self._broken.setdefault(candidate.digest, evaluation)
            value = measure.screen_value(evaluation.pairs) if evaluation.pairs else None
            self._study.tell(proposal.number, value, evaluation.status, evaluation.log)
        taken_s = [self._recorded[str(self._key), c.digest].duration_s for c in unknown if self._is_timed(c)]
        shortest_s = min(taken_s, default=0.0)
        if shortest_s > LONG_TRIAL_S:
            trials = shop.task.trials
            self._study.limit(max(1, trials // LEAST_PART, int(trials * LONG_TRIAL_S / shortest_s)))

    def _is_timed(self, candidate: Candidate) -> bool:
        evaluation = self._recorded.get((str(self._key), candidate.digest))
        return evaluation is not None and evaluation.status is Status.PASSED and evaluation.duration_s > 0

    def _known(self, candidate: Candidate) -> Evaluation | None:
        """Return what the record says: of this key, or a failure at any key. A failed candidate is not tried again."""
        return self._recorded.get((str(self._key), candidate.digest)) or self._broken.get(candidate.digest)

    def _evaluate(self, candidate: Candidate, built: Artifact | BuildFailure) -> Evaluation:
        shop, key = self._shop, str(self._key)
        began = time.monotonic()
        environment = shop.log.environment
        if isinstance(built, BuildFailure):
            status = Status.TIMEOUT if built.timed_out else Status.COMPILE_ERROR
            return Evaluation(candidate.digest, key, status, built.log, None, (), environment, 0.0, now())
        twin = self._by_binary.get(built.digest)
        if twin is not None:
            return Evaluation(
                candidate.digest, key, twin.status, twin.log, twin.correctness, twin.pairs, environment, 0.0, now()
            )
        with ExitStack() as stack:
            with shop.spent("validate"):
                trial = stack.enter_context(shop.evaluator.trial(candidate, built, self._key))
            status, log = trial.status, trial.log
            pairs: tuple[Pair, ...] = ()
            if status is Status.PASSED:
                try:
                    with shop.spent("screen"):
                        pairs = measure.first_rung(trial.session, 0, shop.task.policy, self._rng)
                    if measure.screen_value(pairs) < shop.task.policy.promote_above:
                        trial.dismiss()
                except measure.ArmFailed as error:
                    status, log = error.status, error.log
            correctness = trial.correctness
        evaluation = Evaluation(
            candidate.digest, key, status, log, correctness, pairs, environment, time.monotonic() - began, now()
        )
        self._by_binary[built.digest] = evaluation
        return evaluation

    def _screen(self) -> tuple[str, ...]:
        """Return the finalists of the trials that passed; each binary rides once, and is validated at every point."""
        shop, key = self._shop, self._key
        passed: dict[str, tuple[str, float]] = {}
        for trial in self._study.best(len(self._study.finished)):
            candidate = shop.introduce(self._owner[trial.template], trial.template, dict(trial.config))
            artifact = _build(shop, self._ahead, self._owner, [candidate])[candidate.digest]
            if isinstance(artifact, Artifact) and trial.value is not None:
                passed.setdefault(artifact.digest, (candidate.digest, trial.value))
        arms = tuple(Arm(str(key), key.screen_point, digest) for digest, _ in passed.values())
        values = tuple(value for _, value in passed.values())
        bench = shop.evaluator.bench(arms, shop.artifacts, (key,), fresh_process=False)
        with shop.spent("screen"):
            screening = measure.screen(bench, arms, values, shop.task.policy, self._seed)
        shop.keep_samples(screening.samples)
        finalists = []
        for arm in screening.finalists:
            with shop.spent("validate"):
                outcome = shop.evaluator.validate(shop.candidates[arm.candidate], shop.artifacts[arm.candidate], key)
            if outcome.status is Status.PASSED and shop.task.sanitizer is not None:
                found = sanitize(shop, shop.task.sanitizer, arm.candidate, key)
                if found is None:
                    self._cut = True
                    continue
                outcome = Outcome(found.status, found.log, outcome.correctness)
            if outcome.status is Status.PASSED:
                finalists.append(arm.candidate)
            else:
                shop.log.append(
                    "evaluation",
                    Evaluation(
                        arm.candidate,
                        str(key),
                        outcome.status,
                        outcome.log,
                        outcome.correctness,
                        (),
                        shop.log.environment,
                        0.0,
                        now(),
                    ),
                )
        return tuple(finalists)


def _ahead(shop: Shop, store: StudyStore, keys: Sequence[FeatureKey]) -> Ahead:
    """Return the builds of this search, with what each key will ask for as far as nothing measured decides that."""
    task, options = shop.task, shop.task.options
    compilers = compilers_ahead(task.backends[0].target, shop.conditions.mode, options.jobs)
    return Ahead(
        task.definition,
        _plans(shop, store, keys) if compilers else (),
        jobs=options.jobs,
        compilers=compilers,
        timeout_s=lambda backend: shop.budget.deadline_s(compile_timeout_s(backend.name, options.timeout_s)),
        may_begin=lambda: shop.budget.searchable() > 0,
    )


def _plans(shop: Shop, store: StudyStore, keys: Sequence[FeatureKey]) -> list[Plan]:
    """Return the plan of each key: its design, but for its neighbour's best, without what the record knows.

    Spaces are asked for and studies opened here and now: a backend may use the GPU for the one, which then measures
    nothing yet, and the storage is for one thread.
    """
    recorded = shop.log.evaluations()
    broken = _broken(recorded.values())
    decided, done = shop.verdicts.decisions(), _recorded_finalists(shop)

    def plan_of(key: FeatureKey) -> Plan:
        if decide.covering(decided, key.cell) or str(key) in done:
            return lambda: ()
        owner, spaces = _spaces(shop, key)
        # A fresh run forgets stored trials when the key's turn comes: its draws are those of a study without any.
        study = _open_study(shop, None if shop.task.options.fresh else store, key, spaces, {}, fresh=False)

        def asked() -> Iterator[tuple[Backend, Candidate]]:
            for proposal in study.ask_batch(study.num_design):
                backend = owner[proposal.template]
                candidate = backend.candidate(shop.task.definition, proposal.template, dict(proposal.config))
                if (str(key), candidate.digest) not in recorded and candidate.digest not in broken:
                    yield backend, candidate

        return asked

    return [plan_of(key) for key in keys]


def _spaces(shop: Shop, key: FeatureKey) -> tuple[dict[str, Backend], list[Space]]:
    """Return the spaces of a key, and which backend each template belongs to."""
    owner: dict[str, Backend] = {}
    spaces: list[Space] = []
    for backend in shop.task.backends:
        for space in backend.spaces(shop.task.definition, key)[0]:
            spaces.append(space)
            owner[space.template] = backend
    return owner, spaces


def _open_study(
    shop: Shop,
    store: StudyStore | None,
    key: FeatureKey,
    spaces: Sequence[Space],
    best: Mapping[Cell, Sequence[Trial]],
    *,
    fresh: bool,
) -> KeyStudy:
    return open_study(
        store,
        f"{shop.task.definition.name} {shop.log.definition} {shop.log.environment} {key}",
        spaces,
        seed=_key_seed(shop.task.options.seed, key),
        trials=shop.task.trials,
        warm_start=warm_start(key.cell, best),
        trailing=trailing(key.cell, best),
        fresh=fresh,
        patience=math.ceil(shop.task.trials / PATIENCE_PART),
    )


def _build(
    shop: Shop, ahead: Ahead, owner: Mapping[str, Backend], candidates: Sequence[Candidate]
) -> dict[str, Artifact | BuildFailure]:
    """Build what is not built yet, every compiler at once, and remember the artifacts."""
    results: dict[str, Artifact | BuildFailure] = {
        c.digest: shop.artifacts[c.digest] for c in candidates if c.digest in shop.artifacts
    }
    missing = [c for c in candidates if c.digest not in results]
    for backend in {owner[c.template].name: owner[c.template] for c in missing}.values():
        mine = [c for c in missing if owner[c.template] is backend]
        with shop.spent("compile"):
            results |= ahead.build(backend, mine)
    shop.artifacts |= {digest: built for digest, built in results.items() if isinstance(built, Artifact)}
    return results


def _recorded_finalists(shop: Shop) -> dict[str, tuple[str, ...]]:
    return {value["key"]: tuple(value["candidates"]) for value in shop.verdicts.own("finalists")}


def _with_artifacts(shop: Shop, ahead: Ahead, explored: Sequence[Explored]) -> tuple[Explored, ...]:
    """Make sure that every finalist is built, also one that the record answered; a lost one is no finalist."""
    recorded = shop.log.candidates()
    owners = {backend.name: backend for backend in shop.task.backends}
    native: dict[str, list[float]] = {}
    for (key, _), evaluation in shop.log.evaluations().items():
        native.setdefault(key, []).extend(pair.native_s for pair in evaluation.pairs)
    kept = []
    for item in explored:
        finalists = []
        for digest in item.finalists:
            candidate = shop.candidates.get(digest) or recorded.get(digest)
            if candidate is None or candidate.backend not in owners:
                continue
            shop.candidates[digest] = candidate
            built = _build(shop, ahead, {candidate.template: owners[candidate.backend]}, [candidate])[digest]
            if isinstance(built, Artifact):
                finalists.append(digest)
        native_s = min(native.get(str(item.key), ()), default=0.0)
        kept.append(replace(item, finalists=tuple(finalists), native_s=native_s))
    return tuple(kept)


def _shown_earlier(
    shop: Shop, keys: Sequence[FeatureKey], earlier: Sequence[Evaluation]
) -> dict[Cell, Sequence[Trial]]:
    """Return the trials of other environments by cell, best first: the search of a cell starts from them."""
    cells = {str(key): key.cell for key in keys}
    candidates = shop.log.every_candidate() if earlier else {}
    shown: dict[Cell, dict[str, Trial]] = {}
    for item in earlier:
        candidate = candidates.get(item.candidate)
        if item.key in cells and item.pairs and candidate is not None:
            trial = Trial(candidate.template, candidate.config, measure.screen_value(item.pairs), item.status)
            shown.setdefault(cells[item.key], {})[item.candidate] = trial
    return {
        cell: tuple(sorted(trials.values(), key=lambda trial: -(trial.value or 0.0))) for cell, trials in shown.items()
    }


def _broken(evaluations: Iterable[Evaluation]) -> dict[str, Evaluation]:
    return {item.candidate: item for item in evaluations if item.status is not Status.PASSED}


def _key_seed(seed: int, key: FeatureKey) -> int:
    return int(digest_text(str(seed), "search", str(key))[:8], 16)

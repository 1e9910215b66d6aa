"""The search of one key: ask for configs, build and try them, tell the study, and reduce what passed to finalists."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from fibc import measure
from fibc.ahead import Ahead
from fibc.backends.base import Backend, BuildFailure
from fibc.clock import now
from fibc.known import Known
from fibc.process_bench import Outcome
from fibc.sanitize import sanitize
from fibc.schema.candidate import Artifact, Candidate
from fibc.schema.digest import digest_text
from fibc.schema.evaluation import Arm, Correctness, Evaluation, Pair, Status
from fibc.schema.feature import Cell, FeatureKey
from fibc.schema.space import Space
from fibc.search.store import StudyStore, Trial
from fibc.search.study import KeyStudy, Proposal, open_study
from fibc.search.warm import trailing, warm_start
from fibc.shop import Shop

LONG_TRIAL_S = 0.3
LEAST_PART = 4
"""Where a key's shortest trial takes longer, the key gets fewer trials in proportion, a quarter of them in any case:
its neighbour's best configs come first and are close. Without it six keys of long calls of defs/gemm.json (0.03 to
0.15 s a call) take half of the search."""

PATIENCE_PART = 3
"""A key is done when its design is, and a third of all trials found nothing faster: finalists are the best four, and
what comes next is another of the configs that differ by less than a trial's noise."""

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


@dataclass(frozen=True)
class Searched:
    """A key's search, with its trials, best first, and a line about it."""

    explored: Explored
    trials: tuple[Trial, ...]
    line: str


class KeySearch:
    """The search of one key."""

    def __init__(
        self,
        shop: Shop,
        store: StudyStore,
        key: FeatureKey,
        best: Mapping[Cell, Sequence[Trial]],
        known: Known,
        ahead: Ahead,
    ) -> None:
        self._shop = shop
        self._ahead = ahead
        self._key = key
        self._known = known
        self._owner, spaces = spaces_of(shop, key)
        self._cut = False
        self._by_binary: dict[str, Evaluation] = {}
        self._seed = seed_of(shop.task.options.seed, key)
        self._rng = random.Random(self._seed)
        self._study = study_of(shop, store, key, spaces, best, fresh=shop.task.options.fresh)

    def run(self, share_s: float) -> Searched:
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
        return Searched(Explored(self._key, finalists, ended, partial), trials, line)

    def _try_batch(self, proposals: Sequence[Proposal], ends: float) -> None:
        shop = self._shop
        chosen = {p.number: shop.introduce(self._owner[p.template], p.template, dict(p.config)) for p in proposals}
        unknown = [c for c in chosen.values() if self._known.find(self._key, c.digest) is None]
        built = build(shop, self._ahead, self._owner, unknown)
        for proposal in proposals:
            candidate = chosen[proposal.number]
            over = time.monotonic() >= ends and (bool(self._study.finished) or not shop.time_left())
            if over or self._study.is_left_behind(proposal.template):
                self._study.forget(proposal.number)
                continue
            evaluation = self._known.find(self._key, candidate.digest)
            if evaluation is None:
                evaluation = self._evaluate(candidate, built[candidate.digest])
                self._known.append(evaluation)
            value = measure.screen_value(evaluation.pairs) if evaluation.pairs else None
            self._study.tell(proposal.number, value, evaluation.status, evaluation.log)
        tried = [item for c in unknown if (item := self._known.at(self._key, c.digest)) is not None]
        timed = [item.duration_s for item in tried if item.status is Status.PASSED and item.duration_s > 0]
        shortest_s = min(timed, default=0.0)
        if shortest_s > LONG_TRIAL_S:
            trials = shop.task.trials
            self._study.limit(max(1, trials // LEAST_PART, int(trials * LONG_TRIAL_S / shortest_s)))

    def _evaluate(self, candidate: Candidate, built: Artifact | BuildFailure) -> Evaluation:
        shop = self._shop
        began = time.monotonic()
        if isinstance(built, BuildFailure):
            return self._seen(candidate.digest, Status.TIMEOUT if built.timed_out else Status.COMPILE_ERROR, built.log)
        twin = self._by_binary.get(built.digest)
        if twin is not None:
            return self._seen(candidate.digest, twin.status, twin.log, twin.correctness, twin.pairs)
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
        taken_s = time.monotonic() - began
        evaluation = self._seen(candidate.digest, status, log, correctness, pairs, taken_s)
        self._by_binary[built.digest] = evaluation
        return evaluation

    def _seen(
        self,
        candidate: str,
        status: Status,
        log: str,
        correctness: Correctness | None = None,
        pairs: tuple[Pair, ...] = (),
        taken_s: float = 0.0,
    ) -> Evaluation:
        environment = self._shop.log.environment
        return Evaluation(candidate, str(self._key), status, log, correctness, pairs, environment, taken_s, now())

    def _screen(self) -> tuple[str, ...]:
        """Return the finalists of the trials that passed; each binary rides once, and is validated at every point."""
        shop, key = self._shop, self._key
        passed: dict[str, tuple[str, float]] = {}
        for trial in self._study.best(len(self._study.finished)):
            candidate = shop.introduce(self._owner[trial.template], trial.template, dict(trial.config))
            artifact = build(shop, self._ahead, self._owner, [candidate])[candidate.digest]
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
                self._known.append(self._seen(arm.candidate, outcome.status, outcome.log, outcome.correctness))
        return tuple(finalists)


def spaces_of(shop: Shop, key: FeatureKey) -> tuple[dict[str, Backend], list[Space]]:
    """Return the spaces of a key, and which backend each template belongs to."""
    owner: dict[str, Backend] = {}
    spaces: list[Space] = []
    for backend in shop.task.backends:
        for space in backend.spaces(shop.task.definition, key)[0]:
            spaces.append(space)
            owner[space.template] = backend
    return owner, spaces


def study_of(
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
        seed=seed_of(shop.task.options.seed, key),
        trials=shop.task.trials,
        warm_start=warm_start(key.cell, best),
        trailing=trailing(key.cell, best),
        fresh=fresh,
        patience=math.ceil(shop.task.trials / PATIENCE_PART),
    )


def build(
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


def seed_of(seed: int, key: FeatureKey) -> int:
    return int(digest_text(str(seed), "search", str(key))[:8], 16)

"""The search of all keys, one after another: what is known is answered from the record, the rest is built ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fibc import decide, measure
from fibc.ahead import Ahead, Plan, compilers_ahead
from fibc.backends.base import Backend
from fibc.key_search import Explored, KeySearch, build, spaces_of, study_of
from fibc.known import Known
from fibc.sanitize import recall
from fibc.schema.candidate import Artifact, Candidate
from fibc.schema.evaluation import Evaluation
from fibc.schema.feature import Cell, FeatureKey
from fibc.search.store import StudyStore, Trial
from fibc.settings import compile_timeout_s
from fibc.shop import Shop


def explore(shop: Shop, store: StudyStore, keys: Sequence[FeatureKey]) -> tuple[Explored, ...]:
    """Search every key in the order given; a later key starts from the best of its nearest neighbour.

    A key whose search was finished, or whose cell was decided, by an earlier run with the same fingerprint is answered
    from the record.

    Raises:
        KeyboardInterrupt: As the user asks; what was recorded stays.
    """
    if shop.task.sanitizer is not None:
        recall(shop, shop.task.sanitizer)
    known = Known(shop.log)
    ahead = _ahead(shop, store, keys, known)
    try:
        with ahead:
            explored = _explore(shop, store, keys, known, ahead)
        return _with_artifacts(shop, known, ahead, explored)
    finally:
        shop.builds = ahead.counts


def _explore(shop: Shop, store: StudyStore, keys: Sequence[FeatureKey], known: Known, ahead: Ahead) -> list[Explored]:
    done = _recorded_finalists(shop)
    decided = shop.verdicts.decisions()
    best: dict[Cell, Sequence[Trial]] = _shown_earlier(shop, keys, known.earlier)
    explored: list[Explored] = []
    for index, key in enumerate(keys):
        if rows := decide.covering(decided, key.cell):
            winners = tuple(dict.fromkeys(decision.candidate for decision in rows if decision.candidate))
            explored.append(Explored(key, winners, "decided by an earlier run", partial=False))
            shop.progress.step(f"{key}: decided by an earlier run")
            continue
        if str(key) in done:
            explored.append(Explored(key, done[str(key)], "answered from the record", partial=False))
            shop.progress.step(f"{key}: {len(done[str(key)])} finalists, answered from the record")
            continue
        share_s = shop.budget.share_for_key(index, len(keys))
        ahead.reach(index)
        result = KeySearch(shop, store, key, best, known, ahead).run(share_s)
        best[key.cell] = result.trials
        explored.append(result.explored)
        if result.explored.partial:
            shop.budget.cut(f"search of {key}")
        else:
            shop.verdicts.append("finalists", {"key": str(key), "candidates": list(result.explored.finalists)})
        shop.progress.step(result.line)
    return explored


def _ahead(shop: Shop, store: StudyStore, keys: Sequence[FeatureKey], known: Known) -> Ahead:
    """Return the builds of this search, with what each key will ask for as far as nothing measured decides that."""
    task, options = shop.task, shop.task.options
    compilers = compilers_ahead(task.backends[0].target, shop.conditions.mode, options.jobs)
    return Ahead(
        task.definition,
        _plans(shop, store, keys, known) if compilers else (),
        jobs=options.jobs,
        compilers=compilers,
        timeout_s=lambda backend: shop.budget.deadline_s(compile_timeout_s(backend.name, options.timeout_s)),
        may_begin=lambda: shop.budget.searchable() > 0,
    )


def _plans(shop: Shop, store: StudyStore, keys: Sequence[FeatureKey], known: Known) -> list[Plan]:
    """Return the plan of each key: its design, but for its neighbour's best, without what the record knows.

    Spaces are asked for and studies opened here and now: a backend may use the GPU for the one, which then measures
    nothing yet, and the storage is for one thread.
    """
    decided, done = shop.verdicts.decisions(), _recorded_finalists(shop)

    def plan_of(key: FeatureKey) -> Plan:
        if decide.covering(decided, key.cell) or str(key) in done:
            return lambda: ()
        owner, spaces = spaces_of(shop, key)
        # A fresh run forgets stored trials when the key's turn comes: its draws are those of a study without any.
        study = study_of(shop, None if shop.task.options.fresh else store, key, spaces, {}, fresh=False)

        def asked() -> Iterator[tuple[Backend, Candidate]]:
            for proposal in study.ask_batch(study.num_design):
                backend = owner[proposal.template]
                candidate = backend.candidate(shop.task.definition, proposal.template, dict(proposal.config))
                if known.find(key, candidate.digest) is None:
                    yield backend, candidate

        return asked

    return [plan_of(key) for key in keys]


def _recorded_finalists(shop: Shop) -> dict[str, tuple[str, ...]]:
    return {value["key"]: tuple(value["candidates"]) for value in shop.verdicts.own("finalists")}


def _with_artifacts(shop: Shop, known: Known, ahead: Ahead, explored: Sequence[Explored]) -> tuple[Explored, ...]:
    """Make sure that every finalist is built, also one that the record answered; a lost one is no finalist."""
    recorded = shop.log.candidates()
    owners = {backend.name: backend for backend in shop.task.backends}
    natives_s = known.natives_s()
    kept = []
    for item in explored:
        finalists = []
        for digest in item.finalists:
            candidate = shop.candidates.get(digest) or recorded.get(digest)
            if candidate is None or candidate.backend not in owners:
                continue
            shop.candidates[digest] = candidate
            built = build(shop, ahead, {candidate.template: owners[candidate.backend]}, [candidate])[digest]
            if isinstance(built, Artifact):
                finalists.append(digest)
        kept.append(replace(item, finalists=tuple(finalists), native_s=natives_s.get(str(item.key), 0.0)))
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

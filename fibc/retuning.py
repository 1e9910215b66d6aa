"""One package's night: its winners are shown again or demoted, what flipped is searched anew, the rest stays."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fibc import gate
from fibc.backends.compiled_store import CompiledStore
from fibc.cache import Cache
from fibc.codegen.package import current
from fibc.decide import covering
from fibc.errors import InputError
from fibc.evaluate import Evaluator
from fibc.evaluators import evaluator_of
from fibc.explore import explore
from fibc.gpu_lock import lock_devices
from fibc.outcome import run_of
from fibc.paths import OutLayout
from fibc.progress import Progress
from fibc.prove import Proof, prove
from fibc.publish import keep_dataset, publish
from fibc.published import Published, Snapshot
from fibc.rebuild import environment_of
from fibc.recheck import Rechecked, Standing, key_of, recheck, serving
from fibc.records import RecordLog
from fibc.renew import find_flips, merge, renew, still_tested, take_over
from fibc.runs import RETUNE, evidence_of, find_run, keep_run, pairs_by_stage
from fibc.schema.decision import Decision
from fibc.schema.digest import digest_json
from fibc.schema.facts import differences
from fibc.schema.feature import FeatureKey
from fibc.schema.observed import Observed
from fibc.schema.retune_options import RetuneOptions
from fibc.schema.silicon import Gpu
from fibc.schema.table import DispatchTable
from fibc.schema.upkeep import Flip, RetuneResult
from fibc.schema.workload import load_workloads
from fibc.search.budget import Budget
from fibc.search.store import StudyStore
from fibc.settings import DEFAULT_LOCK_WAIT_S
from fibc.shop import Shop, conditions_of
from fibc.stopwatch import Stopwatch
from fibc.task import Task, make_task
from fibc.traffic import KIND as TRAFFIC


@dataclass(frozen=True)
class Night:
    """What a package's night is about.

    Attributes:
        published: The serving generation with its kernels.
        generation: Its name.
        reasons: Why anything is measured.
        recheck: Winners are to be shown again; else only cells that are asked for are searched.
        share: Part of the calls outside regions now; None where no statistics were given.
        gpus: Further GPUs of the same silicon that are to show the winners, too.
        salt: Of the seeds of its sessions.
    """

    published: Published
    generation: str
    layout: OutLayout
    options: RetuneOptions
    reasons: tuple[str, ...]
    recheck: bool
    share: float | None = None
    gpus: tuple[Gpu, ...] = ()
    salt: str = ""


def retune_package(night: Night, cache: Cache, progress: Progress) -> RetuneResult:
    """Measure the winners of a package, search again what flipped, and publish the next generation.

    Killed at any point, the old generation serves, and the same command goes on from what was recorded.

    Raises:
        InputError: If the table was recorded without what it was tuned from, an option names what it has not, or
            another run measures on a GPU that is asked.
        GateError: If native looks different from itself here.
        BuildError: If the module does not build.
    """
    budget = Budget(night.options.budget_s)
    task, is_whole = _tasks(night, cache)
    held = environment_of(night.published.table)
    if task.environment.identity != held.identity:
        here = ", ".join(map(str, differences(held.facts(), task.environment.facts())))
        raise InputError(
            f"{task.definition.name}: must be shown on the silicon and with the threads of its evidence, got {here} "
            "(set OMP_NUM_THREADS, choose another GPU, or tune here)"
        )
    with contextlib.ExitStack() as stack:
        measured = (task.environment.gpu, *night.gpus)
        stack.enter_context(lock_devices(measured, wait_s=DEFAULT_LOCK_WAIT_S, say=progress.note))
        records = night.layout.records(task.definition.name)
        studies = task.options.storage or night.layout.studies
        if night.options.check:  # nothing that is kept changes
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fibc-check-")))
            records, studies = scratch / records.name, scratch / "studies.db"
        log = stack.enter_context(_log(night, task, records))
        log.note_environment(task.environment.facts())
        verdicts = stack.enter_context(
            RecordLog(
                records,
                definition=task.definition.digest,
                environment=digest_json([task.fingerprint, "retune", night.generation]),
            )
        )
        evaluator = stack.enter_context(evaluator_of(task, cache))
        others = [(f"gpu {gpu.ordinal}", stack.enter_context(evaluator_of(task, cache, gpu=gpu))) for gpu in night.gpus]
        shop = Shop(task, evaluator, conditions_of(evaluator), budget, log, verdicts, progress)
        return _Night(night, shop, cache, is_whole, others).run(studies)


class _Night:
    """The stages of a package's night, in their order."""

    def __init__(
        self, night: Night, shop: Shop, cache: Cache, is_whole: bool, others: Sequence[tuple[str, Evaluator]]
    ) -> None:
        self._night = night
        self._others = others
        self._shop = shop
        self._cache = cache
        self._is_whole = is_whole
        self._before = night.published.table
        self._stopwatch = Stopwatch()
        self._pairs_before = pairs_by_stage(shop.log)
        self._trials_before = len(shop.log.evaluations())

    def run(self, studies: Path | str) -> RetuneResult:
        shop, night = self._shop, self._night
        with self._stopwatch("check"):
            shop.progress.stage("check", 1)
            notes = [*shop.task.notes, *gate.require_gate(shop, self._cache)]
            rows = take_over(shop, night.published, self._cache)
        checked: tuple[Rechecked, ...] = ()
        if night.recheck:
            with self._stopwatch("recheck"):
                seen = recheck(shop, serving(rows), night.salt, self._others)
            checked = seen.rows
            notes += seen.outliers
        keys = self._keys(rows, checked)
        if night.options.check:
            flips = find_flips(self._before, checked, None, shop.candidates)
            return self._result("checked", rows, checked, keys, flips, notes)
        if not keys and not night.recheck:
            return self._result("unchanged", rows, checked, keys, (), notes)
        proof: Proof | None = None
        if keys:
            with self._stopwatch("search"), StudyStore(studies) as store:
                shop.progress.stage("search", len(keys))
                explored = explore(shop, store, keys)
            shop.budget.release_reserve()
            with self._stopwatch("prove"):
                proof = prove(shop, explored)
        rows = merge(rows, checked, proof)
        table = renew(
            shop,
            self._before,
            rows,
            proof,
            fingerprint=shop.task.fingerprint if self._is_whole else "",
            shown="" if night.recheck and not _unchecked(checked) else self._before.shown or self._before.created,
        )
        with self._stopwatch("publish"):
            shop.progress.stage("publish", 1)
            publish(shop, table, night.layout, self._cache)
            if night.share is not None:
                shop.log.append(TRAFFIC, {"share": night.share})
            keep_dataset(shop, night.layout, Proof(rows, (), 0, 0))
        flips = find_flips(self._before, checked, rows, shop.candidates)
        notes += [f"out of time: {', '.join(shop.budget.cuts)}"] if shop.budget.cuts else []
        result = self._result("renewed", rows, checked, keys, flips, notes)
        self._keep_run(table, result)
        return result

    def _keep_run(self, table: DispatchTable, result: RetuneResult) -> None:
        """Keep how the night went: what it took itself, over the sets and the test set's evidence that still hold."""
        shop, before = self._shop, self._before
        records = tuple(shop.log.read())
        earlier = find_run(records, before)
        test, slower = still_tested(earlier, before, table)
        run = run_of(
            shop,
            table,
            stage_s=self._stopwatch.seconds,
            notes=result.notes,
            test=test,
            slower_on_test=slower,
            num_pairs=pairs_by_stage(shop.log) - self._pairs_before,
            num_trials=len(shop.log.evaluations()) - self._trials_before,
            observed=result.observed,
        )
        evidence = dict.fromkeys((shop.log.environment, *evidence_of(records, before, earlier)))
        keep_run(
            shop.log,
            replace(run, kind=RETUNE, reasons=result.reasons, devices=result.devices, evidence=tuple(evidence)),
        )

    def _keys(self, rows: Sequence[Decision], checked: Sequence[Rechecked]) -> tuple[FeatureKey, ...]:
        """Return the cells to search: doubtful and forced ones, those an earlier budget cut short, and new ones."""
        task, options = self._shop.task, self._night.options
        names = {str(row.cell): row for row in rows}
        unknown = [name for name in options.force if name not in names]
        if unknown:
            raise InputError(
                f"--force: must name cells of the table, got {', '.join(unknown)} (accepted: {', '.join(names)})"
            )
        doubtful = [item.row for item in checked if item.standing in (Standing.FLIPPED, Standing.VANISHED)]
        cut_short = [row for row in rows if row.partial]
        chosen = {row.cell: row for row in [*doubtful, *cut_short, *(names[name] for name in options.force)]}
        known = {key.cell: key for key in task.keys}
        keys = [
            known.get(cell) or key_of(row)
            for cell, row in chosen.items()
            if cell in known or row.reconfirm or row.confirm
        ]
        added = [key for key in task.keys if not covering(rows, key.cell) and key.cell not in chosen]
        return (*keys, *added)

    def _result(
        self,
        action: str,
        rows: Sequence[Decision],
        checked: Sequence[Rechecked],
        keys: Sequence[FeatureKey],
        flips: Sequence[Flip],
        notes: Sequence[str],
    ) -> RetuneResult:
        package = self._night.layout.package(self._before.definition)
        serves = current(package)
        task = self._shop.task
        pairs = pairs_by_stage(self._shop.log) - self._pairs_before
        observed = self._observed()
        if observed is not None:
            self._shop.log.append("observed", observed)
        return RetuneResult(
            definition=self._before.definition,
            package=str(package),
            action=action,
            reasons=self._night.reasons,
            flips=tuple(flips),
            num_rechecked=len(checked) - len(_unchecked(checked)),
            num_held=sum(item.standing is Standing.HOLDS for item in checked),
            retuned=tuple(str(key) for key in keys),
            unchecked=tuple(str(item.row.cell) for item in _unchecked(checked)),
            generation=serves.name if serves is not None else "",
            num_pairs=sum(number for stage, number in pairs.items() if stage != "gate"),
            num_replaced=len(serving(rows)),
            notes=tuple(notes),
            stage_s={name: round(seconds, 1) for name, seconds in self._stopwatch.seconds.items()},
            devices=(task.environment.hardware, *(name for name, _ in self._others)),
            seed=task.options.seed,
            observed=observed,
        )

    def _observed(self) -> Observed | None:
        """Return what was seen of all GPUs; None on a CPU."""
        seen = [evaluator.observed for evaluator in (self._shop.evaluator, *(other for _, other in self._others))]
        known = [item for item in seen if item is not None]
        return sum(known[1:], known[0]) if known else None


def _tasks(night: Night, cache: Cache) -> tuple[Task, bool]:
    """Return the task, and whether it is the one that the table was made of but for the environment.

    Where templates, compilers or fibc itself would search otherwise now, a table that was only shown again is not what
    a whole tune would make.
    """
    published = night.published
    snapshot, table = _snapshot(published), published.table
    options = replace(snapshot.options, target=table.target.partition(":")[0], fresh=False, dry_run=False)
    store = CompiledStore(night.layout.compiled)
    task = make_task(published.definition, snapshot.workloads, options, cache, store, native=table.native)
    is_whole = task.fingerprint_with(snapshot.evidence) == table.fingerprint
    if not night.options.workloads:
        return task, is_whole
    known = {workload.uuid for workload in snapshot.workloads}
    more = load_workloads(night.options.workloads, published.definition)
    workloads = [*snapshot.workloads, *(workload for workload in more if workload.uuid not in known)]
    return make_task(published.definition, workloads, options, cache, store, native=table.native), is_whole


def _snapshot(published: Published) -> Snapshot:
    if published.snapshot is None:
        raise InputError(
            f"{published.table.definition}: an earlier version of fibc recorded this table, without its workloads "
            "(tune it once more)"
        )
    return published.snapshot


def _log(night: Night, task: Task, records: Path) -> RecordLog:
    """Return the log of tonight's evidence.

    Winners are doubted in the environment that they were shown in: evidence of one key would then say two things. So it
    gets a key of its own, of this generation; the earlier evidence is history, as that of another environment is.
    """
    key = task.evidence_digest
    if night.recheck and key == _snapshot(night.published).evidence:
        key = digest_json([key, "again", night.generation])
    return RecordLog(records, definition=task.definition.digest, environment=key, identity=task.environment.identity)


def _unchecked(checked: Sequence[Rechecked]) -> list[Rechecked]:
    return [item for item in checked if item.standing is Standing.UNCHECKED]

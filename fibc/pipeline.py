"""The flow of a tuning run: definition in, module out. It has no logic of its own and reads top to bottom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fibc import gate, outcome
from fibc.backends.compiled_store import CompiledStore
from fibc.cache import Cache
from fibc.codegen import build as modules
from fibc.evaluators import evaluator_of
from fibc.explore import explore
from fibc.gpu_lock import lock_device
from fibc.lock import lock_out
from fibc.paths import OutLayout, check_out_writable
from fibc.precompile import precompile
from fibc.progress import Progress, Quiet
from fibc.prove import Proof, prove, read_test_set, recorded_proof, usual_sessions
from fibc.publish import finished_table, keep_dataset, make_table, publish
from fibc.published import read_published, record_files
from fibc.rebuild import rebuild
from fibc.records import RecordLog
from fibc.runs import keep_run, pairs_by_stage
from fibc.schema.decision import Comparison
from fibc.schema.options import TuneOptions
from fibc.schema.result import BuildResult, CompileResult, TuneResult
from fibc.search.budget import GPU_RESERVE_FRACTION, Budget
from fibc.search.store import StudyStore
from fibc.settings import DEFAULT_LOCK_WAIT_S, DEFAULT_MAX_MB, DEFAULT_OUT
from fibc.shop import Shop, conditions_of
from fibc.stopwatch import Stopwatch
from fibc.task import Task, read_task


def tune(
    definition: Path | str,
    workloads: Path | str | None = None,
    *,
    out: Path | str,
    progress: Progress | None = None,
    **options: Any,
) -> TuneResult:
    """Tune one definition and write its module.

    Args:
        definition: Path of a FlashInfer-Trace definition.
        workloads: File or directory; None looks beside the definition and in its dataset, else sweeps.
        out: Directory of the module, the table and the records; shared by any number of definitions.
        progress: Told what happens.
        options: Fields of ``TuneOptions``.

    Raises:
        SchemaError: With every problem of definition, workloads, templates or options.
        InputError: If ``out`` cannot be written or is in use, another run measures on the GPU, or a backend, native or
            storage is not such.
        GateError: If native looks different from itself on this host.
        BuildError: If the module does not build.
        RecordError: If the disk is full; what was recorded before is kept.
    """
    shown = progress or Quiet()
    cache = Cache()
    chosen = TuneOptions(**options)
    budget = Budget(chosen.budget_s)
    layout = OutLayout(Path(out).absolute())
    task = read_task(definition, workloads, chosen, cache, CompiledStore(layout.compiled))
    if chosen.dry_run:
        return outcome.dry_run(task, layout)
    check_out_writable(layout.root)
    with lock_out(layout, wait_s=DEFAULT_LOCK_WAIT_S, say=shown.note):
        table = None if chosen.fresh else finished_table(layout, task)
        if table is not None:
            return outcome.up_to_date(task, layout, table)
        return _work(task, layout, cache, budget, shown)


def compile_only(
    definition: Path | str,
    workloads: Path | str | None = None,
    *,
    out: Path | str,
    max_mb: float = DEFAULT_MAX_MB,
    progress: Progress | None = None,
    **options: Any,
) -> CompileResult:
    """Compile what tuning one definition would ask for, for a device that need not be here.

    Args:
        definition: Path of a FlashInfer-Trace definition.
        workloads: As for ``tune``.
        out: Directory whose ``fibc-compiled`` is filled.
        max_mb: What the definition's candidates may take there, in megabytes.
        progress: Told what happens.
        options: Fields of ``TuneOptions``; ``target`` names an architecture, ``trials`` says how many configs of each
            template every key shall find.

    Raises:
        SchemaError: With every problem of definition, workloads, templates or options.
        InputError: If ``out`` cannot be written or is in use, or a backend or the target is not such.
        ToolchainError: If nothing can be compiled here.
    """
    shown = progress or Quiet()
    cache = Cache()
    chosen = TuneOptions(**options)
    budget = Budget(chosen.budget_s)
    layout = OutLayout(Path(out).absolute())
    task = read_task(definition, workloads, chosen, cache, needs_device=False)
    store, max_bytes = CompiledStore(layout.compiled), int(max_mb * 1e6)
    if chosen.dry_run:
        return precompile(task, store, max_bytes=max_bytes, budget=budget, progress=shown)
    check_out_writable(layout.root)
    with lock_out(layout, wait_s=DEFAULT_LOCK_WAIT_S, say=shown.note):
        return precompile(task, store, max_bytes=max_bytes, budget=budget, progress=shown)


def build(
    records: Path | str, *, target: str = "", out: Path | str = DEFAULT_OUT, compiled: Path | str | None = None
) -> tuple[BuildResult, ...]:
    """Make modules again from what was recorded when they were published, on any machine.

    Args:
        records: A file of records, or an ``--out`` directory for every definition in it.
        target: Of the tables, ``cuda:sm_90a``; empty where the records have one target.
        out: Directory of the packages.
        compiled: A directory that ``compile_only`` filled, for kernels that are not recorded; those of ``out`` and of
            ``records`` are looked at in any case.

    Raises:
        InputError: If there are no such records, or ``out`` cannot be written or is in use.
        BuildError: If a kernel cannot be made as it was measured, or a module does not build.
    """
    cache, layout = Cache(), OutLayout(Path(out).absolute())
    found = [read_published(path, target) for path in record_files(Path(records))]
    roots = [Path(compiled)] if compiled is not None else []
    roots += [layout.compiled, *(OutLayout(root).compiled for root in Path(records).absolute().parents[:2])]
    stores = tuple(CompiledStore(root) for root in roots)
    check_out_writable(layout.root)
    with lock_out(layout, wait_s=DEFAULT_LOCK_WAIT_S, say=Quiet().note):
        return tuple(rebuild(published, layout, cache, stores) for published in found)


def _work(task: Task, layout: OutLayout, cache: Cache, budget: Budget, progress: Progress) -> TuneResult:
    definition, options = task.definition, task.options
    records = layout.records(definition.name)
    log = RecordLog(
        records,
        definition=definition.digest,
        environment=task.evidence_digest,
        identity=task.environment.identity,
    )
    verdicts = RecordLog(records, definition=definition.digest, environment=task.fingerprint)
    notes = [*task.notes, *log.void()]
    if options.fresh:
        log.compact(lambda record: False)
    log.note_environment(task.environment.facts())
    stopwatch = Stopwatch()
    modules.prepare(cache)
    with (
        lock_device(task.environment.gpu, wait_s=DEFAULT_LOCK_WAIT_S, say=progress.note),
        log,
        verdicts,
        StudyStore(options.storage or layout.studies) as store,
        evaluator_of(task, cache) as evaluator,
    ):
        shop = Shop(task, evaluator, conditions_of(evaluator), budget, log, verdicts, progress)
        try:
            with stopwatch("check"):
                progress.stage("check", 3)
                gate.check_reference(shop)
                notes += gate.check_native(shop)
                notes += gate.require_gate(shop, cache)
            with stopwatch("search"):
                progress.stage("search", len(task.keys))
                if task.environment.gpu is not None:
                    budget.reserve(GPU_RESERVE_FRACTION, evaluator.starting_s(usual_sessions(task.policy)))
                explored = explore(shop, store, task.keys)
                budget.release_reserve()
            with stopwatch("prove"):
                proof: Proof | None = prove(shop, explored)
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
            proof = recorded_proof(shop)
        if proof is None:
            return outcome.nothing_kept(task, layout, shop, stopwatch.seconds, notes)
        with stopwatch("publish"):
            progress.stage("publish", 1)
            table = make_table(shop, proof, interrupted=interrupted)
            package = publish(shop, table, layout, cache)
            keep_dataset(shop, layout, proof)
        test: tuple[Comparison, ...] = ()
        slower: tuple[str, ...] = ()
        if not interrupted:
            with stopwatch("test"):
                test, slower = read_test_set(shop, proof.decisions)
        result = outcome.finished(
            task, layout, shop, table, package, test, slower, stopwatch.seconds, notes, interrupted=interrupted
        )
        run = outcome.run_of(
            shop,
            table,
            stage_s=stopwatch.seconds,
            notes=result.notes,
            test=test,
            slower_on_test=slower,
            num_pairs=pairs_by_stage(log),
            num_trials=sum(result.trials.values()),
            observed=result.observed,
        )
        keep_run(log, run)
        return result

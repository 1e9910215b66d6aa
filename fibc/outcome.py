"""What a run ends with, from what its stages left: the result that people read and machines parse."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from fibc.clock import now
from fibc.paths import OutLayout
from fibc.prove import usual_sessions
from fibc.records import RecordLog
from fibc.runs import Member, Run, table_digest
from fibc.schema.decision import Comparison
from fibc.schema.observed import Observed
from fibc.schema.result import BuildCounts, TuneResult
from fibc.schema.table import DispatchTable
from fibc.search.pruning import count_valid
from fibc.session_pool import AT_ONCE, START_S
from fibc.shop import Shop
from fibc.task import Task

COMPILE_S = 1.0
"""One variant's compile; 0.4 to 1.2 s on two cores of an Intel Xeon (Emerald Rapids), g++ 12.2."""

SESSION_START_S = 3.0
"""Start of an exec'd session: importing torch, and fresh weights."""

GPU_SESSION_S = 0.6
"""A session of 27 keys without its start; an H200, 2026-11-30."""

TRIAL_DISK_BYTES = 60_000
"""A trial's object, library, records and dataset files."""


def module_name(layout: OutLayout, task: Task) -> str:
    return layout.package(task.definition.name).name


def dry_run(task: Task, layout: OutLayout) -> TuneResult:
    """Say what a run would do: keys, candidates, builds, and estimates of time and disk."""
    spaces = [space for backend in task.backends for space in backend.spaces(task.definition, task.keys[0])[0]]
    num_configs = sum(count_valid(space) for space in spaces)
    num_trials = len(task.keys) * min(task.trials, num_configs)
    num_builds = min(num_configs, num_trials)
    estimate_s = num_builds * COMPILE_S / task.options.jobs + num_trials * 0.2 + _sessions_s(task)
    return _result(
        task,
        layout,
        plan={
            "definition": task.definition.name,
            "target": str(task.backends[0].target),
            "native": task.native.name,
            "mode": task.mode,
            "workloads": len(task.workloads),
            "keys": len(task.keys),
            "templates": len(spaces),
            "candidates": num_configs,
            "trials": num_trials,
            "builds": num_builds,
            "estimate_s": round(min(estimate_s, task.options.budget_s)),
            "disk_mb": round(num_trials * TRIAL_DISK_BYTES / 1e6, 1),
            "out": str(layout.root),
        },
    )


def _sessions_s(task: Task) -> float:
    """Return about how many seconds the gate and the proof take."""
    num_sessions = usual_sessions(task.policy) + task.policy.fixed_sessions
    if task.environment.gpu is None:
        return num_sessions * SESSION_START_S * 2
    return num_sessions * GPU_SESSION_S + math.ceil(num_sessions / AT_ONCE) * START_S


def up_to_date(task: Task, layout: OutLayout, table: DispatchTable) -> TuneResult:
    """Nothing that the decisions depend on has changed."""
    return _result(task, layout, table=table, package=str(layout.package(task.definition.name)), is_up_to_date=True)


def nothing_kept(task: Task, layout: OutLayout, shop: Shop, stage_s: dict[str, float], notes: list[str]) -> TuneResult:
    """The user interrupted before anything could be decided; the trials are recorded."""
    return _result(
        task,
        layout,
        notes=[*notes, "interrupted before anything was decided; the trials are kept: run the same command to go on"],
        trials=_trials(shop.log),
        stage_s=stage_s,
        builds=shop.builds,
        partial=True,
        interrupted=True,
    )


def finished(
    task: Task,
    layout: OutLayout,
    shop: Shop,
    table: DispatchTable,
    package: Path,
    test: tuple[Comparison, ...],
    slower_on_test: tuple[str, ...],
    stage_s: dict[str, float],
    notes: list[str],
    *,
    interrupted: bool,
) -> TuneResult:
    """A module was written."""
    observed = shop.evaluator.observed
    if observed is not None:
        shop.log.append("observed", observed)
    cuts = [f"out of time: {', '.join(shop.budget.cuts)}"] if shop.budget.cuts else []
    return _result(
        task,
        layout,
        table=table,
        package=str(package),
        test=test,
        slower_on_test=slower_on_test,
        notes=[*notes, *cuts],
        trials=_trials(shop.log),
        stage_s=stage_s,
        builds=shop.builds,
        partial=table.partial,
        interrupted=interrupted,
        observed=observed,
    )


def run_of(
    shop: Shop,
    table: DispatchTable,
    *,
    stage_s: Mapping[str, float],
    notes: Sequence[str],
    test: tuple[Comparison, ...],
    slower_on_test: tuple[str, ...],
    num_pairs: Mapping[str, int],
    num_trials: int,
    observed: Observed | None,
) -> Run:
    """Return what is kept of a tune that published ``table``, beside the table and its evidence."""
    task = shop.task
    axes = task.definition.var_axes
    sets = {"tune": task.sets.tune, "boundary": task.sets.boundary, "test": task.sets.test}
    return Run(
        fingerprint=table.fingerprint,
        created=now(),
        sets=task.set_sizes,
        members=tuple(
            Member(name, tuple((axis, workload.axes[axis]) for axis in axes), workload.weight, workload.uuid)
            for name, workloads in sets.items()
            for workload in workloads
            if not task.synthetic
        ),
        test=test,
        slower_on_test=slower_on_test,
        stage_s={name: round(seconds, 1) for name, seconds in stage_s.items()},
        cost_s={name: round(seconds, 3) for name, seconds in shop.spent.seconds.items()},
        notes=tuple(notes),
        table=table_digest(table),
        environment=task.environment.facts(),
        devices=(task.environment.hardware,),
        seed=task.options.seed,
        num_pairs=dict(num_pairs),
        num_trials=num_trials,
        observed=observed,
        evidence=(shop.log.environment,),
    )


def _result(
    task: Task,
    layout: OutLayout,
    *,
    table: DispatchTable | None = None,
    package: str = "",
    test: tuple[Comparison, ...] = (),
    slower_on_test: tuple[str, ...] = (),
    notes: list[str] | None = None,
    trials: dict[str, int] | None = None,
    stage_s: dict[str, float] | None = None,
    builds: BuildCounts | None = None,
    plan: dict[str, int | float | str] | None = None,
    is_up_to_date: bool = False,
    partial: bool = False,
    interrupted: bool = False,
    observed: Observed | None = None,
) -> TuneResult:
    return TuneResult(
        definition=task.definition.name,
        module=module_name(layout, task),
        package=package,
        table=table,
        boundary=table.boundary if table is not None else (),
        test=test,
        slower_on_test=slower_on_test,
        sets=task.set_sizes,
        trials=trials or {},
        stage_s={name: round(seconds, 1) for name, seconds in (stage_s or {}).items()},
        notes=tuple(notes if notes is not None else task.notes),
        up_to_date=is_up_to_date,
        partial=partial or (table is not None and table.partial),
        interrupted=interrupted,
        observed=observed,
        builds=builds or BuildCounts(),
        plan=plan or {},
    )


def _trials(log: RecordLog) -> dict[str, int]:
    return dict(sorted(Counter(item.status.value for item in log.evaluations().values()).items()))

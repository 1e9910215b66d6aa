"""Records to the numbers of a report. Pure: nothing is measured, read or written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version

from fibc import stats
from fibc.decide import is_slower
from fibc.reporting.contenders import ByPoint, estimates, runner_up
from fibc.reporting.data import (
    GENERATED,
    LIBRARY,
    NOT_RECORDED,
    CellReport,
    Cost,
    EndToEnd,
    LatencyPoint,
    RegionReport,
    ReportData,
    RunReport,
    SearchReport,
    SetReport,
    Speedup,
    TableReport,
    Traffic,
    VariantReport,
)
from fibc.reporting.recorded import Recorded
from fibc.reporting.searched import failures, kind_of, screened_fast_p, searches
from fibc.reporting.tasks import serves, set_fast_p, set_tasks, set_traffic
from fibc.reporting.worth import end_to_end
from fibc.schema.candidate import Candidate
from fibc.schema.decision import Comparison, Decision
from fibc.schema.evidence import Estimate
from fibc.schema.policy import PUBLISHED_LEVEL, Policy


def gather(
    recorded: tuple[Recorded, ...], *, fraction: float | None = None, dispatch_ns: float | None = None
) -> ReportData:
    """Return the numbers of a report on ``recorded``.

    Args:
        fraction: Share of an application's time that the operator takes with native, for an estimate end to end.
        dispatch_ns: What a served call pays for dispatch, as measured.
    """
    tables = tuple(_table(item, fraction, dispatch_ns) for item in recorded)
    return ReportData(version("fibc"), tables)


def _table(recorded: Recorded, fraction: float | None, dispatch_ns: float | None) -> TableReport:
    table, run = recorded.table, recorded.run
    variants = _variants(recorded)
    numbers = {variant.digest: variant.number for variant in variants}
    found = searches(recorded)
    tasks = set_tasks(recorded)
    gained = set_traffic(recorded, tasks)
    return TableReport(
        source=recorded.source,
        definition=recorded.definition,
        target=_target(recorded),
        native=table.native.name if table is not None else NOT_RECORDED,
        created=table.created if table is not None else max((e.timestamp for e in recorded.evaluations), default=""),
        margin=table.min_speedup if table is not None else None,
        alpha=table.alpha if table is not None else None,
        expected_false_replacements=table.expected_false_replacements if table is not None else None,
        partial=table.partial if table is not None else None,
        features=_features(recorded),
        environment=dict(table.environment) if table is not None else {},
        conditions=_conditions(recorded),
        gate=recorded.gate,
        cells=tuple(_cell(decision, numbers) for decision in recorded.decisions),
        variants=variants,
        regions=_regions(recorded, numbers),
        latencies=_latencies(recorded, numbers),
        searches=found,
        failures=failures(found),
        fast_p=(*set_fast_p(recorded, tasks), *screened_fast_p(found)),
        traffic=gained,
        end_to_end=_end_to_end(gained, fraction, dispatch_ns),
        cost=_cost(recorded, found),
        sets=run.sets if run is not None else None,
        boundary=_boundary(recorded),
        test=_test(recorded),
        mismatches=table.mismatches if table is not None else (),
        notes=run.notes if run is not None else (),
        run=_run(recorded),
    )


def _run(recorded: Recorded) -> RunReport | None:
    """Return the run that published the table; None in records from before fibc kept which one it was."""
    run, table = recorded.run, recorded.table
    if run is None or table is None or not run.table:
        return None
    return RunReport(
        kind=run.kind,
        ended=run.created,
        reasons=run.reasons,
        devices=run.devices,
        seed=run.seed,
        num_trials=run.num_trials,
        observed="" if run.observed is None else str(run.observed),
        environment={
            name: value for name, value in run.environment.items() if table.environment.get(name, value) != value
        },
    )


def _variants(recorded: Recorded) -> tuple[VariantReport, ...]:
    """Return what serves, numbered as `fibc tune` numbers it: in the order of symbols, which digests follow."""
    cells: dict[str, list[str]] = {}
    for decision in recorded.decisions:
        if serves(decision):
            cells.setdefault(decision.candidate, []).append(str(decision.cell))
    if recorded.table is not None:
        order = [(variant.candidate.digest, variant.library) for variant in recorded.table.variants]
    else:
        order = [(digest, "") for digest in sorted(cells)]
    reports = []
    for number, (digest, library) in enumerate(order, 1):
        candidate = recorded.candidates.get(digest)
        reports.append(
            VariantReport(
                number=number,
                digest=digest,
                name=str(candidate) if candidate is not None else digest,
                backend=candidate.backend if candidate is not None else NOT_RECORDED,
                kind=LIBRARY if library else kind_of(candidate) if candidate is not None else GENERATED,
                library=library,
                cells=tuple(cells.get(digest, ())),
            )
        )
    return tuple(reports)


def _target(recorded: Recorded) -> str:
    if recorded.table is not None:
        return recorded.table.target
    targets = {str(candidate.target) for candidate in recorded.candidates.values()}
    return ", ".join(sorted(targets)) or NOT_RECORDED


def _features(recorded: Recorded) -> tuple[str, ...]:
    if recorded.table is not None:
        return tuple(feature.name for feature in recorded.table.features)
    axes = next((item.point.axes for d in recorded.decisions for item in d.evidence), ())
    rank = max((len(d.cell.bounds) for d in recorded.decisions), default=0)
    return tuple(name for name, _ in axes) if len(axes) == rank else tuple(f"feature {n + 1}" for n in range(rank))


def _conditions(recorded: Recorded) -> dict[str, str]:
    item = next((item for decision in recorded.decisions for item in decision.evidence), None)
    if item is None:
        return {}
    return {
        "mode": item.mode,
        "residency": item.residency,
        "timer": item.timer,
        "threads": str(item.num_threads),
        "design": item.design,
        "estimator": item.estimator,
        "confidence level": f"{item.confidence_level:g}",
    }


def _cell(decision: Decision, numbers: Mapping[str, int]) -> CellReport:
    flags = {
        "synthetic": decision.synthetic,
        "partial": decision.partial,
        "revoked": decision.revoked,
        "boundary rejected": decision.boundary_rejected,
    }
    return CellReport(
        cell=str(decision.cell),
        bounds=decision.cell.bounds,
        verdict=decision.verdict.value,
        serves=numbers.get(decision.candidate, 0) if serves(decision) else 0,
        flags=tuple(name for name, on in flags.items() if on),
        reason=decision.reason,
        weakest=speedup_of(decision.weakest) if decision.weakest is not None else None,
    )


def speedup_of(item: Comparison) -> Speedup:
    """Return a published comparison as reports show it."""
    return Speedup(
        item.speedup,
        item.ci_low,
        item.ci_high,
        item.stage,
        item.n_sessions,
        str(item.point),
        item.native_us,
        item.candidate_us,
    )


def _regions(recorded: Recorded, numbers: Mapping[str, int]) -> tuple[RegionReport, ...]:
    if recorded.table is not None:
        return tuple(RegionReport(region.cell.bounds, region.variant + 1) for region in recorded.table.regions)
    return tuple(RegionReport(d.cell.bounds, numbers[d.candidate]) for d in recorded.decisions if serves(d))


def _latencies(recorded: Recorded, numbers: Mapping[str, int]) -> tuple[LatencyPoint, ...]:
    raced = estimates(recorded.samples, "confirm")
    return tuple(
        point
        for decision in recorded.decisions
        for point in _cell_latencies(recorded, decision, raced.get(str(decision.cell), {}), numbers)
    )


def _cell_latencies(
    recorded: Recorded, decision: Decision, raced: Mapping[str, ByPoint], numbers: Mapping[str, int]
) -> list[LatencyPoint]:
    """Return the points of one cell.

    The runner-up of a replaced cell was timed in other sessions than the winner: its latency is native's there,
    divided by the runner-up's paired speedup. Where native serves, the runner-up is what came closest.
    """
    replaced = serves(decision)
    second = runner_up(raced, decision.candidate if replaced else "")
    points = []
    for index, item in enumerate(decision.evidence):
        effect = second.log_speedups.get(index) if second is not None else None
        other_us = item.native_us / math.exp(effect) if effect is not None else None
        points.append(
            LatencyPoint(
                cell=str(decision.cell),
                axes=dict(item.point.axes),
                x=_coordinates(recorded, item),
                origin=item.point.origin,
                weight=item.point.weight,
                native_us=item.native_us,
                served_us=item.candidate_us if replaced else item.native_us,
                served=_short(recorded.candidates.get(decision.candidate), numbers) if replaced else "native",
                runner_up_us=other_us,
                runner_up=_short(recorded.candidates.get(second.candidate), numbers) if second is not None else "",
            )
        )
    return points


def _coordinates(recorded: Recorded, item: Comparison) -> tuple[int, ...]:
    axes = dict(item.point.axes)
    if recorded.table is None:
        return tuple(axes.values())
    return tuple(feature.value(axes) for feature in recorded.table.features)


def _short(candidate: Candidate | None, numbers: Mapping[str, int]) -> str:
    """Return a candidate's name for a legend: its template, and its number where it serves."""
    if candidate is None:
        return NOT_RECORDED
    number = numbers.get(candidate.digest)
    return candidate.template if number is None else f"{candidate.template} #{number}"


def _end_to_end(gained: tuple[Traffic, ...], fraction: float | None, dispatch_ns: float | None) -> EndToEnd | None:
    """Return the estimate from the traffic of the tune set, the largest one."""
    tune = next((item for item in gained if item.set_name == "tune"), None)
    return end_to_end(fraction, tune, dispatch_ns) if fraction is not None and tune is not None else None


def _cost(recorded: Recorded, found: tuple[SearchReport, ...]) -> Cost:
    pairs: Counter[str] = Counter()
    for sample in recorded.samples:
        pairs[sample.stage] += len(sample.pairs)
    run = recorded.run
    spent = run.cost_s if run is not None else {}
    nothing = 0.0 if run is not None and run.table else None  # a night that searched nothing spent nothing on it
    proven = None if run is None else [run.stage_s[name] for name in ("recheck", "prove") if name in run.stage_s]
    return Cost(
        compile_s=spent.get("compile", nothing),
        validate_s=spent.get("validate", nothing),
        screen_s=spent.get("screen", nothing),
        confirm_s=None if proven is None else sum(proven),
        trial_s=sum(trial.duration_s for search in found for trial in search.trials),
        stages=run.stage_s if run is not None else {},
        num_trials=sum(len(search.trials) for search in found),
        num_pairs=run.num_pairs if run is not None and run.table else dict(pairs),
    )


def _boundary(recorded: Recorded) -> SetReport | None:
    if recorded.table is not None:
        return SetReport("boundary", tuple(map(speedup_of, recorded.table.boundary)), ())
    return _from_samples(recorded, "boundary")


def _test(recorded: Recorded) -> SetReport | None:
    if recorded.run is not None:
        return SetReport("test", tuple(map(speedup_of, recorded.run.test)), recorded.run.slower_on_test)
    return _from_samples(recorded, "test")


def _from_samples(recorded: Recorded, stage: str) -> SetReport | None:
    """Return a set's evidence from its raw samples, which name a workload by its cell only; None without any."""
    seen = estimates(recorded.samples, stage)
    measured, slower = [], []
    policy = Policy(min_speedup=recorded.table.min_speedup if recorded.table is not None else 1.0)
    for key, by_candidate in seen.items():
        for by_point in by_candidate.values():
            for point, estimate in sorted(by_point.items()):
                if len(estimate.effects) < policy.fixed_sessions:  # time ran out, and the run published nothing of it
                    continue
                where = f"workload {point + 1} of {key.removesuffix(f' {stage}')}"
                measured.append(_of_estimate(estimate, where, stage))
                if is_slower(estimate, policy):
                    slower.append(f"{where}: {measured[-1].value:.3f}x, at most {math.exp(estimate.upper):.3f}x")
    return SetReport(stage, tuple(measured), tuple(slower)) if measured else None


def _of_estimate(estimate: Estimate, where: str, stage: str) -> Speedup:
    low, high = stats.interval(estimate.effects, PUBLISHED_LEVEL)
    return Speedup(
        math.exp(estimate.mean),
        math.exp(low),
        math.exp(high),
        stage,
        len(estimate.effects),
        where,
        estimate.native_s * 1e6,
        estimate.candidate_s * 1e6,
    )

"""A results file made again: every figure from its raw samples, beside what the file says."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fibc import settings, stats
from fibc.errors import InputError
from fibc.published import SUFFIX
from fibc.reporting.figures import Figure, Reproduction, figure
from fibc.reporting.printed import Printed, Row, SearchLine, WorkloadLine, parse
from fibc.reporting.recorded import Recorded, read_recorded
from fibc.reporting.regenerate import Regenerator
from fibc.reporting.remeasure import remeasure
from fibc.schema.decision import Decision, Verdict
from fibc.schema.evidence import Estimate
from fibc.schema.policy import PUBLISHED_LEVEL, Policy

LEADING = ("", "tune_")
"""A text of `fibc tune` may be named so before the name of its records."""

CUT = "…"
"""Ends what did not fit into a column."""

_GIVEN_UP = re.compile(r"given up after (\d+) trials: the best reached ([\d.]+) of native's speed")


def reproduce(result: Path | str, *, measure: bool = False) -> Reproduction:
    """Make every figure of a results file again and compare it with what the file says.

    Args:
        result: A text of ``fibc tune`` with its ``.records`` beside, or a JSON file of a benchmark.
        measure: Measure what is served again, where the device is at hand.

    Raises:
        InputError: If it is no results file, or has no raw samples.
    """
    path = Path(result)
    if not path.is_file():
        raise InputError(
            f"{path}: must be a results file, found none (accepted: benchmarks/results/**/*.txt or *.json)"
        )
    if path.suffix == ".json":
        return _of_json(path, measure=measure)
    if path.suffix != ".txt":
        raise InputError(f"{path}: must be the text of a tune or a benchmark's JSON, got {path.suffix or 'no suffix'}")
    printed = parse(path.read_text())
    records = _records_beside(path)
    recorded = read_recorded(records)[0]
    policy = Policy(
        min_speedup=printed.min_speedup or settings.DEFAULT_MIN_SPEEDUP_CPU,
        alpha=printed.alpha or settings.DEFAULT_ALPHA,
    )
    figures = tuple(_figures(printed, recorded, Regenerator(recorded, policy)))
    if not figures:
        raise InputError(f"{path}: must have a table as `fibc tune` prints it, found none")
    measured, notes = remeasure(records, recorded, policy) if measure else ((), ())
    return Reproduction(str(path), str(records), figures, measured, notes)


def _records_beside(path: Path) -> Path:
    for lead in LEADING:
        found = path.with_name(path.stem.removeprefix(lead) + SUFFIX)
        if path.stem.startswith(lead) and found.is_file():
            return found
    raise InputError(f"{path}: needs its raw samples beside, found none (accepted: {path.with_suffix(SUFFIX).name})")


def _figures(printed: Printed, recorded: Recorded, made: Regenerator) -> Iterator[Figure]:
    for line in printed.searches:
        yield from _search_figures(line, made)
    decisions = {str(decision.cell): decision for decision in recorded.decisions}
    regenerated: dict[str, Decision] = {}
    for row in printed.rows:
        known = decisions.get(row.cell)
        decision = made.decision(known.cell) if known is not None else None
        if decision is not None:
            regenerated[row.cell] = decision
        yield from _row_figures(row, decision, printed, recorded)
        said = printed.reasons.get(row.cell, "")
        if re.search(r"\d", said):
            yield figure(
                f"cell {row.cell}", "reason", said, decision.reason if decision else _given_up(said, made, row)
            )
    yield from _totals(printed, made, regenerated)
    for workload in printed.workloads:
        yield from _workload_figures(workload, made)


def _search_figures(line: SearchLine, made: Regenerator) -> Iterator[Figure]:
    """Yield a key's figures. Finalists are those that raced: where time ran out before, no sample tells of any."""
    search, where = made.search(line.key), f"search of {line.key}"
    yield figure(where, "trials", line.num_trials, str(search.num_trials))
    yield figure(where, "failed", line.num_failed, str(search.num_failed))
    if line.best:
        yield figure(where, "best", line.best, f"{search.best:.2f}" if search.best is not None else None)
    unknown = search.num_finalists == 0 and line.num_finalists != "0"
    yield figure(where, "finalists", line.num_finalists, None if unknown else str(search.num_finalists))


def _row_figures(row: Row, decision: Decision | None, printed: Printed, recorded: Recorded) -> Iterator[Figure]:
    where = f"cell {row.cell}"
    if row.speedup == "-" and decision is None:
        return  # no figure: nothing was compared
    yield figure(where, "verdict", row.verdict, decision.verdict.value if decision else None)
    seen = decision.weakest if decision is not None else None
    yield figure(where, "native us", row.native_us, f"{seen.native_us:.1f}" if seen else None)
    yield figure(where, "speedup", row.speedup, f"{seen.speedup:.3f}" if seen else None)
    yield figure(where, "95 % interval", row.interval, f"{seen.ci_low:.3f} - {seen.ci_high:.3f}" if seen else None)
    served = printed.variants.get(row.serves.rpartition("#")[2], row.serves)
    again = None
    if decision is not None:
        candidate = recorded.candidates.get(decision.candidate)
        again = str(candidate) if candidate is not None else "native"
        if served.endswith(CUT) and again.startswith(served.removesuffix(CUT)):  # a narrow terminal
            again = served
    yield figure(where, "serves", served, again)


def _given_up(said: str, made: Regenerator, row: Row) -> str | None:
    """Return the reason of a key that the search gave up; None for any other."""
    found, search = _GIVEN_UP.search(said), made.search(row.cell)
    if not found or search.best is None:
        return None
    again = f"given up after {search.num_trials} trials: the best reached {search.best:.2f} of native's speed"
    return said.replace(found.group(0), again)


def _totals(printed: Printed, made: Regenerator, regenerated: dict[str, Decision]) -> Iterator[Figure]:
    if printed.replaced:
        num = sum(item.verdict is Verdict.REPLACE for item in regenerated.values())
        yield figure("table", "cells replaced", printed.replaced, f"{num} of {len(printed.rows)}")
    if printed.expected:
        expected = f"{made.num_tested() * made.policy.alpha:.2f}"
        yield figure("table", "expected false replacements", printed.expected, expected)
    if printed.gate:
        yield figure("gate", "native looks faster than itself", printed.gate, made.gate())
    statuses = made.statuses()
    for status, count in printed.statuses.items():
        yield figure("trials", status, str(count), str(statuses.get(status, 0)))


def _workload_figures(line: WorkloadLine, made: Regenerator) -> Iterator[Figure]:
    estimate = _estimate_of(line, made)
    if estimate is None:
        numbers: list[str | None] = [None] * 4
    else:
        low, high = stats.interval(estimate.effects, PUBLISHED_LEVEL)
        numbers = [
            f"{estimate.native_s * 1e6:.1f}",
            f"{estimate.candidate_s * 1e6:.1f}",
            f"{math.exp(estimate.mean):.3f}",
            f"{math.exp(low):.3f} - {math.exp(high):.3f}",
        ]
    said = (line.native_us, line.served_us, line.speedup, line.interval)
    for name, value, again in zip(("native us", "served us", "speedup", "95 % interval"), said, numbers, strict=True):
        yield figure(str(line), name, value, again)


def _estimate_of(line: WorkloadLine, made: Regenerator) -> Estimate | None:
    """Return the estimate of a workload, which samples name by its cell and its place in it.

    Several workloads of one cell are told apart by what the text says of their speedup only where that is one of
    theirs; else the first stands for them, and the figure differs.
    """
    sizes = tuple(size for _, size in line.axes)
    cells = {str(decision.cell): decision.cell for decision in made.recorded.decisions}
    table = made.recorded.table
    values = tuple(f.value(dict(line.axes)) for f in table.features) if table is not None else sizes
    for name, found in made.set_estimates(line.stage).items():
        cell = cells.get(name)
        if cell is None or len(cell.bounds) != len(values) or not cell.holds(values):
            continue
        known = [estimate for estimate in found if estimate is not None]
        said = [item for item in known if f"{math.exp(item.mean):.3f}" == line.speedup]
        return next(iter(said or known), None)
    return None


def _of_json(path: Path, *, measure: bool) -> Reproduction:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        results = document["results"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: must be a benchmark's JSON with results, got: {error!r}") from error
    figures = tuple(_json_figures(results))
    command = document.get("command", "its benchmark")
    notes = [] if not measure else [f"run `{command}` to measure again: it prints what it finds and compares nothing"]
    if not figures:
        notes.append(f"no raw samples are in {path}; `{command}` makes its figures anew")
    return Reproduction(str(path), str(path), figures, (), tuple(notes))


def _json_figures(results: list[dict[str, Any]]) -> Iterator[Figure]:
    """Yield the figures of results with ``samples_ns``: pairs (dispatched, plain), of which medians are said."""
    for result in results:
        samples = result.get("samples_ns")
        if not samples:
            continue
        dispatched, plain = (statistics.median(side) for side in zip(*samples, strict=True))
        added = statistics.median(pair[0] - pair[1] for pair in samples)
        for name, again in (("dispatched_ns", dispatched), ("plain_ns", plain), ("added_ns", added)):
            # Samples are kept to a tenth of a nanosecond, and so are figures.
            yield figure(result["name"], name, f"{result[name]:.1f}", f"{again:.1f}")

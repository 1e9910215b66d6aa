"""A report as CSV of every candidate and as Markdown for a pull request."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from fibc.reporting.compare import SAME
from fibc.reporting.data import (
    GENERATED,
    LIBRARY,
    NOT_RECORDED,
    CellReport,
    ReportData,
    RunReport,
    SetReport,
    Speedup,
    TableComparison,
    TableReport,
)

CSV_COLUMNS = (
    "definition",
    "target",
    "key",
    "trial",
    "status",
    "screened_speedup",
    "backend",
    "kind",
    "template",
    "config",
    "max_bound_ratio",
    "duration_s",
    "timestamp",
    "serves",
    "candidate",
    "log",
)


def write_csv(data: ReportData) -> str:
    """Return a line per trial of every key; ``serves`` names the cells where the candidate is served."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for table in data.tables:
        cells = {variant.digest: " ".join(variant.cells) for variant in table.variants}
        for search in table.searches:
            for trial in search.trials:
                writer.writerow(
                    [
                        table.definition,
                        table.target,
                        search.key,
                        trial.number,
                        trial.status,
                        "" if trial.speedup is None else f"{trial.speedup:.6g}",
                        trial.backend,
                        trial.kind,
                        trial.template,
                        trial.config,
                        "" if trial.max_bound_ratio is None else f"{trial.max_bound_ratio:.6g}",
                        f"{trial.duration_s:.6g}",
                        trial.timestamp,
                        cells.get(trial.digest, ""),
                        trial.digest,
                        trial.log.strip(),
                    ]
                )
    return text.getvalue()


def write_markdown(data: ReportData) -> str:
    """Return what a reviewer reads first: changes where two tables are compared, else each table."""
    lines: list[str] = []
    for comparison in data.comparisons:
        lines += [*_comparison(comparison), ""]
    lines += [f"- {name}" for name in data.unmatched]
    for table in data.tables:
        lines += [*_table(table), ""]
    return "\n".join(lines).rstrip() + "\n"


def _comparison(item: TableComparison) -> list[str]:
    changed = [change for change in item.changes if change.what != SAME]
    lines = [f"## {item.definition}: what changed", "", f"From {item.before} to {item.after}.", ""]
    if item.environment:
        lines += [*_grid(("fact", "before", "after"), [list(fact) for fact in item.environment]), ""]
    if not changed:
        return [*lines, f"None of {len(item.changes)} cells changed."]
    rows = [
        [c.cell, c.what, c.before, _with_interval(c.before_speedup), c.after, _with_interval(c.after_speedup)]
        for c in changed
    ]
    lines += _grid(("cell", "change", "served before", "speedup before", "serves after", "speedup after"), rows)
    return [*lines, "", f"{len(changed)} of {len(item.changes)} cells changed."]


def _table(table: TableReport) -> list[str]:
    margin = NOT_RECORDED if table.margin is None else f"{table.margin:g}"
    lines = [
        f"## {table.definition}",
        "",
        f"Target {table.target}, native `{table.native}`, margin {margin}, {table.created}. "
        f"**{table.num_replaced} of {len(table.cells)} cells replaced**; {table.num_cells_of(GENERATED)} by generated "
        f"kernels, {table.num_cells_of(LIBRARY)} by library calls.",
        "",
    ]
    lines += _grid(
        (" x ".join(table.features) or "cell", "serves", "speedup", "95 % interval", "native us", "verdict", "why"),
        [_cell(table, cell) for cell in table.cells],
    )
    lines += ["", *(f"{variant.number}. `{variant.name}`" for variant in table.variants), ""]
    curves = [
        [
            f"{item.family}: {item.group}",
            str(len(item.speedups)),
            *(f"{item.points[p]:.3f}" for p in ("0", "0.95", "1")),
            f"{item.auc:.3f}",
        ]
        for item in table.fast_p
    ]
    if curves:
        titles = ("fast_p (strictly more than p)", "tasks", "0", "0.95", "1", "area over 0 to 2")
        lines += [*_grid(titles, curves), ""]
    for gained in table.traffic:
        weighted = f"none: {gained.reason}" if gained.weighted is None else f"{gained.weighted:.3f}x"
        lines.append(
            f"- {gained.set_name} set: traffic-weighted speedup {weighted}; mean of ratios "
            f"{gained.mean_of_ratios:.3f}x over {gained.num_workloads} timed workloads"
        )
    if (end := table.end_to_end) is not None:
        gate = "not decided" if end.worth_it is None else "holds" if end.worth_it else "does not hold"
        lines.append(
            f"- end to end at f = {end.fraction:g}: {end.estimate:.3f}x; the gate f (1 - 1/s) > delta {gate} "
            f"({end.gain:.4f} against {end.delta:.6f})"
        )
    lines += [_set_line(name, found) for name, found in (("boundary", table.boundary), ("test", table.test))]
    lines += [f"- failed: {item.count} {item.status} of {item.template}" for item in table.failures]
    spent = ("compile", table.cost.compile_s), ("validate", table.cost.validate_s), ("screen", table.cost.screen_s)
    parts = [f"{name} {_seconds(value)}" for name, value in (*spent, ("confirm", table.cost.confirm_s))]
    lines.append(f"- cost: {', '.join(parts)}; {table.cost.num_trials} trials")
    return [*lines, *(_run(table.run) if table.run is not None else ())]


def _run(run: RunReport) -> Iterator[str]:
    why = f" ({'; '.join(run.reasons)})" if run.reasons else ""
    yield f"- published by {run.kind}, {run.ended}{why}: seed {run.seed}, on {', '.join(run.devices)}"
    if run.observed:
        yield f"- {run.observed}"


def _cell(table: TableReport, cell: CellReport) -> list[str]:
    seen = cell.weakest
    serves = f"{table.variants[cell.serves - 1].name.split('(')[0]} #{cell.serves}" if cell.serves else "native"
    numbers = (
        ["-", "-", "-"]
        if seen is None
        else [f"{seen.value:.3f}", f"{seen.low:.3f} - {seen.high:.3f}", f"{seen.native_us:.1f}"]
    )
    return [cell.cell, serves, *numbers, " ".join((cell.verdict, *cell.flags)), cell.reason]


def _set_line(name: str, found: SetReport | None) -> str:
    if found is None:
        return f"- {name} set: {NOT_RECORDED}"
    speedups = [item.value for item in found.measured]
    spread = f", {min(speedups):.3f}x to {max(speedups):.3f}x" if speedups else ""
    slower = f"; slower than native beyond doubt: {'; '.join(found.slower)}" if found.slower else ""
    return f"- {name} set: {len(speedups)} workloads in replaced cells{spread}{slower}"


def _with_interval(seen: Speedup | None) -> str:
    return "-" if seen is None else f"{seen.value:.3f} ({seen.low:.3f} - {seen.high:.3f})"


def _seconds(value: float | None) -> str:
    return NOT_RECORDED if value is None else f"{value:.1f} s"


def _grid(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return lines + ["| " + " | ".join(_escape(value) for value in row) + " |" for row in rows]


def _escape(text: str) -> str:
    """Return text that neither ends a cell of the table nor the table, and is no HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")

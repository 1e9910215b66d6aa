"""Charts of a report as plotly figures, in plain data: they show its numbers and compute none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fibc.reporting.chart_style import Figure, axis, category, layout, plain, require_plotly
from fibc.reporting.data import CellReport, LatencyPoint, SearchReport, TableReport
from fibc.reporting.palette import LINES, light
from fibc.schema.decision import Verdict

ROW_PX = 26
"""Height of a row of a chart that has one for every cell or key."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")

VERDICTS = {
    Verdict.REPLACE.value: ("replaced", "served", "circle"),
    Verdict.KEEP_NATIVE.value: ("native kept", "native", "square"),
    Verdict.INCONCLUSIVE.value: ("inconclusive", "inconclusive", "diamond"),
}
"""Name, colour and marker of a verdict."""

LABEL_SHARE = 0.05
"""A narrower region, as a part of the axis, has no number in the chart: labels would overlap on a phone."""

HEAT_LIMIT = math.log(2.0)
"""Where the colours of the search end: half of native's speed, and twice as fast."""


def speedups(table: TableReport) -> Figure | None:
    """Return the speedup of every cell with its interval, beside the margin; None where nothing was compared."""
    go = require_plotly()
    cells = [cell for cell in table.cells if cell.weakest is not None]
    if not cells:
        return None
    figure = go.Figure()
    for verdict, (name, colour, symbol) in VERDICTS.items():
        mine = [cell for cell in cells if _shown_verdict(cell) == verdict]
        if mine:
            figure.add_trace(_interval_trace(go, mine, name, light(colour), symbol))
    ceilings = [cell for cell in cells if cell.ceiling is not None]
    if ceilings:
        figure.add_trace(
            go.Scatter(
                x=[cell.ceiling for cell in ceilings],
                y=[cell.cell for cell in ceilings],
                name="ceiling",
                mode="markers",
                marker={"symbol": "line-ns-open", "size": 14, "color": light("fifth"), "line": {"width": 2}},
                hovertemplate="%{y}: at most %{x:.3f}x<extra>ceiling</extra>",
            )
        )
    ends = [end for cell in cells if cell.weakest for end in (cell.weakest.low, cell.weakest.high)]
    figure.add_vline(x=1.0, line={"color": light("muted"), "width": 1})
    if table.margin is not None:
        figure.add_vline(x=table.margin, line={"color": light("bad"), "width": 1.5, "dash": "dash"})
        figure.add_trace(
            go.Scatter(
                x=[None],
                y=[cells[0].cell],
                name=f"margin {table.margin:g}x",
                mode="lines",
                line={"color": light("bad"), "dash": "dash", "width": 1.5},
            )
        )
    wide = max(ends) / min(ends) > 3
    figure.update_layout(
        **layout(90 + ROW_PX * len(cells)),
        xaxis=axis("speedup over native" + (", logarithmic" if wide else ""), type="log" if wide else "linear"),
        yaxis=category([cell.cell for cell in cells]),
    )
    return plain(figure)


def latencies(table: TableReport) -> Figure | None:
    """Return latency over the axis for native, what serves and the runner-up, with the regions behind."""
    go = require_plotly()
    if not table.latencies:
        return None
    points = sorted(table.latencies, key=lambda point: point.x)
    one_axis = len(points[0].x) == 1
    name = table.features[0] if table.features else "size"
    figure = go.Figure()
    if one_axis:
        _add_regions(figure, table)
    mode = "lines+markers" if one_axis else "markers"
    seconds = [point for point in points if point.runner_up_us is not None]
    for label, colour, symbol, dash, shown, value in (
        ("native", "native", "square", "solid", points, "native_us"),
        ("runner-up", "runner_up", "triangle-up", "dot", seconds, "runner_up_us"),
        ("served", "served", "circle", "solid", points, "served_us"),
    ):
        if not shown:
            continue
        figure.add_trace(
            go.Scatter(
                x=[point.x[0] for point in shown],
                y=[getattr(point, value) for point in shown],
                name=label,
                mode=mode,
                line={"color": light(colour), "width": 2, "dash": dash},
                marker={"symbol": symbol, "size": 7, "color": light(colour)},
                text=[_latency_text(point, label) for point in shown],
                hovertemplate="%{text}: %{y:.3~f} us<extra></extra>",
            )
        )
    figure.update_layout(
        **layout(440),
        xaxis=axis(f"{name}, logarithmic", type="log", tickangle=0, tickvals=_powers([point.x[0] for point in points])),
        yaxis=axis("latency of a call, us, logarithmic", type="log", tickformat="~r", dtick="D2"),
    )
    return plain(figure)


def search_map(searches: Sequence[SearchReport]) -> Figure | None:
    """Return every trial of every key: a row is a key, a column the number of the trial, the colour its speedup."""
    go = require_plotly()
    if not any(search.trials for search in searches):
        return None
    columns = max(trial.number for search in searches for trial in search.trials)
    rows: list[list[float | None]] = []
    texts: list[list[str]] = []
    failed: list[tuple[int, str, str]] = []
    for search in searches:
        row: list[float | None] = [None] * columns
        text = [""] * columns
        for trial in search.trials:
            text[trial.number - 1] = trial.template
            if trial.speedup is None:
                failed.append((trial.number, search.key, f"{trial.template}: {trial.status}"))
            else:
                row[trial.number - 1] = round(math.log(trial.speedup), 4)
                text[trial.number - 1] += f": {trial.speedup:.3f}x"
        rows.append(row)
        texts.append(text)
    figure = go.Figure()
    ticks = [0.5, 0.7, 1.0, 1.4, 2.0]
    figure.add_trace(
        go.Heatmap(
            z=rows,
            x=list(range(1, columns + 1)),
            y=[search.key for search in searches],
            text=texts,
            zmin=-HEAT_LIMIT,
            zmax=HEAT_LIMIT,
            colorscale=[[0, light("runner_up")], [0.5, light("grid")], [1, light("served")]],
            hovertemplate="%{y}, trial %{x}: %{text}<extra></extra>",
            hoverongaps=False,
            xgap=1,
            ygap=1,
            colorbar={
                "orientation": "h",
                "thickness": 10,
                "len": 0.9,
                "y": -0.02,
                "yanchor": "top",
                "ypad": 34,
                "outlinewidth": 0,
                "tickvals": [math.log(tick) for tick in ticks],
                "ticktext": [f"{tick:g}x" for tick in ticks],
                "tickfont": {"size": 12},
            },
        )
    )
    if failed:
        figure.add_trace(
            go.Scatter(
                x=[x for x, _, _ in failed],
                y=[y for _, y, _ in failed],
                text=[text for _, _, text in failed],
                mode="markers",
                name="failed",
                marker={"symbol": "x-thin", "size": 7, "line": {"width": 1.5, "color": light("bad")}},
                hovertemplate="%{y}, trial %{x}: %{text}<extra></extra>",
            )
        )
    common = layout(130 + max(14, min(ROW_PX, 900 // len(searches))) * len(searches))
    figure.update_layout(
        **(common | {"margin": common["margin"] | {"b": 90}}),
        xaxis=axis("trial", showgrid=False, zeroline=False, range=[0.5, columns + 0.5]),
        yaxis=category([search.key for search in searches]) | {"showgrid": False},
    )
    return plain(figure)


def fast_p(table: TableReport, family: str) -> Figure | None:
    """Return the fast_p curves of one family (``set``, ``backend``, ``kind``)."""
    go = require_plotly()
    curves = [item for item in table.fast_p if item.family == family]
    if not curves:
        return None
    figure = go.Figure()
    for index, item in enumerate(curves):
        inside = [speedup for speedup in item.speedups if speedup <= item.range_high]
        steps = [(item.range_low, item.points["0"])]
        steps += [(s, sum(other > s for other in item.speedups) / len(item.speedups)) for s in dict.fromkeys(inside)]
        steps.append((item.range_high, steps[-1][1]))
        figure.add_trace(
            go.Scatter(
                x=[x for x, _ in steps],
                y=[y for _, y in steps],
                name=f"{item.group} ({len(item.speedups)})",
                mode="lines",
                line={
                    "shape": "hv",
                    "color": light(LINES[index % len(LINES)]),
                    "dash": DASHES[index % len(DASHES)],
                    "width": 2.5,
                },
                hovertemplate="more than %{x:.3f}x: %{y:.1%}<extra>" + item.group + "</extra>",
            )
        )
    for p in (0.95, 1.0):
        figure.add_vline(x=p, line={"color": light("muted"), "width": 1, "dash": "dot"})
    figure.update_layout(
        **layout(320),
        xaxis=axis("p, times native's speed", range=[curves[0].range_low, curves[0].range_high]),
        yaxis=axis("share faster than p", range=[0, 1.04], tickformat=".0%"),
    )
    return plain(figure)


def failures(table: TableReport) -> Figure | None:
    """Return how many trials failed in which way, by template; None where none did."""
    go = require_plotly()
    if not table.failures:
        return None
    templates = list(dict.fromkeys(item.template for item in table.failures))
    statuses = list(dict.fromkeys(item.status for item in table.failures))
    figure = go.Figure()
    for index, template in enumerate(templates):
        mine = [item for item in table.failures if item.template == template]
        figure.add_trace(
            go.Bar(
                x=[item.count for item in mine],
                y=[item.status for item in mine],
                name=template,
                orientation="h",
                marker={
                    "color": light(LINES[index % len(LINES)]),
                    "pattern": {"shape": ["", "/", ".", "x"][index % 4]},
                },
                hovertemplate="%{y}: %{x}<extra>" + template + "</extra>",
            )
        )
    figure.update_layout(
        **layout(110 + 34 * len(statuses)), barmode="stack", xaxis=axis("trials"), yaxis=category(statuses)
    )
    return plain(figure)


def cost(table: TableReport) -> Figure | None:
    """Return what the run spent, by part; None where nothing of it is recorded."""
    go = require_plotly()
    parts = [
        ("compile", table.cost.compile_s, "served"),
        ("validate", table.cost.validate_s, "good"),
        ("screen", table.cost.screen_s, "inconclusive"),
        ("confirm", table.cost.confirm_s, "fifth"),
    ]
    known = [(name, seconds, colour) for name, seconds, colour in parts if seconds is not None]
    if not known:
        return None
    figure = go.Figure()
    figure.add_trace(
        go.Bar(
            x=[seconds for _, seconds, _ in known],
            y=[name for name, _, _ in known],
            orientation="h",
            marker={"color": [light(colour) for _, _, colour in known]},
            text=[f"{seconds:.1f} s" for _, seconds, _ in known],
            textposition="auto",
            hovertemplate="%{y}: %{x:.1f} s<extra></extra>",
            showlegend=False,
        )
    )
    figure.update_layout(
        **layout(90 + 34 * len(known)), xaxis=axis("seconds"), yaxis=category([name for name, _, _ in known])
    )
    return plain(figure)


def _interval_trace(go: Any, cells: Sequence[CellReport], name: str, colour: str, symbol: str) -> Any:
    known = [(cell, cell.weakest) for cell in cells if cell.weakest is not None]
    return go.Scatter(
        x=[seen.value for _, seen in known],
        y=[cell.cell for cell, _ in known],
        name=name,
        mode="markers",
        marker={"color": colour, "size": 9, "symbol": symbol},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [seen.high - seen.value for _, seen in known],
            "arrayminus": [seen.value - seen.low for _, seen in known],
            "color": colour,
            "thickness": 1.75,
            "width": 4,
        },
        text=[f"{seen.low:.3f} to {seen.high:.3f} at {seen.point}" for _, seen in known],
        hovertemplate="%{y}: %{x:.3f}x (%{text})<extra>" + name + "</extra>",
    )


def _add_regions(figure: Any, table: TableReport) -> None:
    """Put a tinted band behind the sizes that each variant serves, with its number on top where there is room."""
    whole = math.log(max(point.x[0] for point in table.latencies) + 1)
    for region in table.regions:
        first, last = region.bounds[0]
        low, high = max(first - 0.5, 0.75), last + 0.5
        figure.add_shape(
            type="rect",
            xref="x",
            yref="paper",
            x0=low,
            x1=high,
            y0=0,
            y1=1,
            layer="below",
            fillcolor=light("served_tint"),
            line={"width": 1, "color": light("surface")},
        )
        if math.log(high / low) < LABEL_SHARE * whole:
            continue
        figure.add_annotation(
            x=(math.log10(low) + math.log10(high)) / 2,
            y=1,
            xref="x",
            yref="paper",
            yanchor="top",
            text=f"#{region.serves}",
            showarrow=False,
            font={"size": 11, "color": light("served")},
        )


def _latency_text(point: LatencyPoint, label: str) -> str:
    at = ", ".join(f"{name}={size}" for name, size in point.axes.items())
    return f"{at}, " + {"native": "native", "runner-up": point.runner_up, "served": point.served}[label]


def _shown_verdict(cell: CellReport) -> str:
    """A revoked replacement is native's."""
    return Verdict.KEEP_NATIVE.value if "revoked" in cell.flags else cell.verdict


def _powers(values: Sequence[int]) -> list[int]:
    """Return powers of two, few enough to be read on a phone, that span ``values``."""
    low, high = math.floor(math.log2(max(min(values), 1))), math.ceil(math.log2(max(*values, 1)))
    step = max(1, math.ceil((high - low) / 6))
    return [2**power for power in range(low, high + 1, step)]

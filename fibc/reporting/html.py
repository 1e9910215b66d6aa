"""A report as one HTML file that opens without a network."""

from __future__ import annotations

import json
from typing import Any

from fibc.paths import TEMPLATES
from fibc.render import Renderer
from fibc.reporting import charts
from fibc.reporting.chart_style import plotly_script
from fibc.reporting.data import NOT_RECORDED, ReportData, TableReport
from fibc.reporting.palette import PALETTE

FAST_P_FAMILIES = (
    ("set", "What is served, by set"),
    ("backend", "What the search found, by backend"),
    ("kind", "Generated kernels and library calls"),
)


def write_html(data: ReportData) -> str:
    """Return the page: its script, styles and numbers are inside, and nothing is loaded.

    Raises:
        ToolchainError: If plotly is not installed.
    """
    render = Renderer([TEMPLATES / "report"], is_html=True)
    figures: dict[str, Any] = {}
    pages = []
    for index, table in enumerate(data.tables):
        made = _figures(table, f"t{index}")
        figures |= made
        pages.append({"id": f"t{index}", "table": table, "figures": made, "trajectory": _trajectory(table)})
    return render(
        "page.html.j2",
        {
            "data": data,
            "pages": pages,
            "not_recorded": NOT_RECORDED,
            "families": FAST_P_FAMILIES,
            "palette": PALETTE,
            "embedded": embed(
                {"figures": figures, "palette": PALETTE, "search": {p["id"]: p["trajectory"] for p in pages}}
            ),
            "plotly": plotly_script(),
            "title": _title(data),
        },
    )


def embed(value: Any) -> str:
    """Return ``value`` as JSON that may stand inside a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _title(data: ReportData) -> str:
    names = ", ".join(dict.fromkeys(table.definition for table in data.tables))
    return f"{names}: fibc report"


def _figures(table: TableReport, prefix: str) -> dict[str, Any]:
    made = {
        "speedup": charts.speedups(table),
        "latency": charts.latencies(table),
        "search": charts.search_map(table.searches),
        "failures": charts.failures(table),
        "cost": charts.cost(table),
        **{f"fast_p-{family}": charts.fast_p(table, family) for family, _ in FAST_P_FAMILIES},
    }
    return {f"{prefix}-{name}": figure for name, figure in made.items() if figure is not None}


def _trajectory(table: TableReport) -> dict[str, Any]:
    """Return the trials of every key, small: templates by index, configs once each."""
    templates: dict[str, int] = {}
    configs: dict[str, int] = {}
    keys: dict[str, list[list[Any]]] = {}
    for search in table.searches:
        keys[search.key] = [
            [
                trial.number,
                templates.setdefault(trial.template, len(templates)),
                configs.setdefault(trial.config, len(configs)),
                None if trial.speedup is None else round(trial.speedup, 4),
                "" if trial.speedup is not None else trial.status,
            ]
            for trial in search.trials
        ]
    return {"templates": list(templates), "configs": list(configs), "keys": keys}

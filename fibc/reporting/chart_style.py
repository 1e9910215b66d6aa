"""What the charts of a report have in common: plotly itself, layout, axes, and figures as plain data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fibc.errors import ToolchainError
from fibc.reporting.palette import light

Figure = dict[str, Any]


def require_plotly() -> Any:
    """Return ``plotly.graph_objects``.

    Raises:
        ToolchainError: If plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise ToolchainError(
            "fibc report: HTML needs plotly, found none "
            '(pip install "fibc[report]"; --json, --csv and --markdown do without)'
        ) from None
    return go


def plotly_script() -> str:
    """Return the text of plotly.min.js.

    Raises:
        ToolchainError: If plotly is not installed.
    """
    require_plotly()
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def layout(height: int) -> Figure:
    """Return what every chart has in common."""
    return {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 36, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {
            "family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
            "size": 13,
            "color": light("ink"),
        },
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "yref": "paper", "traceorder": "normal"},
        "hoverlabel": {"bgcolor": light("surface"), "bordercolor": light("line"), "font": {"color": light("ink")}},
        "dragmode": False,
        "template": None,
    }


def axis(title: str, **more: Any) -> Figure:
    """Return an axis that neither zooms nor pans: on a phone a page is to be scrolled."""
    return {
        "title": {"text": title, "font": {"size": 13, "color": light("muted")}, "standoff": 8},
        "gridcolor": light("grid"),
        "linecolor": light("line"),
        "tickcolor": light("line"),
        "zeroline": False,
        "automargin": True,
        "fixedrange": True,
        **more,
    }


def category(names: Sequence[str]) -> Figure:
    """Return an axis of names, the first one on top."""
    return axis("") | {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": list(names),
        "range": [len(names) - 0.4, -0.6],
        "tickmode": "array",
        "tickvals": list(names),
        "ticks": "outside",
        "ticklen": 6,
    }


def plain(figure: Any) -> Figure:
    """Return a figure as plain data; what is not a number in it is null."""
    plain: Figure = json.loads(figure.to_json())
    return plain

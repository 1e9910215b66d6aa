"""The state of published packages as node_exporter's textfile collector reads it."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence

from fibc.schema.upkeep import PackageStatus

METRICS: Sequence[tuple[str, str, Callable[[PackageStatus], float]]] = (
    ("fibc_readable", "1 where the package's table can be read.", lambda s: float(not s.problem)),
    ("fibc_cells", "Cells of the table.", lambda s: s.num_cells),
    ("fibc_cells_replaced", "Cells that a variant serves.", lambda s: s.num_replaced),
    ("fibc_shown_timestamp_seconds", "When its replacements were last shown to hold.", lambda s: _epoch(s.shown)),
    ("fibc_created_timestamp_seconds", "When the serving generation was made.", lambda s: _epoch(s.created)),
    ("fibc_changed_facts", "Facts that call for measuring again.", lambda s: len(s.triggers)),
    ("fibc_foreign_silicon", "1 where the table belongs to other silicon.", lambda s: float(bool(s.foreign))),
    ("fibc_partial", "1 where a budget ended before the table was whole.", lambda s: float(s.partial)),
    ("fibc_rolled_back", "Generations after the serving one.", lambda s: len(s.later)),
)


def render(states: Iterable[PackageStatus]) -> str:
    """Return the metrics of ``states`` in Prometheus's text format."""
    known = list(states)
    lines = []
    for name, meaning, value in METRICS:
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} gauge"]
        lines += [
            f'{name}{{definition="{_label(state.definition)}",generation="{_label(state.generation)}"}} '
            f"{value(state):.15g}"
            for state in known
        ]
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _epoch(moment: str) -> float:
    try:
        return datetime.datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return 0.0

"""A report, from records to files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fibc.paths import atomic_write
from fibc.reporting.compare import compare
from fibc.reporting.data import ReportData
from fibc.reporting.gather import gather
from fibc.reporting.html import write_html
from fibc.reporting.recorded import read_recorded
from fibc.reporting.tables import write_csv, write_markdown
from fibc.reporting.worth import read_dispatch_ns
from fibc.schema.codec import to_plain


def report(
    path: Path | str,
    other: Path | str | None = None,
    *,
    html: Path | str | None = None,
    csv: Path | str | None = None,
    markdown: Path | str | None = None,
    fraction: float | None = None,
    dispatch: Path | str | None = None,
) -> ReportData:
    """Return the numbers of a report, and write the files that are asked for. Every number is from records.

    Args:
        path: An ``--out`` directory, a package in it, one generation of a package, or a file of records.
        other: The same, newer or of another machine: the report is about it, and says what changed since ``path``.
        html: File of one page that opens without a network.
        csv: File with a line per trial.
        markdown: File with what a reviewer reads first.
        fraction: Share of an application's time that the operator takes with native, for an estimate end to end.
        dispatch: What ``benchmarks/dispatch_overhead.py`` wrote: what dispatch costs.

    Raises:
        InputError: If nothing is recorded there, or an option is not such.
        ToolchainError: If HTML is asked for and plotly is not installed.
        RecordError: If a file cannot be read or written.
    """
    dispatch_ns = read_dispatch_ns(Path(dispatch)) if dispatch is not None else None
    data = gather(read_recorded(Path(path)), fraction=fraction, dispatch_ns=dispatch_ns)
    if other is not None:
        data = compare(data, gather(read_recorded(Path(other)), fraction=fraction, dispatch_ns=dispatch_ns))
    for file, write in ((html, write_html), (csv, write_csv), (markdown, write_markdown)):
        if file is not None:
            atomic_write(Path(file), write(data).encode())
    return data


def report_json(data: ReportData) -> dict[str, Any]:
    """Return a report's numbers as plain data; what is not finite is null."""
    plain: dict[str, Any] = _finite(to_plain(data))
    return plain


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value

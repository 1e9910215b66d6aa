"""Finished rows of a part as JSON lines: appended one by one, so that a part that was cut off goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zstandard

Row = dict[str, Any]
"""A finished row: at least ``part``, ``row`` (its name in the part) and ``kind``."""

SUFFIX = ".jsonl"


class RowLog:
    """The rows of one part.

    A row is one line, written with one ``write``. A torn last line, of a run that was killed, is no row.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: Row) -> None:
        """Append a row; one of the same name before it no longer counts."""
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size > 0
        line = json.dumps(row, sort_keys=True) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}" if torn else line)
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> dict[str, Row]:
        """Return the last row of each name, in the order in which names came first."""
        return read_rows([self.path]) if self.path.exists() else {}

    def has(self, name: str, **fields: Any) -> bool:
        """Return whether a row of this name is there, with these fields."""
        row = self.rows().get(name)
        return row is not None and all(row.get(field) == value for field, value in fields.items())


def read_rows(paths: Iterable[Path]) -> dict[str, Row]:
    """Return the last row of each name in files of one part, compressed or not; torn lines are passed over."""
    rows: dict[str, Row] = {}
    for path in paths:
        data = path.read_bytes()
        if path.suffix == ".zst":
            data = zstandard.ZstdDecompressor().decompress(data)
        for line in data.decode(errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and "row" in row:
                rows[row["row"]] = row
    return rows

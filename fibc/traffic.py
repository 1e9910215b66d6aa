"""Calls outside a table's regions, from the counters that applications dump."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fibc.errors import SchemaError
from fibc.schema.table import DispatchTable

RISE = 0.05
"""Part of all calls by which those outside regions must have risen to call for a retune."""

KIND = "traffic"
"""Of the record that keeps the share as of the last generation."""

OUTSIDE = "region"
"""The reason that counts them (``csrc/include/fibc/reason.h``)."""


@dataclass(frozen=True)
class Traffic:
    """Counted calls of one definition.

    Attributes:
        calls: All, those that went native included.
        outside: Those whose sizes no region held.
    """

    calls: int
    outside: int

    @property
    def share(self) -> float:
        """Part of the calls outside regions; 0 without calls."""
        return self.outside / self.calls if self.calls else 0.0

    def has_risen(self, before: float) -> bool:
        """Whether the share is at least ``RISE`` above ``before``."""
        return self.share - before > RISE or math.isclose(self.share - before, RISE)


def read_traffic(files: Iterable[Path], table: DispatchTable, *, is_only: bool) -> Traffic | None:
    """Return the calls of ``table`` counted in ``files``, all processes together; None where no file tells.

    A file holds the JSON of one ``stats()``, or an object of several by definition. One by itself belongs to the table
    whose variants it counts, or to the only table there is.

    Raises:
        SchemaError: If a file is no such JSON.
    """
    symbols = {variant.symbol for variant in table.variants}
    calls = outside = 0
    known = False
    for file in files:
        for name, counts in _entries(file):
            mine = name == table.definition if name else (is_only or bool(symbols & counts["hits"].keys()))
            if mine:
                known = True
                calls += int(counts["calls"])
                outside += int(counts["native"].get(OUTSIDE, 0))
    return Traffic(calls, outside) if known else None


def _entries(file: Path) -> list[tuple[str, Mapping[str, Any]]]:
    try:
        plain = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise SchemaError(f"--stats {file}: must be the JSON of stats(), got: {error}") from error
    if _is_stats(plain):
        return [("", plain)]
    if isinstance(plain, dict) and plain and all(_is_stats(value) for value in plain.values()):
        return [(name.removeprefix("fibc_"), value) for name, value in plain.items()]
    raise SchemaError(
        f"--stats {file}: must be the JSON of stats(), or an object of such by definition, got {type(plain).__name__} "
        'without "calls", "hits" and "native"'
    )


def _is_stats(plain: Any) -> bool:
    return (
        isinstance(plain, dict)
        and isinstance(plain.get("calls"), int)
        and isinstance(plain.get("hits"), dict)
        and isinstance(plain.get("native"), dict)
    )

"""The log of a contest: JSON lines, one unit of work in one write, so that a run goes on where another one ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fibc.errors import InputError

Record = dict[str, Any]


class Log:
    """Records in a file. Its first line says of which contest; a torn last line, of a run that was killed, is dropped.

    Raises:
        InputError: If the file belongs to another contest.
    """

    def __init__(self, path: Path, contest: Mapping[str, str]) -> None:
        """Read the file, or begin it.

        Args:
            contest: Digests that all results of the file depend on, by what they are of.
        """
        self.path = path
        self._records: list[Record] = []
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        torn = len(lines.pop()) if lines else 0
        if torn:
            os.truncate(path, path.stat().st_size - torn)
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.append({"kind": "contest", **contest})
            return
        self._records = [json.loads(line) for line in lines]
        different = [name for name, digest in contest.items() if self._records[0].get(name) != digest]
        if different:
            raise InputError(
                f"{path}: must be of this contest, and is of another one (another {', '.join(different)}; "
                "pass another --work, or remove it)"
            )

    def append(self, *records: Record) -> None:
        """Add the records of a unit, all or none."""
        text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        with self.path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        self._records += records

    def of(self, kind: str, **fields: Any) -> Iterator[Record]:
        """Yield the records of a kind whose fields have these values."""
        for record in self._records:
            if record["kind"] == kind and all(record.get(name) == value for name, value in fields.items()):
                yield record

    def has(self, kind: str, **fields: Any) -> bool:
        """Whether there is such a record."""
        return next(self.of(kind, **fields), None) is not None

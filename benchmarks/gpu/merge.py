"""Finished parts to tables: benchmarks/results/h200/*.md, with raw samples and records beside them.

    python benchmarks/gpu/merge.py build/gpu/results [more directories] --out benchmarks/results/h200

Directories hold what benchmarks/gpu/run.py wrote; of a row that is in several the one measured last counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import gpu_tables
import zstandard
from gpu_log import SUFFIX, Row, read_rows

MAX_BYTES = 16_000_000
"""Of everything that is written: what is committed stays small."""

TEXTS = {
    "suite.md": gpu_tables.suite_text,
    "norms.md": gpu_tables.norms_text,
    "host.md": gpu_tables.host_text,
    "peers.md": gpu_tables.peers_text,
}
NEEDS = {"suite.md": "suite-", "norms.md": "norms", "host.md": "host", "peers.md": "peers"}

RECORDS = ".records"


def read_parts(directories: Sequence[Path]) -> dict[str, dict[str, Row]]:
    """Return the rows of every part: of each name the one with the latest date."""
    parts: dict[str, dict[str, Row]] = {}
    for directory in directories:
        for path in sorted([*directory.glob(f"*{SUFFIX}"), *directory.glob(f"raw/*{SUFFIX}.zst")]):
            rows = read_rows([path])
            known = parts.setdefault(path.name.split(".jsonl")[0], {})
            for name, row in rows.items():
                if name not in known or known[name].get("date", "") <= row.get("date", ""):
                    known[name] = row
    return parts


def merge(directories: Sequence[Path], out: Path) -> list[Path]:
    """Write tables, raw rows and records; return the files.

    Raises:
        ValueError: If there are no rows, or all together would be too large.
    """
    parts = read_parts(directories)
    if not any(parts.values()):
        raise ValueError(f"{', '.join(map(str, directories))}: must hold rows of parts, found none (*{SUFFIX})")
    files: dict[Path, bytes] = {}
    for name, text in TEXTS.items():
        if any(part.startswith(NEEDS[name]) for part in parts):
            files[out / name] = text(parts).encode()
    for part, rows in sorted(parts.items()):
        files[out / "raw" / f"{part}{SUFFIX}.zst"] = packed(rows)
    for directory in directories:
        for archive in sorted(directory.glob("*.state.tar.gz")):
            files |= {out / "records" / name: data for name, data in records_in(archive).items()}
    total = sum(map(len, files.values()))
    if total > MAX_BYTES:
        largest = max(files, key=lambda path: len(files[path]))
        raise ValueError(f"{out}: must stay under {MAX_BYTES} bytes, got {total} (the largest is {largest.name})")
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return sorted(files)


def packed(rows: dict[str, Row]) -> bytes:
    """Return rows as compressed JSON lines: the same bytes for the same rows."""
    text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows.values())
    return bytes(zstandard.ZstdCompressor(level=19).compress(text.encode()))


def records_in(archive: Path) -> dict[str, bytes]:
    """Return the records in a part's state, by file name."""
    found: dict[str, bytes] = {}
    with tarfile.open(archive) as state:
        for member in state.getmembers():
            if member.isfile() and member.name.endswith(RECORDS):
                file = state.extractfile(member)
                assert file is not None
                found[Path(member.name).name] = file.read()
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    options = parser.parse_args(arguments)
    try:
        for path in merge(options.directories, options.out):
            print(f"{path} {path.stat().st_size}")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

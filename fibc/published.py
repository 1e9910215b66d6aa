"""What was published, kept among the records: the table, its definition and its kernels, to make the module again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fibc.errors import InputError
from fibc.paths import OutLayout, atomic_write
from fibc.records import RecordLog
from fibc.schema import codec
from fibc.schema.definition import Definition
from fibc.schema.digest import digest_json
from fibc.schema.options import TuneOptions
from fibc.schema.table import DispatchTable
from fibc.schema.workload import Workload

KIND = "published"

RECORDS, SUFFIX = "fibc-records", ".records"
"""Where an ``--out`` directory has its records, see ``OutLayout``."""

SUFFIXES = {"triton": ".py", "cutlass": ".cu"}
"""Of source files, by backend; the others write C++."""


@dataclass(frozen=True)
class Kernel:
    """A variant's relocatable object and its source text."""

    object_code: bytes
    source: str


@dataclass(frozen=True)
class Snapshot:
    """What a table was tuned from beside its definition, to go on from it.

    Attributes:
        workloads: As they were read.
        options: That the run was started with.
        evidence: Environment key of its evidence (``Task.evidence_digest``).
    """

    workloads: tuple[Workload, ...]
    options: TuneOptions
    evidence: str

    @property
    def workloads_digest(self) -> str:
        """Digest of the calls and their traffic, whatever files they came from."""
        return digest_json([[workload.to_json(), workload.weight] for workload in self.workloads])


@dataclass(frozen=True)
class Published:
    """A published table.

    Attributes:
        kernels: Of the variants, by symbol; may be empty.
        snapshot: None where an earlier version of fibc recorded it.
        manifest: What the generation is made of, plain; empty alike.
    """

    definition: Definition
    table: DispatchTable
    kernels: Mapping[str, Kernel]
    snapshot: Snapshot | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)


def keep_published(
    log: RecordLog,
    definition: Definition,
    table: DispatchTable,
    kernels: Mapping[str, Kernel],
    snapshot: Snapshot | None = None,
    manifest: Mapping[str, Any] | None = None,
) -> None:
    """Append what is published; the last one of a target counts.

    Raises:
        RecordError: If it cannot be written.
    """
    log.append(
        KIND,
        {
            "definition": definition.to_json(),
            "table": codec.to_plain(table),
            "kernels": {
                symbol: {"object": kernel.object_code, "source": kernel.source}
                for symbol, kernel in sorted(kernels.items())
            },
            "snapshot": None if snapshot is None else codec.to_plain(snapshot),
            "manifest": dict(manifest or {}),
        },
    )


def record_files(path: Path) -> tuple[Path, ...]:
    """Return the files of records at ``path``: itself, or those of an ``--out`` directory.

    Raises:
        InputError: If there are none.
    """
    if not path.is_dir():
        return (path,)
    found = tuple(sorted([*path.glob(f"*{SUFFIX}"), *path.glob(f"{RECORDS}/*{SUFFIX}")]))
    if not found:
        raise InputError(f"{path}: must hold records, found none (accepted: <out>/{RECORDS}/*{SUFFIX})")
    return found


def read_published(records: Path, target: str = "") -> Published:
    """Return what the file ``records`` says was published last for ``target`` (``cuda:sm_90a``; empty: for any).

    Raises:
        InputError: If there is none, or several targets have one and none is asked for.
        RecordError: If the file cannot be read.
    """
    if not records.is_file():
        raise InputError(f"{records}: must be a file of records, found none (accepted: <out>/{RECORDS}/*{SUFFIX})")
    log = RecordLog(records, definition="", environment="")
    last = {record.value["table"]["target"]: record.value for record in log.read() if record.kind == KIND}
    if not last:
        raise InputError(f"{records}: must hold a published table, has none (let `fibc tune` finish first)")
    if not target and len(last) > 1:
        raise InputError(f"--target: must say which table of {records}, got none (accepted: {', '.join(sorted(last))})")
    chosen = target or next(iter(last))
    if chosen not in last:
        raise InputError(f"--target: {records} has no table for {chosen} (accepted: {', '.join(sorted(last))})")
    return _read(records, last[chosen])


def find_published(records: Path, table: DispatchTable) -> Published | None:
    """Return what was recorded when ``table`` was published; None where nothing was.

    Raises:
        InputError: If it was recorded by another version of fibc.
        RecordError: If the file cannot be read.
    """
    wanted = codec.to_plain(table)
    log = RecordLog(records, definition="", environment="")
    same = [record.value for record in log.read() if record.kind == KIND and record.value["table"] == wanted]
    return _read(records, same[-1]) if same else None


def write_sources(layout: OutLayout, table: DispatchTable, sources: Mapping[str, str]) -> None:
    """Write the source texts of the variants, by symbol, for people.

    Raises:
        RecordError: If one cannot be written.
    """
    for variant in table.variants:
        name = f"{variant.symbol}{SUFFIXES.get(variant.candidate.backend, '.cpp')}"
        atomic_write(layout.sources(table.definition) / name, sources[variant.symbol].encode())


def _read(records: Path, plain: Mapping[str, Any]) -> Published:
    try:
        return Published(
            Definition.model_validate(plain["definition"]),
            codec.from_plain(DispatchTable, plain["table"]),
            {symbol: Kernel(item["object"], item["source"]) for symbol, item in plain["kernels"].items()},
            codec.from_plain(Snapshot, plain["snapshot"]) if plain.get("snapshot") else None,
            plain.get("manifest", {}),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{records}: must hold a table of this version of fibc, got: {error} (tune again)") from error

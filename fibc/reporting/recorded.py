"""Records to read for a report: one table, and the evidence that it was decided on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fibc.errors import InputError
from fibc.paths import OutLayout
from fibc.published import KIND as PUBLISHED
from fibc.published import record_files
from fibc.records import Record, RecordLog
from fibc.runs import Run, evidence_of, find_run
from fibc.schema import codec
from fibc.schema.candidate import Candidate
from fibc.schema.decision import Decision
from fibc.schema.evaluation import Evaluation, SessionSamples
from fibc.schema.table import DispatchTable

T = TypeVar("T")

TABLE = "table.msgpack"
"""Of a package's generation, see ``fibc.codegen.package``."""


@dataclass(frozen=True)
class Recorded:
    """What is recorded of one definition on one target.

    Attributes:
        source: Path that it was read from, as the user gave it or found below it.
        definition: Name.
        table: What was published; None in records from before fibc kept it, and where nothing was published yet.
        decisions: The table's rows, or what is recorded of them.
        candidates: By digest.
        evaluations: In the order of the search.
        samples: Raw pairs, in the order of measuring.
        gate: The A/A gate's text; empty where the host had passed before.
        run: How the run that published went; None in records from before fibc kept it.
    """

    source: str
    definition: str
    table: DispatchTable | None
    decisions: tuple[Decision, ...]
    candidates: Mapping[str, Candidate]
    evaluations: tuple[Evaluation, ...]
    samples: tuple[SessionSamples, ...]
    gate: str
    run: Run | None


def read_recorded(path: Path) -> tuple[Recorded, ...]:
    """Return what is recorded at ``path``, by definition and target.

    Args:
        path: A file of records, an ``--out`` directory, a package in one, or one generation of a package.

    Raises:
        InputError: If nothing is recorded there.
        RecordError: If a file cannot be read.
    """
    if path.is_dir() and (table := _table_below(path)) is not None:
        return (_of_table(path, table),)
    if not path.exists():
        raise InputError(
            f"{path}: must be there, is not (accepted: an --out directory, a package in it, a generation of one, or a "
            "file of records)"
        )
    found = [item for file in record_files(path) for item in _of_file(file)]
    if not found:
        raise InputError(f"{path}: must hold decisions, has none (let `fibc tune` finish first)")
    return tuple(found)


def _table_below(path: Path) -> DispatchTable | None:
    """Return the table of the package or generation at ``path``; None where it is neither."""
    generation = path / "current" if (path / "current").is_dir() else path
    file = generation / TABLE
    if not file.is_file():
        return None
    try:
        return codec.decode(DispatchTable, file.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: must be a dispatch table, got: {error} (tune again)") from error


def _of_table(path: Path, table: DispatchTable) -> Recorded:
    """Return the table with the evidence that lies in the ``--out`` directory around it, if any does."""
    resolved = path.resolve()
    package = resolved if (resolved / "current").is_dir() else resolved.parent
    file = OutLayout(package.parent).records(table.definition)
    return _slice(str(path), _read(file), table.definition_digest, table.fingerprint, table)


def _of_file(file: Path) -> tuple[Recorded, ...]:
    """Return one Recorded per target that has a published table; without any, what was decided last."""
    records = _read(file)
    tables: dict[str, DispatchTable] = {}
    for record in records:
        if record.kind == PUBLISHED:
            try:
                table = codec.from_plain(DispatchTable, record.value["table"])
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{file}: must hold a table of this version of fibc, got: {error} (tune again)"
                ) from error
            tables[table.target] = table
    if tables:
        return tuple(_slice(str(file), records, t.definition_digest, t.fingerprint, t) for t in tables.values())
    last = next((record for record in reversed(records) if record.kind == "decision"), None)
    if last is None:
        return ()
    return (_slice(str(file), records, last.definition, last.environment, None, name=file.stem),)


def _read(file: Path) -> list[Record]:
    return list(RecordLog(file, definition="", environment="").read())


def _slice(
    source: str,
    records: Sequence[Record],
    definition: str,
    fingerprint: str,
    table: DispatchTable | None,
    *,
    name: str = "",
) -> Recorded:
    run = None if table is None else find_run(records, table)
    keys = evidence_of(records, table, run) if table is not None else ()
    keys = keys or (_evidence_digest(records, definition, fingerprint),)

    def of(kind: str, *environments: str) -> list[Any]:
        return [
            r.value for r in records if r.kind == kind and r.definition == definition and r.environment in environments
        ]

    evaluations = [
        [codec.from_plain(Evaluation, value) for value in of("evaluation", environment)] for environment in keys
    ]
    samples = [
        [codec.from_plain(SessionSamples, value) for value in of("samples", environment)] for environment in keys
    ]
    candidates = [codec.from_plain(Candidate, value) for value in of("candidate", *keys)]
    decisions = {d.cell: d for d in (codec.from_plain(Decision, value) for value in of("decision", fingerprint))}
    gates = next((found for environment in keys if (found := of("gate", environment))), [])
    return Recorded(
        source=source,
        definition=table.definition if table is not None else name,
        table=table,
        decisions=table.rows if table is not None else tuple(decisions[cell] for cell in sorted(decisions)),
        candidates={candidate.digest: candidate for candidate in candidates}
        | ({v.candidate.digest: v.candidate for v in table.variants} if table is not None else {}),
        evaluations=_latest(evaluations, lambda item: item.key),
        samples=_latest(samples, lambda item: (item.stage, item.arm.key)),
        gate=str(gates[-1].get("text", "")) if gates else "",
        run=run,
    )


def _latest(evidence: Sequence[Sequence[T]], about: Callable[[T], Hashable]) -> tuple[T, ...]:
    """Return what the latest run that measured a thing showed of it; the earlier runs first.

    Args:
        evidence: Of each run, the latest first: a night measures some cells, and the others keep what they had.
        about: What a piece of evidence is about.
    """
    told: set[Hashable] = set()
    kept: list[list[T]] = []
    for items in evidence:
        kept.append([item for item in items if about(item) not in told])
        told |= set(map(about, items))
    return tuple(item for items in reversed(kept) for item in items)


def _evidence_digest(records: Sequence[Record], definition: str, fingerprint: str) -> str:
    """Return the environment digest of the evidence behind the decisions of ``fingerprint``, where no record names it.

    Evidence holds for an environment and a native, decisions for more than these: the record of a published table has
    both. Before there were such records, decisions followed their samples in the file.
    """
    digest = ""
    decided = False
    for record in records:
        if record.definition != definition:
            continue
        if record.kind == PUBLISHED and record.value["table"].get("fingerprint") == fingerprint:
            return record.environment
        if record.kind == "samples" and not decided:
            digest = record.environment
        decided = decided or (record.kind == "decision" and record.environment == fingerprint)
    return digest

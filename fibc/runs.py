"""How a run went, kept among the records: what it took and saw, the sets that it read, and the test set's evidence."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fibc.errors import FibcError
from fibc.paths import OutLayout
from fibc.published import KIND as PUBLISHED
from fibc.records import Record, RecordLog
from fibc.schema import codec
from fibc.schema.decision import Comparison
from fibc.schema.digest import digest_json
from fibc.schema.observed import Observed
from fibc.schema.result import SetSizes
from fibc.schema.table import DispatchTable
from fibc.schema.upkeep import LastRun

KIND = "run"

TUNE, RETUNE = "tune", "retune"
"""What ran."""

TRIAL = "trial"
"""Stage of the pairs that a search takes with its trials, beside the stages of raw samples."""

_log = logging.getLogger("fibc.runs")


@dataclass(frozen=True)
class Member:
    """A recorded workload and the set that it fell into.

    Attributes:
        set_name: ``tune``, ``boundary`` or ``test``.
        axes: Every var axis of the definition.
        weight: Traffic.
        workload: Its uuid.
    """

    set_name: str
    axes: tuple[tuple[str, int], ...]
    weight: float
    workload: str


@dataclass(frozen=True)
class Run:
    """What one run that published leaves besides evidence and table.

    Attributes:
        fingerprint: Of the table that it published.
        created: When it ended, ISO 8601 in UTC.
        members: Of the sets; empty where the workloads are synthetic.
        test: Evidence of the test workloads, read once after publication; a night carries on what a tune read of cells
            that it left with their variant.
        slower_on_test: Descriptions of test workloads that are slower than native by more than the margin.
        stage_s: Wall time of each stage, in seconds.
        cost_s: What the search spent, in seconds: ``compile``, ``validate`` and ``screen``.
        notes: Sentences that a user must read.
        kind: ``tune`` or ``retune``.
        table: Digest of the table that it published; empty in records from before fibc kept it, as all that follows.
        reasons: Why a night measured anything.
        environment: Facts of the environment that it ran in.
        devices: What it measured on.
        seed: Of the search and of inputs.
        num_pairs: Paired timings by stage: of a night its own, of a tune with those that it went on from.
        num_trials: Alike.
        observed: What was seen of GPUs while pairs were timed; None on a CPU.
        evidence: Environment keys that hold the evidence of the table's rows, that of this run first.
    """

    fingerprint: str
    created: str
    sets: SetSizes
    members: tuple[Member, ...]
    test: tuple[Comparison, ...]
    slower_on_test: tuple[str, ...]
    stage_s: Mapping[str, float]
    cost_s: Mapping[str, float]
    notes: tuple[str, ...]
    kind: str = TUNE
    table: str = ""
    reasons: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    seed: int = 0
    num_pairs: Mapping[str, int] = field(default_factory=dict)
    num_trials: int = 0
    observed: Observed | None = None
    evidence: tuple[str, ...] = ()


def keep_run(log: RecordLog, run: Run) -> None:
    """Append how a run went.

    Raises:
        RecordError: If it cannot be written.
    """
    log.append(KIND, run)


def table_digest(table: DispatchTable) -> str:
    """Return what tells a published table from every other one: two nights may leave equal fingerprints."""
    return digest_json(codec.to_plain(table))


def find_run(records: Iterable[Record], table: DispatchTable) -> Run | None:
    """Return the run that published ``table``; None where none is recorded.

    Records from before fibc kept which table it was have the last run of its fingerprint.
    """
    wanted = table_digest(table)
    found: Run | None = None
    for record in records:
        if record.kind != KIND or record.definition != table.definition_digest:
            continue
        of_table = record.value.get("table", "")
        if of_table != wanted and (of_table or record.value.get("fingerprint") != table.fingerprint):
            continue
        try:
            found = codec.from_plain(Run, record.value)
        except ValueError as error:  # written by a version with another schema
            _log.warning("a record of another version of fibc, %s, is ignored: %s", KIND, error)
    return found


def evidence_of(records: Iterable[Record], table: DispatchTable, run: Run | None) -> tuple[str, ...]:
    """Return the environment keys that hold the evidence of ``table``, the latest first; empty where nothing tells."""
    if run is not None and run.evidence:
        return run.evidence
    plain = codec.to_plain(table)
    known = (r.environment for r in records if r.kind == PUBLISHED and r.value["table"] == plain)
    return tuple(known)[-1:]


def pairs_by_stage(log: RecordLog) -> Counter[str]:
    """Return the paired timings in ``log`` of its environment key, those of trials among them."""
    counts = Counter({TRIAL: sum(len(item.pairs) for item in log.evaluations().values())})
    for item in log.samples():
        counts[item.stage] += len(item.pairs)
    return +counts


def last_run(package: Path, table: DispatchTable) -> LastRun | None:
    """Return how the run that published ``table`` went, for its package's state; None where no record tells."""
    file = OutLayout(package.parent).records(table.definition)
    try:
        run = find_run(RecordLog(file, definition="", environment="").read(), table)
    except FibcError as error:
        _log.warning("%s", error)
        return None
    if run is None:
        return None
    return LastRun(
        kind=run.kind,
        ended=run.created,
        took_s=round(sum(run.stage_s.values()), 1),
        reasons=run.reasons,
        devices=run.devices,
        seed=run.seed,
        num_pairs=sum(run.num_pairs.values()),
        num_trials=run.num_trials,
        observed=run.observed,
    )

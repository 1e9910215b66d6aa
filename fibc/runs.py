"""How a run went, kept among the records: what it took, the sets that it read, and the test set's evidence."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fibc.records import Record, RecordLog
from fibc.schema import codec
from fibc.schema.decision import Comparison
from fibc.schema.result import SetSizes

KIND = "run"

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
    """What one tuning run leaves besides evidence and table.

    Attributes:
        fingerprint: Of the table that it published.
        created: When it ended, ISO 8601 in UTC.
        members: Of the sets; empty where the workloads are synthetic.
        test: Evidence of the test workloads, read once after publication.
        slower_on_test: Descriptions of test workloads that are slower than native by more than the margin.
        stage_s: Wall time of each stage, in seconds.
        cost_s: What the search spent, in seconds: ``compile``, ``validate`` and ``screen``.
        notes: Sentences that a user must read.
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


def keep_run(log: RecordLog, run: Run) -> None:
    """Append how a run went.

    Raises:
        RecordError: If it cannot be written.
    """
    log.append(KIND, run)


def find_run(records: Iterable[Record], fingerprint: str) -> Run | None:
    """Return the last run that published the table of ``fingerprint``; None where none is recorded."""
    found: Run | None = None
    for record in records:
        if record.kind != KIND or record.value.get("fingerprint") != fingerprint:
            continue
        try:
            found = codec.from_plain(Run, record.value)
        except ValueError as error:  # written by a version with another schema
            _log.warning("a record of another version of fibc, %s, is ignored: %s", KIND, error)
    return found

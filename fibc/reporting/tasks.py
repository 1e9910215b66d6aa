"""The workloads of each set as tasks: what serves them, how fast, and what their traffic gains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fibc.reporting.data import FastP, Traffic
from fibc.reporting.fast_p import curve
from fibc.reporting.recorded import Recorded
from fibc.reporting.worth import Served, traffic
from fibc.schema.decision import Comparison, Decision, Verdict
from fibc.schema.feature import feature_values

SET_NAMES = ("tune", "boundary", "test", "stress")

SERVED = "a workload of the set, as the table serves it: 1 where native does"
MEASURED = "a workload of the set that was timed, as the table serves it; the set itself is not recorded"


@dataclass(frozen=True)
class Task:
    """A workload with what is known of it.

    Attributes:
        ratio: Native latency / served latency; 1 where native serves; None where it was not timed.
        native_us: None where it was not timed. Alike ``served_us``.
    """

    set_name: str
    weight: float
    ratio: float | None
    native_us: float | None
    served_us: float | None


def set_tasks(recorded: Recorded) -> tuple[Task, ...]:
    """Return the recorded workloads, by set; those that were timed where the sets are not recorded."""
    return tuple(_members(recorded) if recorded.run is not None and recorded.table is not None else _timed(recorded))


def set_fast_p(recorded: Recorded, tasks: Sequence[Task]) -> tuple[FastP, ...]:
    """Return fast_p of every set that holds a task whose speedup is known."""
    about = SERVED if recorded.run is not None else MEASURED
    curves = []
    for name in SET_NAMES:
        mine = [task for task in tasks if task.set_name == name]
        known = [task.ratio for task in mine if task.ratio is not None]
        if known:
            untimed = len(mine) - len(known)
            curves.append(curve("set", name, about + (f"; {untimed} were not timed" if untimed else ""), known))
    return tuple(curves)


def set_traffic(recorded: Recorded, tasks: Sequence[Task]) -> tuple[Traffic, ...]:
    """Return what each set's traffic gains."""
    found = []
    for name in SET_NAMES:
        mine = [task for task in tasks if task.set_name == name]
        served = [
            Served(task.weight, task.native_us, task.served_us, task.ratio)
            for task in mine
            if task.native_us is not None and task.served_us is not None and task.ratio is not None
        ]
        total = sum(task.weight for task in mine) if recorded.run is not None else None
        found.append(traffic(name, served, total))
    return tuple(item for item in found if item is not None)


def serves(decision: Decision) -> bool:
    """Whether a variant answers the calls of the cell."""
    return decision.verdict is Verdict.REPLACE and not decision.revoked


def _members(recorded: Recorded) -> Iterator[Task]:
    assert recorded.run is not None
    assert recorded.table is not None
    later = [*recorded.table.boundary, *recorded.run.test]
    timed = {item.point.workload: item for item in later if item.point.workload}
    for decision in recorded.decisions:
        timed |= {item.point.workload: item for item in decision.evidence if item.point.workload}
    for member in recorded.run.members:
        values = feature_values(recorded.table.features, dict(member.axes))
        decision_of = next((d for d in recorded.decisions if d.cell.holds(values)), None)
        replaced = decision_of is not None and serves(decision_of)
        yield _task(member.set_name, member.weight, timed.get(member.workload), replaced=replaced)


def _timed(recorded: Recorded) -> Iterator[Task]:
    for decision in recorded.decisions:
        for item in decision.evidence:
            if item.point.origin == "tune":
                yield _task("tune", item.point.weight, item, replaced=serves(decision))
    if recorded.table is not None:
        for item in recorded.table.boundary:
            yield _task("boundary", item.point.weight, item, replaced=True)


def _task(set_name: str, weight: float, item: Comparison | None, *, replaced: bool) -> Task:
    if item is None:
        return Task(set_name, weight, None if replaced else 1.0, None, None)
    if not replaced:
        return Task(set_name, weight, 1.0, item.native_us, item.native_us)
    return Task(set_name, weight, item.speedup, item.native_us, item.candidate_us)

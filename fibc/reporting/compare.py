"""Two reports side by side: generations of a table, or machines."""

from __future__ import annotations

import math
from dataclasses import replace

from fibc.reporting.data import CellReport, Change, ReportData, Speedup, TableComparison, TableReport

SAME, FLIPPED, OTHER, MOVED, NEW, GONE = "same", "flipped", "other variant", "speedup moved", "new", "gone"
"""What became of a cell. A flip is native in place of a variant, or the other way round."""


def compare(before: ReportData, after: ReportData) -> ReportData:
    """Return ``after`` with what changed since ``before``, for each definition that both have.

    Tables of one definition are matched by target where both have several, else whatever their targets: two machines
    may differ in it.
    """
    comparisons = []
    unmatched = []
    left = list(before.tables)
    for table in after.tables:
        same_name = [old for old in left if old.definition == table.definition]
        old = next((item for item in same_name if item.target == table.target), next(iter(same_name), None))
        if old is None:
            unmatched.append(f"{table.definition} ({table.target}) is only in {table.source}")
            continue
        left.remove(old)
        comparisons.append(_compare(old, table))
    unmatched += [f"{old.definition} ({old.target}) is only in {old.source}" for old in left]
    return replace(after, comparisons=tuple(comparisons), unmatched=tuple(unmatched))


def _compare(before: TableReport, after: TableReport) -> TableComparison:
    facts = {**before.environment, **after.environment}
    differs = tuple(
        (name, before.environment.get(name, ""), after.environment.get(name, ""))
        for name in facts
        if before.environment.get(name) != after.environment.get(name)
    )
    return TableComparison(after.definition, _label(before), _label(after), _changes(before, after), differs)


def _label(table: TableReport) -> str:
    return f"{table.source} ({table.target}, {table.created})"


def _changes(before: TableReport, after: TableReport) -> tuple[Change, ...]:
    changes = []
    for cell in after.cells:
        olds = [old for old in before.cells if _overlap(old, cell)]
        if not olds:
            changes.append(Change(cell.cell, NEW, "", _served(after, cell), None, cell.weakest, cell.reason))
        for old in olds:
            name = cell.cell if old.bounds == cell.bounds else _shared(old, cell)
            was, now = _served(before, old), _served(after, cell)
            what = _what(before, old, after, cell)
            changes.append(Change(name, what, was, now, old.weakest, cell.weakest, cell.reason))
    gone = [old for old in before.cells if not any(_overlap(old, cell) for cell in after.cells)]
    changes += [Change(old.cell, GONE, _served(before, old), "native", old.weakest, None, old.reason) for old in gone]
    return tuple(changes)


def _what(before: TableReport, old: CellReport, after: TableReport, new: CellReport) -> str:
    if bool(old.serves) != bool(new.serves):
        return FLIPPED
    if old.serves and before.variants[old.serves - 1].name != after.variants[new.serves - 1].name:
        return OTHER
    if old.weakest is not None and new.weakest is not None and old.serves and _moved(old.weakest, new.weakest):
        return MOVED
    return SAME


def _moved(old: Speedup, new: Speedup) -> bool:
    """Whether two speedups of one variant differ by more than both intervals explain, at the same point.

    The half-widths of independent intervals add in squares.
    """
    if old.point != new.point:
        return False
    widths = [math.log(item.high / item.low) / 2 for item in (old, new)]
    return abs(math.log(new.value / old.value)) > math.hypot(*widths)


def _served(table: TableReport, cell: CellReport) -> str:
    return table.variants[cell.serves - 1].name if cell.serves else "native"


def _overlap(one: CellReport, other: CellReport) -> bool:
    if len(one.bounds) != len(other.bounds):
        return False
    return all(max(a, c) <= min(b, d) for (a, b), (c, d) in zip(one.bounds, other.bounds, strict=True))


def _shared(one: CellReport, other: CellReport) -> str:
    """Return the sizes that both cells hold, where one of them was split."""
    shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one.bounds, other.bounds, strict=True)]
    return " x ".join(f"{first}" if first == last else f"{first}..{last}" for first, last in shared)

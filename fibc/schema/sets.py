"""The split of recorded workloads into tune, boundary and test sets."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fibc.errors import InputError
from fibc.schema.feature import Feature
from fibc.schema.workload import Workload, merge_duplicates

DEFAULT_FRACTIONS = (0.6, 0.2, 0.2)

FEW_WORKLOADS = 10
"""Below it a set that gets a fifth is empty in more than 13 % of cases (0.8^9)."""


@dataclass(frozen=True)
class Skipped:
    """A recorded workload that is not tuned, and why."""

    workload: Workload
    reason: str


@dataclass(frozen=True)
class Sets:
    """Disjoint sets that together hold every recorded workload with work to do, each sorted by size.

    Attributes:
        tune: Searched, screened and confirmed on.
        boundary: Accepts or rejects a row before publication.
        test: Read once, after publication; decides nothing.
        skipped: Workloads without work.
        notes: Sentences that a report prints: which set is empty, and why.
        traffic_weighted: Weights differ, so that "heaviest" means traffic.
    """

    tune: tuple[Workload, ...]
    boundary: tuple[Workload, ...]
    test: tuple[Workload, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]
    traffic_weighted: bool


def split(
    workloads: Iterable[Workload],
    fractions: tuple[float, float, float] = DEFAULT_FRACTIONS,
    features: Sequence[Feature] = (),
) -> Sets:
    """Return the sets of ``workloads``, which do not depend on their order.

    A workload's set follows from a hash of its uuid, so that one recorded later moves none of the others. Only the
    smallest and the largest size of each feature go to the tune set whatever their hash. Equal workloads (axes and
    inputs) are merged and their weights added.

    Args:
        workloads: All of one definition.
        fractions: Of the tune, boundary and test set; they add up to 1.
        features: Whose smallest and largest values are tuned; every axis of the workloads where empty.

    Raises:
        InputError: If the fractions are not such.
    """
    _check_fractions(fractions)
    merged = merge_duplicates(workloads)
    skipped = tuple(Skipped(workload, reason) for workload in merged if (reason := _why_skipped(workload)))
    kept = [workload for workload in merged if not _why_skipped(workload)]

    chosen = {workload.uuid: _set_of(workload.uuid, fractions) for workload in kept}
    for uuid in _extremes(kept, features, chosen):
        chosen[uuid] = 0
    tune, boundary, test = (tuple(w for w in kept if chosen[w.uuid] == index) for index in range(3))

    notes = []
    if 0 < len(kept) < FEW_WORKLOADS:
        notes.append(
            f"{len(kept)} recorded workloads are fewer than {FEW_WORKLOADS}: "
            f"{len(tune)} tune, {len(boundary)} boundary, {len(test)} test"
        )
    members = {"tune": tune, "boundary": boundary, "test": test}
    notes += [f"the {name} set is empty" for name, workloads_of_set in members.items() if not workloads_of_set]
    return Sets(tune, boundary, test, skipped, tuple(notes), len({workload.weight for workload in kept}) > 1)


def _check_fractions(fractions: Sequence[float]) -> None:
    lawful = (
        len(fractions) == 3
        and all(0 <= part <= 1 for part in fractions)
        and fractions[0] > 0
        and math.isclose(sum(fractions), 1, abs_tol=1e-6)
    )
    if not lawful:
        raise InputError(
            f"split: needs three fractions (tune, boundary, test) from 0 to 1 that add up to 1, tune above 0, got "
            f"{','.join(map(str, fractions))} (accepted: for example 0.6,0.2,0.2)"
        )


def _why_skipped(workload: Workload) -> str:
    """Return why there is nothing to tune in ``workload``, or an empty string."""
    empty = [name for name, size in workload.axes.items() if size == 0]
    return f"{' and '.join(empty)} = 0: a tensor without elements, answered without a kernel" if empty else ""


def _set_of(uuid: str, fractions: Sequence[float]) -> int:
    """Return 0 (tune), 1 (boundary) or 2 (test) from the first 64 bits of the hash of ``uuid``."""
    place = int.from_bytes(hashlib.sha256(uuid.encode()).digest()[:8], "big") / 2**64
    if place < fractions[0]:
        return 0
    return 1 if place < fractions[0] + fractions[1] else 2


def _extremes(workloads: Sequence[Workload], features: Sequence[Feature], chosen: dict[str, int]) -> set[str]:
    """Return the uuids that must be tuned so that the smallest and the largest size of each feature are."""
    if not workloads:
        return set()
    axes = [Feature(name, None, (1,)) for name in sorted(workloads[0].axes)]
    moved = set()
    for feature in features or axes:
        for pick in (min, max):
            extreme = pick(feature.value(workload.axes) for workload in workloads)
            holders = [workload.uuid for workload in workloads if feature.value(workload.axes) == extreme]
            if not any(chosen[uuid] == 0 or uuid in moved for uuid in holders):
                moved.add(min(holders))
    return moved

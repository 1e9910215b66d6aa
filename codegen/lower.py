"""Rows to regions: the decisions of cells become the lookup that a module serves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fibc.schema.candidate import Artifact, Candidate
from fibc.schema.decision import Decision, Verdict
from fibc.schema.feature import Cell
from fibc.schema.table import Region, Variant

RELEASE_GIL_ABOVE_US = 100.0
"""Releasing and taking the GIL costs 40 ns, and up to 5 ms where another thread is busy in Python (two cores of an AMD
EPYC, torch 2.13.0): worth it only around work that is long beside it."""


def serves(decision: Decision) -> bool:
    """Return whether ``decision`` puts a variant in native's place."""
    return decision.verdict is Verdict.REPLACE and not decision.revoked


def releases_gil(decision: Decision) -> bool:
    """Return whether the winner took more than RELEASE_GIL_ABOVE_US at every point of the cell."""
    evidence = decision.reconfirm or decision.confirm
    return bool(evidence) and min(comparison.candidate_us for comparison in evidence) > RELEASE_GIL_ABOVE_US


def build_variants(
    decisions: Iterable[Decision],
    artifacts: Mapping[str, Artifact],
    candidates: Mapping[str, Candidate],
    nondeterministic: Collection[str] = frozenset(),
) -> tuple[Variant, ...]:
    """Return the variants that ``decisions`` put in native's place, sorted by symbol.

    Candidates with one object code are one variant, named after the least of their digests.

    Args:
        artifacts: What was built, by the candidate's digest.
        candidates: By digest.
        nondeterministic: Digests of the candidates whose repeats were not bitwise equal.
    """
    replacing = [decision for decision in decisions if serves(decision)]
    by_code: dict[str, set[str]] = {}
    for decision in replacing:
        by_code.setdefault(artifacts[decision.candidate].digest, set()).add(decision.candidate)
    variants = []
    for code, digests in by_code.items():
        digest = min(digests)
        artifact = artifacts[digest]
        variants.append(
            Variant(
                symbol=artifact.symbol,
                candidate=candidates[digest],
                artifact=code,
                isa=candidates[digest].target.arch,
                guards=artifact.guards,
                deterministic=digests.isdisjoint(nondeterministic),
                release_gil=_waits(candidates[digest])
                and all(releases_gil(decision) for decision in replacing if decision.candidate in digests),
                library=str(artifact.resources.get("library", "")),
            )
        )
    return tuple(sorted(variants, key=lambda variant: variant.symbol))


def lower(
    decisions: Iterable[Decision], variants: Sequence[Variant], artifacts: Mapping[str, Artifact]
) -> tuple[Region, ...]:
    """Return disjoint regions, sorted by cell, that serve each size as its own decision does.

    Neighbouring cells with one winner become one region, along one feature at a time. Cells that differ in whether
    they release the GIL stay apart: a merged region could do only one of the two.

    Args:
        decisions: One per cell; the cells are disjoint.
        variants: As ``build_variants`` returns them.
        artifacts: What was built, by the candidate's digest.
    """
    index = {variant.artifact: position for position, variant in enumerate(variants)}
    boxes = []
    for decision in filter(serves, decisions):
        variant = index[artifacts[decision.candidate].digest]
        releases = _waits(variants[variant].candidate) and releases_gil(decision)
        boxes.append(_Box(decision.cell.bounds, variant, releases))
    num_features = len(boxes[0].bounds) if boxes else 0
    for axis in range(num_features):
        boxes = _merge_along(axis, boxes)
    return tuple(
        Region(Cell(box.bounds), box.variant, box.release_gil) for box in sorted(boxes, key=lambda box: box.bounds)
    )


def _waits(candidate: Candidate) -> bool:
    """Return whether a call of ``candidate`` lasts as long as its work; on a GPU it only enqueues it."""
    return candidate.target.kind == "cpu"


@dataclass(frozen=True)
class _Box:
    bounds: tuple[tuple[int, int], ...]
    variant: int
    release_gil: bool

    def across(self, axis: int) -> tuple[object, ...]:
        """Everything that two boxes must share to be merged along ``axis``."""
        return (self.bounds[:axis], self.bounds[axis + 1 :], self.variant, self.release_gil)


def _merge_along(axis: int, boxes: Iterable[_Box]) -> list[_Box]:
    merged: list[_Box] = []
    groups: dict[tuple[object, ...], list[_Box]] = {}
    for box in boxes:
        groups.setdefault(box.across(axis), []).append(box)
    for group in groups.values():
        run: list[_Box] = []
        for box in sorted(group, key=lambda box: box.bounds[axis]):
            if run and run[-1].bounds[axis][1] + 1 == box.bounds[axis][0]:
                joined = (run[-1].bounds[axis][0], box.bounds[axis][1])
                bounds = (*box.bounds[:axis], joined, *box.bounds[axis + 1 :])
                run[-1] = _Box(bounds, box.variant, box.release_gil)
            else:
                run.append(box)
        merged += run
    return merged

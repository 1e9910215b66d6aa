"""Smaller calls that stand in for heavy ones, where what is tried does not need the size."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fibc.bound import reduction_length
from fibc.schema.definition import Definition
from fibc.schema.feature import Point
from fibc.schema.workload import Workload

TERMS_OF_AN_ELEMENT = 1024
"""Least reduction length in a call's terms: an element costs the comparison as much, whatever the operator."""

ORIGIN = "stand-in"

REMAINDER_OF = 16
"""A stand-in leaves the same remainder as its call: rows that fill no block show the same mistakes."""


@dataclass(frozen=True)
class Heavy:
    """From how many terms (output elements times reduction length) on a call is heavy.

    Attributes:
        finalist_terms: For a finalist's adversarial inputs.
        trial_terms: For a trial, of which there are many.
    """

    finalist_terms: int
    trial_terms: int


HEAVY: Mapping[str, Heavy] = {"cpu": Heavy(1 << 31, 1 << 30), "cuda": Heavy(1 << 40, 1 << 38)}
"""By the kind of device. On two cores 2^30 terms are 0.03 s of a float32 oracle, of which each case takes up to four,
and comparing 2^18 elements in five cases takes longer than timing the candidate. A GPU that makes 40 TFLOP/s in float64
needs 0.06 s for 2^40."""


def num_terms(definition: Definition, point: Point) -> int:
    """Return the terms of a call at ``point``."""
    axes = dict(point.axes)
    n = max(TERMS_OF_AN_ELEMENT, reduction_length(definition, axes, multi_affine=True))
    shapes = (definition.shape_of(spec, axes) for spec in definition.outputs.values())
    return n * sum(math.prod(shape or ()) for shape in shapes)


def recorded_values(definition: Definition, workloads: Iterable[Workload]) -> frozenset[str]:
    """Return the uuids of workloads with values of their own, which stand for no other size."""
    return frozenset(
        workload.uuid
        for workload in workloads
        if len(workload.inputs) < len(definition.inputs)
        or any(spec.type != "random" for spec in workload.inputs.values())
    )


def stand_in(definition: Definition, point: Point, heavy_terms: int, recorded: Collection[str] = ()) -> Point:
    """Return the largest light point that leaves the same remainder, or ``point`` where it is light or nothing can.

    Only the one var axis of a definition without constraints is made smaller.

    Args:
        recorded: As ``recorded_values`` has them.
    """
    axes = dict(point.axes)
    if num_terms(definition, point) < heavy_terms:
        return point
    if len(axes) != 1 or definition.constraints or point.workload in recorded:
        return point
    ((axis, size),) = axes.items()
    light = (heavy_terms - 1) * size // num_terms(definition, point)  # terms grow with the axis, at least as fast
    smaller = light - (light - size) % REMAINDER_OF
    if smaller < REMAINDER_OF:
        return point
    made = Point(((axis, smaller),), ORIGIN)
    return made if num_terms(definition, made) < heavy_terms else point


def trial_points(
    definition: Definition,
    points: Sequence[Point],
    screened: Point,
    heavy_terms: int,
    recorded: Collection[str] = (),
) -> tuple[Point, ...]:
    """Return where a trial is judged: the smallest point and the screening point, or what stands in for them.

    A heavy screening point is replaced by what stands in for the largest point, which all heavy keys have in common.
    """
    low, high = min(points, key=Point.size), max(points, key=Point.size)
    if num_terms(definition, screened) >= heavy_terms:
        light = stand_in(definition, high, heavy_terms, recorded)
        screened = light if light != high else screened
    return tuple(dict.fromkeys((stand_in(definition, low, heavy_terms, recorded), screened)))

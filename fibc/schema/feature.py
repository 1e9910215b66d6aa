"""Features, cells and points: how workload sizes become keys of a table."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fibc.errors import SchemaError


@dataclass(frozen=True)
class Feature:
    """An axis, or the ratio of two axes rounded up, with inclusive upper edges that cut its values into cells.

    Attributes:
        numerator: Name of an axis.
        denominator: Name of another axis, or None.
        edges: Strictly increasing inclusive upper bounds; cell ``i`` is ``(edges[i-1], edges[i]]``, the first
            ``[1, edges[0]]``.
    """

    numerator: str
    denominator: str | None
    edges: tuple[int, ...]

    def __post_init__(self) -> None:
        increasing = all(low < high for low, high in zip((0, *self.edges), self.edges, strict=False))
        if not self.edges or not increasing:
            raise SchemaError(f"feature {self.name}: edges must be strictly increasing and >= 1, got {self.edges}")

    @property
    def name(self) -> str:
        return self.numerator if self.denominator is None else f"{self.numerator} / {self.denominator}"

    def value(self, axes: Mapping[str, int]) -> int:
        """Return the axis, or ``ceil(numerator / denominator)`` (0 where the denominator is 0)."""
        if self.denominator is None:
            return axes[self.numerator]
        bottom = axes[self.denominator]
        return -(-axes[self.numerator] // bottom) if bottom > 0 else 0

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Return the ``(first, last)`` of every cell, without a gap from 1 to the last edge."""
        return tuple(zip((1, *(edge + 1 for edge in self.edges[:-1])), self.edges, strict=True))

    def range_of(self, value: int) -> tuple[int, int] | None:
        """Return the ``(first, last)`` that holds ``value``, or None where it is below 1 or above the last edge."""
        if not 1 <= value <= self.edges[-1]:
            return None
        return self.ranges()[bisect_left(self.edges, value)]


def feature_values(features: Sequence[Feature], axes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the coordinates of ``axes``: one value per feature, in their order."""
    return tuple(feature.value(axes) for feature in features)


@dataclass(frozen=True, order=True)
class Cell:
    """A box of feature values, both ends included: one ``(first, last)`` per feature, in the features' order."""

    bounds: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for first, last in self.bounds:
            if not 1 <= first <= last:
                raise SchemaError(f"cell: needs 1 <= first <= last, got ({first}, {last})")

    def holds(self, values: tuple[int, ...]) -> bool:
        return all(first <= value <= last for (first, last), value in zip(self.bounds, values, strict=True))

    def __str__(self) -> str:
        return " x ".join(f"{first}" if first == last else f"{first}..{last}" for first, last in self.bounds)


@dataclass(frozen=True)
class Point:
    """One size inside a cell at which evidence is collected.

    Attributes:
        axes: Every var axis of the definition.
        origin: ``tune`` (a recorded workload), ``end`` (an end of the cell), ``capture`` (a graph-capture size) or
            ``stand-in`` (for a heavier call, where candidates are judged).
        weight: Traffic of the recorded workload, else 0.
        workload: uuid of the recorded workload, else empty.
    """

    axes: tuple[tuple[str, int], ...]
    origin: str
    weight: float = 0.0
    workload: str = ""

    def size(self) -> int:
        """Return the product of the axes."""
        return math.prod(size for _, size in self.axes)

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes)


@dataclass(frozen=True)
class FeatureKey:
    """One cell with its points: the unit of search and of decision. There is one study per key.

    Attributes:
        cell: The box of feature values.
        points: At least one; ``points[screen_point]`` is where screening runs.
        screen_point: Index of the heaviest recorded point, else of the upper end.
        synthetic: True where no recorded workload of the tune set falls into the cell.
        role: Empty for the points that decide; ``boundary`` or ``test`` where they are workloads of that set.
    """

    cell: Cell
    points: tuple[Point, ...]
    screen_point: int
    synthetic: bool
    role: str = ""

    def __str__(self) -> str:
        return f"{self.cell} {self.role}".rstrip()

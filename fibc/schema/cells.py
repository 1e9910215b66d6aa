"""The cells of a definition's features and the points at which evidence for each is collected."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from fibc.errors import InputError
from fibc.schema.axis_laws import AxisLaws
from fibc.schema.capture_sizes import CAPTURE_SIZES
from fibc.schema.definition import Definition
from fibc.schema.feature import Cell, Feature, FeatureKey, Point, feature_values
from fibc.schema.workload import Workload

MAX_POINTS = 5

MAX_TUNE_POINTS = 3
"""Tune workloads of a cell that become points, beside those that sit on its ends."""

HALF_STEPS_ABOVE = 64
"""Edges are powers of two up to here and have half steps (96, 192, ...) above: the sizes between 64 and 128 differ by
more work than all below 64 together."""

CAPACITY_AXES = frozenset({"num_pages", "pool_size", "state_cache_size", "max_seq_len"})
"""Axes that say how large a cache is, not how much of it a call reads; they never become features."""

STRUCTURED_FEATURES: tuple[tuple[frozenset[str], tuple[tuple[str, str | None], ...]], ...] = (
    (frozenset({"total_q", "num_kv_indices"}), (("total_q", None), ("num_kv_indices", None))),
    (frozenset({"total_q", "total_kv"}), (("total_q", None), ("total_kv", None))),
    (frozenset({"batch_size", "num_kv_indices"}), (("batch_size", None), ("num_kv_indices", "batch_size"))),
    (frozenset({"total_seq_len", "num_seqs"}), (("num_seqs", None), ("total_seq_len", "num_seqs"))),
)
"""Features of ragged and paged operators, by the var axes that they have; the first match counts. Prefill work follows
queries and keys, decode work follows requests and the mean length of a request."""

MAX_INWARD_STEPS = 1024
"""How far an end moves into its cell to find a size that the constraints allow (``M % 128 == 0`` needs 127 steps)."""

_Located = tuple[tuple[int, ...], Workload]


def default_edges(largest: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... 64, 96, 128, 192, ... below ``largest``, then ``largest`` itself.

    Args:
        largest: The largest recorded size, at least 1.
    """
    edges = []
    power = 1
    while power < largest:
        edges.append(power)
        half_step = power + power // 2
        if power >= HALF_STEPS_ABOVE and half_step < largest:
            edges.append(half_step)
        power *= 2
    return (*edges, largest)


def default_features(definition: Definition, workloads: Iterable[Workload]) -> tuple[Feature, ...]:
    """Return the features of ``definition``, with default edges up to the largest recorded size of each.

    One per var axis, but for those that an equation determines from others and those in ``CAPACITY_AXES``; operators
    in ``STRUCTURED_FEATURES`` have the features listed there.

    Args:
        workloads: Every recorded workload, of whatever set; those with an axis of 0 do not count.

    Raises:
        InputError: If a feature has no recorded size of at least 1.
    """
    recorded = tuple(workload for workload in workloads if all(workload.axes.values()))
    features = []
    for numerator, denominator in _feature_axes(definition):
        measure = Feature(numerator, denominator, (1,))
        largest = max((measure.value(workload.axes) for workload in recorded), default=0)
        if largest < 1:
            raise InputError(
                f"{definition.name}: needs a recorded workload with {measure.name} >= 1, got {len(recorded)} workloads "
                f"with none (pass others with --workloads)"
            )
        features.append(Feature(numerator, denominator, default_edges(largest)))
    return tuple(features)


def _feature_axes(definition: Definition) -> tuple[tuple[str, str | None], ...]:
    var_axes = tuple(definition.var_axes)
    for needed, features in STRUCTURED_FEATURES:
        if needed <= set(var_axes):
            return features
    determined = AxisLaws(definition).determined
    free = tuple((axis, None) for axis in var_axes if axis not in CAPACITY_AXES and axis not in determined)
    return free or tuple((axis, None) for axis in var_axes)


def make_keys(
    features: Sequence[Feature], tune_workloads: Sequence[Workload], definition: Definition
) -> tuple[FeatureKey, ...]:
    """Return the keys of ``definition``, sorted by cell.

    With one feature its cells run without a gap from 1 to the last edge; with several only the boxes that hold a tune
    workload are keys (docs/adr/0001). A cell in which the definition's constraints allow no size has no key.
    """
    laws = AxisLaws(definition)
    located = _locate(features, tune_workloads)
    if len(features) == 1:
        cells = {Cell((bounds,)) for bounds in features[0].ranges()}
    else:
        cells = {cell for values, _ in located if (cell := _cell_of(features, values)) is not None}
    keys = (_make_key(cell, features, located, laws, definition) for cell in sorted(cells))
    return tuple(key for key in keys if key is not None)


def split_key(
    key: FeatureKey, features: Sequence[Feature], tune_workloads: Sequence[Workload], definition: Definition
) -> tuple[FeatureKey, ...]:
    """Return the two keys of ``key``'s cell cut at its middle, each with points of its own.

    A box is cut along the feature whose last and first size are the furthest apart as a ratio. A cell of one size has
    no middle and gives an empty tuple; a half in which the constraints allow no size is left out.
    """
    bounds = key.cell.bounds
    axis = max(range(len(bounds)), key=lambda index: bounds[index][1] / bounds[index][0])
    first, last = bounds[axis]
    if first == last:
        return ()
    middle = (first + last) // 2
    halves = (
        Cell((*bounds[:axis], (first, middle), *bounds[axis + 1 :])),
        Cell((*bounds[:axis], (middle + 1, last), *bounds[axis + 1 :])),
    )
    laws = AxisLaws(definition)
    located = _locate(features, tune_workloads)
    keys = (_make_key(half, features, located, laws, definition) for half in halves)
    return tuple(key for key in keys if key is not None)


def tuning_order(keys: Iterable[FeatureKey]) -> tuple[FeatureKey, ...]:
    """Return ``keys`` in the order in which the budget is spent: recorded first, then heavy, then small ones."""
    return tuple(sorted(keys, key=lambda key: (key.synthetic, -max(point.weight for point in key.points), key.cell)))


def _locate(features: Sequence[Feature], workloads: Iterable[Workload]) -> tuple[_Located, ...]:
    located = ((feature_values(features, workload.axes), workload) for workload in workloads)
    return tuple(sorted(located, key=lambda item: (item[0], item[1].uuid)))


def _cell_of(features: Sequence[Feature], values: tuple[int, ...]) -> Cell | None:
    ranges = [feature.range_of(value) for feature, value in zip(features, values, strict=True)]
    bounds = tuple(bounds for bounds in ranges if bounds is not None)
    return Cell(bounds) if len(bounds) == len(features) else None


def _make_key(
    cell: Cell, features: Sequence[Feature], located: Sequence[_Located], laws: AxisLaws, definition: Definition
) -> FeatureKey | None:
    """Return the key of ``cell``, or None where the constraints allow no size in it."""
    inside = [item for item in located if cell.holds(item[0])]
    order = tuple(definition.var_axes)
    points = [_recorded_point(workload, order) for _, workload in _pick(inside)]

    def add_synthetic(values: tuple[int, ...], origin: str) -> bool:
        axes = _derive(features, values, located, laws)
        if axes is None:
            return False
        point = Point(tuple((name, axes[name]) for name in order), origin)
        if all(point.axes != other.axes for other in points):
            points.append(point)
        return True

    for corner in (_inward_from_first(cell), _inward_from_last(cell)):
        for values in corner:
            here = [item for item in inside if item[0] == values]
            if here:
                points.append(_recorded_point(_pick(here)[0][1], order))
                break
            if add_synthetic(values, "end"):
                break

    for values in _capture_values(cell, features, inside, points):
        if len(set(points)) >= MAX_POINTS:
            break
        add_synthetic(values, "capture")

    if not points:
        return None
    ordered = sorted(set(points), key=lambda p: (feature_values(features, dict(p.axes)), p.axes, p.workload))
    screen_point = max(range(len(ordered)), key=lambda index: (ordered[index].weight, index))
    return FeatureKey(cell, tuple(ordered), screen_point, synthetic=not inside)


def _recorded_point(workload: Workload, order: Sequence[str]) -> Point:
    return Point(tuple((name, workload.axes[name]) for name in order), "tune", workload.weight, workload.uuid)


def _pick(inside: Sequence[_Located]) -> list[_Located]:
    """Return at most MAX_TUNE_POINTS of ``inside``: heaviest first; of ties smallest, largest, middle."""
    picked: list[_Located] = []
    for weight in sorted({workload.weight for _, workload in inside}, reverse=True):
        tied = [item for item in inside if item[1].weight == weight]
        for index in (0, -1, len(tied) // 2, *range(len(tied))):
            if len(picked) < MAX_TUNE_POINTS and tied[index] not in picked:
                picked.append(tied[index])
    return picked


def _inward_from_first(cell: Cell) -> Iterator[tuple[int, ...]]:
    """Yield the first corner of ``cell``, then the values next to it towards the last."""
    for step in range(_num_steps(cell)):
        yield tuple(min(first + step, last) for first, last in cell.bounds)


def _inward_from_last(cell: Cell) -> Iterator[tuple[int, ...]]:
    """Yield the last corner of ``cell``, then the values next to it towards the first."""
    for step in range(_num_steps(cell)):
        yield tuple(max(last - step, first) for first, last in cell.bounds)


def _num_steps(cell: Cell) -> int:
    return min(MAX_INWARD_STEPS, max(last - first + 1 for first, last in cell.bounds))


def _capture_values(
    cell: Cell, features: Sequence[Feature], inside: Sequence[_Located], points: Sequence[Point]
) -> Iterator[tuple[int, ...]]:
    """Yield the capture sizes in ``cell``, each time the one furthest from every point that is there by then.

    They are sizes of the first feature, where that is an axis and no ratio. The other features take the values of the
    recorded workload that is nearest along the first.
    """
    first, last = cell.bounds[0]
    left = [size for size in CAPTURE_SIZES if first <= size <= last]
    if features[0].denominator is not None or (len(features) > 1 and not inside):
        return
    while left:
        taken = [features[0].value(dict(point.axes)) for point in points]
        size = max(left, key=lambda size: (min((abs(size - other) for other in taken), default=size), -size))
        left.remove(size)
        others = min(inside, key=lambda item: abs(item[0][0] - size))[0][1:] if len(features) > 1 else ()
        yield (size, *others)


def _derive(
    features: Sequence[Feature], values: tuple[int, ...], located: Sequence[_Located], laws: AxisLaws
) -> dict[str, int] | None:
    """Return var axes with the feature values ``values``, or None where the constraints do not allow them.

    Axes that the features leave open are those of the nearest recorded workload (the least sum of |ln| ratios), then
    adapted to the constraints.
    """
    nearest = min(located, key=lambda item: _distance(item[0], values), default=None)
    axes = {} if nearest is None else dict(nearest[1].axes)
    for feature, value in sorted(zip(features, values, strict=True), key=lambda item: item[0].denominator is not None):
        if feature.denominator is None:
            axes[feature.numerator] = value
        else:
            axes[feature.numerator] = value * axes.get(feature.denominator, 0)
    completed = laws.complete(axes, {feature.numerator for feature in features})
    return completed if completed is not None and feature_values(features, completed) == values else None


def _distance(here: tuple[int, ...], there: tuple[int, ...]) -> float:
    return sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in zip(here, there, strict=True))

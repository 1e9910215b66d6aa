"""The calls that candidates are judged on: which inputs, in which layouts, at which points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fibc import buffers, inputs
from fibc.buffers import Buffer
from fibc.calls import Value
from fibc.schema.definition import Definition
from fibc.schema.feature import Point
from fibc.schema.workload import Workload
from fibc.stand_in import HEAVY, num_terms
from fibc.validation import SMALL_BYTES, place

CASES = ("trial", "points", "adversarial")
"""What can be drafted. ``trial``: dense at every point, a few adversarial inputs and one layout at the smallest; at a
heavy smallest point one dense call. ``points``: dense at every point. ``adversarial``: everything at the smallest."""

TRIAL_CASES = frozenset({"one_hot_row", "nan"})
"""Adversarial cases of a trial: they leave weights alone, so that oracles share their upcast copies."""

HEAVY_CASES = frozenset({"huge"})
"""Adversarial cases of a finalist at a heavy point that nothing stands in for; at a light one it meets all of them."""

TRIAL_LAYOUTS = ("row-sliced",)
"""Layouts of a trial: the one that a variant is most likely to take and to get wrong."""


@dataclass(frozen=True)
class Draft:
    """A case without its oracle.

    Attributes:
        oracle: Drafts with one oracle have equal points and equal values.
    """

    name: str
    point: Point
    layout: str
    inputs: Mapping[str, Value]
    placed: Mapping[str, Buffer | Value]
    independent: bool
    oracle: str


class Drafter:
    """Makes the drafts of one definition on one device. Large weights lie in one guarded buffer for all of them."""

    def __init__(
        self,
        definition: Definition,
        workloads: Mapping[str, Workload],
        seed: int,
        make: Callable[[Point], Mapping[str, Value]],
        device: torch.device | str = "cpu",
    ) -> None:
        """Prepare; nothing is made.

        Args:
            workloads: By uuid, as points name them.
            make: Makes the dense inputs of a point, on ``device``.
        """
        self._definition = definition
        self._workloads = workloads
        self._seed = seed
        self._make = make
        self._device = torch.device(device)
        self._weights: dict[str, tuple[Tensor, Buffer | Value]] = {}

    def drafts(self, points: Sequence[Point], low: Point, kind: str) -> Iterator[Draft]:
        """Yield calls: dense at every point; adversarial and otherwise laid out at ``low``.

        Args:
            points: Where dense inputs are tried.
            low: The smallest of them.
            kind: One of ``CASES``.
        """
        heavy = HEAVY[self._device.type]
        heavy_terms = heavy.trial_terms if kind == "trial" else heavy.finalist_terms
        at_low = self._make(low)
        for point in points:
            if point == low or kind == "points" or not self._is_heavy(point, heavy_terms):
                values = at_low if point == low else self._make(point)
                yield self._draft("dense", point, values, independent=self._is_random(point))
        light = not self._is_heavy(low, heavy_terms)
        if kind == "adversarial":
            yield from self._adversarial(low, None if light else HEAVY_CASES)
        elif kind == "trial" and light:
            yield from self._adversarial(low, TRIAL_CASES)
        if light and kind != "points":
            for layout in TRIAL_LAYOUTS if kind == "trial" else buffers.LAYOUTS:
                yield self._draft("dense", low, at_low, layout=layout, independent=self._is_random(low))

    def _adversarial(self, low: Point, wanted: frozenset[str] | None) -> Iterator[Draft]:
        """Yield the adversarial calls ``wanted``, all where it is None."""
        workload = self._workloads.get(low.workload)
        axes = dict(low.axes)
        made = inputs.adversarial(self._definition, axes, self._seed, workload, device=self._device, wanted=wanted)
        for name, values in made:
            yield self._draft(name, low, values)

    def _is_heavy(self, point: Point, heavy_terms: int) -> bool:
        return num_terms(self._definition, point) >= heavy_terms

    def _is_random(self, point: Point) -> bool:
        """Return whether every floating-point input at ``point`` comes from the seed."""
        workload = self._workloads.get(point.workload)
        return workload is None or all(spec.type != "safetensors" for spec in workload.inputs.values())

    def _draft(
        self, name: str, point: Point, values: Mapping[str, Value], *, layout: str = "", independent: bool = False
    ) -> Draft:
        """Place values in guarded buffers."""
        residency = inputs.residency(self._definition)
        make = buffers.LAYOUTS.get(layout, buffers.contiguous)
        pristine: dict[str, Value] = {}
        placed: dict[str, Buffer | Value] = {}
        for key, value in values.items():
            pristine[key] = value
            large = isinstance(value, Tensor) and residency[key] == "cold" and value.nbytes > SMALL_BYTES
            placed |= self._share(key, value, pristine) if large else place({key: value}, make)
        label = ", ".join(filter(None, (name, layout)))
        return Draft(label, point, layout, pristine, placed, independent, oracle=name)

    def _share(self, name: str, value: Value, pristine: dict[str, Value]) -> dict[str, Buffer | Value]:
        """Return a large weight in a row-major buffer, and make it the pristine one: the same for all equal ones."""
        assert isinstance(value, Tensor)
        if name not in self._weights:
            self._weights[name] = value, place({name: value})[name]
        known, buffer = self._weights[name]
        if value is not known and not torch.equal(value, known):
            return place({name: value})
        pristine[name] = known
        return {name: buffer}

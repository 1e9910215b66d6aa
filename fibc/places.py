"""Inputs in memory for timing: weights in copies that are used in turn, and the tensors of each point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fibc import inputs
from fibc.calls import Value
from fibc.schema.callspec import CallSpec
from fibc.schema.definition import Definition
from fibc.schema.feature import Point

Make = Callable[[Point, Mapping[str, Value] | None], Mapping[str, Value]]
"""Makes the inputs of a point; weights that are there already are taken as they are."""


@dataclass
class Place:
    """One point in memory.

    Attributes:
        calls: One tuple of arguments per copy of the weights.
        restored: Inputs that are written before each half, with their values: those that calls write in place, and
            where hot inputs are primed all of these.
        own_bytes: Of the inputs that belong to this point alone, and of their values as they are restored.
        first: Output of each arm before it was timed.
        warm: Native was warmed up here; its outputs and inputs are the same for every arm.
    """

    point: Point
    calls: list[tuple[Any, ...]]
    restored: list[tuple[Tensor, Tensor]]
    own_bytes: int
    first: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    warm: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes that are free once this place is dropped: inputs, and what arms answered before they were timed."""
        return self.own_bytes + sum(tensor.nbytes for outputs in self.first.values() for tensor in outputs)

    def restore(self) -> None:
        """Write the inputs that have to be: as a call finds them that the operator before it made."""
        for tensor, value in self.restored:
            tensor.copy_(value)


class Places:
    """The places of one definition.

    Copies of the weights are shared by all points. A point's own tensors are made when it is first asked for; those of
    points that were asked for longest ago are dropped where all together, outputs kept for comparison too, exceed
    ``keep_bytes``.
    """

    def __init__(
        self, definition: Definition, spec: CallSpec, make: Make, *, num_copies: int, keep_bytes: int, primed: bool
    ) -> None:
        """Prepare; nothing is made.

        Args:
            primed: Hot inputs are written before each half.
        """
        self._definition = definition
        self._spec = spec
        self._make = make
        self._keep_bytes = keep_bytes
        self._primed = primed
        self._cold = [name for name, where in inputs.residency(definition).items() if where == "cold"]
        self._copies: list[dict[str, Value]] = []
        self._places: dict[Point, Place] = {}
        self._turn = 0
        self.num_copies = num_copies

    def take(self, point: Point) -> tuple[Place, list[Place]]:
        """Return the place of ``point``, made now if need be, and those that had to make room."""
        place = self._places.pop(point, None) or self._new(point)
        self._places[point] = place  # the last is the one used last
        dropped = []
        while len(self._places) > 1 and sum(item.num_bytes for item in self._places.values()) > self._keep_bytes:
            dropped.append(self._places.pop(next(iter(self._places))))
        return place, dropped

    def find(self, point: Point) -> Place | None:
        """Return the place of ``point`` if it is in memory."""
        return self._places.get(point)

    def weights(self) -> Mapping[str, Value]:
        """Return the first copy of the weights; empty before they are made."""
        return self._copies[0] if self._copies else {}

    def next_calls(self, count: int) -> int:
        """Return where the next ``count`` calls begin in the rotation over all copies."""
        start, self._turn = self._turn, self._turn + count
        return start

    def clear(self, *, weights: bool) -> list[Place]:
        """Drop every point's own tensors, and with ``weights`` their copies too; return what was dropped."""
        dropped = list(self._places.values())
        self._places.clear()
        if weights:
            self._copies.clear()
        return dropped

    def _new(self, point: Point) -> Place:
        values = dict(self._make(point, self._copies[0] if self._copies else None))
        if not self._copies:
            cold = {name: values[name] for name in self._cold}
            copies = inputs.cold_copies(self._definition, values, self.num_copies)
            self._copies = [{name: copy[name] for name in self._cold} for copy in copies]
            values |= cold
        calls = [tuple({**values, **copy}.values()) for copy in self._copies]
        own = [value for name, value in values.items() if isinstance(value, Tensor) and name not in self._cold]
        written = own if self._primed else [calls[0][index] for index in self._in_place()]
        restored = [(tensor, tensor.clone()) for tensor in written if isinstance(tensor, Tensor)]
        kept = sum(tensor.nbytes for tensor in own) + (sum(tensor.nbytes for tensor in own) if self._primed else 0)
        return Place(point, calls, restored, kept)

    def _in_place(self) -> list[int]:
        return sorted({argument.alias for argument in self._spec.outputs if argument.alias is not None})

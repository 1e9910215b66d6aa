"""Paired timings in one process: weights cold, activations hot, equal work and equal inner counts."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fibc import check, inputs
from fibc.check import Value
from fibc.schema.callspec import CallSpec
from fibc.schema.definition import Definition
from fibc.schema.feature import Point
from fibc.validation import same_bits

SAMPLE_S = 100e-6
"""A native half takes at least this long, so that a candidate five times faster still fills 20 us."""

MAX_INNER = 1000

WARM_S = 0.002
"""A side is warm after two calls, or one that took this long."""

DRIFT = 8.0
"""Roundings by which a non-deterministic candidate's output may differ, in rms, before and after timing."""


class Harness(Protocol):
    """The extension that times calls in C."""

    def bind(self, library_path: str, symbol: str, spec: bytes) -> Any: ...

    def time_calls(
        self, callable: Callable[..., Any], calls: Sequence[tuple[Any, ...]], start: int, inner: int
    ) -> float:
        """Return seconds per call of ``inner`` calls, the i-th with ``calls[(start + i) % len(calls)]``."""
        ...

    def set_num_threads(self, num_threads: int) -> None: ...


class NativeFailedError(Exception):
    """Native itself raised: no candidate is to blame."""


@dataclass(frozen=True)
class Side:
    """What an arm times beside native.

    Attributes:
        call: Takes the inputs by value.
        deterministic: Repeats must be bitwise equal.
    """

    point: Point
    call: Callable[..., Any]
    deterministic: bool


@dataclass
class _Place:
    """One point in memory.

    Attributes:
        calls: One tuple of arguments per copy of the weights.
        restored: In-place inputs with their pristine values.
        num_bytes: Of the tensors that belong to this point alone.
        first: Output of each arm before it was timed.
        warm: Native was warmed up here; its outputs and inputs are the same for every arm.
    """

    calls: list[tuple[Any, ...]]
    restored: list[tuple[Tensor, Tensor]]
    num_bytes: int
    first: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    warm: bool = False


class Timer:
    """Times arms beside native on inputs of one seed.

    Copies of the weights are shared by all points and used in turn, by both halves of a pair alike. A point's own
    tensors are made when it is first timed; those of points that were timed longest ago are dropped where all together
    exceed ``keep_bytes``.
    """

    def __init__(
        self,
        definition: Definition,
        spec: CallSpec,
        native: Callable[..., Any],
        make: Callable[[Point, Mapping[str, Value] | None], Mapping[str, Value]],
        *,
        num_copies: int,
        keep_bytes: int,
        seed: int,
    ) -> None:
        self._definition = definition
        self._spec = spec
        self._native = native
        self._make = make
        self._num_copies = num_copies
        self._keep_bytes = keep_bytes
        self._cold = [name for name, where in inputs.residency(definition).items() if where == "cold"]
        self._copies: list[dict[str, Value]] = []
        self._places: dict[Point, _Place] = {}
        self._turn = 0
        self._rng = random.Random(seed)
        self._changed: dict[int, str] = {}

    def hold(self, point: Point) -> None:
        """Make the point's inputs now."""
        self._place(point, {})

    def first_inputs(self) -> Mapping[str, Value]:
        """Return the first copy of the weights."""
        return self._copies[0] if self._copies else {}

    def inner(self, harness: Harness, point: Point) -> int:
        """Return how many calls make a sample, from native alone; the caller keeps it for every later session."""
        place = self._place(point, {})
        self._warm(self._native_call(harness), place)
        seconds = min(self._native_call(harness)(place.calls, self._next(1), 1) for _ in range(3))
        return max(1, min(MAX_INNER, math.ceil(SAMPLE_S / max(seconds, 1e-9))))

    def pair(
        self, harness: Harness, arm: int, sides: Mapping[int, Side], *, native_first: bool, inner: int
    ) -> tuple[float, float]:
        """Return seconds per call of native and of arm ``arm``, timed one directly after the other.

        The first pair of an arm is preceded by a warm-up of both, in random order; native's is once per point.

        Raises:
            NativeFailedError: If native raised. What the candidate raises is raised as it is.
        """
        side = sides[arm]
        place = self._place(side.point, sides)
        native = self._native_call(harness)

        def candidate(calls: Sequence[tuple[Any, ...]], start: int, count: int) -> float:
            return harness.time_calls(side.call, calls, start, count)

        if arm not in place.first:
            place.first[arm] = self._output(place, side)
            for run in self._rng.sample([native, candidate], 2) if not place.warm else [candidate]:
                self._warm(run, place)
            place.warm = True
        seconds = {}
        for run in (native, candidate) if native_first else (candidate, native):
            _restore(place)
            seconds[run] = run(place.calls, self._next(inner), inner)
        return seconds[native], seconds[candidate]

    def recheck(self, arm: int, sides: Mapping[int, Side]) -> str | None:
        """Run an arm that was timed once more; return what is wrong with its output, now or when it was dropped."""
        place = self._places.get(sides[arm].point)
        if place is not None:
            self._check(place, arm, sides[arm])
        return self._changed.get(arm)

    def forget(self) -> None:
        """Drop every point's own tensors."""
        self._places.clear()

    def _native_call(self, harness: Harness) -> Callable[[Sequence[tuple[Any, ...]], int, int], float]:
        def run(calls: Sequence[tuple[Any, ...]], start: int, count: int) -> float:
            try:
                return harness.time_calls(self._native, calls, start, count)
            except Exception as error:
                raise NativeFailedError(f"native raised {type(error).__name__}: {error}") from error

        return run

    def _next(self, count: int) -> int:
        start, self._turn = self._turn, self._turn + count
        return start

    def _warm(self, run: Callable[[Sequence[tuple[Any, ...]], int, int], float], place: _Place) -> None:
        for _ in range(2):
            began = time.monotonic()
            run(place.calls, self._next(1), 1)
            if time.monotonic() - began >= WARM_S:
                return

    def _place(self, point: Point, sides: Mapping[int, Side]) -> _Place:
        place = self._places.pop(point, None) or self._new_place(point)
        self._places[point] = place  # the last is the one used last
        while len(self._places) > 1 and sum(item.num_bytes for item in self._places.values()) > self._keep_bytes:
            dropped = self._places.pop(next(iter(self._places)))
            for arm in tuple(dropped.first):
                self._check(dropped, arm, sides[arm])
        return place

    def _new_place(self, point: Point) -> _Place:
        values = dict(self._make(point, self._copies[0] if self._copies else None))
        if not self._copies:
            cold = {name: values[name] for name in self._cold}
            copies = inputs.cold_copies(self._definition, values, self._num_copies)
            self._copies = [{name: copy[name] for name in self._cold} for copy in copies]
            values |= cold
        calls = [tuple({**values, **copy}.values()) for copy in self._copies]
        own = [v for name, v in values.items() if isinstance(v, Tensor) and name not in self._cold]
        aliased = {argument.alias for argument in self._spec.outputs if argument.alias is not None}
        in_place = [v for index, v in enumerate(calls[0]) if index in aliased and isinstance(v, Tensor)]
        return _Place(calls, [(t, t.clone()) for t in in_place], sum(tensor.nbytes for tensor in own))

    def _output(self, place: _Place, side: Side) -> tuple[Tensor, ...]:
        _restore(place)
        with torch.no_grad():
            outputs = check.as_outputs(self._definition, side.call(*place.calls[0]))
        return tuple(output.clone() for output in outputs)

    def _check(self, place: _Place, arm: int, side: Side) -> None:
        """Compare an arm's output with the one before it was timed."""
        before = place.first.pop(arm, None)
        if before is None:
            return
        for name, a, b in zip(self._definition.outputs, before, self._output(place, side), strict=True):
            if not same_bits(a, b) and (side.deterministic or not _close(a, b)):
                self._changed[arm] = f"output {name} at {side.point}: must be as before it was timed, got another one"


def _restore(place: _Place) -> None:
    for tensor, pristine in place.restored:
        tensor.copy_(pristine)


def _close(a: Tensor, b: Tensor) -> bool:
    """Return whether two outputs differ by roundings only; equality for integers."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    difference = (a.double() - b.double()).square().mean().sqrt()
    return bool(difference <= DRIFT * check.unit_roundoff(a.dtype) * a.double().square().mean().sqrt())

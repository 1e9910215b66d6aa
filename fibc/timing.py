"""Paired timings in one process: weights cold, activations hot, equal work and equal inner counts."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fibc.bound import unit_roundoff
from fibc.calls import Value, as_outputs
from fibc.errors import BrokenError, FibcError
from fibc.places import Make, Place, Places
from fibc.schema.callspec import CallSpec
from fibc.schema.definition import Definition
from fibc.schema.feature import Point
from fibc.validation import same_bits

SAMPLE_S = 100e-6
"""A native half on a CPU takes at least this long, so that a candidate five times faster still fills 20 us."""

CERTAINTY = 10
"""A call so many samples long is one, however badly its timing went."""

MAX_INNER = 1000

WARM_S = 0.002
"""A side is warm after two calls, or one that took this long."""

DRIFT = 8.0
"""Roundings by which a non-deterministic candidate's output may differ, in rms, before and after timing."""

NATIVE = None
"""What stands for native where an arm's index stands for a candidate."""


class Harness(Protocol):
    """The extension that times calls in C."""

    def bind(self, library_path: str, symbol: str, spec: bytes, device: str = "cpu") -> Any: ...

    def time_calls(
        self, callable: Callable[..., Any], calls: Sequence[tuple[Any, ...]], start: int, inner: int
    ) -> float:
        """Return seconds per call of ``inner`` calls, the i-th with ``calls[(start + i) % len(calls)]``."""
        ...

    def set_num_threads(self, num_threads: int) -> None: ...

    def fill_allocations(self, fills: bool) -> None:
        """Have outputs by value come filled, where torch is asked to fill what it allocates."""
        ...


class NativeFailedError(BrokenError):
    """Native itself raised."""


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


@dataclass(frozen=True)
class Half:
    """One side of a pair at one place.

    Attributes:
        arm: The candidate's, or ``NATIVE``.
        beside: The arm whose pairs it belongs to; None for native alone.
        place: Its inputs.
        run: ``run(calls, start, inner)`` makes ``inner`` calls, see ``Harness.time_calls``.
        next_calls: Where in the rotation the next calls begin, see ``Places``.
    """

    arm: int | None
    beside: int | None
    place: Place
    run: Callable[[Sequence[tuple[Any, ...]], int, int], float]
    next_calls: Callable[[int], int]

    def call(self, count: int) -> float:
        """Make the next ``count`` calls of the rotation; return the host's seconds per call."""
        return self.run(self.place.calls, self.next_calls(count), count)


class Meter(Protocol):
    """The clock of a timer, with the state that the timed side finds.

    Contract:
        * ``time`` restores the place's inputs, untimed, then makes ``inner`` calls and returns seconds per call.
        * When ``time``, ``warm`` or ``block`` returns, nothing of the half is still running: what raises later is
          another one's.
        * It raises what the calls raise, and ``BrokenError`` where the clock itself does not work.

    Attributes:
        primed: Hot inputs are written before each half, not only those that calls write in place.
        sample_s: A native half takes at least this long.
        max_inner: Most calls in a half, where ``least_inner`` is no larger.
    """

    primed: bool
    sample_s: float
    max_inner: int

    def least_inner(self, num_copies: int) -> int:
        """Return how many calls a half needs for every copy of the weights to be cold."""
        ...

    def warm(self, half: Half, called_s: float = 0.0) -> None:
        """Make the calls after which nothing happens for the first time.

        Args:
            called_s: Seconds of a call of the same side that has just been made here; 0 where there was none.
        """
        ...

    def ready(self, half: Half, inner: int) -> None:
        """Do what has to be done once before ``time``, so that both halves of a pair are timed at once after it."""
        ...

    def estimate(self, half: Half, num_copies: int) -> float:
        """Return about how many seconds a call takes."""
        ...

    def time(self, half: Half, inner: int) -> float:
        """Return seconds per call."""
        ...

    def block(self, half: Half, inner: int, seconds: float) -> float:
        """Return seconds per call over about ``seconds`` without a pause."""
        ...

    def settle(self) -> None:
        """Wait until no call is still running."""
        ...

    def drop(self, place: Place) -> None:
        """Forget what is kept for a place that is no more."""
        ...

    def rest(self) -> None:
        """Forget everything, and give back its memory."""
        ...

    def fresh(self, rng: random.Random) -> None:
        """Forget everything, and have what is allocated next lie elsewhere."""
        ...


class HostMeter:
    """The steady clock of the harness around calls that end when they return: a CPU's."""

    primed = False
    sample_s = SAMPLE_S
    max_inner = MAX_INNER

    def least_inner(self, num_copies: int) -> int:
        """Return 1: the rotation goes on from half to half."""
        return 1

    def warm(self, half: Half, called_s: float = 0.0) -> None:
        """Call twice, or once where that takes long; a long call that has just been made is enough."""
        for _ in range(2):
            if called_s >= WARM_S:
                return
            began = time.monotonic()
            half.call(1)
            called_s = time.monotonic() - began

    def ready(self, half: Half, inner: int) -> None:
        """Nothing is to be done."""

    def estimate(self, half: Half, num_copies: int) -> float:
        """Return the shortest of three calls, or the first one that a sample needs no second of."""
        shortest = math.inf
        for _ in range(3):
            shortest = min(shortest, half.call(1))
            if shortest > CERTAINTY * self.sample_s:
                break
        return shortest

    def time(self, half: Half, inner: int) -> float:
        """Return seconds per call."""
        half.place.restore()
        return half.call(inner)

    def block(self, half: Half, inner: int, seconds: float) -> float:
        """Return seconds per call over about ``seconds``."""
        half.place.restore()
        times: list[float] = []
        until = time.monotonic() + seconds
        while not times or time.monotonic() < until:
            times.append(half.call(inner))
        return math.fsum(times) / len(times)

    def settle(self) -> None:
        """Calls end when they return."""

    def drop(self, place: Place) -> None:
        """Nothing is kept."""

    def rest(self) -> None:
        """Nothing is kept."""

    def fresh(self, rng: random.Random) -> None:
        """Nothing is kept; on a CPU a session with another layout is another process."""


class Timer:
    """Times arms beside native on inputs of one seed.

    Copies of the weights are shared by all points and used in turn, by both halves of a pair alike (``Places``). How a
    half is timed is the meter's.
    """

    def __init__(
        self,
        definition: Definition,
        spec: CallSpec,
        native: Callable[..., Any],
        make: Make,
        *,
        num_copies: int,
        keep_bytes: int,
        seed: int,
        meter: Meter | None = None,
    ) -> None:
        self._definition = definition
        self._native = native
        self._meter = meter or HostMeter()
        self._places = Places(
            definition, spec, make, num_copies=num_copies, keep_bytes=keep_bytes, primed=self._meter.primed
        )
        self._rng = random.Random(seed)
        self._changed: dict[int, str] = {}

    def hold(self, point: Point) -> None:
        """Make the point's inputs now."""
        self._place(point, {})

    def first_inputs(self) -> Mapping[str, Value]:
        """Return the first copy of the weights."""
        return self._places.weights()

    def inner(self, harness: Harness, point: Point) -> int:
        """Return how many calls make a sample, from native alone; the caller keeps it for every later session."""
        meter, num_copies = self._meter, self._places.num_copies
        half = self._half(harness, NATIVE, None, self._native, self._place(point, {}))
        with _blaming(half):
            meter.warm(half)
            seconds = meter.estimate(half, num_copies)
        wanted = min(meter.max_inner, math.ceil(meter.sample_s / max(seconds, 1e-9)))
        return max(1, wanted, meter.least_inner(num_copies))

    def pair(
        self, harness: Harness, arm: int, sides: Mapping[int, Side], *, native_first: bool, inner: int
    ) -> tuple[float, float]:
        """Return seconds per call of native and of arm ``arm``, timed one directly after the other.

        The first pair of an arm is preceded by a warm-up of both, in random order; native's is once per point.

        Raises:
            BrokenError: If native raised, or the clock does not work. What the candidate raises is raised as it is.
        """
        native, candidate = self._halves(harness, arm, sides)
        for half in self._rng.sample([native, candidate], 2):
            with _blaming(half):
                self._meter.ready(half, inner)
        seconds = {}
        for half in (native, candidate) if native_first else (candidate, native):
            with _blaming(half):
                seconds[half.arm] = self._meter.time(half, inner)
        return seconds[NATIVE], seconds[arm]

    def block(
        self, harness: Harness, arm: int, sides: Mapping[int, Side], *, native: bool, inner: int, seconds: float
    ) -> float:
        """Return seconds per call of native or of arm ``arm`` over about ``seconds`` without a pause.

        Raises:
            BrokenError: As ``pair``.
        """
        half = self._halves(harness, arm, sides)[0 if native else 1]
        with _blaming(half):
            return self._meter.block(half, inner, seconds)

    def check_outputs(self, arm: int, sides: Mapping[int, Side]) -> str | None:
        """Run an arm that was timed once more; return what is wrong with its output, now or when it was dropped."""
        place = self._places.find(sides[arm].point)
        if place is not None:
            self._check(place, arm, sides[arm])
        return self._changed.get(arm)

    def forget(self) -> None:
        """Drop every point's own tensors, and what was said of arms: the next may be others of the same numbers."""
        self._changed.clear()
        for place in self._places.clear(weights=False):
            self._meter.drop(place)

    def rest(self) -> None:
        """Drop everything, weights too, and give back its memory.

        Outputs are compared no more with those before: call ``check_outputs`` for every arm first.
        """
        self._changed.clear()
        self._places.clear(weights=True)
        self._meter.rest()

    def fresh(self, seed: int) -> None:
        """Begin a session in this process: drop everything as ``rest``; what is made next lies at other addresses."""
        self._rng = random.Random(seed)
        self._changed.clear()
        self._places.clear(weights=True)
        self._meter.fresh(self._rng)

    def _halves(self, harness: Harness, arm: int, sides: Mapping[int, Side]) -> tuple[Half, Half]:
        """Return native and the arm, both warm."""
        side = sides[arm]
        place = self._place(side.point, sides)
        native = self._half(harness, NATIVE, arm, self._native, place)
        candidate = self._half(harness, arm, arm, side.call, place)
        if arm not in place.first:
            place.first[arm], called_s = self._output(place, side)
            for half in self._rng.sample([native, candidate], 2) if not place.warm else [candidate]:
                with _blaming(half):
                    self._meter.warm(half, called_s if half is candidate else 0.0)
            place.warm = True
        return native, candidate

    def _half(
        self, harness: Harness, arm: int | None, beside: int | None, call: Callable[..., Any], place: Place
    ) -> Half:
        def run(calls: Sequence[tuple[Any, ...]], start: int, count: int) -> float:
            return harness.time_calls(call, calls, start, count)

        return Half(arm, beside, place, run, self._places.next_calls)

    def _place(self, point: Point, sides: Mapping[int, Side]) -> Place:
        place, dropped = self._places.take(point)
        for old in dropped:
            for arm in tuple(old.first):
                self._check(old, arm, sides[arm])
            self._meter.drop(old)
        return place

    def _output(self, place: Place, side: Side) -> tuple[tuple[Tensor, ...], float]:
        """Return copies of a call's outputs, and the seconds that it took on the host."""
        place.restore()
        with torch.no_grad():
            began = time.monotonic()
            returned = side.call(*place.calls[0])
            called_s = time.monotonic() - began
            outputs = as_outputs(self._definition, returned)
        copies = tuple(output.clone() for output in outputs)
        self._meter.settle()
        return copies, called_s

    def _check(self, place: Place, arm: int, side: Side) -> None:
        """Compare an arm's output with the one before it was timed."""
        before = place.first.pop(arm, None)
        if before is None:
            return
        after, _ = self._output(place, side)
        for name, a, b in zip(self._definition.outputs, before, after, strict=True):
            if not same_bits(a, b) and (side.deterministic or not _close(a, b)):
                self._changed[arm] = f"output {name} at {side.point}: must be as before it was timed, got another one"


@contextmanager
def _blaming(half: Half) -> Iterator[None]:
    """Have what native raises say that it was native."""
    try:
        yield
    except FibcError:
        raise
    except Exception as error:
        if half.arm is not NATIVE:
            raise
        raise NativeFailedError(f"native raised {type(error).__name__}: {error}") from error


def _close(a: Tensor, b: Tensor) -> bool:
    """Return whether two outputs differ by roundings only; equality for integers."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    difference = (a.double() - b.double()).square().mean().sqrt()
    return bool(difference <= DRIFT * unit_roundoff(a.dtype) * a.double().square().mean().sqrt())

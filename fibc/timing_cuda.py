"""Meters of a GPU's timer: graphs, launches that are queued before the device may begin, and calls as a caller pays.

========  ===================================================================  =====================================
mode      a half                                                               for
========  ===================================================================  =====================================
graph     ``inner`` calls captured once per side and arm, replayed             what engines do with their decode steps
device    ``inner`` calls queued one by one behind a spinning kernel            device time alone, without capture
eager     ``inner`` calls and the wait for them, by the host's clock           what a caller without graphs pays
========  ===================================================================  =====================================

In the first two the device spins until everything is queued: between two events it never waits for the host. Where it
may have (the first event was reached before the last one was queued) the sample counts for nothing and is repeated
behind a longer spin, and finally that is an error.
"""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from fibc.cuda_queue import CudaQueue, Queue
from fibc.errors import BrokenError, InputError
from fibc.places import Place
from fibc.schema.options import MODES
from fibc.timing import Half, Meter

Clock = Callable[[], float]

SAMPLE_S = 200e-6
"""A native half takes at least this long on the device, so that a candidate four times faster still fills 50 us. Two
events with nothing between them read 1.3 us on an H200."""

EAGER_SAMPLE_S = 500e-6
"""The same by the host's clock, where a sample has the wait for the device in it: about 10 us."""

MIN_SPIN_S = 100e-6
MAX_SPIN_S = 0.1
"""Shortest and longest spin. A host that takes longer to queue a sample is busy with something else."""

MAX_LAUNCHES = 100
"""Calls queued behind a spin: a device's queue takes about a thousand launches, then the host waits for it."""

MAX_INNER = 1000
MAX_KEPT_CALLS = 1 << 15
"""Calls in all graphs that are kept: a node is about a kilobyte on the host, and as much on the device."""

ESTIMATED_CALLS = 10


class HostAhead:
    """Times work on a queue such that the device never waits for the host inside it.

    Attributes:
        num_repeated: Samples that had to be repeated.
    """

    def __init__(self, queue: Queue, host_clock: Clock = time.perf_counter) -> None:
        self._queue = queue
        self._host_clock = host_clock
        self._queueing_s = 0.0
        self.num_repeated = 0

    def time(self, before: Callable[[], object], work: Callable[[], object]) -> float:
        """Return the device's seconds for ``work``, queued once ``before`` is.

        Raises:
            BrokenError: If the host was behind even while the device spun for ``MAX_SPIN_S``.
        """
        spin_s = MIN_SPIN_S + 2 * self._queueing_s
        while True:
            before()
            self._queue.spin(spin_s)
            began = self._host_clock()
            begin = self._queue.mark()
            work()
            end = self._queue.mark()
            ahead = not begin.reached()
            self._queueing_s = min(self._host_clock() - began, MAX_SPIN_S)
            self._queue.wait()
            if ahead:
                return end.seconds_since(begin)
            if spin_s >= MAX_SPIN_S:
                raise BrokenError(
                    f"timer: launches must be queued before the device begins, and were not within {MAX_SPIN_S} s "
                    "(end other work on this machine's cores)"
                )
            self.num_repeated += 1
            spin_s = min(2 * spin_s, MAX_SPIN_S)


_Key = tuple[int, int | None, int | None]
"""What a meter keeps something for: a place, the arm that a half is beside, and whose half it is."""


def _key(half: Half) -> _Key:
    return id(half.place), half.beside, half.arm


def _remove(kept: MutableMapping[_Key, Any], place: Place) -> None:
    for key in [key for key in kept if key[0] == id(place)]:
        del kept[key]


@dataclass(frozen=True)
class _Graph:
    """A captured half; ``num_calls`` of them."""

    replay: Callable[[], None]
    num_calls: int


class _DeviceClock:
    """What meters of device time share: inputs are written, and may be flushed, before the spin."""

    primed = True
    sample_s = SAMPLE_S
    max_inner = MAX_INNER

    def __init__(self, queue: Queue, *, flush: bool = False, host_clock: Clock = time.perf_counter) -> None:
        """Prepare.

        Args:
            flush: Write over the cache before each half; inputs are primed after it.
            host_clock: In seconds.
        """
        self._queue = queue
        self._flush = flush
        self._host_clock = host_clock
        self._clock = HostAhead(queue, host_clock)
        self._seen: dict[_Key, int] = {}

    @property
    def num_repeated(self) -> int:
        """Samples that had to be repeated because the host was behind."""
        return self._clock.num_repeated

    def warm(self, half: Half, called_s: float = 0.0) -> None:
        """Call twice, whatever was called before: code is loaded, workspaces are there."""
        half.place.restore()
        half.call(1)
        half.call(1)
        self._queue.wait()

    def ready(self, half: Half, inner: int) -> None:
        """Run a half once as it will be timed.

        A first sample without it is 1.2 to 1.4 % too long (the gate's pairs of a GEMM of 4096 x 4096, H200,
        2026-11-30). Where only candidates had been run before, native looked 0.06 to 0.09 % slower than itself.
        """
        key = _key(half)
        if self._seen.get(key) != inner:
            self._seen[key] = inner
            self._prepare(half)
            self._work(half, inner)()
            self._queue.wait()

    def estimate(self, half: Half, num_copies: int) -> float:
        """Return the shortest of three samples."""
        count = max(ESTIMATED_CALLS, self.least_inner(num_copies))
        return min(self.time(half, count) for _ in range(3))

    def least_inner(self, num_copies: int) -> int:
        """Return 1: the rotation goes on from half to half."""
        return 1

    def time(self, half: Half, inner: int) -> float:
        """Return the device's seconds per call."""
        work = self._work(half, inner)
        return self._clock.time(lambda: self._prepare(half), work) / inner

    def block(self, half: Half, inner: int, seconds: float) -> float:
        """Return the device's seconds per call over about ``seconds`` without a pause."""
        work = self._work(half, inner)
        count = max(1, math.ceil(seconds / max(inner * self.time(half, inner), 1e-6)))
        self._prepare(half)
        begin = self._queue.mark()
        for _ in range(count):
            work()
        end = self._queue.mark()
        self._queue.wait()
        return end.seconds_since(begin) / (count * inner)

    def settle(self) -> None:
        """Wait for the device."""
        self._queue.wait()

    def drop(self, place: Place) -> None:
        """Forget what was run at a place."""
        _remove(self._seen, place)

    def rest(self) -> None:
        """Forget everything, and give back its memory."""
        self._forget()
        self._queue.shed()

    def fresh(self, rng: random.Random) -> None:
        """Forget everything, and move to other addresses."""
        self._forget()
        self._queue.scatter(rng)

    def _forget(self) -> None:
        self._seen.clear()

    def _work(self, half: Half, inner: int) -> Callable[[], object]:
        raise NotImplementedError

    def _prepare(self, half: Half) -> None:
        if self._flush:
            self._queue.flush()
        half.place.restore()


class DeviceMeter(_DeviceClock):
    """Device time of calls that are launched one by one."""

    max_inner = MAX_LAUNCHES

    def _work(self, half: Half, inner: int) -> Callable[[], object]:
        return lambda: half.call(inner)


class GraphMeter(_DeviceClock):
    """Device time of a graph of ``inner`` calls; those used longest ago make room.

    A graph has a small offset of its own for as long as it lives, and with one graph of native for all arms of a point
    these would share it: in the gate's sessions on an H200 (2026-11-30) the mean over 13 arms spread by 0.02 % where
    0.01 % was to be expected (norm), and by 0.06 to 0.10 % instead of 0.05 % (GEMM). So native has one beside each arm.
    """

    def __init__(
        self,
        queue: Queue,
        *,
        flush: bool = False,
        host_clock: Clock = time.perf_counter,
        max_kept_calls: int = MAX_KEPT_CALLS,
    ) -> None:
        super().__init__(queue, flush=flush, host_clock=host_clock)
        self._max_kept_calls = max_kept_calls
        self._graphs: OrderedDict[_Key, _Graph] = OrderedDict()

    def least_inner(self, num_copies: int) -> int:
        """Return ``num_copies``: every replay begins with the first one, which must be cold again by then."""
        return num_copies

    def drop(self, place: Place) -> None:
        """Forget the graphs of a place."""
        super().drop(place)
        _remove(self._graphs, place)

    def _forget(self) -> None:
        super()._forget()
        self._graphs.clear()

    def _work(self, half: Half, inner: int) -> Callable[[], object]:
        key = _key(half)
        known = self._graphs.pop(key, None)
        if known is None or known.num_calls != inner:
            known = self._capture(half, inner)
        self._graphs[key] = known  # the last is the one used last
        while len(self._graphs) > 1 and sum(g.num_calls for g in self._graphs.values()) > self._max_kept_calls:
            self._graphs.popitem(last=False)
        return known.replay

    def _capture(self, half: Half, inner: int) -> _Graph:
        return _Graph(self._queue.capture(lambda: half.run(half.place.calls, 0, inner)), inner)


class EagerMeter(DeviceMeter):
    """The host's clock from the first call to the end of the last one's work; it may be behind or ahead."""

    sample_s = EAGER_SAMPLE_S

    def time(self, half: Half, inner: int) -> float:
        """Return the host's seconds per call."""
        self._prepare(half)
        return self._timed(lambda: half.call(inner)) / inner

    def block(self, half: Half, inner: int, seconds: float) -> float:
        """Return the host's seconds per call over about ``seconds`` without a pause."""
        count = max(1, math.ceil(seconds / max(inner * self.time(half, inner), 1e-6))) * inner
        self._prepare(half)
        return self._timed(lambda: half.call(count)) / count

    def _timed(self, work: Callable[[], object]) -> float:
        self._queue.wait()
        began = self._host_clock()
        work()
        self._queue.wait()
        return self._host_clock() - began


def make_meter(
    mode: str, queue: Queue | None = None, *, flush: bool = False, host_clock: Clock = time.perf_counter
) -> Meter:
    """Return the meter of a mode.

    Args:
        mode: One of ``MODES``.
        queue: Of the device; by default a stream of its own on the first visible one (``CudaQueue``).
        flush: Write over the second-level cache before each half, for operators without weights to rotate.
        host_clock: In seconds.

    Raises:
        InputError: If there is no such mode.
    """
    makers: dict[str, type[_DeviceClock]] = {"graph": GraphMeter, "device": DeviceMeter, "eager": EagerMeter}
    if mode not in makers:
        raise InputError(f"--mode: no such mode, got {mode} (accepted: {', '.join(MODES)})")
    return makers[mode](queue or CudaQueue(), flush=flush, host_clock=host_clock)

"""A CUDA stream as a timer uses it: a queue that can be kept waiting, marked, captured and moved to other memory."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

_cuda: Any = torch.cuda
"""Its annotations are incomplete."""

WAKE_S = 0.05
"""An idle GPU clocks down (an H200 to 345 MHz), and needs some milliseconds of work to come back."""

FLUSH_FACTOR = 4
FLUSH_BYTES = 256 << 20
"""A flush writes so many caches, and at least so many bytes."""

_CALIBRATION_CYCLES = 1_000_000
_SMALL_STEP, _LARGE_STEP = 512, 2 << 20
"""Granularity of torch's allocator below 1 MiB, and of large segments."""


class Mark(Protocol):
    """A place in a queue."""

    def reached(self) -> bool:
        """Return whether the device has come this far."""
        ...

    def seconds_since(self, earlier: Mark) -> float:
        """Return the device's time between two marks that it has reached."""
        ...


class Queue(Protocol):
    """Work for a device, in order. Every call but ``wait`` and ``capture`` returns before the device has done it."""

    def spin(self, seconds: float) -> None:
        """Keep the device busy for about so long, without touching memory."""
        ...

    def flush(self) -> None:
        """Write over the whole second-level cache."""
        ...

    def mark(self) -> Mark: ...

    def wait(self) -> None:
        """Wait until everything is done; raises what the device reports."""
        ...

    def capture(self, enqueue: Callable[[], object]) -> Callable[[], None]:
        """Return what queues again all that ``enqueue`` queues, at once; its work is not done now."""
        ...

    def shed(self) -> None:
        """Give all unused memory back."""
        ...

    def scatter(self, rng: random.Random) -> None:
        """Give all unused memory back, and have what is allocated next lie elsewhere than before."""
        ...


class _Event:
    """A timing event, recorded when it is made."""

    def __init__(self) -> None:
        self._event = _cuda.Event(enable_timing=True)
        self._event.record()

    def reached(self) -> bool:
        return bool(self._event.query())

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _Event)
        return float(earlier._event.elapsed_time(self._event)) * 1e-3


class CudaQueue:
    """A stream of its own on one device, which becomes this thread's current one (the default one cannot be captured).

    For a process that does nothing else on the device; from then on torch, and the harness with it, queue there.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        chosen = torch.device(device)
        torch.cuda.set_device(chosen.index or 0)
        self._stream = _cuda.Stream()
        torch.cuda.set_stream(self._stream)
        self._l2_bytes = int(torch.cuda.get_device_properties(chosen.index or 0).L2_cache_size)
        self._flushed: Tensor | None = None
        self._pads: list[Tensor] = []
        self._pool, self._anchor = self._new_pool()
        self._cycles_per_s = self._calibrate()

    def spin(self, seconds: float) -> None:
        _cuda._sleep(max(1, int(seconds * self._cycles_per_s)))

    def flush(self) -> None:
        if self._flushed is None:
            num_bytes = max(FLUSH_BYTES, FLUSH_FACTOR * self._l2_bytes)
            self._flushed = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        self._flushed.fill_(1)

    def mark(self) -> Mark:
        return _Event()

    def wait(self) -> None:
        self._stream.synchronize()

    def capture(self, enqueue: Callable[[], object]) -> Callable[[], None]:
        """Return the replay of a graph.

        Not ``torch.cuda.graph``: it collects garbage and empties the allocator's cache each time, a tenth of a second.
        All graphs share one pool: none of their results is read, and they never run at once.
        """
        graph = torch.cuda.CUDAGraph()
        self.wait()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            enqueue()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # a capture that the call invalidated; its own error says more
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay

    def _new_pool(self) -> tuple[Any, torch.cuda.CUDAGraph]:
        """Return a pool for graphs, and one that keeps it: torch refuses a pool whose last graph is gone."""
        pool = torch.cuda.graph_pool_handle()
        anchor = torch.cuda.CUDAGraph()
        self.wait()
        anchor.capture_begin(pool=pool, capture_error_mode="thread_local")
        torch.zeros(1, device="cuda")
        anchor.capture_end()
        return pool, anchor

    def shed(self) -> None:
        """Give all unused memory back; that of graphs goes with their pool."""
        self.wait()
        self._pads.clear()
        self._flushed = None
        self._pool, self._anchor = self._new_pool()
        torch.cuda.empty_cache()

    def scatter(self, rng: random.Random) -> None:
        self.shed()
        for step, most in ((_SMALL_STEP, 1 << 10), (_LARGE_STEP, 1 << 5)):
            for _ in range(rng.randint(1, 8)):
                num_bytes = step * rng.randint(1, most)
                self._pads.append(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))
        self._cycles_per_s = self._calibrate()  # others may have started beside this process when it was made

    def wake(self) -> None:
        """Keep the device busy until its clock is up."""
        until = time.monotonic() + WAKE_S
        while time.monotonic() < until:
            _cuda._sleep(_CALIBRATION_CYCLES)
            self.wait()

    def _calibrate(self) -> float:
        """Return the device's cycles per second at the clock that it has when it is busy."""
        self.wake()
        begin = self.mark()
        _cuda._sleep(_CALIBRATION_CYCLES)
        end = self.mark()
        self.wait()
        return _CALIBRATION_CYCLES / max(end.seconds_since(begin), 1e-6)


def is_lost(device: torch.device | str = "cuda") -> bool:
    """Return whether an error of the device stays: nothing more can be done with it in this process.

    For after an error that a candidate raised. Asking waits for the device.
    """
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False

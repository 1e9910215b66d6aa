"""Processes for sessions on a GPU: several are started at once while nothing is timed, and each serves one session."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fibc.backends.memory import jobs_that_fit
from fibc.child import Child, close_all
from fibc.schema.policy import Policy

AT_ONCE = Policy().looks[0]
"""As many as a first look and a reconfirm have sessions."""

CONTEXT_BYTES = 1 << 30
"""Of a GPU's memory, what a process takes that waits: its context and the modules that torch has loaded into it."""

MEASURING_PART = 0.5
"""Of a GPU's memory, what is kept for the one that measures: a quarter for copies of the weights, an eighth for points,
and what candidates and natives allocate."""

HOST_BYTES = 3 << 30
"""Of the host's memory, what a process with torch and a context takes at most."""

START_S = 8.0
"""Assumed for starting ``AT_ONCE`` of them until it has been measured: importing torch and making a context take 4 to
8 s alone on an H200's host."""


@dataclass(frozen=True)
class Room:
    """How many processes start at once.

    Attributes:
        number: At least 1.
        bound: What allows no more.
    """

    number: int
    bound: str


def find_room(device_free_bytes: int, device_bytes: int, *, num_cores: int, host: int) -> Room:
    """Return how many processes start at once. Fewer cost more starts; what sessions say is the same.

    Args:
        device_free_bytes: Of the GPU's memory, ``device_bytes``, what is free while none of them is there.
        num_cores: For importing torch, which takes one for seconds.
        host: Processes that fit into the host's memory.
    """
    spare_bytes = device_free_bytes - MEASURING_PART * device_bytes
    bounds = {
        "the sessions of a look": AT_ONCE,
        "cores": num_cores,
        "the GPU's memory": int(spare_bytes // CONTEXT_BYTES),
        "the host's memory": host,
    }
    bound = min(bounds, key=lambda name: bounds[name])
    return Room(max(1, bounds[bound]), bound)


class SessionPool:
    """Processes of which each serves one session; they are started in batches.

    A context that comes or goes disturbs what is timed beside it, so both happen while nothing is: where none is left
    for the next session, those that have served are ended together, and then the next batch is started in parallel.
    One that waits holds a context and runs nothing.

    Attributes:
        num_started: Processes.
        num_batches: How often some were started.
        started_s: Seconds that it took, ends included.
    """

    def __init__(self, spawn: Callable[[], Child], set_up: Callable[[list[Child]], None]) -> None:
        """Start nothing.

        Args:
            spawn: Execs one, without waiting for it.
            set_up: Has all of them get ready, in parallel, and waits for that.
        """
        self._spawn = spawn
        self._set_up = set_up
        self._ready: list[Child] = []
        self._served: list[Child] = []
        self._room: Room | None = None
        self.num_started = 0
        self.num_batches = 0
        self.started_s = 0.0

    def __bool__(self) -> bool:
        """Whether one is ready."""
        return any(child.open for child in self._ready)

    def take(self) -> Child:
        """Return the next one that is ready, for one session; ``start`` some where there is none."""
        self._ready = [child for child in self._ready if child.open]
        self._served.append(self._ready[0])
        return self._ready.pop(0)

    def start(self, find_room: Callable[[], Room]) -> None:
        """End those that have served, and start as many as there is room for.

        Args:
            find_room: Asked when the others have ended.

        Raises:
            EvaluationError: If one does not start; then none is left.
        """
        began = time.monotonic()
        self.end_served()
        self._room = find_room()
        try:
            for _ in range(self._room.number):
                self._ready.append(self._spawn())
            self._set_up(self._ready)
        except BaseException:
            close_all(self._ready)
            self._ready.clear()
            raise
        self.num_started += self._room.number
        self.num_batches += 1
        self.started_s += time.monotonic() - began

    def end_served(self) -> None:
        """End those that have served: no session is open."""
        close_all(self._served)
        self._served.clear()

    def stop(self) -> None:
        """End all."""
        self.end_served()
        close_all(self._ready)
        self._ready.clear()

    def starting_s(self, num_sessions: int) -> float:
        """Return about how many seconds starts take for so many more sessions."""
        missing = max(0, num_sessions - sum(child.open for child in self._ready))
        number = AT_ONCE if self._room is None else self._room.number
        batch_s = self.started_s / self.num_batches if self.num_batches else START_S
        return math.ceil(missing / number) * batch_s

    def __str__(self) -> str:
        if self._room is None:
            return ""
        return (
            f"{self.num_started} processes for sessions, {self._room.number} at once (bound: {self._room.bound}), "
            f"started in {self.started_s:.1f} s"
        )


def host_room() -> Mapping[str, int]:
    """Return the arguments of ``find_room`` that are this host's."""
    return {"num_cores": len(os.sched_getaffinity(0)), "host": jobs_that_fit(AT_ONCE, HOST_BYTES)}

"""The worker processes of an evaluation on a GPU: a keeper that stays and judges, and one for each fresh session."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from fibc.child import START_TIMEOUT_S, Child, ChildFailedError, spawn
from fibc.processes import ask_first, set_up, set_up_all
from fibc.schema import codec
from fibc.schema.observed import Observed
from fibc.session_pool import Room, SessionPool, find_room, host_room
from fibc.worker import Setup

WORKER = "fibc.gpu_worker"


class GpuProcesses:
    """See ``Processes``. Keeper and judge are one process, and so are sessions that need not be fresh.

    A fresh session is a process of its own, with buffers at random distances: on an H200 two processes differed by up
    to 1 %, which fresh buffers in one do not show (docs/adr/0013). It binds candidates in that one session and is ended
    before the next batch is started, so nothing that a wrong kernel left behind in it meets another one. An error that
    a context cannot survive ends its process.
    """

    def __init__(self, name: str, setup: Setup) -> None:
        self._name = name
        self._setup = setup
        self._keeper: Child | None = None
        self._pool = SessionPool(self._spawn, lambda children: set_up_all(children, name, setup, setup.seed))
        self._seen: dict[Child, Observed] = {}
        self.epoch = 0

    @property
    def started_s(self) -> float:
        """Seconds that starting processes of fresh sessions took so far."""
        return self._pool.started_s

    def starting_s(self, num_sessions: int) -> float:
        """Return about how many seconds starts take for so many more fresh sessions."""
        return self._pool.starting_s(num_sessions)

    def observed(self) -> Observed | None:
        """Return what all workers have observed; of one that died, until its last session ended."""
        if self._keeper is not None and self._keeper.open:
            self._look_at(self._keeper)
        return replace(sum(self._seen.values(), Observed()), sessions=str(self._pool))

    def keeper(self) -> Child:
        """Return the keeper."""
        if self._keeper is None or not self._keeper.open:
            self._end_keeper()
            self._keeper = self._spawn()
            self.epoch += 1
            set_up(self._keeper, self._name, self._setup, self._setup.seed)
            ask_first(self._keeper, self._name, "start")
        return self._keeper

    def judge(self) -> Child:
        """Return the keeper; processes whose session is over are ended first."""
        self._pool.end_served()
        return self.keeper()

    def session(self, seed: int, *, fresh: bool) -> Child:
        """Return a process that has not served yet where the session must be ``fresh``, else the keeper."""
        if not fresh:
            child = self.judge()
            ask_first(child, self._name, "reseed", seed=seed)
            return child
        while self._pool:
            child = self._pool.take()
            with contextlib.suppress(ChildFailedError):  # it died while it waited: the next one serves
                child.call("reseed", START_TIMEOUT_S, seed=seed, fresh=True)
                return child
            child.close()
        self._pool.start(self._room)
        if self._keeper is not None and self._keeper.open:  # it has to know those that came
            ask_first(self._keeper, self._name, "watch")
        child = self._pool.take()
        ask_first(child, self._name, "reseed", seed=seed, fresh=True)
        return child

    def end(self, child: Child) -> None:
        """Let a worker forget its candidates, and one of a fresh session all that it holds.

        One that does not answer is ended.
        """
        child.bound.clear()
        if not child.open:
            child.close()
        elif child is self._keeper:
            self._look_at(child)
            ask_first(child, self._name, "release")
        else:
            self._rest(child)

    def condemn(self, child: Child) -> None:
        """End a worker: a wrong kernel may have written anywhere in its context, counters of a workspace included."""
        child.close()

    def stop(self) -> None:
        """End every process."""
        self._pool.stop()
        self._end_keeper()

    def _spawn(self) -> Child:
        """Exec a worker, which sees another GPU than the first as its only one."""
        gpu = self._setup.gpu
        seen = {"CUDA_VISIBLE_DEVICES": str(gpu["uuid"])} if gpu is not None and gpu["ordinal"] > 0 else {}
        return spawn(WORKER, seen)

    def _room(self) -> Room:
        """Return how many processes may start; the keeper gives back what it holds for timing."""
        assert self._setup.gpu is not None
        total_bytes = int(self._setup.gpu["validity"]["memory_bytes"])
        free_bytes = total_bytes
        if self._keeper is not None and self._keeper.open:
            free_bytes = ask_first(self._keeper, self._name, "rest")
        return find_room(free_bytes, total_bytes, **host_room())

    def _rest(self, child: Child) -> None:
        """Have a process that has served give its memory back until the pool ends it."""
        try:
            seen, facts, _ = [child.call(op, START_TIMEOUT_S) for op in ("observed", "facts", "rest")]
        except ChildFailedError:  # what it timed was answered before, and stays
            child.close()
        else:
            self._take_in(child, seen, facts)

    def _end_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
        self._keeper = None

    def _look_at(self, keeper: Child) -> None:
        seen, facts = [ask_first(keeper, self._name, op) for op in ("observed", "facts")]
        self._take_in(keeper, seen, facts)

    def _take_in(self, worker: Child, seen: dict[str, Any], facts: dict[str, str]) -> None:
        self._seen[worker] = replace(codec.from_plain(Observed, seen), facts=facts)

"""Builds ahead of the search: while keys are measured, what they ask for next is compiled on other cores."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

from fibc.backends.base import Backend, BuildFailure
from fibc.leash import CutError, Leash
from fibc.schema.candidate import Artifact, Candidate, Target
from fibc.schema.definition import Definition
from fibc.schema.result import BuildCounts

DEVICE_TIMED = ("graph", "device")
"""Modes in which the device works behind a spin until the host has queued everything: what else the host does is not in
a timing, and where it was too slow to queue, the sample is repeated (``fibc.timing_cuda``)."""

MEASURING_CORES = 2
"""The search itself, and the worker that queues the device's work."""

SHARE = 2
"""One in so many of the compilers works ahead, so that the search finds as many idle for what it asks for at once."""

Plan = Callable[[], Iterable[tuple[Backend, Candidate]]]
"""What a key will ask for, in order; called once, in the thread that builds ahead, when the keys before have theirs."""


def overlaps(target: Target, mode: str) -> bool:
    """Return whether compilers may run while something is measured for ``target``: never on a CPU."""
    return target.kind == "cuda" and mode in DEVICE_TIMED


def compilers_ahead(target: Target, mode: str, jobs: int) -> int:
    """Return how many of ``jobs`` compilers work ahead; 0 where nothing may, or no core is left."""
    if not overlaps(target, mode):
        return 0
    return max(0, min(jobs // SHARE, len(os.sched_getaffinity(0)) - MEASURING_CORES))


class Ahead:
    """The builds of one search. A context manager: inside it a second thread builds ahead, and no process outlives it.

    ``build`` answers like ``Backend.build``, one thread at a time. What was built ahead is answered at once, what is
    being built is waited for, and what is only planned is built as if nobody had planned it: no candidate is built
    twice, but for one that a deadline ended. The thread takes a candidate for each of its compilers at a time, so that
    the search waits for one no longer than it would have built.
    """

    def __init__(
        self,
        definition: Definition,
        plans: Sequence[Plan],
        *,
        jobs: int,
        compilers: int,
        timeout_s: Callable[[Backend], float],
        may_begin: Callable[[], bool],
    ) -> None:
        """Prepare; nothing is started.

        Args:
            plans: Of the keys, in the order of tuning.
            jobs: Compilers at once, those ahead included.
            compilers: Those ahead, less than ``jobs``; with 0 nothing is built ahead.
            timeout_s: Deadline of a candidate's build by a backend, from now.
            may_begin: Whether there is time to build ahead; the thread ends where there is none.
        """
        self._definition = definition
        self._jobs = jobs
        self._compilers = compilers
        self._timeout_s = timeout_s
        self._may_begin = may_begin
        self._changed = threading.Condition()
        self._plans = deque(enumerate(plans))
        self._reached = 0
        self._planned: dict[str, tuple[int, Backend, Candidate]] = {}
        self._making: frozenset[str] = frozenset()
        self._made: dict[str, Artifact | BuildFailure | Exception] = {}
        self._asked: set[str] = set()
        self._num_own = 0
        self._failed: tuple[int, Exception] | None = None
        self._closed = False
        self._leash = Leash()
        self._thread = threading.Thread(target=self._work, name="fibc-ahead", daemon=True)
        self._waited_s = 0.0
        self._num = {"ready": 0, "awaited": 0, "built": 0}

    def __enter__(self) -> Self:
        if self._compilers > 0 and self._plans:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._leash.cut()
            self._thread.join()

    @property
    def counts(self) -> BuildCounts:
        """What became of the builds that were asked for."""
        unused = len(self._made.keys() - self._asked)
        return BuildCounts(round(self._waited_s, 1), **self._num, unused=unused)

    def reach(self, place: int) -> None:
        """Forget what the keys before plan ``place`` did not ask for; what that plan raised is raised now."""
        with self._changed:
            self._reached = place
            self._planned = {digest: item for digest, item in self._planned.items() if item[0] >= place}
            if self._failed is not None and self._failed[0] <= place:
                raise self._failed[1]

    def build(self, backend: Backend, candidates: Sequence[Candidate]) -> dict[str, Artifact | BuildFailure]:
        """Build every candidate, see ``Backend.build``; what was raised ahead for one of them is raised now."""
        began = time.monotonic()
        digests = {candidate.digest for candidate in candidates}
        with self._changed:
            self._asked |= digests
            for digest in digests:
                self._planned.pop(digest, None)
            ready, awaited = digests & self._made.keys(), digests & self._making
        results = self._build(backend, [c for c in candidates if c.digest not in ready | awaited])
        with self._changed:
            self._changed.wait_for(lambda: not awaited & self._making)
            made = {digest: self._made[digest] for digest in (ready | awaited) & self._made.keys()}
        for digest, outcome in made.items():
            if isinstance(outcome, Exception):
                raise outcome
            if not (isinstance(outcome, BuildFailure) and outcome.timed_out):  # alone it may be fast enough
                results[digest] = outcome
        self._num["ready"] += len(ready & results.keys())
        self._num["awaited"] += len(awaited & results.keys())
        results |= self._build(backend, [c for c in candidates if c.digest not in results])
        self._waited_s += time.monotonic() - began
        return results

    def _build(self, backend: Backend, missing: Sequence[Candidate]) -> dict[str, Artifact | BuildFailure]:
        """Build for the search, with the compilers that do not work ahead."""
        if not missing:
            return {}
        with self._changed:
            jobs = self._jobs - len(self._making)
            self._num_own = min(jobs, len(missing))
        try:
            built = backend.build(self._definition, missing, timeout_s=self._timeout_s(backend), jobs=jobs)
        finally:
            with self._changed:
                self._num_own = 0
                self._changed.notify_all()
        self._num["built"] += len(missing)
        return built

    # The thread ------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        with self._leash.worn():
            while self._plan() and (batch := self._next()):
                self._make(*batch)

    def _plan(self) -> bool:
        """Ask plans until every compiler has work; return False where one raised."""
        while self._plans and len(self._planned) < self._compilers and not self._closed:
            place, plan = self._plans.popleft()
            if place < self._reached:
                continue
            try:
                found = {candidate.digest: (place, backend, candidate) for backend, candidate in plan()}
            except Exception as error:  # noqa: BLE001  raised again when the key's turn comes
                self._failed = place, error
                return False
            with self._changed:
                known = self._asked | self._made.keys()
                self._planned |= {digest: item for digest, item in found.items() if digest not in known}
        return True

    def _next(self) -> tuple[Backend, list[Candidate]] | None:
        """Wait for idle compilers, and return what one backend shall build with them; None where it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._num_own + self._compilers <= self._jobs)
            if self._closed or not self._planned or not self._may_begin():
                return None
            items = list(self._planned.values())
            backend = items[0][1]
            batch = [candidate for _, other, candidate in items if other is backend][: self._compilers]
            self._making = frozenset(candidate.digest for candidate in batch)
            for digest in self._making:
                del self._planned[digest]
            return backend, batch

    def _make(self, backend: Backend, batch: Sequence[Candidate]) -> None:
        made: dict[str, Artifact | BuildFailure | Exception] = {}
        try:
            made |= backend.build(self._definition, batch, timeout_s=self._timeout_s(backend), jobs=self._compilers)
        except CutError:
            pass  # closed: nobody asks any more
        except Exception as error:  # noqa: BLE001  raised again where one of them is asked for
            made |= dict.fromkeys(self._making, error)
        finally:
            with self._changed:
                self._made |= made
                self._making = frozenset()
                self._changed.notify_all()

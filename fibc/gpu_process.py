"""The worker process of an evaluation on a GPU: one that stays, as starting a CUDA context takes seconds."""

from __future__ import annotations

from dataclasses import replace

from fibc.child import START_TIMEOUT_S, Child, spawn
from fibc.processes import ask_first, set_up
from fibc.schema import codec
from fibc.schema.observed import Observed
from fibc.worker import Setup


class GpuProcess:
    """See ``Processes``. Keeper, judge and session are one process; an error that its context cannot survive ends it.

    A fresh session has newly allocated buffers at other addresses. On an H200 the spread between processes was no
    larger than the error within one (docs/measuring.md); the A/A gate says whether that holds here.
    """

    def __init__(self, name: str, setup: Setup) -> None:
        self._name = name
        self._setup = setup
        self._worker: Child | None = None
        self._seen: dict[int, Observed] = {}
        self.epoch = 0

    def observed(self) -> Observed | None:
        """Return what all workers have observed; of one that died, until its last session ended."""
        if self._worker is not None and self._worker.open:
            self._look(self._worker)
            facts = ask_first(self._worker, self._name, "facts")
            self._seen[self.epoch] = replace(self._seen[self.epoch], facts=facts)
        return sum(self._seen.values(), Observed())

    def keeper(self) -> Child:
        """Return the worker."""
        if self._worker is None or not self._worker.open:
            self.stop()
            self._worker = spawn("fibc.gpu_worker", self._visible())
            self.epoch += 1
            set_up(self._worker, self._name, self._setup, self._setup.seed)
            ask_first(self._worker, self._name, "start")
        return self._worker

    def _visible(self) -> dict[str, str]:
        """Return what lets the worker see another GPU than the first as its only one."""
        gpu = self._setup.gpu
        return {"CUDA_VISIBLE_DEVICES": str(gpu["uuid"])} if gpu is not None and gpu["ordinal"] > 0 else {}

    def judge(self) -> Child:
        """Return the worker."""
        return self.keeper()

    def session(self, seed: int, *, fresh: bool) -> Child:
        """Return the worker with other inputs, and where ``fresh`` with other buffers."""
        worker = self.keeper()
        worker.call("reseed", START_TIMEOUT_S, seed=seed, fresh=fresh)
        return worker

    def end(self, child: Child) -> None:
        """Let the worker forget its candidates; one that does not answer is ended."""
        child.bound.clear()
        if child.open:
            self._look(child)
            ask_first(child, self._name, "release")

    def condemn(self, child: Child) -> None:
        """End the worker: a wrong kernel may have written anywhere on the device, counters of a workspace included."""
        child.close()

    def stop(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def _look(self, worker: Child) -> None:
        self._seen[self.epoch] = codec.from_plain(Observed, ask_first(worker, self._name, "observed"))

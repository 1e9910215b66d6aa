"""The worker of an evaluation on a GPU: keeps cases and weights, and validates and times one candidate after another.

An error that the device reports after the fact leaves a context unusable: every later call fails, whoever makes it. So
a request that failed is followed by a question to the device, and where that fails too the process ends. Its parent
tries the candidate once more in a clean one, and blames it if that one ends as well.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from fibc import inputs
from fibc.calls import Value, call_reference, form_problem
from fibc.case_book import CaseBook
from fibc.cases import Drafter
from fibc.nvml import Monitor, NvmlError, open_monitor
from fibc.observer import Observer, OwnProcesses
from fibc.schema import codec
from fibc.schema.feature import Point
from fibc.schema.observed import Observed
from fibc.schema.silicon import Gpu
from fibc.timing import Timer
from fibc.timing_cuda import make_meter
from fibc.worker import LOG_BYTES, Worker, load_harness, main

LOST_STATUS = 70
"""Exit status of a worker whose context is lost."""


class GpuWorker(Worker):
    """State and requests of the process."""

    def do_setup(self, setup: dict[str, Any]) -> None:
        """Take in the definition, and start the context."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.backends.cuda.matmul.allow_tf32 = False
        super().do_setup(setup)
        self._case_seed = self._setup.seed
        drafter = Drafter(
            self._definition, self._workloads, self._case_seed, self._make_case, device=self._setup.device
        )
        self._book = CaseBook(self._definition, self._reference(), self._native, drafter)
        self._before = Observed()
        self._monitor = self._open_monitor()
        self._observer = self._observe()

    def make_timer(self) -> Timer:
        """Return the timer of the mode."""
        return Timer(
            self._definition,
            self._spec,
            self._native,
            self._make,
            num_copies=self._setup.num_copies,
            keep_bytes=self._setup.keep_bytes,
            seed=self._setup.seed,
            meter=make_meter(self._setup.mode),
        )

    def do_start(self) -> None:
        """Load the harness; candidates may run from here on."""
        faulthandler.enable()
        resource.setrlimit(resource.RLIMIT_FSIZE, (LOG_BYTES, LOG_BYTES))
        torch.set_num_threads(self._setup.num_threads)
        self._harness = load_harness(Path(self._setup.harness_path))

    def do_prepare(
        self, name: str, points: list[dict[str, Any]], low: int, kind: str, limit_s: float
    ) -> list[dict[str, Any]]:
        """Make the cases ``name`` with their oracles; return native's own agreement, case by case.

        The arguments are those of ``fibc.zygote``. The deadline is the parent's: the process ends with it.
        """
        places = [codec.from_plain(Point, point) for point in points]
        natives = self._book.prepare(name, places, places[low], kind)
        self._cases[name] = self._book[name]
        return natives

    def do_reference(self, points: list[dict[str, Any]], limit_s: float) -> list[str]:
        """Return what is wrong with the reference on declared inputs, at most one problem for each point."""
        problems = (self._reference_problem(codec.from_plain(Point, point)) for point in points)
        return [problem for problem in problems if problem]

    def do_validate(self, arm: int, cases: str) -> dict[str, Any]:
        """Judge arm ``arm``; a candidate that wrote into what it is judged by ends the process."""
        try:
            return super().do_validate(arm, cases)
        finally:
            if (problem := self._book.broken()) is not None:
                self._end(problem)

    def do_pair(self, arm: int, native_first: bool, inner: int | None) -> tuple[float, float, int]:
        """Time one pair under observation; where ``inner`` is None it is found first, from native."""
        if self._observer is None:
            return super().do_pair(arm, native_first, inner)
        timed = super().do_pair
        return self._observer.pair(lambda: timed(arm, native_first, inner))

    def do_observed(self) -> dict[str, Any]:
        """Return what was observed since the worker began."""
        seen: dict[str, Any] = codec.to_plain(self._observed())
        return seen

    def do_facts(self) -> dict[str, str]:
        """Return the state of the GPU, and what was observed since the session began."""
        return {} if self._observer is None else self._observer.facts()

    def do_hold(self, point: dict[str, Any]) -> None:
        """Make a point's inputs for timing."""
        self._timer.hold(codec.from_plain(Point, point))

    def do_reseed(self, seed: int, fresh: bool = False) -> None:
        """From here on make inputs from ``seed``; with ``fresh`` also weights, and at random distances."""
        if fresh:
            self._setup = replace(self._setup, seed=seed)
            self._timer.fresh(seed)
            self.do_watch()
        else:
            super().do_reseed(seed)

    def do_watch(self) -> None:
        """Observe anew: other processes of this run have come to the GPU."""
        self._before = self._observed()
        self._observer = self._observe()

    def do_rest(self) -> int:
        """Forget every candidate, and give back what timing holds; return the bytes that are free on the GPU."""
        self.do_release()
        self._timer.rest()
        return int(torch.cuda.mem_get_info()[0])

    def do_release(self) -> None:
        """Forget every candidate."""
        self._sides.clear()
        self._artifacts.clear()
        self._timer.forget()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = super()._answer(request)
        if "ok" not in answer:
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                self._end(f"{answer}\n{traceback.format_exc()}")
        return answer

    def _end(self, why: str) -> NoReturn:
        sys.stderr.write(f"{why}\n")
        sys.stderr.flush()
        os._exit(LOST_STATUS)

    def _open_monitor(self) -> Monitor | None:
        """Return the monitor of all sessions; None where NVML cannot be asked, which ``do_observed`` says."""
        assert self._setup.gpu is not None
        try:
            return open_monitor(codec.from_plain(Gpu, self._setup.gpu))
        except (NvmlError, OSError) as error:
            self._before = Observed(problem=f"NVML: {error}")
            return None

    def _observe(self) -> Observer | None:
        """Return an observer of a session."""
        return None if self._monitor is None else Observer(self._monitor, OwnProcesses(self._setup.run_pid))

    def _observed(self) -> Observed:
        if self._observer is None:
            return self._before
        seen = self._observer.discards
        return self._before + Observed(seen.timed, seen.capped, dict(seen.reasons or {}))

    def _reference_problem(self, point: Point) -> str | None:
        where = f"{self._definition.name}: reference: at {point}"
        try:
            outputs = call_reference(self._definition, self._reference(), self._make_case(point))
        except Exception as error:  # noqa: BLE001  a user's function raises what it likes
            return f"{where}: must return, raised {type(error).__name__}: {error}"
        problem = form_problem(self._definition, dict(point.axes), outputs)
        return None if problem is None else f"{where}: {problem[1]}"

    def _make_case(self, point: Point) -> dict[str, Value]:
        return self._inputs(point, self._case_seed, None)

    def _make(self, point: Point, made: Mapping[str, Value] | None = None) -> dict[str, Value]:
        return self._inputs(point, self._setup.seed, made)

    def _inputs(self, point: Point, seed: int, made: Mapping[str, Value] | None) -> dict[str, Value]:
        workload = self._workloads.get(point.workload)
        values = inputs.make(self._definition, dict(point.axes), seed, workload, made, device=self._setup.device)
        return dict(values)


if __name__ == "__main__":
    main(GpuWorker, sys.argv[1:])

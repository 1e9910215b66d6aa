"""The zygote of a definition: holds inputs and oracles, and forks children that share them copy-on-write.

It imports torch and runs nothing parallel (a child of a process that ran an OpenMP region hangs in its next one), so a
child is ready in about 20 ms instead of 1.3 s. Reference and native run in children too; a child that computed oracles
leaves them in memory that later children map privately, so that no candidate can change what others are judged by.
"""

from __future__ import annotations

import contextlib
import gc
import math
import mmap
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from fibc import buffers, check, inputs, isolation
from fibc.buffers import Buffer
from fibc.check import ErrorModel, Expected, Oracle, Value, Weights
from fibc.rpc import Channel, ChannelClosedError
from fibc.schema import codec
from fibc.schema.evaluation import Status
from fibc.schema.feature import Point
from fibc.validation import SMALL_BYTES, Case, place
from fibc.worker import FailedError, Worker, load_text, main

HEAVY_TERMS = 1 << 33
"""Output elements times reduction length from which a point is heavy: about 0.2 s for a float32 oracle on two cores."""

HEAVY_TRIAL_TERMS = 1 << 31
"""The same for a trial, of which there are many: comparing 2^19 elements in five cases takes longer than the timing."""

CASES = ("trial", "points", "adversarial")
"""What can be prepared. ``trial``: dense at every point, a few adversarial inputs and one layout at the smallest; at a
heavy smallest point one dense call. ``points``: dense at every point. ``adversarial``: everything at the smallest."""

TERMS_OF_AN_ELEMENT = 1024
"""Least reduction length in that product: an element costs the comparison as much, whatever the operator."""

TRIAL_CASES = frozenset({"one_hot_row", "nan"})
"""Adversarial cases of a trial: they leave weights alone, so that oracles share their upcast copies."""

HEAVY_CASES = frozenset({"huge"})
"""Adversarial cases of a finalist at a heavy point; at a light one it meets all of them."""

TRIAL_LAYOUTS = ("row-sliced",)
"""Layouts of a trial: the one that a variant is most likely to take and to get wrong."""


@dataclass(frozen=True)
class _Draft:
    """A case without its oracle.

    Attributes:
        oracle: Drafts with one oracle have equal points and equal values.
    """

    name: str
    point: Point
    layout: str
    inputs: Mapping[str, Value]
    placed: Mapping[str, Buffer | Value]
    independent: bool
    oracle: str


class Zygote(Worker):
    """State and requests of a zygote; its children go on as workers with what it held."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._children: set[int] = set()
        self._weights: dict[str, tuple[Tensor, Buffer | Value]] = {}
        self._model: ErrorModel | None = None
        isolation.adopt_orphans()

    def do_setup(self, setup: dict[str, Any]) -> None:
        """Take in the definition."""
        super().do_setup(setup)
        self._wide_weights = Weights(self._definition)
        gc.freeze()  # the collector writes into what it looks at, which would copy pages that children share

    def do_fork(self) -> int:
        """Fork a child that serves on a socket and writes into a log, both sent along; return its id."""
        channel_fd, log_fd = self._channel.receive_fds(2)
        pid = os.fork()
        if pid == 0:
            self._become_child(channel_fd, log_fd)
        os.close(channel_fd)
        os.close(log_fd)
        self._children.add(pid)
        return pid

    def do_reap(self, pid: int, kill: bool) -> int:
        """Wait for a child, and kill what it left behind; return its wait status."""
        return self._reap(pid, kill=kill)

    def do_hold(self, point: dict[str, Any]) -> None:
        """Make a point's inputs for timing, shared by all later children."""
        self._timer.hold(codec.from_plain(Point, point))

    def do_prepare(
        self, name: str, points: list[dict[str, Any]], low: int, kind: str, limit_s: float
    ) -> list[dict[str, Any]]:
        """Make the cases ``name`` with their oracles; return native's own agreement, case by case.

        Args:
            points: Where dense inputs are tried.
            low: Index of the smallest point, where adversarial inputs and layouts are tried.
            kind: One of ``CASES``.
            limit_s: Seconds for the reference and native.
        """
        places = [codec.from_plain(Point, point) for point in points]
        drafts = [*self._drafts(places, places[low], kind)]
        return self._with_oracles(name, drafts, limit_s)

    def do_forget(self, name: str) -> None:
        """Drop the cases ``name``."""
        self._cases.pop(name, None)

    def do_reference(self, points: list[dict[str, Any]], limit_s: float) -> list[str]:
        """Return what is wrong with the reference on declared inputs, at most one problem for each point."""
        drafts = [codec.from_plain(Point, point) for point in points]

        problems = self._in_child(lambda: [self._reference_problem(point) for point in drafts], limit_s)
        return [problem for problem in problems if problem]

    def _reference_problem(self, point: Point) -> str | None:
        where = f"{self._definition.name}: reference: at {point}"
        try:
            outputs = check.call_reference(self._definition, self._reference(), self._make(point))
        except Exception as error:  # noqa: BLE001  a user's function raises what it likes
            return f"{where}: must return, raised {type(error).__name__}: {error}"
        problem = check.form_problem(self._definition, dict(point.axes), outputs)
        return None if problem is None else f"{where}: {problem[1]}"

    def _reference(self) -> Callable[..., object]:
        reference: Callable[..., object] = getattr(
            load_text("fibc_reference", self._definition.reference), self._definition.entry_point
        )
        return reference

    def _become_child(self, channel_fd: int, log_fd: int) -> NoReturn:
        status = 1
        try:
            os.setsid()
            isolation.die_with_parent()
            self._channel.close()
            os.dup2(log_fd, 1)
            os.dup2(log_fd, 2)
            self._channel = Channel(socket.socket(fileno=channel_fd))
            self._children.clear()
            self.serve()
            status = 0
        except BaseException:  # noqa: BLE001  the log is all that is left to say it in
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _reap(self, pid: int, *, kill: bool) -> int:
        if kill:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self._children.discard(pid)
        isolation.kill_descendants(frozenset(self._children))
        return status

    def _drafts(self, points: Sequence[Point], low: Point, kind: str) -> Iterator[_Draft]:
        """Yield calls without oracles: dense at every point; adversarial and otherwise laid out at ``low``."""
        heavy_terms = HEAVY_TRIAL_TERMS if kind == "trial" else HEAVY_TERMS
        at_low = self._make(low)
        for point in points:
            if point == low or kind == "points" or not self._is_heavy(point, heavy_terms):
                values = at_low if point == low else self._make(point)
                yield self._draft("dense", point, values, independent=self._is_random(point))
        light = not self._is_heavy(low, heavy_terms)
        if kind == "adversarial":
            yield from self._adversarial(low, None if light else HEAVY_CASES)
        elif kind == "trial" and light:
            yield from self._adversarial(low, TRIAL_CASES)
        if light and kind != "points":
            for layout in TRIAL_LAYOUTS if kind == "trial" else buffers.LAYOUTS:
                yield self._draft("dense", low, at_low, layout=layout, independent=self._is_random(low))

    def _adversarial(self, low: Point, wanted: frozenset[str] | None) -> Iterator[_Draft]:
        """Yield the adversarial calls ``wanted``, all where it is None."""
        left = set(wanted or ())
        workload = self._workloads.get(low.workload)
        for name, values in inputs.adversarial(self._definition, dict(low.axes), self._setup.seed, workload):
            if wanted is None or name in wanted:
                yield self._draft(name, low, values)
                left.discard(name)
                if wanted is not None and not left:
                    return  # the next ones cost as much to make as to run

    def _is_heavy(self, point: Point, heavy_terms: int) -> bool:
        axes = dict(point.axes)
        n = max(TERMS_OF_AN_ELEMENT, check.reduction_length(self._definition, axes, multi_affine=True))
        shapes = (self._definition.shape_of(spec, axes) for spec in self._definition.outputs.values())
        return n * sum(math.prod(shape or ()) for shape in shapes) >= heavy_terms

    def _is_random(self, point: Point) -> bool:
        """Return whether every floating-point input at ``point`` comes from the seed."""
        workload = self._workloads.get(point.workload)
        return workload is None or all(spec.type != "safetensors" for spec in workload.inputs.values())

    def _draft(
        self, name: str, point: Point, values: Mapping[str, Value], *, layout: str = "", independent: bool = False
    ) -> _Draft:
        """Place values in guarded buffers."""
        residency = inputs.residency(self._definition)
        make = buffers.LAYOUTS.get(layout, buffers.contiguous)
        pristine: dict[str, Value] = {}
        placed: dict[str, Buffer | Value] = {}
        for key, value in values.items():
            pristine[key] = value
            large = isinstance(value, Tensor) and residency[key] == "cold" and value.nbytes > SMALL_BYTES
            placed |= self._share(key, value, pristine) if large else place({key: value}, make)
        label = ", ".join(filter(None, (name, layout)))
        return _Draft(label, point, layout, pristine, placed, independent, oracle=name)

    def _share(self, name: str, value: Value, pristine: dict[str, Value]) -> dict[str, Buffer | Value]:
        """Return a large weight in a row-major buffer, and make it the pristine one: the same for all equal ones."""
        assert isinstance(value, Tensor)
        if name not in self._weights:
            self._weights[name] = value, place({name: value})[name]
        known, buffer = self._weights[name]
        if value is not known and not torch.equal(value, known):
            return place({name: value})
        pristine[name] = known
        return {name: buffer}

    def _with_oracles(self, name: str, drafts: Sequence[_Draft], timeout_s: float) -> list[dict[str, Any]]:
        """Run reference and native in a child; keep the cases with the oracles that it wrote."""
        self._wide_weights.hold(drafts[0].inputs)
        memory = os.memfd_create("oracles")

        def work() -> list[Any]:
            reference = self._reference()
            smallest = min(drafts, key=lambda draft: math.prod(size for _, size in draft.point.axes))
            model = self._model or check.probe(self._definition, reference, smallest.inputs)
            oracle = Oracle(self._definition, reference, model, self._wide_weights)
            known: dict[tuple[Point, str], tuple[Expected, ...]] = {}
            stored = []
            for draft in drafts:
                same = (draft.point, draft.oracle)
                if same not in known:
                    known[same] = oracle.expect(draft.inputs, dict(draft.point.axes), independent=draft.independent)
                    stored.append([_store(memory, expected) for expected in known[same]])
            natives = [self._native_agreement(draft, known[draft.point, draft.oracle]) for draft in drafts]
            return [codec.to_plain(model), stored, natives]

        try:
            model, stored, natives = self._in_child(work, timeout_s)
            mapped = mmap.mmap(memory, os.fstat(memory).st_size, flags=mmap.MAP_PRIVATE)
        finally:
            os.close(memory)
        self._model = codec.from_plain(ErrorModel, model)
        order = dict.fromkeys((draft.point, draft.oracle) for draft in drafts)
        oracles = {
            same: tuple(_load(mapped, item) for item in items) for same, items in zip(order, stored, strict=True)
        }
        self._cases[name] = tuple(
            Case(d.name, dict(d.point.axes), d.layout, d.inputs, d.placed, oracles[d.point, d.oracle]) for d in drafts
        )
        return list(natives)

    def _native_agreement(self, draft: _Draft, expected: Sequence[Expected]) -> dict[str, Any]:
        """Return how native by value agrees with the oracle."""
        values = [value.clone() if isinstance(value, Tensor) else value for value in draft.inputs.values()]
        result = {"case": draft.name, "point": str(draft.point), "status": Status.RUNTIME_ERROR, "message": ""}
        try:
            outputs = check.as_outputs(self._definition, self._native(*values))
        except Exception:  # noqa: BLE001  native may raise what it likes; it is reported and keeps serving
            return {**result, "message": traceback.format_exc(limit=-2)}
        agreement = check.compare(self._definition, dict(draft.point.axes), outputs, expected)
        return {**result, "status": agreement.status, "message": agreement.message}

    def _in_child(self, work: Callable[[], Any], timeout_s: float) -> Any:
        """Return what ``work`` returns in a fork that may use every thread.

        Raises:
            FailedError: If it raised, died or took longer.
        """
        ours, theirs = Channel.pair()
        pid = os.fork()
        if pid == 0:
            self._work(work, Channel(theirs))
        theirs.close()
        try:
            message = ours.receive(timeout_s)
        except TimeoutError:
            raise FailedError(Status.TIMEOUT, f"must end within {timeout_s:g} s, and did not") from None
        except ChannelClosedError:
            raise FailedError(Status.CRASH, "its process died") from None
        finally:
            ours.close()
            self._reap(pid, kill=True)
        if "raised" in message:
            raise FailedError(Status.RUNTIME_ERROR, message["raised"])
        return message["ok"]

    def _work(self, work: Callable[[], Any], report: Channel) -> NoReturn:
        try:
            os.setsid()
            isolation.die_with_parent()
            torch.set_num_threads(self._setup.num_threads)
            report.send({"ok": work()})
        except BaseException:  # noqa: BLE001  a user's function raises what it likes; it is reported
            report.send({"raised": traceback.format_exc(limit=-3)})
        finally:
            os._exit(0)


def _store(memory: int, expected: Expected) -> dict[str, Any]:
    """Append one expected output to the file ``memory``; return where it is."""
    return {
        "name": expected.name,
        "dtype": str(expected.dtype)[6:],
        "values": _append(memory, expected.values),
        "bound": None if expected.bound is None else _append(memory, expected.bound),
        "rms_bound": expected.rms_bound,
        "open": None if expected.open is None else _append(memory, expected.open),
        "all_finite": expected.all_finite,
    }


def _append(memory: int, tensor: Tensor) -> list[Any]:
    begin = os.fstat(memory).st_size
    os.lseek(memory, begin, os.SEEK_SET)
    with open(memory, "wb", closefd=False) as file:
        tensor.contiguous().view(-1).view(torch.uint8).numpy().tofile(file)
        file.flush()
        file.write(bytes(-tensor.nbytes % 64))
    return [begin, list(tensor.shape), str(tensor.dtype)[6:]]


def _load(memory: mmap.mmap, stored: Mapping[str, Any]) -> Expected:
    """Return what ``_store`` described, without a copy."""
    return Expected(
        stored["name"],
        check.torch_dtype(stored["dtype"]),
        _tensor(memory, stored["values"]),
        None if stored["bound"] is None else _tensor(memory, stored["bound"]),
        stored["rms_bound"],
        None if stored["open"] is None else _tensor(memory, stored["open"]),
        stored["all_finite"],
    )


def _tensor(memory: mmap.mmap, stored: Sequence[Any]) -> Tensor:
    begin, shape, dtype = stored
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=check.torch_dtype(dtype))
    return torch.frombuffer(memory, dtype=check.torch_dtype(dtype), count=count, offset=begin).view(shape)


if __name__ == "__main__":
    main(Zygote, sys.argv[1:])

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fibc import check, supervisor
from fibc.bound import Expected
from fibc.case_book import expect_all, find_error_model, native_agreement, with_oracles
from fibc.cases import Draft, Drafter
from fibc.error_model import ErrorModel
from fibc.oracle import Oracle
from fibc.rpc import Channel, ChannelClosedError
from fibc.schema import codec
from fibc.schema.evaluation import Status
from fibc.schema.feature import Point
from fibc.upcast import Weights
from fibc.worker import FailedError, Worker, main


class Zygote(Worker):
    """State and requests of a zygote; its children go on as workers with what it held."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._children: set[int] = set()
        self._model: ErrorModel | None = None
        supervisor.adopt_orphans()

    def do_setup(self, setup: dict[str, Any]) -> None:
        """Take in the definition."""
        super().do_setup(setup)
        self._wide_weights = Weights(self._definition)
        self._drafter = Drafter(self._definition, self._workloads, self._setup.seed, self._make)
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
            kind: One of ``cases.CASES``.
            limit_s: Seconds for the reference and native.
        """
        places = [codec.from_plain(Point, point) for point in points]
        drafts = [*self._drafter.drafts(places, places[low], kind)]
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

    def _become_child(self, channel_fd: int, log_fd: int) -> NoReturn:
        status = 1
        try:
            os.setsid()
            supervisor.die_with_parent()
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
        supervisor.kill_descendants(frozenset(self._children))
        return status

    def _with_oracles(self, name: str, drafts: Sequence[Draft], timeout_s: float) -> list[dict[str, Any]]:
        """Run reference and native in a child; keep the cases with the oracles that it wrote."""
        self._wide_weights.hold(drafts[0].inputs)
        memory = os.memfd_create("oracles")

        def work() -> list[Any]:
            reference = self._reference()
            model = self._model or find_error_model(self._definition, reference, drafts)
            oracles = expect_all(Oracle(self._definition, reference, model, self._wide_weights), drafts)
            stored = [[_store(memory, expected) for expected in items] for items in oracles.values()]
            natives = [native_agreement(self._definition, self._native, d, oracles[d.point, d.oracle]) for d in drafts]
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
        self._cases[name] = with_oracles(drafts, oracles)
        return list(natives)

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
            supervisor.die_with_parent()
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

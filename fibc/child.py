"""A worker process as its parent sees it: requests, answers, deadlines, and how it ended."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import IO, Any, Protocol

from fibc import isolation
from fibc.errors import EvaluationError
from fibc.rpc import Channel, ChannelClosedError
from fibc.schema.evaluation import Status
from fibc.worker import MALLOC_TUNABLES

START_TIMEOUT_S = 180.0
"""Importing torch takes 1.3 s; a native's package that compiles kernels when it is imported takes minutes."""

LOG_TAIL_BYTES = 8192


class ChildFailedError(Exception):
    """A request failed because of what the child ran.

    Attributes:
        alive: The child still serves.
    """

    def __init__(self, status: Status, log: str, *, alive: bool) -> None:
        super().__init__(log)
        self.status = status
        self.log = log
        self.alive = alive


class Process(Protocol):
    """How a child's process is ended."""

    def end(self, *, kill: bool) -> int:
        """Wait for its end, which was seen to come or is forced; return its exit code, minus the signal."""
        ...


class Child:
    """A worker as its parent sees it."""

    def __init__(self, channel: Channel, log: IO[bytes], process: Process) -> None:
        self.channel = channel
        self._log = log
        self._process = process
        self.open = True
        self.bound: set[int] = set()

    def call(self, op: str, timeout_s: float, **arguments: Any) -> Any:
        """Return what the child answers.

        Raises:
            ChildFailedError: If a candidate failed: it raised, died, or took longer, which ends the child.
            EvaluationError: If native failed.
        """
        self.tell(op, **arguments)
        return self.answer(timeout_s)

    def tell(self, op: str, **arguments: Any) -> None:
        """Send a request whose answer is read later."""
        try:
            self.channel.send({"op": op, **arguments})
        except ChannelClosedError:
            raise self._died(kill=False) from None

    def answer(self, timeout_s: float) -> Any:
        """Return the answer to the last request, as ``call``."""
        try:
            reply = self.channel.receive(timeout_s)
        except TimeoutError:
            self._died(kill=True)
            log = f"took longer than {timeout_s:g} s\n{self.log_tail()}".rstrip()
            raise ChildFailedError(Status.TIMEOUT, log, alive=False) from None
        except ChannelClosedError:
            raise self._died(kill=False) from None
        except BaseException:  # an interrupt: the answer is still to come, so nothing more can be asked
            self._died(kill=True)
            raise
        if "ok" in reply:
            return reply["ok"]
        if "failed" in reply:
            status, log = reply["failed"]
            raise ChildFailedError(Status(status), log, alive=True)
        raise EvaluationError(f"native failed while it was timed:\n{reply['broken']}")

    def hang_up(self) -> None:
        """Have a child that serves end by itself, without waiting for it; ``close`` waits."""
        self.channel.close()

    def close(self) -> None:
        """End the child."""
        if self.open:
            self._died(kill=True)
        self._log.close()

    def log_tail(self) -> str:
        """Return the end of what the child wrote to its standard streams."""
        if self._log.closed:
            return ""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip()

    def _died(self, *, kill: bool) -> ChildFailedError:
        self.open = False
        self.channel.close()
        code = self._process.end(kill=kill)
        tail = self.log_tail()
        status = Status.RUNTIME_ERROR
        how = f"exited with status {code}"
        if code < 0:
            number = signal.Signals(-code)
            how = f"ended by {number.name}"
            exhausted = number in (signal.SIGKILL, signal.SIGXFSZ) or "bad_alloc" in tail
            status = Status.RESOURCE if exhausted else Status.CRASH
        return ChildFailedError(status, f"{how}\n{tail}".rstrip(), alive=False)


@dataclass(frozen=True)
class Exec:
    """An exec'd worker."""

    supervised: isolation.Supervised

    def end(self, *, kill: bool) -> int:
        done = None if kill else self.supervised.wait(isolation.GRACE_S)
        return (done or self.supervised.stop()).returncode


def spawn(module: str, variables: Mapping[str, str] | None = None) -> Child:
    """Exec a worker, without waiting for it.

    Args:
        module: What ``python -m`` runs.
        variables: Of its environment, beside ours.
    """
    ours, theirs = Channel.pair()
    log = tempfile.TemporaryFile()  # noqa: SIM115  the Child closes it
    tunables = ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), MALLOC_TUNABLES)))
    try:
        supervised = isolation.start(
            [sys.executable, "-P", "-m", module, str(theirs.fileno())],
            env={**os.environ, **(variables or {}), "GLIBC_TUNABLES": tunables},
            pass_fds=(theirs.fileno(),),
            stdout=log.fileno(),
            stderr=log.fileno(),
        )
    finally:
        theirs.close()
    return Child(ours, log, Exec(supervised))


def close_all(children: Iterable[Child]) -> None:
    """End children at once: a process with a CUDA context takes a while to end."""
    ended = list(children)
    for child in ended:
        child.hang_up()
    for child in ended:
        child.close()


def may_be_bad_luck(error: ChildFailedError) -> bool:
    """Return whether a clean process could show another outcome: the child died, and not of its deadline."""
    return not error.alive and error.status is not Status.TIMEOUT

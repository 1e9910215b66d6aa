"""The worker processes of an evaluation on a CPU: a zygote that holds cases, its forks, and exec'd sessions."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fibc import isolation
from fibc.child import START_TIMEOUT_S, Child, ChildFailedError, spawn
from fibc.errors import EvaluationError
from fibc.rpc import Channel
from fibc.schema import codec
from fibc.schema.observed import Observed
from fibc.worker import Setup


class Processes(Protocol):
    """Where candidates are judged and timed.

    Contract:
        * The keeper holds prepared cases. Where it was lost another one takes its place, without cases, and ``epoch``
          has grown.
        * A judge has the keeper's cases and no candidate. A session has no candidate either; its inputs follow from a
          seed, and with ``fresh`` it is a process that has served no other one, as inference needs.
        * Every judge and session is given back with ``end``, dead ones too, or with ``condemn`` where what it ran was
          wrong: nothing that it may have left behind meets another candidate. One is in use at a time.
    """

    epoch: int

    @property
    def started_s(self) -> float:
        """Seconds that starting processes of fresh sessions took so far, where several are started at once."""
        ...

    def starting_s(self, num_sessions: int) -> float:
        """Return about how many seconds such starts take for so many more fresh sessions."""
        ...

    def observed(self) -> Observed | None:
        """Return what was seen of a GPU while pairs were timed; None where it is a CPU."""
        ...

    def keeper(self) -> Child: ...

    def judge(self) -> Child: ...

    def session(self, seed: int, *, fresh: bool) -> Child: ...

    def end(self, child: Child) -> None: ...

    def condemn(self, child: Child) -> None: ...

    def stop(self) -> None:
        """End every process."""
        ...


def set_up(child: Child, name: str, setup: Setup, seed: int) -> None:
    """Wait for a worker, and tell it what it works on."""
    ask_first(child, name, "setup", setup=codec.to_plain(setup) | {"seed": seed})


def set_up_all(children: Sequence[Child], name: str, setup: Setup, seed: int) -> None:
    """Have several workers get ready for candidates in parallel, and wait for all.

    Raises:
        EvaluationError: If one does not.
    """
    plain = codec.to_plain(setup) | {"seed": seed}
    try:
        for child in children:
            child.tell("setup", setup=plain)
            child.tell("start")
        for child in children:
            child.answer(START_TIMEOUT_S)
            child.answer(START_TIMEOUT_S)
    except ChildFailedError as error:
        raise _not_started(name, error) from error


def _not_started(name: str, error: ChildFailedError) -> EvaluationError:
    return EvaluationError(f"{name}: a worker must start, and did not:\n{error.log}")


def ask_first(child: Child, name: str, op: str, **arguments: Any) -> Any:
    """Return what a worker answers to something that no candidate has a part in.

    Raises:
        EvaluationError: If the worker does not answer.
    """
    try:
        return child.call(op, START_TIMEOUT_S, **arguments)
    except ChildFailedError as error:
        child.close()
        raise _not_started(name, error) from error


@dataclass(frozen=True)
class _Fork:
    """A child of the zygote."""

    zygote: Child
    pid: int

    def end(self, *, kill: bool) -> int:
        if not self.zygote.open:  # it went with the zygote
            return -signal.SIGKILL
        status = self.zygote.call("reap", isolation.GRACE_S * 2, pid=self.pid, kill=kill)
        return os.waitstatus_to_exitcode(status)


class CpuProcesses:
    """See ``Processes``. Judges are forks of the keeper, a zygote; so are sessions that need not be fresh."""

    def __init__(self, name: str, setup: Setup) -> None:
        self._name = name
        self._setup = setup
        self._zygote: Child | None = None
        self._spare: Child | None = None
        self.epoch = 0
        self.started_s = 0.0

    def starting_s(self, num_sessions: int) -> float:
        """Return 0: the start of a process belongs to its session."""
        return 0.0

    def observed(self) -> None:
        """Return None."""

    def keeper(self) -> Child:
        """Return the zygote."""
        if self._zygote is None or not self._zygote.open:
            self.stop()
            self._zygote = spawn("fibc.zygote")
            set_up(self._zygote, self._name, self._setup, self._setup.seed)
        return self._zygote

    def judge(self) -> Child:
        """Fork the zygote."""
        zygote = self.keeper()
        ours, theirs = Channel.pair()
        log = tempfile.TemporaryFile()  # noqa: SIM115  the Child closes it
        try:
            zygote.tell("fork")
            zygote.channel.send_fds((theirs.fileno(), log.fileno()))
            pid = zygote.answer(START_TIMEOUT_S)
        except ChildFailedError as error:
            raise EvaluationError(f"{self._name}: a worker must fork, and did not:\n{error.log}") from error
        finally:
            theirs.close()
        child = Child(ours, log, _Fork(zygote, pid))
        ask_first(child, self._name, "start")
        return child

    def session(self, seed: int, *, fresh: bool) -> Child:
        """Exec a worker where it must be fresh, else fork the zygote.

        Two are exec'd at once and one is kept for the next call: importing torch takes one core, and nothing is timed
        meanwhile. The spare has nothing to do, and no weights, until its turn.
        """
        if not fresh:
            child = self.judge()
            child.call("reseed", START_TIMEOUT_S, seed=seed)
            return child
        self._stop_zygote()  # its copies of the weights and a session's would together take half of the memory
        spare, self._spare = self._spare, None
        if spare is None:
            spare, self._spare = spawn("fibc.worker"), spawn("fibc.worker")
            set_up(self._spare, self._name, self._setup, seed)
        set_up(spare, self._name, self._setup, seed)
        ask_first(spare, self._name, "start")
        return spare

    def end(self, child: Child) -> None:
        """End its process."""
        child.close()

    def condemn(self, child: Child) -> None:
        """End its process."""
        child.close()

    def stop(self) -> None:
        """End every process."""
        self._stop_zygote()
        if self._spare is not None:
            self._spare.close()
        self._spare = None

    def _stop_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
        self._zygote = None
        self.epoch += 1

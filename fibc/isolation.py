"""Commands in child processes that cannot outlive their deadline, their parent or their memory limit.

Every command runs under a supervisor (``fibc.supervisor``), a process of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from fibc import leash, supervisor

TAIL_BYTES = 64 * 1024
"""Output kept of a stream: its end, where compilers and tracebacks say what went wrong."""

GRACE_S = 5.0
"""How long a supervisor may take to clear up before it is killed itself."""


@dataclass(frozen=True)
class Completed:
    """How a command ended.

    Attributes:
        returncode: Its exit status, or minus the signal that ended it.
        signal: The signal that ended it, else None.
        timed_out: The deadline ended it (``signal`` is then SIGKILL).
        stdout: The last ``TAIL_BYTES`` of it; bytes that are not UTF-8 are replaced.
        stderr_tail: The last ``TAIL_BYTES`` of standard error, alike.
    """

    returncode: int
    signal: int | None
    timed_out: bool
    stdout: str
    stderr_tail: str

    @property
    def ok(self) -> bool:
        return self.returncode == 0


class Supervised:
    """A long-living command under its supervisor, from ``start``. As a context manager it is stopped at the end.

    The thread that started it must outlive it: parent-death signals follow threads.
    """

    def __init__(self, supervisor: subprocess.Popen[bytes], report: IO[bytes]) -> None:
        self._supervisor = supervisor
        self._report = report
        self._completed: Completed | None = None

    @property
    def pid(self) -> int:
        """Id of the supervisor."""
        return self._supervisor.pid

    def poll(self) -> Completed | None:
        """Return how it ended (streams empty: they are the caller's), or None while it runs."""
        if self._completed is None and self._supervisor.poll() is not None:
            self._completed = _completed(self._report.read())
            self._report.close()
        return self._completed

    def wait(self, timeout_s: float) -> Completed | None:
        """Return how it ended, waiting at most ``timeout_s``; None where it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(timeout_s)
        return self.poll()

    def terminate(self) -> None:
        """Have its supervisor kill it with everything below it, without waiting for that. Any thread may."""
        self._supervisor.terminate()

    def stop(self) -> Completed:
        """Kill it with everything below it, and return how it ended."""
        if self._supervisor.poll() is None:
            self.terminate()
            if self.wait(GRACE_S) is None:
                self._supervisor.kill()
                self._supervisor.wait()
        completed = self.poll()
        assert completed is not None
        return completed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def _completed(report: bytes) -> Completed:
    """Read a supervisor's report; without one (it was killed) the command counts as killed."""
    status, timed_out = (int(word) for word in report.split()) if report else (int(signal.SIGKILL), 0)
    code = os.waitstatus_to_exitcode(status)
    return Completed(code, -code if code < 0 else None, bool(timed_out), "", "")


def start(
    command: Sequence[str | Path],
    *,
    timeout_s: float = math.inf,
    memory_bytes: int | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
) -> Supervised:
    """Start ``command`` under a supervisor and return at once.

    Args:
        timeout_s: Seconds after which it is stopped.
        memory_bytes: Limit of each of its processes, see ``supervisor.limit_resources``.
        pass_fds: File descriptors that it keeps under the same numbers.
        stdin: A file descriptor or a constant of ``subprocess``; alike ``stdout`` and ``stderr`` (None: the caller's).
    """
    read_fd, write_fd = os.pipe()
    options = ["--timeout-s", repr(timeout_s), "--report-fd", str(write_fd)]
    if memory_bytes is not None:
        options += ["--memory-bytes", str(memory_bytes)]
    try:
        process = subprocess.Popen(
            [sys.executable, "-S", "-I", supervisor.__file__, *options, "--", *map(str, command)],
            cwd=cwd,
            env=env,
            pass_fds=(*pass_fds, write_fd),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,  # a Ctrl-C at the terminal reaches the caller, who decides
        )
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    return Supervised(process, os.fdopen(read_fd, "rb"))


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float,
    memory_bytes: int | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
) -> Completed:
    """Run ``command`` to its end or its deadline, and leave no process of it behind.

    A command that cannot start ends with 127 and says why on stderr, as in a shell.

    Args:
        timeout_s: Seconds after which it is killed with everything below it.
        memory_bytes: Limit of each of its processes, see ``supervisor.limit_resources``.
        stdin: What it reads; None is an empty input.

    Raises:
        CutError: If another thread cuts the leash that this one wears.
    """
    with contextlib.ExitStack() as stack:
        source = subprocess.DEVNULL
        if stdin is not None:
            source = os.memfd_create("stdin")
            stack.callback(os.close, source)
            os.write(source, stdin)
            os.lseek(source, 0, os.SEEK_SET)
        streams = []
        write_fds = []
        for _ in range(2):
            read_fd, write_fd = os.pipe()
            streams.append(stack.enter_context(os.fdopen(read_fd, "rb", buffering=0)))
            write_fds.append(write_fd)
        try:
            supervised = start(
                command,
                timeout_s=timeout_s,
                memory_bytes=memory_bytes,
                cwd=cwd,
                env=env,
                stdin=source,
                stdout=write_fds[0],
                stderr=write_fds[1],
            )
        finally:
            for write_fd in write_fds:
                os.close(write_fd)
        with supervised, leash.hold(supervised.terminate):
            stdout, stderr = _drain(streams, time.monotonic() + timeout_s + GRACE_S)
            ended = supervised.wait(GRACE_S) or supervised.stop()
        return Completed(ended.returncode, ended.signal, ended.timed_out, stdout, stderr)


def _drain(streams: Sequence[IO[bytes]], deadline: float) -> tuple[str, str]:
    """Read two streams to their ends, or to ``deadline`` (monotonic seconds), and return their tails."""
    tails = [bytearray(), bytearray()]
    with selectors.DefaultSelector() as selector:
        for stream, tail in zip(streams, tails, strict=True):
            selector.register(stream, selectors.EVENT_READ, tail)
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(max(0.0, min(deadline - time.monotonic(), 3600.0))):
                chunk = os.read(key.fd, TAIL_BYTES)
                if not chunk:
                    selector.unregister(key.fileobj)
                key.data.extend(chunk)
                del key.data[:-TAIL_BYTES]
    stdout, stderr = (bytes(tail).decode(errors="replace") for tail in tails)
    return stdout, stderr

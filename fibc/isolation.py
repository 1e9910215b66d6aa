"""Commands in child processes that cannot outlive their deadline, their parent or their memory limit.

Every command runs under a *supervisor*: this file as a script, a Python without site packages (about 15 ms). It is the
subreaper of all that the command starts, so a grandchild that left the process group (``setsid``) is still found and
killed. The supervisor ends, and ends everything below it, when the command ends, at the deadline, or when the thread
that started it dies; the command itself dies with the supervisor.

As a script (the rules of a build use it so)::

    python -S fibc/isolation.py --timeout-s 60 --memory-bytes 4000000000 -- g++ -c kernel.cpp

it exits with the command's status, 124 after the deadline, 128 + n after signal n, 127 where the command cannot start.

Linux only: prctl(2) and /proc. Two things are out of reach: a supervisor killed by SIGKILL takes the command along, but
not the command's children; and the memory limit holds for each process, not for their sum.
"""

import contextlib
import ctypes
import math
import os
import resource
import signal
import sys
import time

TIMED_OUT_STATUS = 124
"""Exit status of the supervisor after a deadline, as coreutils' timeout has it."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_OOM_SCORE_ADJ = "500"
"""Where memory runs out in spite of the limits, the kernel's killer takes the command before its parent."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send signal ``number`` to this process when the thread that created it ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends (a subreaper)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def limit_resources(memory_bytes: int | None, *, address_space: bool = True) -> None:
    """Limit this process and its future children.

    Args:
        memory_bytes: Limit of RLIMIT_DATA and, where ``address_space``, of RLIMIT_AS too; None leaves both.
        address_space: False for processes that reserve far more than they use (CUDA) or share large mappings.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None:
        for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS) if address_space else (resource.RLIMIT_DATA,):
            _, hard = resource.getrlimit(kind)
            bound = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
            resource.setrlimit(kind, (bound, bound))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123  pathlib costs 5 ms
        file.write(_OOM_SCORE_ADJ)


def descendants(root: int | None = None) -> list[int]:
    """Return the ids of all living processes below ``root`` (default: this process), zombies included."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:  # noqa: PTH123
                    stat = file.read()
            except OSError:  # it ended meanwhile
                continue
            parent = int(stat[stat.rindex(b")") + 2 :].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    pending = [os.getpid() if root is None else root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def kill_descendants(keep: frozenset[int] = frozenset(), *, patience_s: float = 5.0) -> dict[int, int]:
    """Kill and reap everything below this process, except ``keep`` and what is below those.

    Call ``adopt_orphans`` first, before anything was started; otherwise what escaped cannot be found.

    Returns:
        The wait status of every direct child that was reaped.
    """
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + patience_s
    while True:
        spared = keep.union(*(descendants(pid) for pid in keep))
        targets = [pid for pid in descendants() if pid not in spared]
        if not targets:
            return statuses
        for pid in targets:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in targets:
            with contextlib.suppress(ChildProcessError):  # a grandchild: it comes to us when its parent is reaped
                reaped, status = os.waitpid(pid, os.WNOHANG)
                if reaped:
                    statuses[reaped] = status
        if time.monotonic() > deadline:  # uninterruptible in the kernel: nothing more can be done from here
            return statuses
        time.sleep(0.001)


def _become(command: list[str], memory_bytes: int | None) -> None:
    """Turn this forked child into ``command``; does not return."""
    try:
        os.setsid()
        die_with_parent()
        limit_resources(memory_bytes)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; programs expect the default
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(command[0], command)
    except (OSError, ValueError) as error:
        os.write(2, f"isolation: cannot start {command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _supervise(command: list[str], timeout_s: float, memory_bytes: int | None) -> tuple[int, bool]:
    """Run ``command`` to its end, the deadline or a stop signal, and leave nothing below this process.

    Returns:
        Its wait status, and whether the deadline ended it.
    """
    deadline = time.monotonic() + timeout_s
    watched = (signal.SIGCHLD, *_STOP_SIGNALS)
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    die_with_parent(signal.SIGTERM)
    adopt_orphans()
    child = os.fork()
    if child == 0:
        _become(command, memory_bytes)
    timed_out = False
    statuses: dict[int, int] = {}
    while child not in statuses:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            timed_out = True
            break
        received = signal.sigtimedwait(watched, min(remaining, 3600.0))
        if received is not None and received.si_signo in _STOP_SIGNALS:
            break
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                statuses[pid] = status
    statuses |= kill_descendants()
    return statuses.get(child, signal.SIGKILL), timed_out


def _main(arguments: list[str]) -> int:
    usage = "usage: isolation.py [--timeout-s N] [--memory-bytes N] [--report-fd N] -- command ..."
    options: dict[str, str] = {}
    while arguments and arguments[0] != "--":
        if arguments[0] not in ("--timeout-s", "--memory-bytes", "--report-fd") or len(arguments) < 2:
            print(usage, file=sys.stderr)
            return 2
        options[arguments[0]] = arguments[1]
        arguments = arguments[2:]
    command = arguments[1:]
    if not command:
        print(usage, file=sys.stderr)
        return 2
    timeout_s = float(options.get("--timeout-s", math.inf))
    memory_bytes = int(options["--memory-bytes"]) if "--memory-bytes" in options else None
    report_fd = int(options["--report-fd"]) if "--report-fd" in options else None
    if report_fd is not None:
        os.set_inheritable(report_fd, False)
    status, timed_out = _supervise(command, timeout_s, memory_bytes)
    if report_fd is not None:
        os.write(report_fd, f"{status} {int(timed_out)}".encode())
    if timed_out:
        print(f"isolation: {command[0]}: stopped after its deadline of {timeout_s:g} s", file=sys.stderr)
        return TIMED_OUT_STATUS
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))

# Here the script has ended: what follows is for importers, and would add 20 ms to every compiler call.

import selectors  # noqa: E402
import subprocess  # noqa: E402
from collections.abc import Mapping, Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from types import TracebackType  # noqa: E402
from typing import IO, Self  # noqa: E402

from fibc import leash  # noqa: E402

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
        memory_bytes: Limit of each of its processes, see ``limit_resources``.
        pass_fds: File descriptors that it keeps under the same numbers.
        stdin: A file descriptor or a constant of ``subprocess``; alike ``stdout`` and ``stderr`` (None: the caller's).
    """
    read_fd, write_fd = os.pipe()
    options = ["--timeout-s", repr(timeout_s), "--report-fd", str(write_fd)]
    if memory_bytes is not None:
        options += ["--memory-bytes", str(memory_bytes)]
    try:
        supervisor = subprocess.Popen(
            [sys.executable, "-S", "-I", __file__, *options, "--", *map(str, command)],
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
    return Supervised(supervisor, os.fdopen(read_fd, "rb"))


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
        memory_bytes: Limit of each of its processes, see ``limit_resources``.
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

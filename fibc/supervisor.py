"""The supervisor of a command, as a script: it leaves nothing of the command behind.

It runs without site packages (about 15 ms) and is the subreaper of all that the command starts, so a grandchild that
left the process group (``setsid``) is still found and killed. It ends, and ends everything below it, when the command
ends, at the deadline, or when the thread that started it dies; the command itself dies with it.

``fibc.isolation`` starts it, and so do the rules of a build::

    python -S fibc/supervisor.py --timeout-s 60 --memory-bytes 4000000000 -- g++ -c kernel.cpp

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
    usage = "usage: supervisor.py [--timeout-s N] [--memory-bytes N] [--report-fd N] -- command ..."
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

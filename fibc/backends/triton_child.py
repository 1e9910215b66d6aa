"""The child that compiles Triton kernels: it imports Triton once, and forks for each kernel.

Run as ``python -P -m fibc.backends.triton_child`` with a JSON job on standard input::

    {"jobs": 2, "timeout_s": 60.0, "memory_bytes": 4000000000, "kernels": ["/build/a", ...]}

Each kernel's directory holds ``kernel.py`` and ``kernel.json`` (function, signature, divisible, constants, options,
capability). A fork leaves ``kernel.cubin`` and ``facts.json`` there, or a ``log`` that says why not, and this process
writes ``outcome.json``: the exit status (minus a signal), and whether the deadline ended it. So a crash, an abort or a
ptxas without end costs one kernel. It exits with 0 when all outcomes are written.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any, NoReturn

from fibc import supervisor

FACTS = ("name", "shared", "num_warps", "global_scratch_size", "profile_scratch_size", "tensordesc_meta")
"""What is kept of Triton's metadata."""

_TICK_S = 1.0
"""Longest sleep between two looks at the clock; a child that ends wakes this process at once."""


def main() -> int:
    job = json.load(sys.stdin)
    import triton.compiler  # noqa: F401  for the forks: they find it imported

    supervisor.adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    waiting = deque(Path(name) for name in job["kernels"])
    running: dict[int, tuple[Path, float]] = {}
    late: set[int] = set()
    while waiting or running:
        while waiting and len(running) < job["jobs"]:
            directory = waiting.popleft()
            running[_fork(directory, job["memory_bytes"])] = directory, time.monotonic() + job["timeout_s"]
        signal.sigtimedwait({signal.SIGCHLD}, _patience_s([deadline for _, deadline in running.values()]))
        for pid, (_, deadline) in running.items():
            if time.monotonic() >= deadline and pid not in late:
                late.add(pid)
                _kill(pid)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid in running:
                directory, _ = running.pop(pid)
                outcome = {"status": os.waitstatus_to_exitcode(status), "timed_out": pid in late}
                (directory / "outcome.json").write_text(json.dumps(outcome))
    return 0


def _patience_s(deadlines: list[float]) -> float:
    return min(_TICK_S, max(0.0, min(deadlines) - time.monotonic()))


def _kill(pid: int) -> None:
    """Kill a fork with what it started; its process group holds both."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # it had no group of its own yet


def _fork(directory: Path, memory_bytes: int) -> int:
    pid = os.fork()
    if pid == 0:
        _be_a_fork(directory, memory_bytes)
    return pid


def _be_a_fork(directory: Path, memory_bytes: int) -> NoReturn:
    status = 1
    try:
        os.setsid()
        supervisor.die_with_parent()
        supervisor.limit_resources(memory_bytes)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _compile(directory)
        status = 0
    except BaseException:  # noqa: BLE001  whatever it is, it ends this fork and stands in the log
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _compile(directory: Path) -> None:
    """Compile the kernel in ``directory``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for name in ("cache", "tmp"):
        (directory / name).mkdir()
    os.environ["TRITON_CACHE_DIR"] = str(directory / "cache")
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory / "tmp")
    asked = json.loads((directory / "kernel.json").read_text())
    function = getattr(_load(directory / "kernel.py"), asked["function"])
    signature = dict(asked["signature"])
    if list(signature) != function.arg_names:
        raise TypeError(f"{asked['function']}: must take {', '.join(signature)}, got {', '.join(function.arg_names)}")
    attributes = {(index,): [["tt.divisibility", 16]] for index in asked["divisible"]}
    compiled = triton.compile(
        ASTSource(function, signature, {}, attributes),
        target=GPUTarget("cuda", asked["capability"], 32),
        options=asked["options"],
    )
    metadata = compiled.metadata._asdict()
    facts = {name: metadata[name] for name in FACTS}
    (directory / "facts.json").write_text(json.dumps(facts))
    (directory / "kernel.cubin").write_bytes(compiled.asm["cubin"])  # last: with it the kernel is complete


def _load(path: Path) -> Any:
    """Return the module at ``path``; Triton reads a function's source from its file."""
    spec = importlib.util.spec_from_file_location("fibc_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())

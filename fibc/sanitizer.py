"""NVIDIA's compute-sanitizer: where it is, which of its tools a kernel is run under, and what they find."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fibc import cuda_toolchain, isolation, settings
from fibc.errors import EvaluationError, ToolchainError
from fibc.sanitize_child import STARTED
from fibc.schema import codec
from fibc.schema.candidate import Artifact
from fibc.schema.evaluation import Status
from fibc.schema.feature import Point
from fibc.schema.sanitized import Sanitized
from fibc.worker import Setup

PROGRAM = "compute-sanitizer"

INSTALL = "pip install nvidia-cuda-sanitizer-api, or the CUDA toolkit's cuda-sanitizer package"

TIMEOUT_S = 300.0
"""Of one run: a call becomes up to a hundred times slower, and the tool patches every kernel that is loaded."""

FINDING_STATUS = 86
"""Exit status that says that something was found; neither Python nor the candidate ends with it."""

LOG_CHARS = 4000

MEMCHECK, INITCHECK, RACECHECK = TOOLS = ("memcheck", "initcheck", "racecheck")
"""Accesses outside of allocations, reads of global memory that nothing has written, races in shared memory."""

OPTIONS = ("--report-api-errors", "no", "--racecheck-detect-level", "error")
"""What torch asks of the driver in vain is no fault of a candidate's, and a warning of a hazard is no finding."""

_PROBE_S = 60.0


@dataclass(frozen=True)
class Sanitizer:
    """A compute-sanitizer that answers.

    Attributes:
        version: ``2025.3.1``.
    """

    path: Path
    version: str

    def __str__(self) -> str:
        return f"{PROGRAM} {self.version}"


def find() -> Sanitizer:
    """Return the sanitizer on PATH, of ``$CUDA_HOME``, below /usr/local or of the PyPI wheel.

    Raises:
        ToolchainError: If there is none, or it does not answer.
    """
    path = next((place for place in _places() if place.is_file()), None)
    if path is None:
        raise ToolchainError(
            f"--sanitize: needs {PROGRAM}, found none (looked at PATH, CUDA_HOME, {cuda_toolchain.SYSTEM_ROOTS}/cuda* "
            f"and the package nvidia-cuda-sanitizer-api; install it: {INSTALL}; or leave out --sanitize)"
        )
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_PROBE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"{path}: does not answer --version: {error} (install it again: {INSTALL})") from error
    version = re.search(r"\d+(?:\.\d+)+", done.stdout + done.stderr)
    if version is None:
        raise ToolchainError(f"{path}: does not say its version (install it again: {INSTALL})")
    return Sanitizer(path.absolute(), version[0])


def tools_for(artifact: Artifact) -> tuple[str, ...]:
    """Return the tools under which a kernel is run.

    A call of a library runs its maker's code: whether it stays inside of what it is given is looked at, and no more.
    """
    return (MEMCHECK,) if artifact.resources.get("kind") == "library" else TOOLS


def sanitize(
    sanitizer: Sanitizer, setup: Setup, candidate: str, artifact: Artifact, point: Point, *, timeout_s: float
) -> Sanitized:
    """Call a candidate once in a child under each tool, until one finds something.

    Args:
        candidate: Its digest.
        timeout_s: Of each run.

    Raises:
        EvaluationError: If the sanitizer fails before the candidate is called.
    """
    tools: list[str] = []
    status, log = Status.PASSED, ""
    for tool in tools_for(artifact):
        tools.append(tool)
        status, log = _run(sanitizer, setup, artifact, point, tool, timeout_s)
        if status is not Status.PASSED:
            break
    return Sanitized(artifact.digest, candidate, str(point), str(sanitizer), tuple(tools), status, log)


def _run(
    sanitizer: Sanitizer, setup: Setup, artifact: Artifact, point: Point, tool: str, timeout_s: float
) -> tuple[Status, str]:
    parts = {"setup": setup, "point": point, "artifact": artifact}
    with tempfile.NamedTemporaryFile("w", prefix="fibc-sanitize-", suffix=".json") as request:
        json.dump({name: codec.to_plain(value) for name, value in parts.items()}, request)
        request.flush()
        done = isolation.run(
            [
                *(sanitizer.path, "--tool", tool, "--error-exitcode", str(FINDING_STATUS), *OPTIONS),
                *(sys.executable, "-P", "-m", "fibc.sanitize_child", request.name),
            ],
            timeout_s=timeout_s,
            # every tensor is an allocation of its own, past whose end the tool sees
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
    said = f"{sanitizer} --tool {tool} at {point}: {done.stdout}{done.stderr_tail}"[-LOG_CHARS:].strip()
    if done.timed_out:
        return Status.TIMEOUT, f"{PROGRAM} --tool {tool} took longer than {timeout_s:.0f} s\n{said}"
    if STARTED not in done.stdout:  # a tool that cannot start the process may end with 0 all the same
        raise EvaluationError(f"--sanitize: must start, and did not:\n{said}")
    if done.returncode == 0:
        return Status.PASSED, ""
    found = "found something" if done.returncode == FINDING_STATUS else f"ended with status {done.returncode}"
    return Status.RUNTIME_ERROR, f"{PROGRAM} --tool {tool} {found}\n{said}"


def _places() -> Iterator[Path]:
    """Yield where the program may lie, the most wanted first."""
    if (on_path := shutil.which(PROGRAM)) is not None:
        yield Path(on_path)
    roots = [Path(home)] if (home := settings.cuda_home()) is not None else []
    for root in (*roots, *cuda_toolchain.system_roots(), *cuda_toolchain.wheel_roots()):
        yield root / "bin" / PROGRAM
        yield root / PROGRAM / PROGRAM

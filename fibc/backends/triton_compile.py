"""Triton kernels to cubins, without a GPU: what the cache lacks is compiled by one child, one fork a kernel."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from fibc import isolation
from fibc.backends.base import BuildFailure
from fibc.backends.build import LOG_CHARS
from fibc.backends.memory import room
from fibc.backends.once import Once
from fibc.cache import Cache
from fibc.errors import BuildError, ToolchainError
from fibc.schema.digest import digest_json

INSTALL = 'pip install "fibc[cuda]"'

OLDEST = (3, 6)
"""Older ones have another launch interface: no profile scratch, other tensor maps."""

CHILD = "fibc.backends.triton_child"

COMPILE_MEMORY_BYTES = 6 << 30
"""Limit of a process that compiles."""

TYPICAL_MEMORY_BYTES = 700 << 20
"""What a compile really takes, for the number of them at a time."""

_START_S = 60.0
"""What the child's start may take: the import of Triton from a cold disk."""

_KIND = "cubins"

_UNDER_WAY = Once()

_SCRUBBED = ("TRITON_", "PTXAS_", "DISABLE_PTXAS", "NVPTX_", "LLVM_", "MLIR_", "USE_IR_LOC")
"""Beginnings of environment variables that change what Triton compiles: the child gets none of a user's."""

_ENVIRONMENT = {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_ALWAYS_COMPILE": "1", "TRITON_STORE_BINARY_ONLY": "1"}
"""Line info would hold the path of a temporary file, and doubles a cubin."""


@dataclass(frozen=True)
class TritonToolchain:
    """What compiles, as far as code follows from it."""

    version: str
    ptxas: str


def find() -> TritonToolchain:
    """Return the installed Triton, without importing it.

    Raises:
        ToolchainError: If it is missing, too old, or its assembler does not run; says what installs it.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        raise ToolchainError(f"triton: not installed (install it: {INSTALL})")
    return _find(Path(spec.submodule_search_locations[0]))


@functools.cache
def _find(package: Path) -> TritonToolchain:
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError as error:
        raise ToolchainError(f"triton: {package} belongs to no installed package (install it: {INSTALL})") from error
    numbers = tuple(int(part) for part in version.partition("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ToolchainError(f"triton: needs {oldest} or newer, found {version} (install it: {INSTALL})")
    ptxas = package / "backends" / "nvidia" / "bin" / "ptxas"
    try:
        done = subprocess.run([ptxas, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(
            f"{ptxas}: does not answer --version: {error} (install Triton again: {INSTALL})"
        ) from error
    return TritonToolchain(version, done.stdout.strip().splitlines()[-1])


@dataclass(frozen=True)
class KernelSource:
    """A kernel to compile.

    Attributes:
        text: A Python module.
        function: The kernel's name in it.
        signature: Its parameters with their types as Triton spells them, in order.
        divisible: Indexes of parameters that are multiples of 16.
        options: Triton's, all that are not its defaults.
        capability: Compute capability, ``90``.
    """

    text: str
    function: str
    signature: tuple[tuple[str, str], ...]
    divisible: tuple[int, ...]
    options: Mapping[str, int | bool]
    capability: int

    def request(self) -> dict[str, Any]:
        """Return all but the text, JSON-able."""
        return {
            "function": self.function,
            "signature": [list(item) for item in self.signature],
            "divisible": list(self.divisible),
            "options": dict(self.options),
            "capability": self.capability,
        }

    def digest(self, toolchain: TritonToolchain) -> str:
        """Return the digest of everything that the cubin follows from."""
        return digest_json([self.text, self.request(), toolchain.version, toolchain.ptxas, _ENVIRONMENT])


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Attributes:
        facts: Triton's metadata, the names in ``triton_child.FACTS``.
    """

    cubin: bytes
    facts: Mapping[str, Any]


def compile_kernels(
    sources: Mapping[str, KernelSource], toolchain: TritonToolchain, *, cache: Cache, timeout_s: float, jobs: int
) -> dict[str, Compiled | BuildFailure]:
    """Compile what the cache lacks; the results have the keys of ``sources``.

    Args:
        timeout_s: Deadline of each kernel.
        jobs: Kernels at a time; fewer where memory is short.

    Raises:
        BuildError: If the child itself fails.
    """
    digests = {key: source.digest(toolchain) for key, source in sources.items()}
    by_digest: dict[str, Compiled | BuildFailure] = {}
    left = {digest: sources[key] for key, digest in digests.items()}
    while left:
        with _UNDER_WAY.claim(left.keys()) as mine:  # candidates share kernels, and threads may build candidates
            missing: dict[str, KernelSource] = {}
            for digest in [digest for digest in left if digest in mine]:
                source = left.pop(digest)
                known = _cached(digest, cache)
                if known is None:
                    missing[digest] = source
                else:
                    by_digest[digest] = known
            if missing:
                with room(jobs, TYPICAL_MEMORY_BYTES) as fit:
                    by_digest |= _compile(missing, cache, timeout_s, fit)
    return {key: by_digest[digest] for key, digest in digests.items()}


def _compile(
    missing: Mapping[str, KernelSource], cache: Cache, timeout_s: float, jobs: int
) -> dict[str, Compiled | BuildFailure]:
    with tempfile.TemporaryDirectory(prefix="fibc-triton-") as name:
        work = Path(name)
        for digest, source in missing.items():
            (work / digest).mkdir()
            (work / digest / "kernel.py").write_text(source.text, encoding="utf-8")
            (work / digest / "kernel.json").write_text(json.dumps(source.request()))
        job = {
            "jobs": jobs,
            "timeout_s": timeout_s,
            "memory_bytes": COMPILE_MEMORY_BYTES,
            "kernels": [str(work / digest) for digest in missing],
        }
        rounds = math.ceil(len(missing) / jobs)
        done = isolation.run(
            [sys.executable, "-P", "-m", CHILD],
            timeout_s=_START_S + rounds * (timeout_s + isolation.GRACE_S),
            env=child_environment(os.environ),
            stdin=json.dumps(job).encode(),
        )
        if not done.ok:
            said = (done.stdout + done.stderr_tail)[-LOG_CHARS:]
            raise BuildError(f"triton: the process that compiles ended with status {done.returncode}: {said}")
        return {digest: _collect(digest, work / digest, cache) for digest in missing}


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without what would change code, and with what the child needs."""
    kept = {name: value for name, value in environment.items() if not name.startswith(_SCRUBBED)}
    return {**kept, **_ENVIRONMENT}


def _cached(digest: str, cache: Cache) -> Compiled | None:
    facts = cache.get_json(_KIND, digest)
    cubin = cache.get_bytes(_KIND, digest, ".cubin")
    return None if facts is None or cubin is None else Compiled(cubin, facts)


def _collect(digest: str, directory: Path, cache: Cache) -> Compiled | BuildFailure:
    """Move a compiled kernel into the cache, or say why it is none."""
    outcome = json.loads((directory / "outcome.json").read_text())
    cubin = directory / "kernel.cubin"
    if outcome["status"] == 0 and cubin.is_file():
        facts = json.loads((directory / "facts.json").read_text())
        cache.put_file(_KIND, digest, ".cubin", cubin)
        cache.put_json(_KIND, digest, facts)  # last: an entry with its facts is complete
        return Compiled(cubin.read_bytes(), facts)
    log = directory / "log"
    text = log.read_text(encoding="utf-8", errors="replace")[-LOG_CHARS:] if log.is_file() else ""
    if outcome["timed_out"]:
        text += "\ntriton: stopped after its deadline"
    elif outcome["status"] < 0:
        text += f"\ntriton: the compiler ended with signal {-outcome['status']}"
    return BuildFailure(bool(outcome["timed_out"]), text.strip() or "triton: the compiler said nothing")

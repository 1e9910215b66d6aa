"""CUTLASS kernels to cubins, without a GPU: what the cache lacks is compiled by nvcc, side by side as memory allows."""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fibc import isolation, supervisor
from fibc.backends.base import BuildFailure
from fibc.backends.build import LOG_CHARS, words
from fibc.backends.memory import room
from fibc.backends.once import Once
from fibc.cache import Cache
from fibc.cuda_toolchain import CudaToolchain
from fibc.errors import BuildError
from fibc.paths import INCLUDE
from fibc.schema.digest import digest_json
from fibc.toolchain import Toolchain

FUNCTION = "fibc_gemm"
"""Name of the kernel in every source."""

KERNEL_HEADERS = "fibc/cutlass"
"""Directory of the headers that kernels include, each by itself; what lies in directories below it is for launchers."""

FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-w")
"""An assertion in device code is a call, and a call in the main loop has its matrix products wait for each other."""

COMPILE_MEMORY_BYTES = 16 << 30
"""Limit of a process that compiles; address space, of which nvcc's parts use a fifth."""

TYPICAL_MEMORY_BYTES = 3500 << 20
"""What the compilation of a kernel of the collective builder really takes, for the number of them at a time."""

_KIND = "cubins"

_UNDER_WAY = Once()

_PATH_HASH = re.compile(rb"(_INTERNAL_|_GLOBAL__N__)[0-9a-f]{8}(?=_)")
"""In names of symbols with internal linkage: what nvcc makes of the source's absolute path."""

_SCRUBBED = ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
"""Environment variables that change what is compiled: nvcc gets none of a user's."""

_RULES = """\
ninja_required_version = 1.11
rule cubin
  command = {guard} {nvcc} {flags} -cubin -o $out $in > $log 2>&1 || {{ echo $$? > $status; exit 1; }}
"""


@dataclass(frozen=True)
class KernelCompiler:
    """What compiles kernels for one architecture.

    Attributes:
        arch: ``sm_90a``.
    """

    cuda: CudaToolchain
    host: Toolchain
    arch: str

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags that code follows from."""
        number = self.arch.removeprefix("sm_")
        return (*FLAGS, f"-gencode=arch=compute_{number},code={self.arch}")

    @property
    def includes(self) -> tuple[Path, ...]:
        return (INCLUDE, self.cuda.cutlass)

    def digest(self, text: str) -> str:
        """Return the digest of everything that the cubin of ``text`` follows from."""
        return digest_json([text, self.flags, self.cuda.digest, self.host.digest, included_headers(text)])


def included_headers(text: str) -> dict[str, str]:
    """Return the text of every header of fibc that a kernel includes, by the path that it includes."""
    found = {f"{KERNEL_HEADERS}/{file.name}": file for file in sorted((INCLUDE / KERNEL_HEADERS).glob("*.h"))}
    return {path: file.read_text() for path, file in found.items() if f'#include "{path}"' in text}


def compile_kernels(
    texts: Sequence[str], compiler: KernelCompiler, *, cache: Cache, timeout_s: float, jobs: int
) -> dict[str, bytes | BuildFailure]:
    """Return the cubin of each text; those that the cache lacks are compiled, each once.

    Args:
        timeout_s: Deadline of each compilation.
        jobs: Compilations at a time; fewer where memory is short.

    Raises:
        BuildError: If ninja itself fails.
    """
    results: dict[str, bytes | BuildFailure] = {}
    left = {compiler.digest(text): text for text in texts}
    while left:
        with _UNDER_WAY.claim(left.keys()) as mine:  # candidates share kernels, and threads may build candidates
            missing: dict[str, str] = {}
            for digest in [digest for digest in left if digest in mine]:
                text = left.pop(digest)
                known = cache.get_bytes(_KIND, digest, ".cubin")
                if known is None:
                    missing[text] = digest
                else:
                    results[text] = known
            if missing:
                with room(jobs, TYPICAL_MEMORY_BYTES) as fit:
                    results |= _compile(missing, compiler, cache, timeout_s, fit)
    return results


def _compile(
    missing: Mapping[str, str], compiler: KernelCompiler, cache: Cache, timeout_s: float, jobs: int
) -> dict[str, bytes | BuildFailure]:
    results: dict[str, bytes | BuildFailure] = {}
    with tempfile.TemporaryDirectory(prefix="fibc-nvcc-") as name:
        work = Path(name)
        for text, digest in missing.items():
            (work / digest).mkdir()
            (work / digest / "kernel.cu").write_text(text, encoding="utf-8")
        (work / "build.ninja").write_text(ninja_text(list(missing.values()), compiler, timeout_s=timeout_s))
        rounds = math.ceil(len(missing) / jobs)
        done = isolation.run(
            [compiler.host.ninja, "-C", work, "-k", "0", "-j", str(jobs), "--quiet"],
            timeout_s=rounds * (timeout_s + isolation.GRACE_S),
            env=compile_environment(os.environ, work),
        )
        for text, digest in missing.items():
            outcome = _collect(digest, work / digest, cache)
            if isinstance(outcome, BuildFailure) and not outcome.log:
                said = (done.stdout + done.stderr_tail)[-LOG_CHARS:]
                raise BuildError(f"ninja: failed before it ran nvcc: {said}")
            results[text] = outcome
    return results


def compile_environment(environment: Mapping[str, str], work: Path) -> dict[str, str]:
    """Return ``environment`` without what would change code; temporary files go to ``work``, and with it."""
    kept = {name: value for name, value in environment.items() if name not in _SCRUBBED}
    return {**kept, "TMPDIR": str(work)}


def ninja_text(digests: Sequence[str], compiler: KernelCompiler, *, timeout_s: float) -> str:
    """Return the text of a ``build.ninja`` that compiles ``<digest>/kernel.cu`` for each of ``digests``."""
    guard = [sys.executable, "-S", "-I", supervisor.__file__]
    guard += ["--timeout-s", f"{timeout_s:g}", "--memory-bytes", str(COMPILE_MEMORY_BYTES), "--"]
    includes = [part for path in compiler.includes for part in ("-I", path)]
    rules = _RULES.format(
        guard=words(guard),
        nvcc=words([compiler.cuda.nvcc, "-ccbin", compiler.host.cxx]),
        flags=words([*compiler.flags, *includes]),
    )
    edges = (f"build {d}/kernel.cubin: cubin {d}/kernel.cu\n  log = {d}/log\n  status = {d}/status\n" for d in digests)
    return rules + "".join(edges)


def without_paths(cubin: bytes) -> bytes:
    """Return ``cubin`` as it would be wherever its source lay; names keep their lengths, and nothing looks them up."""
    return _PATH_HASH.sub(rb"\g<1>00000000", cubin)


def _collect(digest: str, directory: Path, cache: Cache) -> bytes | BuildFailure:
    """Move a cubin into the cache, or say why there is none."""
    cubin, status, log = (directory / name for name in ("kernel.cubin", "status", "log"))
    if cubin.is_file() and not status.is_file():
        content = without_paths(cubin.read_bytes())
        cache.put_bytes(_KIND, digest, ".cubin", content)
        return content
    code = int(status.read_text()) if status.is_file() else 0
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if code and not text:
        text = f"nvcc ended with status {code} and said nothing"
    return BuildFailure(code == supervisor.TIMED_OUT_STATUS, text[-LOG_CHARS:])

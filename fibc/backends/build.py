"""Kernel sources to objects and libraries: one ninja run, each command a supervised child, results in the cache."""

from __future__ import annotations

import math
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fibc import isolation, supervisor
from fibc.backends.base import BuildFailure
from fibc.backends.prelude import precompiled
from fibc.cache import Cache
from fibc.errors import BuildError
from fibc.schema.candidate import Artifact, Guards
from fibc.schema.digest import digest_text
from fibc.toolchain import Toolchain

ENTRY = "fibc_entry"
"""Name of the entry in every kernel's source. The object is digested under this name, so that equal code has an equal
digest, and only then given a name of its own."""

ENTRY_SUFFIXES = ("", "_workspace", "_prepare")
"""The entry, and what a kernel for GPUs has beside it; all are renamed alike."""

COMPILE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # sums are contracted where the source says so, on every compiler
    "-fno-asynchronous-unwind-tables",
)

COMPILE_MEMORY_BYTES = 4 << 30
"""Limit of a compiler process; a kernel needs about 0.2 GB."""

LOG_CHARS = 4000
"""Tail of a log that a BuildFailure keeps."""

LINK_WORDS = ("-shared", "-nostartfiles", "-Wl,-z,defs")
"""A kernel's object becomes a library that workers load; it needs libc alone."""

_KIND = "kernels"

_SCRIPT = """\
# build.sh DIRECTORY SYMBOL: kernel.cpp to kernel.o, renamed.o and kernel.so. One process watches over all three steps.
set -e
cd "$1"
{cxx} {flags} -I {include} -c kernel.cpp -o kernel.o
{objcopy} {renames} kernel.o renamed.o
{cxx} {link} -o kernel.so renamed.o -lc
"""

_RULES = """\
ninja_required_version = 1.11
rule build
  command = {guard} /bin/sh build.sh $unit $symbol > $unit/log 2>&1 || {{ echo $$? > $unit/status; exit 1; }}
"""


@dataclass(frozen=True)
class Unit:
    """A source to build, under the digest of everything that the result depends on."""

    digest: str
    source: str

    @property
    def symbol(self) -> str:
        return f"fibc_{self.digest}"


@dataclass(frozen=True)
class Built:
    """A built unit, with its files in the cache."""

    digest: str
    object_path: Path
    library_path: Path
    symbol: str
    size_bytes: int

    def artifact(self, source: str, guards: Guards, resources: dict[str, int | str | bool]) -> Artifact:
        """Return it as a candidate's, whose ``source`` people read."""
        return Artifact(
            digest=self.digest,
            object_path=str(self.object_path),
            library_path=str(self.library_path),
            symbol=self.symbol,
            size_bytes=self.size_bytes,
            source=source,
            guards=guards,
            resources=resources,
        )


def build_units(
    units: Sequence[Unit],
    toolchain: Toolchain,
    *,
    flags: Sequence[str],
    include: Path,
    cache: Cache,
    timeout_s: float,
    jobs: int,
    prelude: str = "",
) -> dict[str, Built | BuildFailure]:
    """Build what the cache lacks; the keys are the units' digests.

    Args:
        flags: Added to ``COMPILE_FLAGS``.
        include: Directory of the headers.
        timeout_s: Deadline of each unit.
        jobs: Units at a time.
        prelude: Text of a header that comes before every source, precompiled.

    Raises:
        BuildError: If ninja itself fails.
    """
    results: dict[str, Built | BuildFailure] = {}
    missing: list[Unit] = []
    for unit in units:
        if unit.digest in results:
            continue
        known = _cached(unit, cache)
        if known is None:
            missing.append(unit)
        else:
            results[unit.digest] = known
    if not missing:
        return results
    with tempfile.TemporaryDirectory(prefix="fibc-build-") as name:
        work = Path(name)
        for unit in missing:
            (work / unit.digest).mkdir()
            (work / unit.digest / "kernel.cpp").write_text(unit.source, encoding="utf-8")
        every = [*COMPILE_FLAGS, *flags]
        if prelude:
            every += ["-include", str(precompiled(prelude, toolchain, every, cache))]
        (work / "build.sh").write_text(script_text(toolchain, flags=every, include=include), encoding="utf-8")
        (work / "build.ninja").write_text(ninja_text(missing, timeout_s=timeout_s), encoding="utf-8")
        rounds = math.ceil(len(missing) / jobs)
        done = isolation.run(
            [toolchain.ninja, "-C", work, "-k", "0", "-j", str(jobs), "--quiet"],
            timeout_s=rounds * (timeout_s + isolation.GRACE_S),
        )
        for unit in missing:
            results[unit.digest] = _collect(unit, work / unit.digest, cache)
            failure = results[unit.digest]
            if isinstance(failure, BuildFailure) and not failure.log:
                raise BuildError(
                    f"ninja: failed before it ran a compiler: {(done.stdout + done.stderr_tail)[-LOG_CHARS:]}"
                )
    return results


def script_text(toolchain: Toolchain, *, flags: Sequence[str], include: Path) -> str:
    """Return the text of the shell script that builds one unit."""
    renames = " ".join(f'--redefine-sym {ENTRY}{suffix}="$2"{suffix}' for suffix in ENTRY_SUFFIXES)
    return _SCRIPT.format(
        cxx=shlex.quote(str(toolchain.cxx)),
        flags=shlex.join(flags),
        include=shlex.quote(str(include)),
        objcopy=shlex.quote(str(toolchain.objcopy)),
        renames=renames,
        link=shlex.join(LINK_WORDS),
    )


def ninja_text(units: Sequence[Unit], *, timeout_s: float) -> str:
    """Return the text of a ``build.ninja`` that builds ``<digest>/kernel.cpp`` for each unit."""
    guard = [sys.executable, "-S", "-I", supervisor.__file__]
    guard += ["--timeout-s", f"{timeout_s:g}", "--memory-bytes", str(COMPILE_MEMORY_BYTES), "--"]
    edges = [
        f"build {unit.digest}/kernel.so: build {unit.digest}/kernel.cpp\n"
        f"  unit = {unit.digest}\n  symbol = {unit.symbol}\n"
        for unit in units
    ]
    return _RULES.format(guard=words(guard)) + "".join(edges)


def words(parts: Sequence[str | Path]) -> str:
    """Return ``parts`` quoted for the shell, then for ninja."""
    return " ".join(shlex.quote(str(part)) for part in parts).replace("$", "$$")


def _cached(unit: Unit, cache: Cache) -> Built | None:
    facts = cache.get_json(_KIND, unit.digest)
    object_path = cache.get(_KIND, unit.digest, ".o")
    library_path = cache.get(_KIND, unit.digest, ".so")
    if facts is None or object_path is None or library_path is None:
        return None
    return Built(facts["object"], object_path, library_path, unit.symbol, facts["size_bytes"])


def _collect(unit: Unit, directory: Path, cache: Cache) -> Built | BuildFailure:
    """Move a finished unit into the cache, or say why it is not finished."""
    library = directory / "kernel.so"
    if not library.is_file():
        log = directory / "log"
        status = directory / "status"
        code = int(status.read_text()) if status.is_file() else 0
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        if code and not text:
            text = f"the compiler ended with status {code} and said nothing"
        return BuildFailure(code == supervisor.TIMED_OUT_STATUS, text[-LOG_CHARS:])
    plain = (directory / "kernel.o").read_bytes()
    object_path = cache.put_file(_KIND, unit.digest, ".o", directory / "renamed.o")
    library_path = cache.put_file(_KIND, unit.digest, ".so", library)
    digest = digest_text(plain)
    facts = {"object": digest, "size_bytes": len(plain)}
    cache.put_json(_KIND, unit.digest, facts)  # last: an entry with its facts is complete
    return Built(digest, object_path, library_path, unit.symbol, len(plain))

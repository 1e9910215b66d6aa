"""The C++ toolchain: which compiler and ninja there are, and the flags that every build shares."""

from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fibc import settings
from fibc.errors import ToolchainError
from fibc.schema.digest import DIGEST_CHARS

COMPILERS = ("g++", "c++", "clang++")

INSTALL = "install one, for example: apt-get install g++"

_PROBE_S = 20.0
"""Deadline of ``--version``; a compiler behind a cold network mount takes seconds."""


@dataclass(frozen=True)
class Toolchain:
    """Programs that build C++.

    Attributes:
        cxx: Absolute path of the compiler.
        version: First line of ``--version``.
        digest: Of ``--version`` and the compiler's own bytes: equal digests compile alike.
        objcopy: Absolute path.
        ninja: Absolute path.
    """

    cxx: Path
    version: str
    digest: str
    objcopy: Path
    ninja: Path


def find() -> Toolchain:
    """Return the toolchain: ``$CXX``, else the first of ``COMPILERS`` on ``PATH``.

    Raises:
        ToolchainError: If a program is missing or the compiler does not answer; says what installs it.
    """
    return _find(settings.cxx())


@functools.cache
def _find(chosen: str | None) -> Toolchain:
    cxx = _compiler(chosen)
    version = _version(cxx)
    content = hashlib.sha256(cxx.resolve().read_bytes())
    content.update(version.encode())
    return Toolchain(
        cxx=cxx,
        version=version.splitlines()[0],
        digest=content.hexdigest()[:DIGEST_CHARS],
        objcopy=_program("objcopy", "install it: apt-get install binutils"),
        ninja=_ninja(),
    )


def _compiler(chosen: str | None) -> Path:
    if chosen is not None:
        return _program(chosen, f"CXX={chosen!r} names no program; unset CXX, or {INSTALL}")
    for name in COMPILERS:
        if found := shutil.which(name):
            return Path(found).absolute()
    raise ToolchainError(f"compiler: needs a C++ compiler, found none (accepted: {', '.join(COMPILERS)}; {INSTALL})")


def _version(cxx: Path) -> str:
    """Return what ``--version`` prints."""
    try:
        done = subprocess.run([cxx, "--version"], capture_output=True, text=True, timeout=_PROBE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"{cxx}: does not answer --version: {error} ({INSTALL})") from error
    if not done.stdout.strip():
        raise ToolchainError(f"{cxx}: does not answer --version: it prints nothing ({INSTALL})")
    return done.stdout


def _ninja() -> Path:
    """Return the ninja of the PyPI package of that name, else the one on PATH."""
    try:
        import ninja
    except ImportError:
        return _program("ninja", "install it: pip install ninja")
    packaged = Path(ninja.BIN_DIR) / "ninja"
    return packaged if packaged.is_file() else _program("ninja", "install it: pip install ninja")


def _program(name: str, remedy: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise ToolchainError(f"{name}: not found on PATH ({remedy})")
    return Path(found).absolute()

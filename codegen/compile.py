"""Compiles and links fibc's own C++: the shared entry, the harness, tables. Objects are cached by content."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pybind11

from fibc import isolation, toolchain
from fibc.cache import Cache
from fibc.errors import BuildError, ToolchainError
from fibc.paths import INCLUDE, temporary_sibling
from fibc.schema.digest import digest_text

EXPORTS = INCLUDE / "fibc" / "entry" / "exports.map"
"""Linker script: an extension exports nothing but its initialiser."""

COMPILE_FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-march=x86-64",  # runs everywhere: only variants, behind their check, use more
    "-mtune=generic",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-Wall",
    "-Wextra",
)

LINK_FLAGS = (
    "-shared",
    "-static-libstdc++",
    "-static-libgcc",
    "-Wl,--gc-sections",
    "-Wl,-z,now",
    "-Wl,--build-id=none",
    "-s",
)

EXTENSION_SUFFIX: str = sysconfig.get_config_var("EXT_SUFFIX")

_TIMEOUT_S = 120.0
"""The slowest of these translation units takes 8 s on two busy cores."""

_MEMORY_BYTES = 4 << 30
"""pybind11's headers take 0.5 GB."""


def compile_entry(name: str, cache: Cache) -> Path:
    """Return the object of ``fibc/entry/<name>.cpp``, which needs Python, pybind11 and torch's DLPack header.

    Raises:
        BuildError: If it does not compile.
        ToolchainError: If the compiler or Python's headers are missing.
    """
    includes = entry_includes()
    source = INCLUDE / "fibc" / "entry" / f"{name}.cpp"
    digest = digest_text(
        source.read_bytes(),
        _headers_digest(),
        sys.version,
        EXTENSION_SUFFIX,
        pybind11.__version__,
        (includes[-1] / "ATen" / "dlpack.h").read_bytes(),
        *_flags_digest(),
    )
    return _compile(source, digest, cache, includes)


def compile_table(text: str, cache: Cache) -> Path:
    """Return the object of a generated translation unit of constants.

    Raises:
        BuildError: If it does not compile.
        ToolchainError: If the compiler is missing.
    """
    digest = digest_text(text, _headers_digest(), *_flags_digest())
    source = cache.put_bytes("table", digest, ".cpp", text.encode())
    return _compile(source, digest, cache, ())


def link(objects: Sequence[Path], target: Path) -> None:
    """Link ``objects`` into the extension ``target``, which appears whole or not at all.

    Raises:
        BuildError: If they do not link.
        ToolchainError: If the compiler is missing.
    """
    with temporary_sibling(target) as temporary:
        exports = f"-Wl,--version-script={EXPORTS}"
        _run([toolchain.find().cxx, *LINK_FLAGS, exports, *objects, "-ldl", "-o", temporary], f"link of {target.name}")
        temporary.chmod(0o755)
        temporary.replace(target)


def _compile(source: Path, digest: str, cache: Cache, includes: Sequence[Path]) -> Path:
    if found := cache.get("object", digest, ".o"):
        return found
    target = cache.path("object", digest, ".o")
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_sibling(target) as temporary:
        command: list[str | Path] = [toolchain.find().cxx, *COMPILE_FLAGS, f"-I{INCLUDE}"]
        command += [f"-isystem{path}" for path in includes]
        # Assertions name the file that they stand in: no path of this machine may stay in the object.
        command += [f"-ffile-prefix-map={path}=." for path in (source.parent, INCLUDE.resolve(), INCLUDE, *includes)]
        _run([*command, "-c", source, "-o", temporary], f"compilation of {source.name}")
        return cache.put_file("object", digest, ".o", temporary)


def _run(command: Sequence[str | Path], what: str) -> None:
    done = isolation.run(command, timeout_s=_TIMEOUT_S, memory_bytes=_MEMORY_BYTES, env={**os.environ, "LC_ALL": "C"})
    if done.timed_out:
        raise BuildError(f"{what}: took longer than {_TIMEOUT_S:g} s")
    if not done.ok:
        raise BuildError(f"{what}: {command[0]} ended with {done.returncode}:\n{done.stderr_tail.strip()}")


def entry_includes() -> tuple[Path, Path, Path]:
    """Return the directories of Python.h, pybind11 and ATen/dlpack.h."""
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ToolchainError(
            f"Python.h: not found in {python} (install Python's headers, "
            f"for example: apt-get install python{version}-dev)"
        )
    torch = importlib.util.find_spec("torch")  # importing it takes a second
    assert torch is not None
    assert torch.origin is not None
    return python, Path(pybind11.get_include()), Path(torch.origin).parent / "include"


def _flags_digest() -> tuple[str, ...]:
    return (toolchain.find().digest, *COMPILE_FLAGS)


@cache
def _headers_digest() -> str:
    headers = sorted((INCLUDE / "fibc").rglob("*.h"))
    return digest_text(*(part for path in headers for part in (str(path.relative_to(INCLUDE)), path.read_bytes())))

"""The CUDA toolchain: which nvcc and which CUTLASS headers there are, for kernels that are compiled from C++."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fibc import settings
from fibc.errors import ToolchainError
from fibc.schema.digest import DIGEST_CHARS, digest_text

INSTALL = 'install it: pip install "fibc[cuda]"'

OLDEST_NVCC = (12, 4)
"""Older ones lack what CUTLASS 4 uses of sm_90a."""

OLDEST_CUTLASS = (4, 2)
"""The headers in ``fibc/cutlass`` are written for it."""

SYSTEM_ROOTS = Path("/usr/local")
"""Where NVIDIA's packages put ``cuda`` and ``cuda-13.0``."""

_WHEEL_ROOTS = ("cu13", "cuda_nvcc")
"""Directories of the package ``nvidia`` into which the wheels of CUDA 13, and of CUDA 12, install nvcc."""

_PROBE_S = 60.0
"""Deadline of ``nvcc --version``; a compiler behind a cold network mount takes seconds."""


@dataclass(frozen=True)
class CudaToolchain:
    """What compiles CUTLASS kernels.

    Attributes:
        nvcc: Absolute path.
        origin: How it was found: ``CUDA_HOME``, ``PATH``, ``/usr/local/cuda`` or ``PyPI``.
        version: ``13.0``.
        includes: Directories of CUDA's own headers, in the order in which nvcc searches them.
        cutlass: Directory of CUTLASS's headers.
        cutlass_version: ``4.2.0``.
        digest: Of the compiler's build and of every header of CUTLASS: equal digests compile alike.
    """

    nvcc: Path
    origin: str
    version: str
    includes: tuple[Path, ...]
    cutlass: Path
    cutlass_version: str
    digest: str


def find() -> CudaToolchain:
    """Return the toolchain: nvcc of ``$CUDA_HOME``, else on ``PATH``, else below ``/usr/local``, else of PyPI's wheels.

    Raises:
        ToolchainError: If nvcc or CUTLASS is missing, too old or does not answer; says what installs it.
    """
    return _find(settings.cuda_home(), shutil.which("nvcc"))


@functools.cache
def _find(cuda_home: str | None, on_path: str | None) -> CudaToolchain:
    nvcc, origin = _nvcc(cuda_home, on_path)
    said = _ask(nvcc, "--version")
    version = re.search(r"release (\d+)\.(\d+)", said)
    if version is None:
        raise ToolchainError(f"{nvcc}: does not say its version, got: {said.strip()[-200:] or 'nothing'} ({INSTALL})")
    if (int(version[1]), int(version[2])) < OLDEST_NVCC:
        raise ToolchainError(f"{nvcc}: needs release {_dotted(OLDEST_NVCC)} or newer, found {version[0]} ({INSTALL})")
    cutlass = _cutlass()
    return CudaToolchain(
        nvcc=nvcc,
        origin=origin,
        version=f"{version[1]}.{version[2]}",
        includes=tuple(_includes(nvcc)),
        cutlass=cutlass,
        cutlass_version=_cutlass_version(cutlass),
        digest=digest_text(said, _digest_of(cutlass)),
    )


def _nvcc(cuda_home: str | None, on_path: str | None) -> tuple[Path, str]:
    if cuda_home is not None:
        chosen = Path(cuda_home) / "bin" / "nvcc"
        if not chosen.is_file():
            raise ToolchainError(f"CUDA_HOME={cuda_home}: holds no bin/nvcc (unset it, or {INSTALL})")
        return chosen.absolute(), "CUDA_HOME"
    if on_path is not None:
        return Path(on_path).absolute(), "PATH"
    for root in system_roots():
        if (root / "bin" / "nvcc").is_file():
            return root / "bin" / "nvcc", str(root)
    for root in wheel_roots():
        if (root / "bin" / "nvcc").is_file():
            return root / "bin" / "nvcc", "PyPI"
    raise ToolchainError(
        f"nvcc: needs CUDA's compiler, found none (looked at CUDA_HOME, PATH, {SYSTEM_ROOTS}/cuda* and the package "
        f"nvidia-cuda-nvcc; {INSTALL})"
    )


def system_roots() -> list[Path]:
    """Return ``/usr/local/cuda``, then the numbered directories beside it, the newest first."""

    def number(path: Path) -> tuple[int, ...]:
        return tuple(int(part) for part in path.name.removeprefix("cuda-").split(".") if part.isdecimal())

    return [SYSTEM_ROOTS / "cuda", *sorted(SYSTEM_ROOTS.glob("cuda-*"), key=number, reverse=True)]


def wheel_roots() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")  # a namespace package: nothing is run
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        for name in _WHEEL_ROOTS:
            yield Path(location) / name


def _includes(nvcc: Path) -> Iterator[Path]:
    """Yield the directories that nvcc passes to the host's compiler, as a dry run prints them.

    A wrapper script on ``PATH`` says nothing about where they are.
    """
    printed = _ask(nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null")
    for name in ("INCLUDES", "SYSTEM_INCLUDES"):
        line = re.search(rf"^#\$ {name}=(.*)$", printed, re.MULTILINE)
        for path in re.findall(r'"(?:-I)?([^"]+)"', line[1]) if line else ():
            if not path.startswith("-") and Path(path).is_dir():
                yield Path(path).resolve()


def _cutlass() -> Path:
    spec = importlib.util.find_spec("cutlass_library")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        headers = Path(location) / "source" / "include"
        if (headers / "cutlass" / "version.h").is_file():
            return headers
    raise ToolchainError(f"CUTLASS: needs the headers of the package nvidia-cutlass, found none ({INSTALL})")


def _cutlass_version(headers: Path) -> str:
    text = (headers / "cutlass" / "version.h").read_text()
    numbers = tuple(
        int(found[1]) if (found := re.search(rf"#define CUTLASS_{name} (\d+)", text)) else 0
        for name in ("MAJOR", "MINOR", "PATCH")
    )
    if numbers < OLDEST_CUTLASS:
        raise ToolchainError(
            f"{headers}: needs CUTLASS {_dotted(OLDEST_CUTLASS)} or newer, found {_dotted(numbers)} ({INSTALL})"
        )
    return _dotted(numbers)


def _digest_of(headers: Path) -> str:
    """Return the digest of every file below ``headers``: 27 MB, a tenth of a second."""
    state = hashlib.sha256()
    for file in sorted(path for path in headers.rglob("*") if path.is_file()):
        content = file.read_bytes()
        state.update(f"{file.relative_to(headers).as_posix()}:{len(content)}:".encode())
        state.update(content)
    return state.hexdigest()[:DIGEST_CHARS]


def _ask(nvcc: Path, *arguments: str) -> str:
    """Return what nvcc prints, on either stream."""
    try:
        done = subprocess.run([nvcc, *arguments], capture_output=True, text=True, timeout=_PROBE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"{nvcc}: does not answer {' '.join(arguments)}: {error} ({INSTALL})") from error
    return done.stdout + done.stderr


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))

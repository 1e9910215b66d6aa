"""What this machine has for GPU targets, for ``fibc doctor``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

from fibc import cuda_toolchain
from fibc.backends.registry import DEFAULTS
from fibc.errors import ToolchainError
from fibc.gpus import Found, find
from fibc.nvml import NvmlError, open_monitor
from fibc.schema.silicon import Gpu

INSTALL = "pip install 'fibc[cuda]'"

Tool = Callable[[], str]
"""Returns what was found, or raises ToolchainError with the command that installs it."""


def packaged(name: str) -> Tool:
    """Return a tool that is a package."""

    def look() -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            raise ToolchainError(f"{name} is not installed: {INSTALL}") from None

    return look


def nvcc() -> str:
    """Return which nvcc compiles CUTLASS kernels.

    Raises:
        ToolchainError: If there is none, or no CUTLASS beside it.
    """
    found = cuda_toolchain.find()
    return f"{found.nvcc} ({found.version}, from {found.origin})"


BACKEND_OF: Mapping[str, str] = {"nvcc": "cutlass"}
"""The backend that needs a tool, where it is not the tool's name."""

TOOLS: Mapping[str, Tool] = {"triton": packaged("triton"), "nvcc": nvcc, "cutlass": packaged("nvidia-cutlass")}


def examine_cuda(found: Found | None = None, tools: Mapping[str, Tool] = TOOLS) -> tuple[dict[str, str], list[str]]:
    """Return facts by name, and what a GPU that is here lacks, each with the command that installs it.

    Without a GPU nothing is lacking: what is not installed is a fact.

    Args:
        found: The visible GPUs; None looks for them.
        tools: Compilers and headers.
    """
    seen = find() if found is None else found
    facts: dict[str, str] = {}
    missing: list[str] = []
    for gpu in seen.gpus:
        facts |= {f"gpu {gpu.ordinal}": str(gpu), f"gpu {gpu.ordinal} state": _state(gpu)}
    if seen.gpus:
        facts["driver"] = seen.gpus[0].driver
    else:
        facts["gpu"] = f"none: {seen.problem or 'CUDA shows no device'}"
    lacking: dict[str, list[str]] = {}
    for name, look in tools.items():
        try:
            facts[name] = look()
        except ToolchainError as error:
            facts[name] = f"not found ({error})"
            lacking.setdefault(BACKEND_OF.get(name, name), []).append(name)
            if seen.gpus:
                missing.append(str(error))
    facts["gpu backends"] = "; ".join(_offers(name, lacking.get(name, ())) for name in DEFAULTS["cuda"])
    return facts, missing


def _offers(backend: str, lacking: Sequence[str]) -> str:
    """Return what a tune would search of a backend here."""
    if lacking:
        return f"{backend}: what --compile-only left in --out ({', '.join(lacking)} not found)"
    return f"{backend}: {'asked on a GPU' if backend == 'cublaslt' else 'compiles here'}"


def _state(gpu: Gpu) -> str:
    """Return clocks and what disturbs measuring, or why NVML does not tell."""
    try:
        facts = open_monitor(gpu).facts()
    except (NvmlError, OSError) as error:
        return f"not watched: {error}"
    names = (
        "sm clock",
        "sm clock default",
        "power",
        "power limit",
        "temperature",
        "clock reasons",
        "ecc",
        "xid events",
    )
    return ", ".join(f"{name} {facts[name]}" for name in names)

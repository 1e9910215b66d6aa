"""What this machine has for tuning and what it lacks, for ``fibc doctor``."""

from __future__ import annotations

import platform
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from fibc import toolchain
from fibc.cache import Cache
from fibc.doctor_cuda import examine_cuda
from fibc.environment import detect
from fibc.errors import ToolchainError
from fibc.gate import gate_digest

PACKAGES = ("torch", "optuna", "jinja2", "ninja", "pybind11", "msgpack", "pydantic", "scipy", "flashinfer-python")

OLDEST_TORCH = (2, 10)
"""Generated modules need torch's DLPack exchange interface."""


@dataclass(frozen=True)
class Examined:
    """Facts by name, and what is missing, each with the command that installs it."""

    facts: Mapping[str, str]
    missing: tuple[str, ...]


def examine() -> Examined:
    """Look at this machine. Changes nothing and measures nothing."""
    facts: dict[str, str] = {"python": f"{platform.python_version()} ({sys.executable})"}
    missing: list[str] = []
    environment = detect()
    facts |= {f"{name}": text for name, text in environment.facts().items() if name != "python"}
    facts["target"] = f"cpu:{environment.isa[-1]}" if environment.isa else "none: this CPU has no AVX2, native serves"
    for package in PACKAGES:
        facts[package] = _version(package)
    if _parsed(facts["torch"]) < OLDEST_TORCH:
        missing.append(f"torch 2.10 or newer, found {facts['torch']}: pip install --upgrade torch")
    try:
        found = toolchain.find()
        facts |= {"compiler": f"{found.cxx} ({found.version})", "ninja program": str(found.ninja)}
    except ToolchainError as error:
        missing.append(str(error))
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if header.is_file():
        facts["python headers"] = str(header.parent)
    else:
        missing.append(f"Python headers, no {header}: apt-get install python3-dev")
    cache = Cache()
    facts["cache"] = f"{cache.root}{' (temporary)' if cache.private else ''}"
    gate = cache.get_json("gate", gate_digest(environment.digest))
    facts["A/A gate"] = gate["text"] if gate is not None else "not run yet: the first `fibc tune` runs it"
    facts["qemu-x86_64-static"] = shutil.which("qemu-x86_64-static") or "not found (tests of older CPUs)"
    cuda_facts, cuda_missing = examine_cuda()
    facts |= cuda_facts
    missing += cuda_missing
    return Examined(facts, tuple(missing))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _parsed(version: str) -> tuple[int, ...]:
    numbers = version.partition("+")[0].split(".")[:2]
    return tuple(int(number) for number in numbers) if all(number.isdecimal() for number in numbers) else (0,)

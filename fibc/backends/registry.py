"""The backends by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fibc.backends.base import Backend
from fibc.backends.cpu import CpuBackend
from fibc.backends.cublaslt import CublasLtBackend
from fibc.backends.cutlass import CutlassBackend
from fibc.backends.triton import TritonBackend
from fibc.cache import Cache
from fibc.environment import Environment
from fibc.errors import InputError

NAMES: Mapping[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("triton", "cutlass", "cublaslt")}
"""Backends by the kind of target that they serve."""

DEFAULTS: Mapping[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("triton", "cutlass", "cublaslt")}
"""What is searched unless ``--backends`` says so, as far as it is there: one that cannot build here is a note."""

LIBRARIES = frozenset({"cublaslt"})
"""Backends whose candidates are calls of a library; reports count them apart from generated kernels."""


def make_backends(
    names: Sequence[str], environment: Environment, cache: Cache, templates: Sequence[Path] = ()
) -> tuple[Backend, ...]:
    """Return the backends called ``names``, once each, in the order given.

    Raises:
        InputError: If a name is unknown.
        SchemaError: If a template is malformed.
    """

    def triton() -> Backend:
        if environment.gpu is None:
            return TritonBackend(cache, templates)
        held = environment.gpu.validity
        return TritonBackend(cache, templates, arch_name=held.arch, num_sms=held.num_sms, l2_bytes=held.l2_bytes)

    def cutlass() -> Backend:
        if environment.gpu is None:
            return CutlassBackend(cache, templates)
        held = environment.gpu.validity
        return CutlassBackend(cache, templates, arch_name=held.arch, num_sms=held.num_sms, l2_bytes=held.l2_bytes)

    makers: dict[str, Callable[[], Backend]] = {
        "cpu": lambda: CpuBackend(environment, cache, templates),
        "triton": triton,
        "cutlass": cutlass,
        "cublaslt": lambda: CublasLtBackend(environment, cache, templates),
    }
    unknown = [name for name in names if name not in makers]
    if unknown:
        raise InputError(f"--backends: unknown backend, got {', '.join(unknown)} (accepted: {', '.join(makers)})")
    return tuple(makers[name]() for name in dict.fromkeys(names))

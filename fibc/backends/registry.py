"""The backends by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fibc.backends.base import Backend
from fibc.backends.cpu import CpuBackend
from fibc.cache import Cache
from fibc.environment import Environment
from fibc.errors import InputError

NAMES = ("cpu",)


def make_backends(
    names: Sequence[str], environment: Environment, cache: Cache, templates: Sequence[Path] = ()
) -> tuple[Backend, ...]:
    """Return the backends called ``names``, once each, in the order given.

    Raises:
        InputError: If a name is unknown.
        SchemaError: If a template is malformed.
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise InputError(f"--backends: unknown backend, got {', '.join(unknown)} (accepted: {', '.join(NAMES)})")
    return tuple(CpuBackend(environment, cache, templates) for _ in dict.fromkeys(names))

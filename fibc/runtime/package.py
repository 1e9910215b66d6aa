"""Generated packages, loaded and read from their path."""

from __future__ import annotations

import importlib.util
import sys
from itertools import count
from pathlib import Path
from types import ModuleType

from fibc.errors import InputError
from fibc.schema import codec
from fibc.schema.table import DispatchTable

_numbers = count(1)


def load(path: str | Path) -> ModuleType:
    """Return the package at ``path``, imported without touching ``sys.path``.

    A package of this name that was imported from the same generation is returned again; one from elsewhere, or a newer
    generation, is loaded beside it under a name of its own.

    Raises:
        InputError: If there is no package.
        ImportError: If it cannot be imported here (another Python).
    """
    directory = _package(path)
    generation = (directory / "current").resolve()
    for name, known in list(sys.modules.items()):
        if name.partition("__")[0] == directory.name and _generation_of(known) == generation:
            return known
    name = directory.name if directory.name not in sys.modules else f"{directory.name}__{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(
        name, directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            del sys.modules[loaded]
        raise
    return module


def read_table(path: str | Path) -> DispatchTable:
    """Return the table of the package at ``path``; nothing is imported.

    Raises:
        InputError: If there is no package, or its table is torn.
    """
    file = _package(path) / "current" / "table.msgpack"
    try:
        return codec.decode(DispatchTable, file.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: must be a dispatch table, got: {error} (tune again)") from error


def _package(path: str | Path) -> Path:
    directory = Path(path).absolute()
    if not (directory / "__init__.py").is_file() or not (directory / "current").is_dir():
        seen = "a directory without one" if directory.is_dir() else "no such directory"
        raise InputError(
            f"{path}: must be a generated package, got {seen} "
            "(accepted: <out>/fibc_<definition>, written by `fibc tune`)"
        )
    return directory


def _generation_of(module: ModuleType) -> Path | None:
    generation = getattr(module, "_generation", None)
    file = getattr(generation, "__file__", None)
    return Path(file).resolve().parent if file else None

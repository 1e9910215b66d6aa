"""The layout of a published package: generations beside each other, the current one behind a link.

::

    fibc_<definition>/
        __init__.py  __init__.pyi  py.typed
        current -> g<digest>            swapped in one step
        g<digest>/                      never written again once it is published
            __init__.py  surface.py  custom_op.py  _native<suffix>  table.msgpack  module.cpp  manifest.json
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from fibc.errors import RecordError
from fibc.paths import TEMPORARY_PREFIX, atomic_write, swap_symlink

LINK = "current"
TABLE = "table.msgpack"


def current(package: Path) -> Path | None:
    """Return the directory of the current generation, or None where nothing is published."""
    generation = package / LINK
    return generation.resolve() if generation.is_dir() else None


def publish(package: Path, digest: str, write: Callable[[Path], None], outer: dict[str, str]) -> Path:
    """Publish a generation and return its directory.

    A process that has an old one mapped keeps it: files are never rewritten, and no generation is removed here
    (``fibc.codegen.generations``).

    Args:
        package: Made where it does not exist.
        digest: Names the generation.
        write: Writes the generation's files into the directory it is given.
        outer: Files of the package itself, by name.

    Raises:
        RecordError: If a file cannot be written; what was published before still is.
    """
    generation = package / f"g{digest}"
    try:
        package.mkdir(parents=True, exist_ok=True)
        if not generation.is_dir():
            staged = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=package))
            try:
                write(staged)
                staged.chmod(0o755)
                staged.rename(generation)
            finally:
                shutil.rmtree(staged, ignore_errors=True)
        os.utime(generation)
    except OSError as error:
        raise RecordError(f"{package}: cannot be written: {error.strerror or error}") from error
    for name, text in outer.items():
        atomic_write(package / name, text.encode())
    swap_symlink(package / LINK, generation.name)
    return generation

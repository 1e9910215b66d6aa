"""The generations of a published package: which there are, which one serves, going back to an earlier one, removing."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgpack

from fibc.codegen.package import LINK, TABLE, current
from fibc.errors import InputError
from fibc.paths import swap_symlink

_NAME = re.compile(r"g[0-9a-f]{16}")


@dataclass(frozen=True)
class Generation:
    """One published table.

    Attributes:
        name: Of its directory, ``g`` and a digest.
        created: When its table was made, ISO 8601 in UTC; empty where the table cannot be read.
        serving: The package's link names it: what a process that imports now gets.
    """

    name: str
    path: Path
    created: str
    serving: bool


def generations(package: Path) -> tuple[Generation, ...]:
    """Return the generations of ``package``, oldest first."""
    serving = current(package)
    found = [
        Generation(path.name, path, _created(path), path.resolve() == serving)
        for path in package.glob("g*")
        if path.is_dir() and not path.is_symlink() and _NAME.fullmatch(path.name)
    ]
    return tuple(sorted(found, key=lambda item: (item.created, item.path.stat().st_mtime_ns)))


def find_earlier(package: Path, to: str = "") -> Generation:
    """Return the generation that a way back leads to; nothing changes.

    Args:
        to: Name of a generation, or the beginning of it; empty: the one before the serving one.

    Raises:
        InputError: If there is no such generation.
    """
    known = generations(package)
    names = ", ".join(item.name for item in known if not item.serving) or "none"
    if to:
        chosen = [item for item in known if item.name.startswith(to)]
        if len(chosen) != 1:
            raise InputError(f"--to: must name one generation of {package.name}, got {to!r} (accepted: {names})")
        return chosen[0]
    place = next((index for index, item in enumerate(known) if item.serving), 0)
    if place == 0:
        raise InputError(f"{package.name}: has no generation before the serving one (accepted with --to: {names})")
    return known[place - 1]


def roll_back(package: Path, to: str = "") -> Generation:
    """Let an earlier generation serve from the next import on, in one step; processes that have one loaded keep it.

    Args:
        to: As ``find_earlier`` takes it.

    Raises:
        InputError: If there is no such generation.
        RecordError: If the link cannot be written; the old one still serves.
    """
    target = find_earlier(package, to)
    swap_symlink(package / LINK, target.name)
    return Generation(target.name, target.path, target.created, serving=True)


def collect(package: Path, keep: int) -> tuple[str, ...]:
    """Remove the oldest generations until ``keep`` are left beside the serving one's elders; return their names.

    The serving one and the one before it always stay: a process may have read the link and not yet imported.
    """
    known = generations(package)
    place = next((index for index, item in enumerate(known) if item.serving), len(known) - 1)
    safe = {item.name for item in (*known[max(0, place - 1) : place + 1], *known[max(0, len(known) - keep) :])}
    removed = []
    for item in known:
        if item.name not in safe:
            shutil.rmtree(item.path, ignore_errors=True)
            removed.append(item.name)
    return tuple(removed)


def _created(generation: Path) -> str:
    try:
        plain = msgpack.unpackb((generation / TABLE).read_bytes(), raw=False, strict_map_key=False)
        return str(plain["created"])
    except (OSError, ValueError, KeyError, TypeError, msgpack.UnpackException):
        return ""

"""The headers that the launchers of GPU kernels include."""

from __future__ import annotations

from pathlib import Path

import fibc

INCLUDE = Path(fibc.__file__).parent / "include"

LAUNCH_HEADERS = ("fibc/kernel_abi.h", "fibc/cuda")
"""What a launcher includes, files or directories of files below ``INCLUDE``. Their content is part of a unit's
identity, and no part of a generated candidate's: it changes nothing that runs on the device."""


def launch_headers() -> dict[str, str]:
    """Return the text of every header that launchers include, by the path that they include."""
    roots = (INCLUDE / name for name in LAUNCH_HEADERS)
    files = [file for root in roots for file in (sorted(root.glob("*.h")) if root.is_dir() else [root])]
    return {file.relative_to(INCLUDE).as_posix(): file.read_text() for file in files}

"""The text of the headers that kernels and their launchers include: what is built follows from it."""

from __future__ import annotations

from collections.abc import Iterable

from fibc.paths import INCLUDE

LAUNCH_HEADERS = ("fibc/kernel_abi.h", "fibc/cuda")
"""What a launcher of a GPU kernel includes. Their content is part of a unit's identity, and no part of a generated
candidate's: it changes nothing that runs on the device."""


def header_texts(names: Iterable[str]) -> dict[str, str]:
    """Return the text of headers, by the path that they are included by.

    Args:
        names: Files or directories of files below ``INCLUDE``.
    """
    roots = (INCLUDE / name for name in names)
    files = [file for root in roots for file in (sorted(root.glob("*.h")) if root.is_dir() else [root])]
    return {file.relative_to(INCLUDE).as_posix(): file.read_text() for file in files}

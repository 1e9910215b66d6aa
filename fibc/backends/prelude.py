"""Headers that many sources begin with, precompiled once for each compiler and set of flags."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fibc import isolation
from fibc.cache import Cache
from fibc.schema.digest import digest_text
from fibc.toolchain import Toolchain

_log = logging.getLogger("fibc.backends.prelude")

_KIND = "prelude"

_TIMEOUT_S = 60.0
_MEMORY_BYTES = 4 << 30
"""It takes 0.6 s and 0.1 GB (g++ 12.2)."""

_known: dict[Path, None] = {}
"""Headers whose precompiled form this process has made or read: 27 MB each, whose sum is checked once."""


def precompiled(text: str, toolchain: Toolchain, flags: Sequence[str], cache: Cache) -> Path:
    """Return a header of ``text`` to ``-include``, with its precompiled form beside it where the compiler takes one.

    A compiler passes over a form that does not suit its flags, and reads the header: the result is the same, later.

    Args:
        flags: Those of the sources that include it.
    """
    digest = digest_text(text, toolchain.digest, *flags)
    header = cache.get(_KIND, digest, ".h") or cache.put_bytes(_KIND, digest, ".h", text.encode())
    if header in _known:
        return header
    _known[header] = None
    if cache.get(_KIND, digest, ".h.gch") is not None:
        return header
    with tempfile.TemporaryDirectory(prefix="fibc-prelude-") as name:
        made = Path(name) / "prelude.h.gch"
        done = isolation.run(
            [toolchain.cxx, *flags, "-x", "c++-header", header, "-o", made],
            timeout_s=_TIMEOUT_S,
            memory_bytes=_MEMORY_BYTES,
        )
        if done.ok and made.is_file():
            cache.put_file(_KIND, digest, ".h.gch", made)
        else:
            _log.warning(
                "%s: does not precompile headers, so builds take about twice as long: %s",
                toolchain.cxx,
                done.stderr_tail.strip()[-400:] or f"ended with {done.returncode}",
            )
    return header

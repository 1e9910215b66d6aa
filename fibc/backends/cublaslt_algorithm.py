"""An algorithm of cuBLASLt as text: what a config holds, and all that a launcher needs to run it."""

from __future__ import annotations

from dataclasses import dataclass

from fibc.errors import SchemaError

OPAQUE_BYTES = 64
"""Size of cublasLtMatmulAlgo_t."""

COMPUTE = ("f32", "tf32")
"""How products are made: in float32 (those of shorter types are exact there), or of factors rounded to tf32."""

_WORD_BYTES = 8


@dataclass(frozen=True)
class Algorithm:
    """An algorithm that the heuristic returned.

    Attributes:
        compute: One of ``COMPUTE``.
        workspace_bytes: What it needs for the sizes that the heuristic was asked about.
        opaque: Its ``cublasLtMatmulAlgo_t``, for the version of the library that wrote it and no other.
    """

    compute: str
    workspace_bytes: int
    opaque: bytes

    def __str__(self) -> str:
        """Return ``f32:4194304:42ff...``; zeros at the end of the algorithm's bytes are left out."""
        return f"{self.compute}:{self.workspace_bytes}:{self.opaque.rstrip(bytes(1)).hex()}"

    @property
    def words(self) -> tuple[str, ...]:
        """The bytes as eight C++ literals of 64 bits, little-endian."""
        starts = range(0, OPAQUE_BYTES, _WORD_BYTES)
        values = (int.from_bytes(self.opaque[start : start + _WORD_BYTES], "little") for start in starts)
        return tuple(f"0x{value:x}ull" for value in values)


def parse(text: str) -> Algorithm:
    """Return the algorithm that ``str`` made ``text`` of.

    Raises:
        SchemaError: If it is none.
    """
    try:
        compute, workspace, digits = text.split(":")
        found = Algorithm(compute, int(workspace), bytes.fromhex(digits).ljust(OPAQUE_BYTES, bytes(1)))
    except ValueError:
        found = None
    if (
        found is None
        or found.compute not in COMPUTE
        or len(found.opaque) != OPAQUE_BYTES
        or found.workspace_bytes < 0
        or str(found) != text
    ):
        raise SchemaError(
            f"algorithm: must be compute:workspace:bytes, got {text!r} (accepted: compute {' or '.join(COMPUTE)}, "
            f"bytes of workspace, at most {2 * OPAQUE_BYTES} lower-case hexadecimal digits)"
        )
    return found

"""One generation of the dispatch of toy_gemm: table 99bb47b4d6fc2da6."""

from . import _native
from .surface import Surface

exports = Surface(_native)

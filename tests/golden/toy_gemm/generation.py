"""One generation of the dispatch of toy_gemm: table a5bb6e78589bb6d4."""

from . import _native
from .surface import Surface

exports = Surface(_native)

"""One generation of the dispatch of toy_gemm: table 90acf022213321e8."""

from . import _native
from .surface import Surface

exports = Surface(_native)

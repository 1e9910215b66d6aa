"""One generation of the dispatch of toy_gemm: table fc1284055521e6c9."""

from . import _native
from .surface import Surface

exports = Surface(_native)

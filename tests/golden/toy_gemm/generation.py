"""One generation of the dispatch of toy_gemm: table df2bea2a8f2478ba."""

from . import _native
from .surface import Surface

exports = Surface(_native)

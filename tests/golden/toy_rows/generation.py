"""One generation of the dispatch of toy_rows: table ddd0d1d0bb6002d1."""

from . import _native
from .surface import Surface

exports = Surface(_native)

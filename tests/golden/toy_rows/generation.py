"""One generation of the dispatch of toy_rows: table f607af44db7fcf69."""

from . import _native
from .surface import Surface

exports = Surface(_native)

"""One generation of the dispatch of toy_rows: table 97e1d6b0484b6aef."""

from . import _native
from .surface import Surface

exports = Surface(_native)

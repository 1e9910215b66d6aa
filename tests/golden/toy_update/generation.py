"""One generation of the dispatch of toy_update: table 24f6e106ceb6a2ec."""

from . import _native
from .surface import Surface

exports = Surface(_native)

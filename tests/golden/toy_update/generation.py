"""One generation of the dispatch of toy_update: table 7e7f6b956abd268f."""

from . import _native
from .surface import Surface

exports = Surface(_native)

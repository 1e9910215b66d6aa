"""One generation of the dispatch of toy_update: table bc80afe4c29544d3."""

from . import _native
from .surface import Surface

exports = Surface(_native)

"""One generation of the dispatch of toy_update: table 5f189dc925ca006d."""

from . import _native
from .surface import Surface

exports = Surface(_native)

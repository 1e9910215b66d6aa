"""One generation of the dispatch of toy_update: table 9ef100f9db1eac6f."""

from . import _native
from .surface import Surface

exports = Surface(_native)

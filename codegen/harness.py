"""Builds the extension through which tuning workers call candidates, as a generated module would, and time calls."""

from __future__ import annotations

from pathlib import Path

from fibc.cache import Cache
from fibc.codegen import compile as cxx
from fibc.schema.digest import digest_text

MODULE = "_harness"
"""Name to import it under. It exports

* ``bind(library_path, symbol, spec, device="cpu")``, where ``spec`` is an encoded CallSpec and ``device`` is ``cpu``,
  ``cuda`` (the current GPU) or ``cuda:1``, which is prepared: a callable that runs by value, with a method ``run_out``;
* ``time_calls(callable, calls, start, inner)``: host seconds per call;
* ``call_many(callable, calls, start, inner)``: the same loop without a clock, for timers that stand around it;
* ``fill_allocations(fills)``: whether outputs by value come filled, where torch is asked to fill what it allocates;
* ``set_num_threads(num_threads)``."""


def build(cache: Cache) -> Path:
    """Return the harness extension for this Python, from the cache where nothing has changed.

    Raises:
        BuildError: If it does not build.
        ToolchainError: If the compiler or Python's headers are missing.
    """
    compiled = cxx.compile_entry("harness", cache)
    digest = digest_text(compiled.stem, *cxx.LINK_FLAGS, cxx.EXPORTS.read_bytes())
    suffix = cxx.EXTENSION_SUFFIX
    if found := cache.get(MODULE, digest, suffix):
        return found
    target = cache.path(MODULE, digest, suffix)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f"staged-{target.name}")
    cxx.link([compiled], staged)
    try:
        return cache.put_file(MODULE, digest, suffix, staged)
    finally:
        staged.unlink(missing_ok=True)

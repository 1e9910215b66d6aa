"""Settings: the defaults of options, each with its reason, and every environment variable the tuner reads.

``FIBC_DISABLE`` and ``FIBC_ACCEPT_CPU`` are not here: generated modules read them, without fibc.
"""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_TRIALS = 16
"""Trials per key. Most spaces hold tens to hundreds of configs, and a key also starts from its neighbour's best. A key
of long trials gets a quarter (``fibc/explore.py``)."""

DEFAULT_TRIALS_GPU = 40
"""Trials per key on a GPU, a tenth of a second each (466 took 44 s on an H200). Nine templates of three backends serve
a GEMM there: about 12 algorithms of cuBLASLt, three of each CUTLASS template and Triton's starts come first."""

DEFAULT_BUDGET_S = 900.0
"""Seconds for a whole run, warm-up, reference, builds and module included. 580 s were not enough to finish
the 21 cells of defs/gemm.json on two cores (Intel Xeon, Emerald Rapids, 2026-11-30)."""

DEFAULT_TIMEOUT_S = 60.0
"""Seconds for one candidate's compilation, and for its validation and first rung. A variant for a CPU compiles in about
0.5 s, a Triton kernel in a few seconds: more time would only be spent on compilers that hang."""

LEAST_COMPILE_TIMEOUT_S = {"cutlass": 300.0}
"""Seconds for one candidate's compilation at least, by backend. nvcc takes 30 to 60 s for a kernel of CUTLASS's
collective builder that is alone on a core, and a multiple where as many compile at once as there are cores."""

DEFAULT_ALPHA = 0.05
"""Error per key."""

DEFAULT_MIN_SPEEDUP_CPU = 1.02
"""Margin on a CPU that other work may share: layout alone moves a session by up to 2 % there."""

DEFAULT_MIN_SPEEDUP_GPU = 1.01
"""Margin on a GPU."""

DEFAULT_SPLIT = (0.6, 0.2, 0.2)
"""Fractions of the recorded workloads that go to the tune, boundary and test sets."""

DEFAULT_SEED = 0
"""Seed of the search, the inputs and the order of measurements."""

DEFAULT_OUT = "build"
"""Directory of modules that are made again from records."""

DEFAULT_HTML = "fibc-report.html"
"""Page that ``fibc report`` writes into the current directory where no other file is asked for."""

DEFAULT_MAX_MB = 40.0
"""Megabytes of one definition's candidates that are compiled for another machine: a Triton candidate takes 8 kB, and
what travels to a borrowed device is often limited to tens of megabytes."""

DEFAULT_MAX_AGE_S = 7 * 86400.0
"""Seconds after which a night shows a table's replacements again though nothing has changed that fibc knows of."""

DEFAULT_KEEP = 3
"""Generations that ``fibc gc`` leaves."""

DEFAULT_LOCK_WAIT_S = 60.0
"""Seconds a second run on one ``--out``, or on one GPU, waits for the first before it refuses."""


def compile_timeout_s(backend: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> float:
    """Return the deadline of one compilation by ``backend`` in a run whose ``--timeout-s`` is ``timeout_s``."""
    return max(timeout_s, LEAST_COMPILE_TIMEOUT_S.get(backend, 0.0))


def cache_dir() -> Path | None:
    """Return where the cache lives: ``$FIBC_CACHE_DIR``, else ``fibc`` in the XDG cache directory.

    None where neither is known (no ``HOME`` and no entry in the password database). Nothing is created.
    """
    if chosen := os.environ.get("FIBC_CACHE_DIR"):
        return Path(chosen).absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if Path(xdg).is_absolute():  # the XDG specification: a relative path is invalid and must be ignored
        return Path(xdg) / "fibc"
    try:
        return Path.home() / ".cache" / "fibc"
    except RuntimeError:
        return None


def cxx() -> str | None:
    """Return the C++ compiler that ``$CXX`` names, or None where the toolchain shall find one."""
    return os.environ.get("CXX") or None


def cuda_home() -> str | None:
    """Return the CUDA toolkit that ``$CUDA_HOME`` names, or None where the toolchain shall find one."""
    return os.environ.get("CUDA_HOME") or None

"""Options of a tuning run, checked once for all callers."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from fibc import settings
from fibc.errors import SchemaError
from fibc.schema.arch import ARCH_NAMES

TARGETS = ("", "cpu", "cuda", *(f"cuda:{name}" for name in ARCH_NAMES))
"""What ``--target`` takes; empty is the first visible GPU, else the CPU."""

MODES = ("graph", "device", "eager")
"""What ``--mode`` takes: how calls on a GPU are timed (``fibc/timing_cuda.py``); the first is the default."""

CPU_MODE = "eager"
"""The only one on a CPU."""


ON_CHANGE = ("serve", "native", "refuse")
"""What a module does where driver, torch or a library is not the one it was tuned with: serve the same binaries and say
so, send every call to native, or refuse to be imported. ``FIBC_ON_CHANGE`` overrides it at import."""


@dataclass(frozen=True)
class TuneOptions:
    """What a user may choose; the defaults are the documented ones.

    Attributes:
        native: ``MODULE.fn`` or ``FILE.py::fn``, the baseline; None resolves it from the definition.
        target: What to tune for, ``cpu``, ``cuda``, or ``cuda:sm_90a`` for an architecture by its name; empty: the
            first visible GPU, else the CPU.
        backends: Names of backends to search; empty: all that serve the target.
        templates: Directories with more kernel templates.
        trials: Trials per key; None: the documented number of the target.
        budget_s: Wall time of the whole run, in seconds; warm-up, reference and builds included.
        timeout_s: Wall time of one candidate's compilation, and of its validation and timing, in seconds; of a slow
            compiler's compilation more (``settings.compile_timeout_s``).
        mode: One of ``MODES``; empty: the documented one of the target. Calls on a CPU have ``CPU_MODE`` alone.
        min_speedup: Margin that a lower bound must beat; None: the documented one of the target.
        alpha: Error per key.
        alpha_table: One guarantee over all keys: alpha is divided by their number.
        split: Fractions of the tune, boundary and test sets.
        seed: Seed of the search, the inputs and the order of measurements.
        storage: Optuna storage URL; None is a SQLite file in ``out``.
        jobs: Compilers at once.
        fresh: Forget studies and evidence of this definition first.
        dry_run: Say what would be done, and do nothing.
        sanitize: Run finalists under compute-sanitizer; what it finds costs the candidate.
        compiled_only: Search only inside what ``--compile-only`` left in ``out``. Without a backend's compiler that is
            so in any case.
        on_change: One of ``ON_CHANGE``, kept in the table.
    """

    native: str | None = None
    target: str = ""
    backends: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    trials: int | None = None
    budget_s: float = settings.DEFAULT_BUDGET_S
    timeout_s: float = settings.DEFAULT_TIMEOUT_S
    mode: str = ""
    min_speedup: float | None = None
    alpha: float = settings.DEFAULT_ALPHA
    alpha_table: bool = False
    split: tuple[float, float, float] = settings.DEFAULT_SPLIT
    seed: int = settings.DEFAULT_SEED
    storage: str | None = None
    jobs: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    fresh: bool = False
    dry_run: bool = False
    compiled_only: bool = False
    sanitize: bool = False
    on_change: str = ON_CHANGE[0]

    @property
    def target_kind(self) -> str:
        """``cpu``, ``cuda`` or empty."""
        return self.target.partition(":")[0]

    @property
    def target_arch(self) -> str:
        """``sm_90a``, or empty where the target names none."""
        return self.target.partition(":")[2]

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            SchemaError: With one problem per option that is out of range.
        """
        laws = (
            ("--trials", self.trials, self.trials is None or self.trials >= 1, "1 and more"),
            ("--budget-s", self.budget_s, self.budget_s > 0, "more than 0 seconds"),
            ("--timeout-s", self.timeout_s, self.timeout_s > 0, "more than 0 seconds"),
            ("--min-speedup", self.min_speedup, 1.0 <= (self.min_speedup or 1.0) <= 10.0, "1.0 to 10.0"),
            ("--alpha", self.alpha, 0.0 < self.alpha < 0.5, "more than 0, less than 0.5"),
            ("--seed", self.seed, 0 <= self.seed < 2**32, "0 to 2^32 - 1"),
            ("--jobs", self.jobs, self.jobs >= 1, "1 and more"),
            (
                "--split",
                self.split,
                len(self.split) == 3 and min(self.split) >= 0 and self.split[0] > 0 and abs(sum(self.split) - 1) < 1e-6,
                "three fractions that sum to 1, the first above 0, for example 0.6,0.2,0.2",
            ),
            ("--mode", self.mode, self.mode in ("", *MODES), ", ".join(MODES)),
            ("--on-change", self.on_change, self.on_change in ON_CHANGE, ", ".join(ON_CHANGE)),
            ("--target", self.target, self.target in TARGETS, ", ".join(filter(None, TARGETS))),
        )
        problems = [
            f"{name}: out of range, got {seen} (accepted: {accepted})"
            for name, seen, good, accepted in laws
            if not good
        ]
        if problems:
            raise SchemaError(problems)

"""Options of a tuning run, checked once for all callers."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from fibc import settings
from fibc.errors import SchemaError


@dataclass(frozen=True)
class TuneOptions:
    """What a user may choose; the defaults are the documented ones.

    Attributes:
        native: ``MODULE.fn`` or ``FILE.py::fn``, the baseline; None resolves it from the definition.
        backends: Names of backends to search.
        templates: Directories with more kernel templates.
        trials: Trials per key.
        budget_s: Wall time of the whole run, in seconds; warm-up, reference and builds included.
        timeout_s: Wall time of one candidate's build, and of its validation and timing, in seconds.
        min_speedup: Margin that a lower bound must beat.
        alpha: Error per key.
        alpha_table: One guarantee over all keys: alpha is divided by their number.
        split: Fractions of the tune, boundary and test sets.
        seed: Seed of the search, the inputs and the order of measurements.
        storage: Optuna storage URL; None is a SQLite file in ``out``.
        jobs: Compilers at once.
        fresh: Forget studies and evidence of this definition first.
        dry_run: Say what would be done, and do nothing.
    """

    native: str | None = None
    backends: tuple[str, ...] = ("cpu",)
    templates: tuple[str, ...] = ()
    trials: int = settings.DEFAULT_TRIALS
    budget_s: float = settings.DEFAULT_BUDGET_S
    timeout_s: float = settings.DEFAULT_TIMEOUT_S
    min_speedup: float = settings.DEFAULT_MIN_SPEEDUP_CPU
    alpha: float = settings.DEFAULT_ALPHA
    alpha_table: bool = False
    split: tuple[float, float, float] = settings.DEFAULT_SPLIT
    seed: int = settings.DEFAULT_SEED
    storage: str | None = None
    jobs: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    fresh: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            SchemaError: With one problem per option that is out of range.
        """
        laws = (
            ("--trials", self.trials, self.trials >= 1, "1 and more"),
            ("--budget-s", self.budget_s, self.budget_s > 0, "more than 0 seconds"),
            ("--timeout-s", self.timeout_s, self.timeout_s > 0, "more than 0 seconds"),
            ("--min-speedup", self.min_speedup, 1.0 <= self.min_speedup <= 10.0, "1.0 to 10.0"),
            ("--alpha", self.alpha, 0.0 < self.alpha < 0.5, "more than 0, less than 0.5"),
            ("--seed", self.seed, 0 <= self.seed < 2**32, "0 to 2^32 - 1"),
            ("--jobs", self.jobs, self.jobs >= 1, "1 and more"),
            (
                "--split",
                self.split,
                len(self.split) == 3 and min(self.split) >= 0 and self.split[0] > 0 and abs(sum(self.split) - 1) < 1e-6,
                "three fractions that sum to 1, the first above 0, for example 0.6,0.2,0.2",
            ),
            ("--backends", self.backends, len(self.backends) > 0, "at least one name"),
        )
        problems = [
            f"{name}: out of range, got {seen} (accepted: {accepted})"
            for name, seen, good, accepted in laws
            if not good
        ]
        if problems:
            raise SchemaError(problems)

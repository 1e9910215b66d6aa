"""Options of a night's run over published tables, checked once for all callers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fibc import settings
from fibc.errors import SchemaError

DEVICES = ("first", "all")

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class RetuneOptions:
    """What a user may choose.

    Attributes:
        max_age_s: Evidence that is older is shown again, also where nothing has changed.
        check: Measure and report, and change nothing.
        force: Cells to search again whatever they show, as tables print them.
        workloads: A file of more workloads: their cells are tuned, and the rest of the table stays.
        stats: Files with the JSON of ``stats()``, as applications dump it.
        budget_s: Wall time for each package, in seconds.
        devices: ``first``, or ``all``: winners are shown again on every GPU of the table's silicon, for one decision.
    """

    max_age_s: float = settings.DEFAULT_MAX_AGE_S
    check: bool = False
    force: tuple[str, ...] = ()
    workloads: str = ""
    stats: tuple[str, ...] = field(default=())
    budget_s: float = settings.DEFAULT_BUDGET_S
    devices: str = DEVICES[0]

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            SchemaError: With one problem per option that is out of range.
        """
        laws = (
            ("--max-age", self.max_age_s, self.max_age_s >= 0, "0 and more"),
            ("--devices", self.devices, self.devices in DEVICES, ", ".join(DEVICES)),
            ("--budget-s", self.budget_s, self.budget_s > 0, "more than 0 seconds"),
        )
        problems = [
            f"{name}: out of range, got {seen} (accepted: {accepted})"
            for name, seen, good, accepted in laws
            if not good
        ]
        if problems:
            raise SchemaError(problems)


def duration_s(text: str, option: str) -> float:
    """Return the seconds of ``90s``, ``30m``, ``12h``, ``7d`` or a plain number of seconds.

    Raises:
        SchemaError: If it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None:
        raise SchemaError(f"{option}: must be a duration, got {text!r} (accepted: for example 90s, 30m, 12h, 7d)")
    return float(found[1]) * UNITS_S[found[2] or "s"]

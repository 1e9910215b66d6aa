"""The time as records keep it."""

from __future__ import annotations

import datetime


def now() -> str:
    """Return the time: ISO 8601, UTC, whole seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

"""fibc: a compiler for dispatch decisions, from an operator's contract and its workloads to a native table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fibc.pipeline import build, compile_only, tune
    from fibc.reporting.report import report
    from fibc.reporting.reproduce import reproduce
    from fibc.runtime import load
    from fibc.upkeep import gc, retune, rollback, status, verify

__all__ = [
    "build",
    "compile_only",
    "gc",
    "load",
    "report",
    "reproduce",
    "retune",
    "rollback",
    "status",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: ``import fibc.schema`` shall not import torch."""
    if name in ("build", "compile_only", "tune"):
        from fibc import pipeline

        return getattr(pipeline, name)
    if name in ("gc", "retune", "rollback", "status", "verify"):
        from fibc import upkeep

        return getattr(upkeep, name)
    if name == "report":
        from fibc.reporting.report import report

        return report
    if name == "reproduce":
        from fibc.reporting.reproduce import reproduce

        return reproduce
    if name == "load":
        from fibc.runtime import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

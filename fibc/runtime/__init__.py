"""Loads generated packages and reads their tables; ``surface`` is the part that every package carries."""

from __future__ import annotations

from fibc.runtime.package import load, read_table

__all__ = ["load", "read_table"]

"""Colours of a report: one name each, a light and a dark value, contrast at least 4.5 to 1 where they carry text."""

from __future__ import annotations

from collections.abc import Mapping

PALETTE: Mapping[str, tuple[str, str]] = {
    "page": ("#f6f7f8", "#0f1216"),
    "surface": ("#ffffff", "#171b21"),
    "ink": ("#1a1f26", "#e7eaee"),
    "muted": ("#59636e", "#9ca7b3"),
    "line": ("#e1e4e8", "#2c333c"),
    "grid": ("#eceef1", "#252b33"),
    "served": ("#0a5fc2", "#69b0ff"),
    "served_tint": ("#e3effc", "#142b45"),
    "runner_up": ("#a94c06", "#ffa25c"),
    "native": ("#5f6b77", "#a5afba"),
    "inconclusive": ("#7d5a00", "#e5bb55"),
    "inconclusive_tint": ("#fbf1d5", "#352a0e"),
    "bad": ("#b3251c", "#ff8d84"),
    "bad_tint": ("#fdeae8", "#3d1a18"),
    "good": ("#0a7048", "#5ad3a0"),
    "good_tint": ("#e0f4ea", "#12301f"),
    "fifth": ("#7a3fb0", "#c79bf2"),
}
"""The chart colours differ in lightness as well as in hue, and charts never tell two things apart by colour alone."""

LINES = ("served", "runner_up", "good", "fifth", "inconclusive", "native")
"""Order in which a chart of many lines takes them."""


def light(name: str) -> str:
    """Return the light value, which charts are made with; the page swaps it for the dark one where that is shown."""
    return PALETTE[name][0]

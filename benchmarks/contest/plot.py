"""Claimed against refereed speedup as an SVG: one panel a picker, on equal logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from contest.pickers import FIBC, PICKERS
from contest.score import Claim

SIDE, GAP, LEFT, TOP, BOTTOM = 190, 14, 52, 56, 44
"""Of a panel, between panels, and around them, in pixels."""

TICKS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0)
LEAST_TICKS_APART = 24.0

INK, FAINT, FASTER, SLOWER = "#24292f", "#d0d7de", "#0969da", "#cf222e"


def draw(claims: Mapping[str, Sequence[Claim]], title: str) -> str:
    """Return the plot.

    A point on the diagonal is a claim that came true. Below it a claim was too large, and below 1, in red, native was
    replaced by something slower. Bars are 95 % intervals: the referee's, and the claim's where there is one.

    Args:
        claims: By picker.
        title: One line.
    """
    scale = _Scale.of([claim for made in claims.values() for claim in made])
    width = LEFT + len(PICKERS) * (SIDE + GAP)
    height = TOP + SIDE + BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="13" fill="{INK}">{escape(title)}</text>',
    ]
    for index, picker in enumerate(PICKERS):
        lines += _panel(LEFT + index * (SIDE + GAP), picker, claims.get(picker, ()), scale, ticks=index == 0)
    middle = TOP + SIDE / 2
    lines += [
        f'<text x="14" y="{middle:.0f}" transform="rotate(-90 14 {middle:.0f})" text-anchor="middle" '
        f'fill="{INK}">refereed speedup</text>',
        f'<text x="{(LEFT + width) / 2:.0f}" y="{height - 8}" text-anchor="middle" fill="{INK}">claimed speedup</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


class _Scale:
    """A logarithmic axis from ``low`` to ``high`` over the side of a panel."""

    def __init__(self, low: float, high: float) -> None:
        self._low, self._span = math.log(low), math.log(high / low)

    @staticmethod
    def of(claims: Sequence[Claim]) -> _Scale:
        """Return the axis that holds every claim, and 1."""
        ends = [value for c in claims for value in (c.row.pick.claimed, c.row.pick.high, *c.seen.interval) if value]
        return _Scale(min([0.95, *ends]) / 1.02, max([1.05, *ends]) * 1.02)

    def at(self, value: float) -> float:
        """Return pixels from the low end."""
        return SIDE * (math.log(value) - self._low) / self._span

    def ticks(self) -> Iterator[float]:
        """Yield round values, 1 among them, that are not too near to each other."""
        kept = [1.0]
        for tick in sorted(TICKS, key=lambda tick: abs(math.log(tick))):
            if 0 <= self.at(tick) <= SIDE and all(abs(self.at(tick) - self.at(k)) >= LEAST_TICKS_APART for k in kept):
                kept.append(tick)
        yield from sorted(kept)


def _panel(left: float, picker: str, claims: Sequence[Claim], scale: _Scale, *, ticks: bool) -> Iterator[str]:
    floor = TOP + SIDE
    weight = "bold" if picker == FIBC else "normal"
    yield (
        f'<text x="{left + SIDE / 2:.0f}" y="{TOP - 10}" text-anchor="middle" font-weight="{weight}" '
        f'fill="{INK}">{escape(picker)}</text>'
    )
    for tick in scale.ticks():
        at = scale.at(tick)
        colour = INK if tick == 1.0 else FAINT
        yield _line(left + at, TOP, left + at, floor, colour, 0.6)
        yield _line(left, floor - at, left + SIDE, floor - at, colour, 0.6)
        yield f'<text x="{left + at:.1f}" y="{floor + 14}" text-anchor="middle" fill="{INK}">{tick:g}</text>'
        if ticks:
            yield f'<text x="{left - 5}" y="{floor - at + 4:.1f}" text-anchor="end" fill="{INK}">{tick:g}</text>'
    yield _line(left, floor, left + SIDE, TOP, INK, 0.8)
    for claim in claims:
        colour = SLOWER if claim.seen.mean < 0 else FASTER
        pick, (low, high) = claim.row.pick, claim.seen.interval
        x, y = left + scale.at(pick.claimed), floor - scale.at(claim.seen.speedup)
        yield _line(x, floor - scale.at(low), x, floor - scale.at(high), colour, 0.7)
        if pick.low is not None and pick.high is not None:
            yield _line(left + scale.at(pick.low), y, left + scale.at(pick.high), y, colour, 0.7)
        name = f"{claim.row.definition} M={claim.row.key}: {pick.claimed:.3f}, refereed {claim.seen.speedup:.3f}"
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}" fill-opacity="0.55">'
            f"<title>{escape(name)}</title></circle>"
        )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'

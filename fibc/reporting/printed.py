"""What the text of a tune says: its figures, as `fibc tune` prints them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

NUMBER = r"\d+(?:\.\d+)?"

_CELL = r"\d+(?:\.\.\d+)?(?: x \d+(?:\.\.\d+)?)*"

_SEARCH = re.compile(
    rf"^  ({_CELL}): (\d+) trials, (\d+) failed, (?:best ({NUMBER})x|none passed), (\d+) finalists$", re.MULTILINE
)
_ROW = re.compile(
    rf"^({_CELL}) +({NUMBER}|-) +(native|\S+ #\d+|\S+…) +({NUMBER}|-) +({NUMBER} - {NUMBER}|-) +"
    r"(replace|keep_native|inconclusive)((?: +(?:synthetic|partial|revoked))*) *$",
    re.MULTILINE,
)
_VARIANT = re.compile(r"^  #(\d+) (.+\))$", re.MULTILINE)
_REASON = re.compile(rf"^  ({_CELL}(?:, {_CELL})*): (\S.*)$", re.MULTILINE)
_WORKLOAD = re.compile(
    rf"^((?:\w+=\d+)(?:, \w+=\d+)*) +({NUMBER}) +({NUMBER}) +({NUMBER}) +({NUMBER} - {NUMBER}) *$", re.MULTILINE
)


@dataclass(frozen=True)
class Row:
    """A cell's line; numbers as printed, ``-`` where there are none."""

    cell: str
    native_us: str
    serves: str
    speedup: str
    interval: str
    verdict: str


@dataclass(frozen=True)
class SearchLine:
    """A key's line of the search; ``best`` is empty where nothing passed."""

    key: str
    num_trials: str
    num_failed: str
    best: str
    num_finalists: str


@dataclass(frozen=True)
class WorkloadLine:
    """A line of the boundary or the test set."""

    stage: str
    axes: tuple[tuple[str, int], ...]
    native_us: str
    served_us: str
    speedup: str
    interval: str

    def __str__(self) -> str:
        return f"{self.stage} {', '.join(f'{name}={size}' for name, size in self.axes)}"


@dataclass(frozen=True)
class Printed:
    """The figures of one text.

    Attributes:
        min_speedup: Margin; None where the text has none. Alike ``alpha``.
        variants: Candidates by number.
        reasons: By cell; sentences of one line only.
        replaced: ``7 of 27``; empty where it is not said. Alike ``expected`` and ``gate``.
        statuses: Trials by status.
    """

    min_speedup: float | None
    alpha: float | None
    rows: tuple[Row, ...]
    variants: dict[str, str]
    reasons: dict[str, str]
    searches: tuple[SearchLine, ...]
    workloads: tuple[WorkloadLine, ...]
    replaced: str
    expected: str
    gate: str
    statuses: dict[str, int]


def parse(text: str) -> Printed:
    """Return the figures of ``text``. Lines that were wrapped at a terminal's width are read as far as they go."""
    _, _, after = text.partition("boundary set: ")
    boundary, _, test = after.partition("test set: ")
    table = text[: len(text) - len(after)]
    last_row = max((found.end() for found in _ROW.finditer(table)), default=0)
    return Printed(
        min_speedup=_number(r"margin\s+(" + NUMBER + ")", text),
        alpha=_number(r"\(alpha\s+(" + NUMBER + r")\)", text),
        rows=tuple(Row(*(part.strip() for part in found.groups()[:6])) for found in _ROW.finditer(table)),
        variants=dict(_VARIANT.findall(table)),
        reasons={
            cell: reason
            for cells, reason in _REASON.findall(table[last_row:])
            for cell in cells.split(", ")
            if not reason.endswith(" ")  # wrapped
        },
        searches=tuple(SearchLine(*found) for found in _SEARCH.findall(table)),
        workloads=(*_workloads("boundary", boundary), *_workloads("test", test)),
        replaced=_text(r"(\d+ of \d+) cells\s+replaced", text),
        expected=_text(r"expected\s+false\s+replacements\s+at\s+most\s+(" + NUMBER + ")", text),
        gate=_text(r"(\d+ of \d+)\s+native-against-native", text),
        statuses={
            status: int(count) for count, status in re.findall(r"(\d+) ([A-Z_]+)", _text(r"^trials +(\d.*)$", text))
        },
    )


def _workloads(stage: str, text: str) -> Iterator[WorkloadLine]:
    for axes, *numbers in _WORKLOAD.findall(text):
        sizes = tuple((name, int(size)) for name, _, size in (part.partition("=") for part in axes.split(", ")))
        yield WorkloadLine(stage, sizes, *numbers)


def _text(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found.group(1) if found else ""


def _number(pattern: str, text: str) -> float | None:
    found = _text(pattern, text)
    return float(found) if found else None

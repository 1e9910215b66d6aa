"""Progress of a run: the events that stages report, and who shows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Progress(Protocol):
    """Receives events in the order of the run. An implementation never raises and never slows a measurement."""

    def stage(self, name: str, total: int) -> None:
        """Begin the stage ``name`` of ``total`` steps."""
        ...

    def step(self, text: str) -> None:
        """One step of the current stage is done; ``text`` says what was seen."""
        ...

    def note(self, text: str) -> None:
        """Something that the user must read."""
        ...


class Quiet:
    """Shows nothing; notes still reach the user through the result."""

    def stage(self, name: str, total: int) -> None: ...

    def step(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...


class TerminalProgress:
    """Shows the current stage as one bar, and notes as lines, on a console (standard error)."""

    def __init__(self, console: Console, bars: Bars) -> None:
        self._console = console
        self._bars = bars
        self._task = bars.add_task("start", total=None, text="")

    def stage(self, name: str, total: int) -> None:
        if not self._console.is_terminal:
            self._console.print(f"{name}: {total} steps")
        self._bars.reset(self._task, description=name, total=total, text="")

    def step(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"  {text}", highlight=False, markup=False)
        self._bars.update(self._task, advance=1, text=text)

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", style="yellow", markup=False, highlight=False)


@contextmanager
def terminal(console: Console) -> Iterator[TerminalProgress]:
    """Show progress on ``console`` until the block ends."""
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield TerminalProgress(console, bars)

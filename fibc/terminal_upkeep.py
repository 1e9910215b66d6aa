"""What looking after tables prints: states, nights, generations, verifications."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from fibc.codegen.generations import Generation
from fibc.schema.upkeep import Flip, PackageStatus, RetuneResult, VerifyResult

SAME, DIFFERS = "same", "differs"


def print_status(console: Console, states: Iterable[PackageStatus]) -> None:
    """Print a line per package, then what differs."""
    states = list(states)
    grid = Table(box=None, pad_edge=False)
    for title in ("definition", "generation", "shown", "replaced", "environment", "generations"):
        grid.add_column(title, justify="right" if title in ("shown", "replaced") else "left")
    for state in states:
        others = f"{len(state.earlier)} before" + (f", {len(state.later)} after" if state.later else "")
        replaced = f"{state.num_replaced} of {state.num_cells}" + (" partial" if state.partial else "")
        grid.add_row(
            state.definition, state.generation, f"{_age(state.age_s)} ago", replaced, state.match, others, style=None
        )
    console.print(grid)
    for state in states:
        if state.problem:
            _line(console, f"  {state.definition}: {state.problem}")
        for item in (*state.foreign, *state.triggers):
            _line(console, f"  {state.definition}: {item}")
        if state.run is not None:
            _line(console, f"  {state.definition}: {state.run}")


def print_retuned(console: Console, results: Iterable[RetuneResult]) -> None:
    """Print what a night did with each package: what flipped and why, with the evidence then and now."""
    for result in results:
        _line(console, f"{result.definition}: {result.action}: {'; '.join(result.reasons)}")
        for finding in result.findings:
            if not finding.ok or "disturbs" in finding.text:
                _line(console, f"  {finding.name}: {finding.text}")
        for flip in result.flips:
            _print_flip(console, flip)
        if result.action in ("renewed", "checked"):
            unchecked = f", {len(result.unchecked)} left for the next night" if result.unchecked else ""
            _line(
                console,
                f"  {result.num_held} of {result.num_rechecked} winners hold, {len(result.flips)} cells "
                f"{'would flip' if result.action == 'checked' else 'flipped'}, {len(result.retuned)} "
                f"{'to search' if result.action == 'checked' else 'searched'}{unchecked}; {result.num_pairs} pairs",
            )
            _line(console, f"  serving {result.generation}, {result.num_replaced} cells replaced")
            stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result.stage_s.items())
            _line(console, f"  time {stages}; seed {result.seed}, on {', '.join(result.devices)}")
        if result.observed is not None:
            _line(console, f"  gpu {result.observed}")
        for note in result.notes:
            _line(console, f"  note: {note}")


def print_generations(console: Console, moved: Iterable[tuple[str, Generation]]) -> None:
    """Print which generation serves now."""
    for definition, generation in moved:
        _line(console, f"{definition}: {generation.name} of {generation.created} serves from the next import on")


def print_removed(console: Console, removed: Iterable[tuple[str, tuple[str, ...]]]) -> None:
    """Print which generations are gone."""
    for definition, names in removed:
        _line(console, f"{definition}: {', '.join(names) or 'nothing'} removed")


def print_verified(console: Console, results: Iterable[VerifyResult]) -> None:
    """Print every item of each package."""
    for result in results:
        counts = Counter(item.verdict for item in result.items)
        _line(console, f"{result.definition} {result.generation}: {'sound' if result.sound else 'NOT SOUND'}")
        for item in result.items:
            _line(console, f"  {item.verdict:<8} {item.item}: {item.text}")
        _line(console, f"  {', '.join(f'{number} {verdict}' for verdict, number in sorted(counts.items()))}")


def _print_flip(console: Console, flip: Flip) -> None:
    _line(console, f"  {flip.cell}: {flip.old} -> {flip.new or 'to be searched'}")
    for name, shown in (("then", flip.then), ("now", flip.now), ("new", flip.shown)):
        if shown is not None:
            _line(console, f"    {name:<5}{shown}")
    if flip.why:
        _line(console, f"    why  {flip.why}")


def _age(seconds: float) -> str:
    for unit, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)

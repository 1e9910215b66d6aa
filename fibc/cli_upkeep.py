"""The commands that look after published tables: status, retune, rollback, gc, verify."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fibc import progress, prometheus, settings, terminal_upkeep, upkeep
from fibc.schema.codec import to_plain
from fibc.schema.retune_options import duration_s

EXIT_FAILED = 1
EXIT_WOULD_FLIP = 3
EXIT_INTERRUPTED = 130

OutPath = Annotated[Path, typer.Argument(help="An --out directory, or one package in it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    for command in (status, retune, rollback, gc, verify):
        app.command()(command)


def status(
    path: OutPath,
    as_prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print metrics for node_exporter's textfile collector.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print which generation serves, how old its evidence is, and what differs here; exit 1 where one is unreadable."""
    states = upkeep.status(path)
    if as_prometheus:
        typer.echo(prometheus.render(states), nl=False)
    elif as_json:
        _print_json("packages", [{**to_plain(state), "match": state.match} for state in states])
    else:
        terminal_upkeep.print_status(Console(), states)
    raise typer.Exit(EXIT_FAILED if any(state.problem for state in states) else 0)


def retune(
    path: OutPath,
    max_age: Annotated[
        str, typer.Option(help="Show winners again that were shown longer ago: 12h, 7d.")
    ] = f"{settings.DEFAULT_MAX_AGE_S / 86400:g}d",
    check: Annotated[bool, typer.Option("--check", help="Measure, change nothing; exit 3 where cells flip.")] = False,
    force: Annotated[list[str] | None, typer.Option(help="A cell to search again: 65..96. Repeatable.")] = None,
    workloads: Annotated[Path | None, typer.Option(help="More workloads: their cells are added to the table.")] = None,
    stats: Annotated[list[Path] | None, typer.Option(help="A dump of stats(). Repeatable.")] = None,
    budget_s: Annotated[float, typer.Option(help="Wall time for each package.")] = settings.DEFAULT_BUDGET_S,
    devices: Annotated[str, typer.Option(help="GPUs that show winners again: first or all.")] = "first",
    as_json: AsJson = False,
) -> None:
    """Show winners again where something has changed, search again what flipped, publish the next generation."""
    options: dict[str, Any] = {
        "max_age_s": duration_s(max_age, "--max-age"),
        "check": check,
        "force": tuple(force or ()),
        "workloads": "" if workloads is None else str(workloads),
        "stats": tuple(map(str, stats or ())),
        "budget_s": budget_s,
        "devices": devices,
    }
    errors = Console(stderr=True)
    try:
        with progress.terminal(errors) as shown:
            results = upkeep.retune(path, progress=shown, **options)
    except KeyboardInterrupt:
        errors.print("fibc: interrupted; what served goes on serving, and the same command goes on")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        _print_json("packages", [to_plain(result) for result in results])
    else:
        terminal_upkeep.print_retuned(Console(), results)
    if any(result.action == "failed" for result in results):
        raise typer.Exit(EXIT_FAILED)
    raise typer.Exit(EXIT_WOULD_FLIP if check and any(result.flips for result in results) else 0)


def rollback(
    path: OutPath,
    to: Annotated[str, typer.Option(help="Generation, or the beginning of its name. [default: the one before]")] = "",
    as_json: AsJson = False,
) -> None:
    """Let an earlier generation serve from the next import on."""
    moved = upkeep.rollback(path, to)
    if as_json:
        _print_json("packages", [{"definition": name, "generation": item.name} for name, item in moved])
    else:
        terminal_upkeep.print_generations(Console(), moved)


def gc(
    path: OutPath,
    keep: Annotated[int, typer.Option(help="Generations to keep of each package.")] = settings.DEFAULT_KEEP,
    as_json: AsJson = False,
) -> None:
    """Remove old generations; the serving one and the one before it stay."""
    removed = upkeep.gc(path, keep)
    if as_json:
        _print_json("packages", [{"definition": name, "removed": list(names)} for name, names in removed])
    else:
        terminal_upkeep.print_removed(Console(), removed)


def verify(
    path: OutPath,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Link the module again and compare its bytes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compute every item of each package's manifest again; exit 1 where one differs or is missing."""
    results = upkeep.verify(path, rebuild=rebuild)
    if as_json:
        _print_json("packages", [{**to_plain(result), "sound": result.sound} for result in results])
    else:
        terminal_upkeep.print_verified(Console(), results)
    raise typer.Exit(0 if all(result.sound for result in results) else EXIT_FAILED)


def _print_json(name: str, values: Iterable[Any]) -> None:
    typer.echo(json.dumps({name: list(values)}))

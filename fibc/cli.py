"""The command line: it parses, calls one function of the package, and prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fibc import cli_upkeep, progress, settings, terminal
from fibc.errors import FibcError, SchemaError
from fibc.schema.codec import to_plain
from fibc.schema.result import CompileResult, TuneResult

app = typer.Typer(
    name="fibc",
    help="Tune kernels for an operator's real workloads and compile the proven ones into a dispatch table.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def _show_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"fibc {version('fibc')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None: ...


@app.command()
def tune(
    definition: Annotated[Path, typer.Argument(help="FlashInfer-Trace definition (JSON).")],
    out: Annotated[Path, typer.Option(help="Directory of the module, the table and the records.")],
    workloads: Annotated[
        Path | None, typer.Option(help="Workloads: a JSON-lines file, or a directory that holds the definition's.")
    ] = None,
    native: Annotated[str | None, typer.Option(help="The baseline: MODULE.fn or FILE.py::fn.")] = None,
    target: Annotated[
        str, typer.Option(help="cpu, cuda, or cuda:sm_90a. [default: the first visible GPU, else the CPU]")
    ] = "",
    backends: Annotated[
        str, typer.Option(help="Backends to search, separated by commas. [default: all of the target]")
    ] = "",
    templates: Annotated[list[Path] | None, typer.Option(help="A directory with more kernel templates.")] = None,
    trials: Annotated[
        int | None, typer.Option(help="Trials per key. [default: 16 on a CPU and with --compile-only, 40 on a GPU]")
    ] = None,
    budget_s: Annotated[float, typer.Option(help="Seconds for the whole run.")] = settings.DEFAULT_BUDGET_S,
    timeout_s: Annotated[
        float, typer.Option(help="Seconds per candidate (CUTLASS compiles in 300).")
    ] = settings.DEFAULT_TIMEOUT_S,
    mode: Annotated[
        str, typer.Option(help="How calls on a GPU are timed: graph, device or eager. [default: graph]")
    ] = "",
    min_speedup: Annotated[
        float | None, typer.Option(help="Margin that a lower bound must beat. [default: 1.02 on a CPU, 1.01 on a GPU]")
    ] = None,
    alpha: Annotated[float, typer.Option(help="Error per key.")] = settings.DEFAULT_ALPHA,
    alpha_table: Annotated[bool, typer.Option("--alpha-table", help="One guarantee over all keys.")] = False,
    split: Annotated[str, typer.Option(help="Fractions of the tune, boundary and test sets.")] = ",".join(
        f"{fraction:g}" for fraction in settings.DEFAULT_SPLIT
    ),
    seed: Annotated[int, typer.Option(help="Seed of search, inputs and order.")] = settings.DEFAULT_SEED,
    storage: Annotated[str | None, typer.Option(help="Optuna storage URL; default SQLite in --out.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Compilers at once; default one per core.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh/--resume", help="Forget earlier studies and evidence, or go on (default).")
    ] = False,
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Compile for --target and measure nothing: no device is needed.")
    ] = False,
    max_mb: Annotated[
        float, typer.Option(help="With --compile-only: megabytes of candidates to keep.")
    ] = settings.DEFAULT_MAX_MB,
    compiled_only: Annotated[
        bool, typer.Option("--compiled-only", help="Search only what --compile-only left in --out.")
    ] = False,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="Run every finalist under NVIDIA's compute-sanitizer first.")
    ] = False,
    on_change: Annotated[
        str, typer.Option(help="Where driver or torch is another one than tuned with: serve, native or refuse.")
    ] = "serve",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Search, prove and compile a dispatch table for one definition."""
    import fibc

    options: dict[str, Any] = {
        "native": native,
        "target": target,
        "backends": tuple(name.strip() for name in backends.split(",") if name.strip()),
        "templates": tuple(str(path) for path in templates or ()),
        "trials": trials,
        "budget_s": budget_s,
        "timeout_s": timeout_s,
        "mode": mode,
        "min_speedup": min_speedup,
        "alpha": alpha,
        "alpha_table": alpha_table,
        "split": _fractions(split),
        "seed": seed,
        "storage": storage,
        "fresh": fresh,
        "dry_run": dry_run,
        "compiled_only": compiled_only,
        "sanitize": sanitize,
        "on_change": on_change,
    }
    if jobs is not None:
        options["jobs"] = jobs
    errors = Console(stderr=True)
    result: TuneResult | CompileResult
    try:
        with progress.terminal(errors) as shown:
            if compile_only:
                result = fibc.compile_only(definition, workloads, out=out, max_mb=max_mb, progress=shown, **options)
            else:
                result = fibc.tune(definition, workloads, out=out, progress=shown, **options)
    except KeyboardInterrupt:
        errors.print("fibc: interrupted before there was anything to keep")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(to_plain(result)))
    elif isinstance(result, CompileResult):
        terminal.print_compiled(Console(), result)
    else:
        terminal.print_result(Console(), result)
    raise typer.Exit(_compile_status(result) if isinstance(result, CompileResult) else _tune_status(result))


@app.command()
def build(
    records: Annotated[Path, typer.Argument(help="A file of records, or an --out directory for all in it.")],
    target: Annotated[str, typer.Option(help="Target of the tables, for example cuda:sm_90a.")] = "",
    out: Annotated[Path, typer.Option(help="Directory of the modules.")] = Path(settings.DEFAULT_OUT),
    compiled: Annotated[Path | None, typer.Option(help="A directory that --compile-only filled.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Make modules again from what a tune has recorded, on any machine: nothing is measured."""
    import fibc

    results = fibc.build(records, target=target, out=out, compiled=compiled)
    if as_json:
        typer.echo(json.dumps({"built": [to_plain(result) for result in results]}))
    else:
        for result in results:
            terminal.print_built(Console(), result)


@app.command()
def explain(
    path: Annotated[Path, typer.Argument(help="A package that fibc wrote, or a definition (JSON).")],
    axes: Annotated[list[str] | None, typer.Option(help="Explain one call: NAME=SIZE, repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Print a table as people read it, what serves one call, or which templates match a definition."""
    from fibc import explain as explaining

    explained = explaining.explain(path, _sizes(axes or []))
    if as_json:
        typer.echo(json.dumps(to_plain(explained)))
    elif isinstance(explained, explaining.TableExplained):
        terminal.print_table(Console(), explained.table)
    elif isinstance(explained, explaining.CallExplained):
        terminal.print_call(Console(), explained)
    else:
        terminal.print_templates(Console(), explained)


@app.command()
def report(
    path: Annotated[Path, typer.Argument(help="An --out directory, a package or generation in it, or a records file.")],
    other: Annotated[
        Path | None, typer.Argument(help="The same, newer or of another machine: what changed since PATH.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help=f"Page to write. [default: {settings.DEFAULT_HTML}, where nothing else is asked]"),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="CSV of every trial to write.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Markdown for a pull request to write.")] = None,
    fraction: Annotated[
        float | None, typer.Option(help="Share of an application's time that the operator takes with native.")
    ] = None,
    dispatch: Annotated[
        Path | None, typer.Option(help="Measured dispatch cost: a result of benchmarks/dispatch_overhead.py.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Write what was decided, on what evidence, and how the search went: every number is from records."""
    import fibc
    from fibc.reporting.report import report_json

    if html is None and csv is None and markdown is None and not as_json:
        html = Path(settings.DEFAULT_HTML)
    data = fibc.report(path, other, html=html, csv=csv, markdown=markdown, fraction=fraction, dispatch=dispatch)
    if as_json:
        typer.echo(json.dumps(report_json(data)))
    else:
        for file in filter(None, (html, csv, markdown)):
            typer.echo(str(file))


@app.command()
def reproduce(
    result: Annotated[Path, typer.Argument(help="Text of a tune with its .records beside, or a benchmark's JSON.")],
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure what is served again, where the device is at hand.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Make every figure of a results file again from its raw samples; exit 1 where one differs."""
    import fibc

    made = fibc.reproduce(result, measure=measure)
    if as_json:
        typer.echo(json.dumps(to_plain(made)))
    else:
        terminal.print_reproduction(Console(), made)
    raise typer.Exit(EXIT_DONE if made.holds else EXIT_FAILED)


@app.command()
def validate(
    paths: Annotated[list[Path], typer.Argument(help="Definitions, workloads, or directories of them.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Print every problem of every file, each with its path; exit 2 where there is one."""
    from fibc.schema.validate import validate_paths

    checked = validate_paths(paths)
    if as_json:
        typer.echo(json.dumps({"files": checked.num_files, "problems": list(checked.problems)}))
    else:
        for problem in checked.problems:
            typer.echo(problem)
        typer.echo(f"{checked.num_files} files, {len(checked.problems)} problems")
    raise typer.Exit(EXIT_USAGE if checked.problems else EXIT_DONE)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Print what this machine has for tuning, and what is missing with the command that installs it."""
    from fibc.doctor import examine

    examined = examine()
    if as_json:
        typer.echo(json.dumps({"facts": dict(examined.facts), "missing": list(examined.missing)}))
    else:
        terminal.print_facts(Console(), examined.facts)
        for line in examined.missing:
            typer.echo(f"missing: {line}")
    raise typer.Exit(EXIT_FAILED if examined.missing else EXIT_DONE)


cli_upkeep.register(app)


def _tune_status(result: TuneResult) -> int:
    if result.plan or result.table is not None:
        return EXIT_DONE
    return EXIT_INTERRUPTED if result.interrupted else EXIT_FAILED


def _compile_status(result: CompileResult) -> int:
    if result.interrupted:
        return EXIT_INTERRUPTED
    tried = any(item.compiled or item.left_out for item in result.templates)
    return EXIT_DONE if tried else EXIT_FAILED


def _fractions(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise SchemaError(
            f"--split: must be three numbers, got {text!r} (accepted: fractions that sum to 1, for example 0.6,0.2,0.2)"
        ) from None


def _sizes(items: list[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for item in items:
        for part in item.split(","):
            name, _, size = part.partition("=")
            if not size.strip().isdigit():
                raise SchemaError(f"--axes: must be NAME=SIZE, got {part!r} (accepted: for example batch_size=7)")
            sizes[name.strip()] = int(size)
    return sizes


def main() -> None:
    """Run the command line; the errors of ``FibcError`` are printed without a traceback."""
    try:
        app()
    except FibcError as error:
        for line in str(error).splitlines():
            print(f"fibc: {line}", file=sys.stderr)
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()

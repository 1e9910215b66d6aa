"""What people read on a terminal: the closing table of a run, and a table explained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fibc.explain import CallExplained, DefinitionExplained
from fibc.reporting.figures import Outcome, Reproduction
from fibc.schema.decision import Comparison, Decision, Verdict
from fibc.schema.result import BuildResult, CompileResult, TuneResult
from fibc.schema.table import DispatchTable


def print_result(console: Console, result: TuneResult) -> None:
    """Print what a run ends with: rows, boundary and test sets, what the numbers mean, how to import."""
    for note in result.notes:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if result.plan:
        _print_plan(console, result)
        return
    table = result.table
    if table is None:
        console.print(f"{result.definition}: no module was written")
        return
    if result.up_to_date:
        console.print(f"{result.definition}: up to date, nothing was built and nothing measured")
    print_table(console, table)
    _print_set(console, "boundary", "may reject a row before publication", result.boundary, result.sets.boundary)
    if not result.up_to_date:
        _print_set(console, "test", "read once after publication, decides nothing", result.test, result.sets.test)
        for line in result.slower_on_test:
            console.print(f"slower than native beyond doubt: {line}", style="red", markup=False)
    _print_counts(console, result)
    if result.partial:
        console.print("partial: the run ended before the evidence did; run the same command again to go on")
    console.print(f"module    {result.package}", highlight=False, soft_wrap=True)
    parent = result.package.rsplit("/", 1)[0]
    console.print(
        f"import    import sys; sys.path.insert(0, {parent!r}); import {result.module}", highlight=False, soft_wrap=True
    )


def print_compiled(console: Console, result: CompileResult) -> None:
    """Print what a run that only compiles ends with: counts per template, what was left out and why, where it is."""
    for note in result.notes:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{result.definition}  target {result.target}  {result.num_keys} keys", highlight=False, markup=False)
    grid = Table(box=None, pad_edge=False)
    for title in ("template", "compiled", "failed", "left out", "MB"):
        grid.add_column(title, justify="left" if title == "template" else "right")
    for item in result.templates:
        counts = (str(item.compiled), str(item.failed), str(item.left_out), f"{item.num_bytes / 1e6:.2f}")
        grid.add_row(escape(item.template), *counts)
    console.print(grid)
    for why, count in result.left_out:
        console.print(f"left out  {count} {why}", highlight=False, markup=False)
    for reason, count in result.failures:
        console.print(f"failed    {count}: {reason}", highlight=False, markup=False, soft_wrap=True)
    for template, reason in result.mismatches:
        line = f"  template {template} does not match: {reason}"
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    if result.interrupted:
        console.print("interrupted: run the same command again to go on")
    console.print(f"time      {result.duration_s:.0f} s, {result.num_new} compiled now", highlight=False)
    console.print(f"store     {result.store} ({result.num_bytes / 1e6:.1f} MB)", highlight=False, soft_wrap=True)
    console.print(
        "next      take it to the device as fibc-compiled in its --out, and tune there (--compiled-only searches "
        "nothing else)",
        highlight=False,
        soft_wrap=True,
    )


def print_built(console: Console, result: BuildResult) -> None:
    """Print what was made again, from what, and whether it serves here."""
    origins = Counter(origin for _, origin in result.kernels)
    kernels = ", ".join(f"{count} {origin}" for origin, count in sorted(origins.items())) or "none"
    print_facts(
        console,
        {
            "definition": result.definition,
            "target": result.target,
            "kernels": kernels,
            "module": result.package,
            "here": "; ".join(result.notes) or "serves",
        },
    )


def print_table(console: Console, table: DispatchTable) -> None:
    """Print a dispatch table as people read it: a line per cell, then what did not match."""
    names = ", ".join(feature.name for feature in table.features)
    timed = sorted({item.mode for row in table.rows for item in (*row.confirm, *row.reconfirm)})
    mode = f"  mode {', '.join(timed)}" if timed and table.target.startswith("cuda") else ""
    console.print(
        f"{table.definition}  target {table.target}  native {table.native.name}  margin {table.min_speedup:g}{mode}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    grid = Table(box=None, pad_edge=False)
    for title in (names, "native us", "serves", "speedup", "95 % interval", "verdict"):
        grid.add_column(title, justify="left" if title in (names, "serves", "verdict") else "right")
    short = {v.candidate.digest: f"{v.candidate.template} #{number}" for number, v in enumerate(table.variants, 1)}
    for row in table.rows:
        grid.add_row(*_row_cells(row, short))
    console.print(grid)
    for number, variant in enumerate(table.variants, 1):
        console.print(f"  #{number} {variant.candidate}", markup=False, highlight=False, soft_wrap=True)
    reasons = _grouped_reasons(table.rows)
    for reason, cells in reasons.items():
        console.print(f"  {', '.join(cells)}: {reason}", style="dim", markup=False, highlight=False, soft_wrap=True)
    replaced = sum(row.verdict is Verdict.REPLACE for row in table.rows)
    console.print(
        f"{replaced} of {len(table.rows)} cells replaced; expected false replacements at most "
        f"{table.expected_false_replacements:.2f} (alpha {table.alpha:g}); "
        f"{table.num_boundary_rejected} rejected by the boundary set; sizes outside the cells are native",
        highlight=False,
        soft_wrap=True,
    )
    if table.target.startswith("cuda"):
        console.print(f"served by {_served_by(table)}", highlight=False, markup=False, soft_wrap=True)
    if "sanitizer" in table.environment:
        console.print(f"sanitized by {table.environment['sanitizer']}", highlight=False, markup=False, soft_wrap=True)
    for template, reason in table.mismatches:
        line = f"  template {template} does not match: {reason}"
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def print_call(console: Console, explained: CallExplained) -> None:
    """Print what serves one call and on what evidence."""
    facts = {
        "call": ", ".join(f"{name}={size}" for name, size in explained.axes.items()),
        "serves": explained.serves,
        "reason": explained.reason,
    }
    if explained.library:
        facts["calls"] = explained.library
    row = explained.row
    if row is not None:
        facts["cell"] = str(row.cell)
        facts["verdict"] = row.verdict.value
        for item in row.evidence:
            facts[f"at {item.point}"] = (
                f"{item.speedup:.3f}x ({item.ci_low:.3f} to {item.ci_high:.3f}), {item.n_sessions} sessions, "
                f"native {item.native_us:.1f} us, {item.stage}"
            )
    print_facts(console, facts)


def print_templates(console: Console, explained: DefinitionExplained) -> None:
    """Print which templates serve a definition, and why the others do not."""
    console.print(f"{explained.definition}  target {explained.target}", markup=False, highlight=False)
    for template in explained.matches:
        console.print(f"  {template}: matches", markup=False, highlight=False)
    for template, reason in explained.mismatches:
        console.print(f"  {template}: {reason}", style="dim", markup=False, highlight=False)


def print_reproduction(console: Console, made: Reproduction) -> None:
    """Print what differs and what has no samples, then the counts, then what was measured again."""
    for item in made.figures:
        if item.outcome is not Outcome.SAME:
            style = "red" if item.outcome is Outcome.DIFFERS else "dim"
            console.print(str(item), style=style, markup=False, highlight=False, soft_wrap=True)
    if made.measured:
        grid = Table(box=None, pad_edge=False)
        for title in ("cell", "at", "published", "95 % interval", "again", "95 % interval", ""):
            grid.add_column(title, justify="left" if title in ("cell", "at", "") else "right")
        for seen in made.measured:
            numbers = [f"{s.value:.3f} {s.low:.3f} - {s.high:.3f}".split(" ", 1) for s in (seen.published, seen.again)]
            agrees = "agrees" if seen.agrees else "differs"
            grid.add_row(escape(seen.cell), escape(seen.published.point), *numbers[0], *numbers[1], agrees)
        console.print(grid)
    for note in made.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    counts = ", ".join(f"{made.counts[outcome]} {outcome}" for outcome in Outcome)
    console.print(
        f"{made.result}: {len(made.figures)} figures: {counts}", highlight=False, markup=False, soft_wrap=True
    )


def print_facts(console: Console, facts: Mapping[str, str]) -> None:
    """Print a line per fact."""
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        console.print(f"{name:<{width}}  {value}", markup=False, highlight=False, soft_wrap=True)


def _row_cells(row: Decision, variants: Mapping[str, str]) -> tuple[str, ...]:
    weakest = row.weakest
    native = f"{weakest.native_us:.1f}" if weakest else "-"
    speedup = f"{weakest.speedup:.3f}" if weakest else "-"
    interval = f"{weakest.ci_low:.3f} - {weakest.ci_high:.3f}" if weakest else "-"
    serves = variants.get(row.candidate, row.candidate) if row.verdict is Verdict.REPLACE else "native"
    flags = " ".join(
        name for name, on in (("synthetic", row.synthetic), ("partial", row.partial), ("revoked", row.revoked)) if on
    )
    verdict = f"{row.verdict.value} {flags}".strip()
    return escape(str(row.cell)), native, escape(serves), speedup, interval, verdict


def _served_by(table: DispatchTable) -> str:
    """Return how many cells generated kernels serve, and how many calls of a library."""
    called = {variant.candidate.digest: variant.library for variant in table.variants if variant.library}
    replaced = [row.candidate for row in table.rows if row.verdict is Verdict.REPLACE and not row.revoked]
    by_library = sum(candidate in called for candidate in replaced)
    generated = _counted(len(table.variants) - len(called), "generated kernel", len(replaced) - by_library)
    if not called:
        return generated
    libraries = ", ".join(sorted(set(called.values())))
    return f"{generated}, {_counted(len(called), 'library call', by_library)} ({libraries})"


def _counted(num_variants: int, name: str, num_cells: int) -> str:
    variants = f"{num_variants} {name}{'' if num_variants == 1 else 's'}"
    return f"{variants} in {num_cells} cell{'' if num_cells == 1 else 's'}"


def _grouped_reasons(rows: Iterable[Decision]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict is not Verdict.REPLACE:
            grouped.setdefault(row.reason, []).append(str(row.cell))
    return grouped


def _print_set(console: Console, name: str, meaning: str, comparisons: tuple[Comparison, ...], recorded: int) -> None:
    console.print(
        f"{name} set: {recorded} workloads, {len(comparisons)} in replaced cells ({meaning})", highlight=False
    )
    if not comparisons:
        return
    grid = Table(box=None, pad_edge=False)
    for title in ("workload", "native us", "served us", "speedup", "95 % interval"):
        grid.add_column(title, justify="left" if title == "workload" else "right")
    for item in comparisons:
        grid.add_row(
            escape(str(item.point)),
            f"{item.native_us:.1f}",
            f"{item.candidate_us:.1f}",
            f"{item.speedup:.3f}",
            f"{item.ci_low:.3f} - {item.ci_high:.3f}",
        )
    console.print(grid)


def _print_counts(console: Console, result: TuneResult) -> None:
    trials = ", ".join(f"{count} {status}" for status, count in sorted(result.trials.items()))
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result.stage_s.items())
    console.print(f"trials    {trials or 'none'}", highlight=False)
    if stages:
        console.print(f"time      {stages}", highlight=False)
    if result.observed is not None:
        console.print(f"gpu       {result.observed}", highlight=False, markup=False, soft_wrap=True)
    builds = result.builds
    if ahead := builds.ready + builds.awaited:
        console.print(
            f"builds    {ahead} of {ahead + builds.built} ahead, {builds.awaited} of them waited for; "
            f"the search waited {builds.waited_s:.0f} s for compilers",
            highlight=False,
        )


def _print_plan(console: Console, result: TuneResult) -> None:
    console.print(f"{result.definition}: dry run, nothing is done")
    for name, value in result.plan.items():
        console.print(f"  {name:<14} {value}", highlight=False)

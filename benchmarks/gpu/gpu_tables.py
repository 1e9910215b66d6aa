"""Finished rows as tables that people read, with the numbers that were promised beside those that were reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from gpu_limits import COPY_BYTES_PER_S, PEAK_FLOPS, gemm_limit_us, recorded_read_us
from gpu_log import Row
from gpu_rows import SHAPES, TUNED_SIZES, UNSEEN_SIZES, Shape

Rows = Mapping[str, Row]
Parts = Mapping[str, Rows]
"""Rows by name, by part."""

LARGE_BYTES = 16 << 20
"""Weights above are the four large ones."""

SLOWER = math.log(1.01)
"""A size is slower than native beyond doubt where the upper bound of its log speedup is below minus this."""


def suite_text(parts: Parts) -> str:
    """Return the tables of every weight shape, and what they come to."""
    sections = [_head("GEMM suite", parts)]
    for shape in SHAPES:
        rows = parts.get(f"suite-{shape.name}")
        if rows:
            sections.append(_shape_text(shape, rows))
    sections.append(_summary_text(parts))
    return "\n".join(sections)


def norms_text(parts: Parts) -> str:
    rows = [row for row in parts.get("norms", {}).values() if row["kind"] == "norm"]
    lines = [
        "| definition | rows | native us | served us | native / served | 95 % interval | FlashInfer / served | copy us "
        "| of copy bandwidth |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["definition"], row["rows"])):
        served = row["served"]
        if "failed" in served:
            lines.append(f"| {row['definition']} | {row['rows']} | - | {_failure(served)} | - | - | - | - | - |")
            continue
        served_us, copy_us = served["candidate_us"], row["peers"].get("copy", {}).get("candidate_us")
        copied = f"{copy_us:.2f} | {copy_us / served_us:.3f}" if copy_us else "- | -"
        against = row["against"].get("flashinfer")
        flashinfer = f"{against['speedup']:.3f} ({_interval(against)})" if against else row["flashinfer"]
        lines.append(
            f"| {row['definition']} | {row['rows']} | {served['native_us']:.2f} | {served_us:.2f} "
            f"| {served['speedup']:.3f} | {_interval(served)} | {flashinfer} | {copied} |"
        )
    text = [
        _head("Norms", parts, "norms"),
        *lines,
        "",
        "The copy moves as many bytes as the norm reads and writes (the weight left out), in the same sessions; "
        f"copies of an H200 were recorded at {COPY_BYTES_PER_S / 1e12:.2f} TB/s.",
        "",
    ]
    return "\n".join(text)


def host_text(parts: Parts) -> str:
    rows = parts.get("host", {})
    lines = [_head("Host cost of a call", parts, "host"), "| way | us | 95 % interval |", "|---|---|---|"]
    for row in sorted((row for row in rows.values() if row["kind"] == "host"), key=lambda row: row["us"]):
        lines.append(f"| {row['row']} | {row['us']:.2f} | {row['ci_low']:.2f} - {row['ci_high']:.2f} |")
    hits = [row for row in rows.values() if row["kind"] == "host" and row["row"].startswith("run_out")]
    plain = [row["us"] for row in hits if "split K" not in row["row"]]
    if plain:
        lines += [
            "",
            _promise("run_out on a hit without workspace, the slowest kind, us", max(plain), 4.2, at_most=True),
        ]
    uses = rows.get("first use")
    if uses:
        lines += ["", f"First use, milliseconds, the median of {len(next(iter(uses['uses'].values())))} processes "]
        lines[-1] += f"(a module of {uses['variants']} variants):"
        names = list(dict.fromkeys(name for runs in uses["uses"].values() for run in runs for name in run["ms"]))
        lines += ["", f"| | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
        for flag, runs in uses["uses"].items():
            cells = [[run["ms"][name] for run in runs if name in run["ms"]] for name in names]
            shown = " | ".join(f"{median(cell):.2f}" if cell else "-" for cell in cells)
            lines.append(f"| {flag.removeprefix('--')} | {shown} |")
    return "\n".join([*lines, ""])


def peers_text(parts: Parts) -> str:
    rows = [row for row in parts.get("peers", {}).values() if row["kind"] == "peer"]
    names = list(dict.fromkeys(name for row in rows for name in row["calls"] if name != "served"))
    lines = [
        _head("Peers", parts, "peers"),
        "native / call, in the same sessions; after it call / served where a module was there.",
        "",
        f"| N x K | M | native us | served | {' | '.join(names)} |",
        f"|---|---|---|---|{'---|' * len(names)}",
    ]
    for row in sorted(rows, key=lambda row: (-row["n"] * row["k"], row["n"], row["m"])):
        calls = row["calls"]
        native = next((f"{call['native_us']:.2f}" for call in calls.values() if "native_us" in call), "-")
        cells = [_peer_cell(calls.get("served"), None)]
        cells += [_peer_cell(calls.get(name), row["against"].get(name)) for name in names]
        lines.append(f"| {row['n']} x {row['k']} | {row['m']} | {native} | {' | '.join(cells)} |")
    for name in ("served", *names):
        speedups = [row["calls"][name]["speedup"] for row in rows if "speedup" in row["calls"].get(name, {})]
        if speedups:
            slower = sum(speedup < 0.99 for speedup in speedups)
            lines += [
                "",
                f"{name}: geometric mean {geometric_mean(speedups):.3f} over {len(speedups)} rows, {slower} slower "
                "than native by over 1 %.",
            ]
    lines += ["", "cuBLASLt best-of-heuristic is left for later: no part times its algorithms as a peer yet.", ""]
    return "\n".join(lines)


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of at least one positive value."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


def _shape_text(shape: Shape, rows: Rows) -> str:
    read_us, read_from = _read_us(shape, rows)
    lines = [
        f"## {shape.n} x {shape.k}",
        "",
        f"Cold read of the weight: {read_us:.2f} us ({read_from}; recorded earlier, one launch at a time: "
        f"{recorded_read_us(shape.weight_bytes):.2f} us).",
        "",
        "| M | sizes | native us | served us | native / served | 95 % interval | limit us | of limit | serves |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(_sizes(rows), key=lambda row: row["m"]):
        limit_us, what = gemm_limit_us(row["m"], shape.n, shape.k, read_us)
        if "failed" in row:
            lines.append(f"| {row['m']} | {row['kind']} | - | {_failure(row)} | - | - | {limit_us:.2f} {what} | - | |")
            continue
        lines.append(
            f"| {row['m']} | {row['kind']} | {row['native_us']:.2f} | {row['candidate_us']:.2f} | {row['speedup']:.3f} "
            f"| {_interval(row)} | {limit_us:.2f} {what} | {limit_us / row['candidate_us']:.3f} | {row['serves']} |"
        )
    cells = [row for row in rows.values() if row["kind"] == "cell"]
    if cells:
        lines += [
            "",
            "| cell | verdict | confirm, weakest point | reconfirm, weakest point | |",
            "|---|---|---|---|---|",
        ]
        lines += [_cell_line(row) for row in cells]
    tunes = [row for row in rows.values() if row["kind"] == "tune"]
    for row in tunes:
        stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in row["stage_s"].items())
        trials = ", ".join(f"{count} {status}" for status, count in sorted(row["trials"].items()))
        lines += ["", f"Tune: {stages}; trials: {trials}{'; partial' if row['partial'] else ''}."]
    return "\n".join([*lines, ""])


def _cell_line(row: Row) -> str:
    flags = [name for name in ("synthetic", "partial", "revoked") if row[name]]
    verdict = " ".join([row["verdict"], *flags])
    weakest = [min(row[stage], key=lambda item: item["ci_low"], default=None) for stage in ("confirm", "reconfirm")]
    shown = [f"{item['speedup']:.3f} ({_interval(item)})" if item else "-" for item in weakest]
    reason = "" if row["replaced"] else row["reason"]
    return f"| {row['row'].removeprefix('cell ')} | {verdict} | {' | '.join(shown)} | {reason} |"


def _summary_text(parts: Parts) -> str:
    measured = {shape: _sizes(parts[f"suite-{shape.name}"]) for shape in SHAPES if f"suite-{shape.name}" in parts}
    every = [row for rows in measured.values() for row in rows]
    lines = ["## What it comes to", ""]
    for kind, title, goal in (("tuned", "tuned sizes", 1.09), ("unseen", "sizes that tuning never saw", 1.05)):
        speedups = [row["speedup"] for row in every if row["kind"] == kind and "speedup" in row]
        wanted = len(SHAPES) * (len(TUNED_SIZES) if kind == "tuned" else sum(_is_unseen(m) for m in UNSEEN_SIZES))
        if speedups:
            name = f"geometric mean of native / served, {title} ({len(speedups)} of {wanted} rows)"
            lines.append(_promise(name, geometric_mean(speedups), goal))
    unseen = [row for row in every if row["kind"] == "unseen" and "upper" in row]
    if unseen:
        share = sum(row["speedup"] < math.exp(-SLOWER) for row in unseen) / len(unseen)
        doubt = sum(math.log(row["upper"]) < -SLOWER for row in unseen)
        name = f"unseen sizes slower than native by over 1 %, percent ({doubt} beyond doubt)"
        lines.append(_promise(name, 100 * share, 1.0, at_most=True))
    ends = [row for row in every if row["kind"] == "end" and "speedup" in row]
    if ends:
        sizes = sorted({row["m"] for row in ends})
        mean = geometric_mean(row["speedup"] for row in ends)
        named = ", ".join(f"M = {m}" for m in sizes)
        lines.append(
            f"- {named}: an end of a cell, so tuning saw it; native / served {mean:.3f} over {len(ends)} rows."
        )
    replaced = [row for part in parts.values() for row in part.values() if row["kind"] == "cell" and row["replaced"]]
    bounds = [item["ci_low"] for row in replaced for item in row["reconfirm"] or row["confirm"]]
    if bounds:
        lines.append(_promise(f"least lower bound of {len(replaced)} replaced cells, reconfirm", min(bounds), 1.0))
    for title, goal, chosen in _LIMIT_GOALS:
        fractions = [
            gemm_limit_us(row["m"], shape.n, shape.k, _read_us(shape, parts[f"suite-{shape.name}"])[0])[0]
            / row["candidate_us"]
            for shape, rows in measured.items()
            for row in rows
            if "candidate_us" in row and chosen(shape, row["m"])
        ]
        if fractions:
            lines.append(
                _promise(f"least part of the cold-read limit, {title} ({len(fractions)} rows)", min(fractions), goal)
            )
    lines += [
        "",
        f"The limit of a row is the larger of a cold read of its weight and its arithmetic at {PEAK_FLOPS / 1e12:.0f} "
        "TFLOP/s.",
        "",
    ]
    return "\n".join(lines)


_LIMIT_GOALS: tuple[tuple[str, float, Callable[[Shape, int], bool]], ...] = (
    ("M = 1, large weights", 0.90, lambda shape, m: m == 1 and shape.weight_bytes > LARGE_BYTES),
    ("M = 4 to 16, large weights", 0.80, lambda shape, m: 4 <= m <= 16 and shape.weight_bytes > LARGE_BYTES),
    ("M = 1 to 16, small weights", 0.65, lambda shape, m: m <= 16 and shape.weight_bytes <= LARGE_BYTES),
)


def _sizes(rows: Rows) -> list[Row]:
    return [row for row in rows.values() if row["kind"] in ("tuned", "unseen", "end")]


def _is_unseen(m: int) -> bool:
    """Whether a size is no end of a default cell; those are the same for every weight."""
    return m > 4


def _read_us(shape: Shape, rows: Rows) -> tuple[float, str]:
    """Return a cold read of the weight, and where the number is from."""
    measured = rows.get("read limit", {}).get("read_us")
    return (measured, "measured here") if measured else (recorded_read_us(shape.weight_bytes), "not measured here")


def _peer_cell(call: Row | None, against: Row | None) -> str:
    if call is None:
        return "-"
    if "failed" in call:
        return _failure(call)
    relative = f"; {against['speedup']:.3f}" if against else ""
    return f"{call['speedup']:.3f} ({_interval(call)}){relative}"


def _head(title: str, parts: Parts, only: str = "") -> str:
    """Return a title, and where and how the rows were measured."""
    lines = [f"# {title}", ""]
    chosen = {name: rows for name, rows in parts.items() if name == only or (not only and name.startswith("suite-"))}
    facts: dict[str, None] = {}
    for rows in chosen.values():
        environment = rows.get("environment")
        if environment:
            named = environment["facts"]
            shown = [
                f"{key} {named[key]}" for key in ("gpu", "driver", "torch", "cublas", "python", "cpu") if key in named
            ]
            facts["; ".join(shown)] = None
    lines += [f"{line}." for line in facts]
    commands = dict.fromkeys(rows["environment"]["command"] for rows in chosen.values() if "environment" in rows)
    dates = sorted({row["date"][:10] for rows in chosen.values() for row in rows.values()})
    if dates:
        lines.append(f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))} with:")
        lines += ["", *(f"    {command}" for command in commands), ""]
    sessions = next((row for rows in chosen.values() for row in _with_sessions(rows)), None)
    if sessions:
        lines += [
            f"{sessions['n_sessions']} sessions, {sessions['n_pairs']} pairs a row; mode {sessions['mode']}, timer "
            f"{sessions['timer']}, residency {sessions['residency']}; intervals at 95 %.",
            "",
        ]
    return "\n".join(lines)


def _with_sessions(rows: Rows) -> Iterable[Row]:
    for row in rows.values():
        for candidate in (row, row.get("served", {}), *row.get("calls", {}).values()):
            if "n_sessions" in candidate:
                yield candidate


def _interval(row: Row) -> str:
    return f"{row['ci_low']:.3f} - {row['ci_high']:.3f}"


def _failure(row: Row) -> str:
    lines: Sequence[str] = row["failed"].strip().splitlines()
    return f"failed: {lines[0][:80]}"


def _promise(name: str, seen: float, goal: float, *, at_most: bool = False) -> str:
    holds = seen <= goal if at_most else seen >= goal
    bound = "at most" if at_most else "at least"
    return f"- {name}: {seen:.3f} (goal: {bound} {goal:g}; {'holds' if holds else 'not reached'})"

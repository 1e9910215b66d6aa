"""The suite, a weight shape a part: tune it, then time the generated module at the tuned sizes and at unseen ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_context import Context, served_digest
from gpu_limits import recorded_read_us
from gpu_measure import TIMEOUT_S, Call, measure_rows
from gpu_rows import TUNED_SIZES, UNSEEN_SIZES, Shape, seen_among, write_gemm

from fibc.evaluate import Evaluator
from fibc.evaluators import evaluator_of
from fibc.runtime import oracle
from fibc.schema.codec import to_plain
from fibc.schema.decision import Verdict
from fibc.schema.table import DispatchTable
from fibc.task import Task

RESERVE_S = 40.0
"""For the rows, after the tune: 25 arms in 8 sessions, and the start of a worker (22 s on an H200)."""

GROUP_S = 20.0
"""A group of rows is begun with so much time left, at least."""

READS = ((1024, 4, 0), (2048, 8, 0), (2048, 8, 2), (4096, 8, 4), (1024, 4, 8), (512, 4, 0))
"""Configs of the kernel that only reads: words a block, warps, programs for each multiprocessor (0: all at once)."""


def run(
    context: Context, shape: Shape, tuned: Sequence[int] = TUNED_SIZES, unseen: Sequence[int] = UNSEEN_SIZES
) -> None:
    """Run what is left of the part."""
    definition = write_gemm(context.work / "defs", shape, tuned)
    task = context.task(definition)
    context.note_environment(task)
    table = context.tuned(definition, reserve_s=RESERVE_S)
    if table is None:
        return
    for key in _keys(table):
        context.add(**key)
    package = context.layout.package(task.definition.name)
    ends = seen_among(definition, unseen)
    with evaluator_of(task, context.cache, timeout_s=TIMEOUT_S) as evaluator:
        if task.environment.gpu is not None and not context.log.has("read limit"):
            _measure_read(context, task, evaluator, shape, tuned[0])
        groups = (("tuned", tuned), ("unseen", [m for m in unseen if m not in ends]), ("end", ends))
        for kind, sizes in groups:
            _measure_group(context, task, evaluator, shape, table, package, kind, sizes)


def _measure_group(
    context: Context,
    task: Task,
    evaluator: Evaluator,
    shape: Shape,
    table: DispatchTable,
    package: Path,
    kind: str,
    sizes: Sequence[int],
) -> None:
    """Measure the sizes of one kind that are not measured for this table yet."""
    digest = served_digest(table)
    left = [m for m in sizes if not context.log.has(f"M={m}", table=digest)]
    if not left:
        return
    if context.left_s() < GROUP_S:
        context.say(f"{context.part}: no time left for {kind} sizes {left}")
        return
    began = time.monotonic()
    served = Call("served", f"gpu_calls.served({str(package)!r})")
    rows = measure_rows(evaluator, task, left, {m: [served] for m in left}, f"suite {kind}")
    for m in left:
        numbers = rows[m, "served"]
        context.add(f"M={m}", kind, table=digest, m=m, n=shape.n, k=shape.k, serves=serves(table, task, m), **numbers)
        context.say(f"{shape.name} M={m} ({kind}): {numbers.get('speedup', numbers.get('failed'))}")
    context.say(f"{kind}: {len(left)} sizes in {time.monotonic() - began:.0f} s")


def _measure_read(context: Context, task: Task, evaluator: Evaluator, shape: Shape, m: int) -> None:
    """Measure a cold read of the weight: the best of some kernels that do nothing else."""
    calls = [Call(f"read {config}", f"gpu_calls.read{config}") for config in READS]
    rows = measure_rows(evaluator, task, [m], {m: calls}, "read limit")
    measured = {call.name: rows[m, call.name] for call in calls}
    times = [row["candidate_us"] for row in measured.values() if "candidate_us" in row]
    read_us = min(times, default=None)
    recorded_us = round(recorded_read_us(shape.weight_bytes), 2)
    context.add(
        "read limit",
        "limit",
        read_us=read_us,
        recorded_us=recorded_us,
        weight_bytes=shape.weight_bytes,
        kernels=measured,
    )
    context.say(f"{shape.name}: a cold read takes {read_us} us (recorded earlier: {recorded_us} us)")


def serves(table: DispatchTable, task: Task, m: int) -> str:
    """Return the variant that a table has for a size, or ``native`` with the verdict of its cell."""
    axes = {**task.definition.const_axes, next(iter(task.definition.var_axes)): m}
    region = oracle.find_region(table, axes)
    if region is not None:
        return str(table.variants[table.regions[region].variant].candidate)
    row = next((row for row in table.rows if row.cell.holds((m,))), None)
    return "native" if row is None else f"native ({row.verdict.value}{', revoked' if row.revoked else ''})"


def _keys(table: DispatchTable) -> list[dict[str, Any]]:
    """Return a row for each cell: the verdict with its evidence."""
    return [
        {
            "row": f"cell {row.cell}",
            "kind": "cell",
            "verdict": row.verdict.value,
            "replaced": row.verdict is Verdict.REPLACE and not row.revoked,
            "synthetic": row.synthetic,
            "partial": row.partial,
            "revoked": row.revoked,
            "reason": row.reason,
            "confirm": [to_plain(item) for item in row.confirm],
            "reconfirm": [to_plain(item) for item in row.reconfirm],
        }
        for row in table.rows
    ]

"""Fused add and RMS norm, out of place and in place: against native, FlashInfer where it imports, and a device copy."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from gpu_context import Context, served_digest
from gpu_measure import TIMEOUT_S, Call, against, measure_rows
from gpu_rows import DEFS, NORM_ROWS, write_norm

from fibc.evaluators import evaluator_of
from fibc.schema.constants import epsilon
from fibc.task import Task

NAMES = ("fused_add_rmsnorm", "fused_add_rmsnorm_inplace")
"""Files in ``defs/``; one that is not there is said and left out."""

RESERVE_S = 60.0
"""For the rows of one definition, after its tune."""

TENSORS_MOVED = {"fused_add_rmsnorm": 3, "fused_add_rmsnorm_inplace": 4}
"""Tensors [rows, hidden] that are read or written: two in and one out; in place two in and two out."""


def definitions(directory: Path, rows: Sequence[int] = NORM_ROWS) -> list[Path]:
    """Write the definitions of the part, for those who compile first."""
    return [write_norm(directory, name, rows) for name in NAMES if (DEFS / f"{name}.json").is_file()]


def run(context: Context, rows: Sequence[int] = NORM_ROWS) -> None:
    """Run what is left of the part."""
    names = [name for name in NAMES if (DEFS / f"{name}.json").is_file()]
    for name in set(NAMES) - set(names):
        context.say(f"{name}: defs has no such definition, left out")
    for index, name in enumerate(names):
        _measure(context, name, rows, share=len(names) - index)


def _measure(context: Context, name: str, rows: Sequence[int], share: int) -> None:
    definition = write_norm(context.work / "defs", name, rows)
    task = context.task(definition)
    context.note_environment(task)
    reserve_s = RESERVE_S * share + (context.left_s() - RESERVE_S * share) * (share - 1) / share
    table = context.tuned(definition, reserve_s=reserve_s)
    if table is None:
        return
    digest = served_digest(table)
    left = [m for m in rows if not context.log.has(f"{name} rows={m}", table=digest)]
    if not left:
        return
    package = context.layout.package(task.definition.name)
    calls = {m: _calls(context, task, name, str(package), m) for m in left}
    with evaluator_of(task, context.cache, timeout_s=TIMEOUT_S) as evaluator:
        measured = measure_rows(evaluator, task, left, calls, f"norms {name}")
    for m in left:
        served = measured[m, "served"]
        peers = {call.name: measured[m, call.name] for call in calls[m] if call.name != "served"}
        compared = {
            peer: against(served, numbers)
            for peer, numbers in peers.items()
            if "effects" in numbers and "effects" in served
        }
        context.add(
            f"{name} rows={m}",
            "norm",
            table=digest,
            definition=name,
            rows=m,
            num_bytes=_num_bytes(task, name, m),
            served=served,
            peers=peers,
            against=compared,
            flashinfer=_why_no_flashinfer() or "measured",
        )
        context.say(f"{name} rows={m}: {served.get('speedup', served.get('failed'))}")


def _calls(context: Context, task: Task, name: str, package: str, m: int) -> list[Call]:
    calls = [Call("served", f"gpu_calls.served({package!r})")]
    if task.environment.gpu is None:
        return calls
    eps = epsilon(task.definition)
    if not _why_no_flashinfer() and eps is not None and name.endswith("inplace"):
        calls.append(Call("flashinfer", f"gpu_calls.flashinfer_norm({eps!r})"))
    if len(task.definition.outputs) == 1:
        calls.append(Call("copy", f"gpu_calls.copy({_num_bytes(task, name, m)})"))
    else:
        calls.append(Call("copy", f"gpu_calls.copy_twice({_num_bytes(task, name, m)})"))
    return calls


def _num_bytes(task: Task, name: str, m: int) -> int:
    """Return the bytes that a call has to move; the weight is left out."""
    hidden = max(task.definition.const_axes.values())
    return TENSORS_MOVED[name] * m * hidden * 2


def _why_no_flashinfer() -> str:
    return "" if importlib.util.find_spec("flashinfer") else "not installed here"

"""Candidates and their evaluations as FlashInfer-Trace solutions and traces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, get_args

from fibc.schema.candidate import Candidate
from fibc.schema.codec import to_plain
from fibc.schema.decision import Comparison
from fibc.schema.definition import Definition
from fibc.schema.digest import digest_json
from fibc.schema.evaluation import Evaluation, Status
from fibc.schema.table import NativeSource
from fibc.schema.trace import Language, Solution, Trace, TraceStatus
from fibc.schema.workload import RandomInput, Workload

AUTHOR = "fibc"


def solution_name(definition: Definition, candidate: Candidate) -> str:
    """Return the unique name of the solution that ``candidate`` is for ``definition``."""
    return f"{definition.name}_{candidate.digest}"


def to_solution(
    definition: Definition,
    candidate: Candidate,
    source: str,
    *,
    language: Language,
    file: str,
    entry: str,
    headers: Mapping[str, str] | None = None,
    dependencies: Sequence[str] = (),
) -> Solution:
    """Return ``candidate`` as a solution.

    Args:
        source: The rendered source.
        file: Name of its file.
        entry: The kernel's function in it; in C++ for the host one with the ABI of ``fibc/kernel_abi.h``.
        headers: Text of the headers that ``source`` includes, by path.
        dependencies: Libraries that it needs.
    """
    target = candidate.target
    sources = [{"path": file, "content": source}]
    sources += [{"path": path, "content": text} for path, text in (headers or {}).items()]
    return Solution.model_validate(
        {
            "name": solution_name(definition, candidate),
            "definition": definition.name,
            "author": AUTHOR,
            "description": str(candidate),
            "spec": {
                "language": language,
                "target_hardware": [target.kind if target.kind == "cpu" else str(target)],
                "entry_point": f"{file}::{entry}",
                "dependencies": list(dependencies),
                "destination_passing_style": True,
                "binding": None,
            },
            "sources": sources,
        }
    )


def to_trace(
    definition: Definition,
    workload: Workload,
    candidate: Candidate,
    evaluation: Evaluation,
    native: NativeSource,
    *,
    hardware: str,
    libs: Mapping[str, str],
    timestamp: str,
    comparisons: Sequence[Comparison] = (),
    digests: Mapping[str, str] | None = None,
) -> Trace | None:
    """Return ``evaluation`` as a trace; None where it never ran, or passed without a timing, which no trace can say.

    ``reference_latency_ms`` is native's, what a user has today, and not that of the reference, which nobody serves.
    Its errors are NaN where the outputs held no number to compare.

    Args:
        workload: Where it was evaluated.
        hardware: Name of the device.
        libs: Versions by name.
        timestamp: ISO date and time.
        comparisons: Its published intervals, for ``correctness.extra["fibc"]``.
        digests: More identities to record there, say of the harness.
    """
    status = _trace_status(evaluation.status)
    if status is None or (evaluation.status is Status.PASSED and not evaluation.pairs):
        return None
    outcome: dict[str, Any] = {
        "status": status,
        "environment": {"hardware": hardware, "libs": dict(libs)},
        "timestamp": timestamp,
        "log": evaluation.log,
        "correctness": None,
        "performance": None,
    }
    if status in ("PASSED", "INCORRECT_NUMERICAL"):
        extra = {
            "native": native.name,
            "native_origin": native.origin,
            "reference_latency_of": "native",
            "key": evaluation.key,
            "comparisons": [to_plain(comparison) for comparison in comparisons],
            "digests": {
                **(digests or {}),
                "definition": definition.digest,
                "candidate": candidate.digest,
                "source": candidate.source_digest,
                "native": native.digest,
                "environment": evaluation.environment,
            },
        }
        outcome["correctness"] = {**_errors(evaluation), "extra": {"fibc": extra}}
    if status == "PASSED":
        outcome["performance"] = _performance(evaluation)
    document = {
        "definition": definition.name,
        "workload": workload.to_json(),
        "solution": solution_name(definition, candidate),
        "evaluation": outcome,
    }
    return Trace.model_validate(document)


def workload_at(axes: Mapping[str, int], definition: Definition) -> Workload:
    """Return the workload of a synthetic point: random inputs, a uuid that follows from the definition and ``axes``."""
    identity = f"fibc-{digest_json([definition.name, dict(axes)])}"
    return Workload(identity, dict(axes), {name: RandomInput() for name in definition.inputs}, synthesised=True)


def _trace_status(status: Status) -> str | None:
    if status is Status.REJECTED:
        return None
    return status.value if status.value in get_args(TraceStatus) else "RUNTIME_ERROR"


def _errors(evaluation: Evaluation) -> dict[str, float]:
    found = evaluation.correctness
    if found is None:
        return {"max_relative_error": math.nan, "max_absolute_error": math.nan}
    return {"max_relative_error": found.max_relative_error, "max_absolute_error": found.max_absolute_error}


def _performance(evaluation: Evaluation) -> dict[str, float]:
    log_ratios = [math.log(pair.native_s / pair.candidate_s) for pair in evaluation.pairs]
    return {
        "latency_ms": 1e3 * median(pair.candidate_s for pair in evaluation.pairs),
        "reference_latency_ms": 1e3 * median(pair.native_s for pair in evaluation.pairs),
        "speedup_factor": math.exp(median(log_ratios)),
    }

"""Rows measured as fibc measures: arms beside native in paired sessions, through an Evaluator."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_log import Row

from fibc import decide, measure, stats
from fibc.evaluate import Evaluator
from fibc.schema.candidate import Artifact, Guards
from fibc.schema.codec import to_plain
from fibc.schema.digest import digest_text
from fibc.schema.evaluation import Arm, SessionSamples
from fibc.schema.feature import Cell, FeatureKey, Point
from fibc.schema.policy import PUBLISHED_LEVEL, Policy
from fibc.shop import conditions_of
from fibc.task import Task

TIMEOUT_S = 240.0
"""For one request to the worker. ``torch.compile`` with max-autotune takes half a minute for a row."""

CALLS = Path(__file__).with_name("gpu_calls.py")


@dataclass(frozen=True)
class Call:
    """One arm of a comparison: Python source with ``call(*inputs)``.

    Attributes:
        name: ``served``, ``torch.compile``, ...
        expression: What makes the call, in the names of ``gpu_calls``.
    """

    name: str
    expression: str

    def artifact(self) -> Artifact:
        """Return it as a bench takes it; the worker keeps what ``gpu_calls`` has made over its sessions."""
        source = (
            f"import sys\n\nsys.path.insert(0, {str(CALLS.parent)!r})\nimport gpu_calls\n\ncall = {self.expression}\n"
        )
        return Artifact(digest_text(source), "", "", "", 0, source, Guards((), ()))


def measure_rows(
    evaluator: Evaluator,
    task: Task,
    sizes: Sequence[int],
    calls: Mapping[int, Sequence[Call]],
    stage: str,
    *,
    policy: Policy | None = None,
) -> dict[tuple[int, str], Row]:
    """Measure calls at sizes of the one varying axis; return a row's numbers by size and name of the call.

    All of them ride in the same sessions. One that failed has ``failed`` in place of numbers.

    Args:
        calls: By size.
        stage: Seeds the sessions, with the task's seed.
    """
    (axis,) = task.definition.var_axes
    keys = [FeatureKey(Cell(((m, m),)), (Point(((axis, m),), "benchmark"),), 0, synthetic=False) for m in sizes]
    chosen = policy or task.policy
    artifacts = {_id(m, call): call.artifact() for m in sizes for call in calls[m]}
    arms = [Arm(str(key), 0, _id(m, call)) for key, m in zip(keys, sizes, strict=True) for call in calls[m]]
    bench = evaluator.bench(arms, artifacts, keys, fresh_process=True)
    seen = measure.assess(bench, arms, chosen, task.options.seed, stage)
    conditions = conditions_of(evaluator)
    failures = {(failure.arm.key, failure.arm.candidate): failure for failure in seen.failures}
    rows: dict[tuple[int, str], Row] = {}
    for key, m in zip(keys, sizes, strict=True):
        for call in calls[m]:
            index = arms.index(Arm(str(key), 0, _id(m, call)))
            estimate = seen.estimates[index]
            if estimate is None:
                failure = failures.get((str(key), _id(m, call)))
                log = f"{failure.status}: {failure.log}" if failure else "not measured in every session"
                rows[m, call.name] = {"failed": log[-2000:]}
                continue
            comparison = to_plain(decide.compare(estimate, key.points[0], stage, conditions))
            mine = [sample for sample in seen.samples if sample.arm == arms[index]]
            rows[m, call.name] = {
                **comparison,
                "effects": list(estimate.effects),
                "upper": math.exp(estimate.upper),
                "samples": [_samples(sample) for sample in mine],
            }
    return rows


def against(row: Row, other: Row) -> Row:
    """Return how one call compares with another of the same size in the same sessions: ``speedup`` and interval."""
    effects = [a - b for a, b in zip(row["effects"], other["effects"], strict=True)]
    low, high = stats.interval(effects, PUBLISHED_LEVEL)
    return {"speedup": math.exp(stats.mean(effects)), "ci_low": math.exp(low), "ci_high": math.exp(high)}


def _id(size: int, call: Call) -> str:
    return f"{call.name} at {size}"


def _samples(sample: SessionSamples) -> Row:
    """Return a session's pairs in microseconds: native, candidate, whether native was first."""
    pairs: list[Any] = [
        [round(pair.native_s * 1e6, 4), round(pair.candidate_s * 1e6, 4), int(pair.native_first)]
        for pair in sample.pairs
    ]
    return {"session": sample.session, "seed": sample.seed, "pairs": pairs}

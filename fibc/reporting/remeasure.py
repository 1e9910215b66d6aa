"""What a table serves, measured again: its recorded kernels against native, in fresh sessions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from fibc import decide, gpus, measure
from fibc.backends.recorded import restore
from fibc.cache import Cache
from fibc.environment import detect
from fibc.errors import InputError
from fibc.evaluators import evaluator_on
from fibc.published import Published, read_published
from fibc.reporting.figures import Measured
from fibc.reporting.gather import speedup_of
from fibc.reporting.recorded import Recorded
from fibc.schema.candidate import Artifact
from fibc.schema.decision import Decision
from fibc.schema.evaluation import Arm
from fibc.schema.feature import FeatureKey
from fibc.schema.policy import Policy
from fibc.schema.silicon import CudaValidity
from fibc.settings import DEFAULT_SEED, DEFAULT_TIMEOUT_S
from fibc.shop import conditions_of

SEED = DEFAULT_SEED + 1
"""Other inputs and another order than those of the published sessions."""


def remeasure(records: Path, recorded: Recorded, policy: Policy) -> tuple[tuple[Measured, ...], tuple[str, ...]]:
    """Measure every replaced cell at the points that were published; return them, or why that is not possible here.

    Inputs are random: a recorded tensor does not travel with records.

    Raises:
        BuildError: If a recorded kernel does not link.
        EvaluationError: If native fails, or no worker starts.
    """
    if recorded.table is None:
        return (), (f"not measured: {records} is from before fibc kept kernels with them",)
    published = read_published(records, recorded.table.target)
    table = published.table
    environment = detect(gpu=next(iter(gpus.find().gpus), None) if isinstance(table.validity, CudaValidity) else None)
    if environment.validity() != table.validity:
        return (), (f"not measured: the device is not at hand: {table.validity}, here is {environment.validity()}",)
    cache = Cache()
    artifacts = _restored(published, cache)
    rows = [row for row in table.rows if row.candidate and row.reconfirm]
    keys = {row.cell: _key(row) for row in rows}
    arms = [Arm(str(keys[row.cell]), n, row.candidate) for row in rows for n in range(len(row.reconfirm))]
    mode = rows[0].reconfirm[0].mode if rows else ""
    with evaluator_on(
        environment, published.definition, table.native, cache, seed=SEED, mode=mode, timeout_s=DEFAULT_TIMEOUT_S
    ) as evaluator:
        conditions = conditions_of(evaluator)
        bench = evaluator.bench(arms, artifacts, list(keys.values()), fresh_process=True)
        seen = measure.assess(bench, arms, policy, SEED, "reconfirm")
    found: list[Measured] = []
    for row in rows:
        for said, estimate in zip(row.reconfirm, seen.of(str(keys[row.cell])), strict=True):
            if estimate is not None:
                again = speedup_of(decide.compare(estimate, said.point, "reconfirm", conditions))
                before = speedup_of(said)
                widths = [math.log(item.high / item.low) / 2 for item in (before, again)]
                agrees = abs(math.log(again.value / before.value)) <= math.hypot(*widths)
                found.append(Measured(str(row.cell), before, again, agrees))
    failed = tuple(f"not measured: {item.arm.key}: {item.status}: {item.log}" for item in seen.failures)
    return tuple(found), failed


def _key(row: Decision) -> FeatureKey:
    points = tuple(replace(item.point, workload="") for item in row.reconfirm)
    return FeatureKey(row.cell, points, 0, row.synthetic)


def _restored(published: Published, cache: Cache) -> dict[str, Artifact]:
    """Return the recorded kernels as workers load them, by candidate: the objects that were served."""
    artifacts = {}
    for variant in published.table.variants:
        kernel = published.kernels.get(variant.symbol)
        if kernel is None:
            raise InputError(f"{variant.candidate}: must be recorded with its kernel to be measured again, is not")
        artifacts[variant.candidate.digest] = restore(variant, kernel, cache)
    return artifacts

"""Coverage: of the recorded sizes at which some candidate beats native, how many does a tuned table serve?

An independent run: every candidate that passed in the table's records is timed again at every recorded size, the best
few in sessions that the tune has not seen. Run it after `fibc tune DEFINITION --out OUT`, on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

from fibc import measure
from fibc.cache import Cache
from fibc.clock import now
from fibc.evaluate import Evaluator
from fibc.evaluators import evaluator_of
from fibc.paths import OutLayout
from fibc.records import RecordLog
from fibc.runtime import oracle
from fibc.runtime.package import read_table
from fibc.schema.candidate import Artifact
from fibc.schema.evaluation import Arm, Status
from fibc.schema.feature import Cell, FeatureKey, Point, feature_values
from fibc.schema.options import TuneOptions
from fibc.task import Task, read_task

NUM_BEST = 3
"""Candidates of a size that are measured in sessions; the others were slower in the first look."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("definition", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--largest", type=int, default=1 << 62, help="leave out larger sizes of the first axis")
    parser.add_argument("--results", type=Path, help="write JSON here")
    options = parser.parse_args()
    cache = Cache()
    task = read_task(options.definition, None, TuneOptions(seed=1), cache)
    layout = OutLayout(options.out.absolute())
    table = read_table(layout.package(task.definition.name))
    artifacts = _artifacts(task, layout)
    keys = _keys(task, options.largest)
    with evaluator_of(task, cache) as evaluator:
        best = [arm for key in keys for arm in _best(evaluator, artifacts, key, task)]
        bench = evaluator.bench(best, artifacts, keys, fresh_process=True)
        seen = measure.assess(bench, best, task.policy, 1, "coverage")
    rows = []
    for key in keys:
        estimates = [estimate for estimate in seen.of(str(key)) if estimate is not None]
        lead = max(estimates, key=lambda estimate: estimate.lower)
        axes = {**task.definition.const_axes, **dict(key.points[0].axes)}
        rows.append(
            {
                "size": dict(key.points[0].axes),
                "beatable": lead.lower > task.policy.margin,
                "served": oracle.find_region(table, axes) is not None,
                "speedup": math.exp(lead.mean),
                "lower": math.exp(lead.lower),
                "effects": lead.effects,
            }
        )
        print(f"{key.points[0]}: best {rows[-1]['speedup']:.3f}x, served {rows[-1]['served']}", flush=True)
    beatable = [row for row in rows if row["beatable"]]
    served = sum(bool(row["served"]) for row in beatable)
    print(
        f"coverage: {served} of {len(beatable)} sizes at which a candidate is faster than {task.policy.min_speedup:g}x"
    )
    if options.results:
        command = f"python benchmarks/coverage.py {options.definition} --out {options.out}"
        summary = {"command": command, "date": now(), "environment": task.environment.facts(), "rows": rows}
        options.results.write_text(json.dumps(summary, indent=1) + "\n")


def _artifacts(task: Task, layout: OutLayout) -> dict[str, Artifact]:
    """Build every candidate that passed somewhere."""
    records = layout.records(task.definition.name)
    log = RecordLog(records, definition=task.definition.digest, environment=task.evidence_digest)
    passed = {digest for (_, digest), item in log.evaluations().items() if item.status is Status.PASSED}
    candidates = [candidate for digest, candidate in log.candidates().items() if digest in passed]
    built = task.backends[0].build(task.definition, candidates, timeout_s=60, jobs=task.options.jobs)
    return {digest: item for digest, item in built.items() if isinstance(item, Artifact)}


def _keys(task: Task, largest: int) -> list[FeatureKey]:
    """Return a key of one point for every recorded size."""
    keys = {}
    for workload in task.workloads:
        axes = tuple((name, workload.axes[name]) for name in task.definition.var_axes)
        if 0 < axes[0][1] <= largest:
            cell = Cell(tuple((value, value) for value in feature_values(task.features, workload.axes)))
            keys[axes] = FeatureKey(cell, (Point(axes, "recorded", 0.0, workload.uuid),), 0, synthetic=False)
    return list(keys.values())


def _best(evaluator: Evaluator, artifacts: dict[str, Artifact], key: FeatureKey, task: Task) -> list[Arm]:
    """Return the candidates that look fastest at a size."""
    arms = [Arm(str(key), 0, digest) for digest in artifacts]
    rng = random.Random(1)
    with evaluator.bench(arms, artifacts, [key], fresh_process=False).session(1) as session:
        pairs = [measure.first_rung(session, index, task.policy, rng) for index in range(len(arms))]
    values = [measure.screen_value(item) for item in pairs]
    ranking = sorted(range(len(arms)), key=lambda index: -values[index])
    return [arms[index] for index in ranking[:NUM_BEST]]


if __name__ == "__main__":
    main()

"""Record what every valid config of one key is worth, for replay_samplers.py and the tests of the search.

    python benchmarks/record_objective.py defs/gemm.json 4 tests/data/recorded_gemm_m4.json

Each config is built, validated and timed as a trial of ``fibc tune`` is, but for NUM_RUNGS first rungs: a recording
shall show the landscape, and a trial's noise would hide it. Takes minutes.
"""

from __future__ import annotations

import argparse
import random
import sys
from datetime import UTC, datetime
from pathlib import Path

from fibc import measure
from fibc.backends.base import Backend
from fibc.cache import Cache
from fibc.evaluate import Evaluator
from fibc.evaluators import evaluator_of
from fibc.schema.candidate import Artifact, Candidate
from fibc.schema.evaluation import Status
from fibc.schema.feature import FeatureKey
from fibc.schema.options import TuneOptions
from fibc.search.replay import Place, Recording, save
from fibc.search.space import ConfigSpace
from fibc.task import Task, read_task

NUM_RUNGS = 5


def main() -> None:
    """Parse the command line and record one key."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("definition", type=Path)
    parser.add_argument("size", type=int, help="a size in the key's cell, of the first feature")
    parser.add_argument("recording", type=Path)
    arguments = parser.parse_args()
    cache = Cache()
    task = read_task(arguments.definition, None, TuneOptions(), cache)
    key = next(key for key in task.keys if key.cell.bounds[0][0] <= arguments.size <= key.cell.bounds[0][1])
    save(arguments.recording, record(task, key, cache))


def record(task: Task, key: FeatureKey, cache: Cache) -> Recording:
    """Evaluate every valid config at ``key``."""
    values: dict[Place, float | None] = {}
    spaces = []
    rng = random.Random(task.options.seed)
    with evaluator_of(task, cache) as evaluator:
        for backend in task.backends:
            for space in backend.spaces(task.definition, key)[0]:
                spaces.append(space)
                configs = list(ConfigSpace(space).configs())
                candidates = [backend.candidate(task.definition, space.template, dict(config)) for config in configs]
                artifacts = build(task, backend, candidates)
                for config, candidate in zip(configs, candidates, strict=True):
                    artifact = artifacts.get(candidate.digest)
                    value = evaluate(task, key, evaluator, candidate, artifact, rng) if artifact else None
                    values[space.template, config] = value
                    print(f"{candidate}: {'failed' if value is None else f'{value:+.3f}'}", file=sys.stderr)
    about = (
        f"{task.definition.name} at {key.points[key.screen_point]}, native {task.native.name}, "
        f"{task.environment.model}, {task.environment.num_threads} threads, "
        f"python {' '.join(sys.argv)}, {datetime.now(UTC):%Y-%m-%d}"
    )
    return Recording(about, tuple(spaces), values)


def build(task: Task, backend: Backend, candidates: list[Candidate]) -> dict[str, Artifact]:
    """Return what could be built, by the candidates' digests."""
    built = backend.build(task.definition, candidates, timeout_s=task.options.timeout_s, jobs=task.options.jobs)
    return {digest: artifact for digest, artifact in built.items() if isinstance(artifact, Artifact)}


def evaluate(
    task: Task, key: FeatureKey, evaluator: Evaluator, candidate: Candidate, artifact: Artifact, rng: random.Random
) -> float | None:
    """Return the value of one config, or None where it failed."""
    with evaluator.trial(candidate, artifact, key) as trial:
        if trial.status is not Status.PASSED:
            return None
        try:
            rungs = [measure.first_rung(trial.session, 0, task.policy, rng) for _ in range(NUM_RUNGS)]
        except measure.ArmFailed:
            return None
        return round(measure.screen_value([pair for rung in rungs for pair in rung]), 4)


if __name__ == "__main__":
    main()

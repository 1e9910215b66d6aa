"""What compiling ahead saves: a search whose candidates are really compiled and whose measurements sleep.

::

    python benchmarks/overlap.py --definition defs/fused_add_rmsnorm.json --keys 4 --trials 12 --trial-s 0.8

searches the same keys twice, each time with an empty cache: with no compiler ahead, and with some. No GPU is needed:
Triton cross-compiles, and a trial sleeps for ``--trial-s`` as if a GPU were measured. Prints wall time, how long the
search waited for compilers, and where its builds came from. A trial of more than a second would make a key heavy.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from worlds import MACHINES, SimulatedBench

import fibc.explore
from fibc.cache import Cache
from fibc.evaluate import Evaluator
from fibc.explore import explore
from fibc.paths import OutLayout
from fibc.process_bench import Outcome
from fibc.progress import Quiet
from fibc.records import RecordLog
from fibc.schema.candidate import Artifact, Candidate
from fibc.schema.evaluation import Arm, Correctness, Status
from fibc.schema.feature import FeatureKey
from fibc.schema.options import TuneOptions
from fibc.search.budget import Budget
from fibc.search.store import StudyStore
from fibc.shop import Shop, conditions_of
from fibc.task import read_task


class SleepingEvaluator:
    """Passes every candidate, with a speedup that follows from its digest, after a sleep."""

    facts: Mapping[str, str] = {"residency": "", "mode": "graph", "timer": "simulated", "threads": "1"}

    def __init__(self, trial_s: float) -> None:
        self._trial_s = trial_s

    @contextlib.contextmanager
    def trial(self, candidate: Candidate, artifact: Artifact, key: FeatureKey) -> Iterator[Any]:
        time.sleep(self._trial_s)
        arm = Arm(str(key), key.screen_point, candidate.digest)
        with self.bench([arm], {}, (key,), fresh_process=False).session(0) as session:
            yield SimpleNamespace(status=Status.PASSED, log="", correctness=None, session=session)

    def validate(self, candidate: Candidate, artifact: Artifact, key: FeatureKey) -> Outcome:
        return Outcome(Status.PASSED, "", Correctness(0.0, 0.0, 0.0, True, 1))

    def bench(
        self, arms: Sequence[Arm], artifacts: Mapping[str, Artifact], keys: Sequence[FeatureKey], *, fresh_process: bool
    ) -> SimulatedBench:
        speedups = [random.Random(arm.candidate).uniform(0.7, 1.1) for arm in arms]
        return SimulatedBench(MACHINES[0], arms, speedups, 0)


def search(arguments: argparse.Namespace, compilers: int) -> str:
    """Search every key with an empty cache; return a line of what it took."""
    fibc.explore.compilers_ahead = lambda *_: compilers
    with tempfile.TemporaryDirectory() as name:
        options = TuneOptions(
            target=arguments.target,
            trials=arguments.trials,
            jobs=arguments.jobs,
            budget_s=3600.0,
            split=(1.0, 0.0, 0.0),
        )
        cache, layout = Cache(Path(name) / "cache"), OutLayout(Path(name) / "out")
        layout.root.mkdir()
        task = read_task(arguments.definition, None, options, cache, needs_device=False)
        records = layout.records(task.definition.name)
        records.parent.mkdir(parents=True, exist_ok=True)
        evaluator = cast(Evaluator, SleepingEvaluator(arguments.trial_s))
        with (
            RecordLog(records, definition="", environment="evidence") as log,
            RecordLog(records, definition="", environment="verdicts") as verdicts,
            StudyStore(layout.studies) as store,
        ):
            shop = Shop(task, evaluator, conditions_of(evaluator), Budget(3600.0), log, verdicts, Quiet())
            began = time.monotonic()
            explore(shop, store, task.keys[: arguments.keys])
            wall_s = time.monotonic() - began
            trials = len(log.evaluations())
    builds = shop.builds
    return (
        f"{compilers} of {arguments.jobs} compilers ahead: {wall_s:6.1f} s, {trials} trials, {builds.waited_s:5.1f} s "
        f"waiting for compilers; builds: {builds.ready} ready, {builds.awaited} under way, {builds.built} when asked, "
        f"{builds.unused} unused"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--definition", type=Path, default=Path("defs/fused_add_rmsnorm.json"))
    parser.add_argument("--target", default="cuda:sm_90a")
    parser.add_argument("--keys", type=int, default=4)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--trial-s", type=float, default=0.8)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--compilers", type=int, default=0, help="ahead; by default half of the jobs")
    arguments = parser.parse_args()
    for compilers in (0, arguments.compilers or arguments.jobs // 2):
        print(search(arguments, compilers), flush=True)


if __name__ == "__main__":
    main()

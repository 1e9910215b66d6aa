"""What a session has to be where processes differ: how often 95 % intervals cover the truth, and how often a tie wins.

    python benchmarks/session_kinds.py

takes one candidate of known speedup through confirm and reconfirm in a simulated GPU whose processes differ, with
sessions that share processes in several ways. docs/measuring.md has the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from worlds import SimulatedBench, World

from fibc import measure, stats
from fibc.schema.decision import Verdict
from fibc.schema.evaluation import Arm
from fibc.schema.policy import PUBLISHED_LEVEL, Policy
from fibc.turn import time_pair

BETWEEN = 0.006
WITHIN = 0.002
"""Standard deviations of a ratio between processes and between fresh buffers of one; each side draws its own part."""

GPU = World(
    "GPU", jitter=0.001, drift=0.002, outliers=0.0, layout=WITHIN / math.sqrt(2), process=BETWEEN / math.sqrt(2)
)
"""Graphs on a quiet H200 scatter by a tenth of a percent."""

KINDS: dict[str, Callable[[int], int]] = {
    "fresh buffers in one process": lambda session: 0,
    "eight processes in turn": lambda session: session % 8,
    "a process each": lambda session: session,
}
"""Which process the n-th session is in."""

POLICY = Policy(min_speedup=1.01)
SPEEDUP = 1.07
NUM_RUNS = 1000


@dataclass(frozen=True)
class Seen:
    """What ``NUM_RUNS`` runs showed of one kind of session.

    Attributes:
        covered: Part of the 95 % intervals of a reconfirm that hold the truth.
        covered_long: The same of 32 sessions.
        ties_replaced: Part of the ties that confirm replaces where there is no margin.
        changed: Part of the pairs of runs of a candidate 1 % over the margin that end in another verdict.
    """

    covered: float
    covered_long: float
    ties_replaced: float
    changed: float


def covers(world: World, process_of: Callable[[int], int], num_sessions: int, seed: int) -> bool:
    """Return whether the interval of one reconfirm holds the true speedup."""
    bench = SimulatedBench(world, [Arm("k", 0, "a")], [SPEEDUP], seed, process_of=process_of)
    effects = []
    for index in range(num_sessions):
        with bench.session(index) as session:
            pairs = [time_pair(session, 0, turn, flip=False) for turn in range(POLICY.pairs_per_session)]
            effects.append(stats.session_effect(pairs))
    low, high = stats.interval(effects, PUBLISHED_LEVEL)
    return low <= math.log(SPEEDUP) <= high


def coverage(world: World, process_of: Callable[[int], int], num_sessions: int, num_runs: int = NUM_RUNS) -> float:
    """Return the part of ``num_runs`` intervals that hold the truth."""
    return sum(covers(world, process_of, num_sessions, seed) for seed in range(num_runs)) / num_runs


def replaces(world: World, process_of: Callable[[int], int], speedup: float, policy: Policy, seed: int) -> bool:
    """Return whether confirm replaces native by a candidate."""
    arms = [Arm("k", 0, "a")]
    bench = SimulatedBench(world, arms, [speedup], seed, process_of=process_of)
    return measure.confirm(bench, arms, policy, seed)["k"].verdict is Verdict.REPLACE


def look(process_of: Callable[[int], int]) -> Seen:
    """Return what one kind of session shows."""
    free = Policy(min_speedup=1.0)
    ties = [replaces(GPU, process_of, 1.0, free, seed) for seed in range(NUM_RUNS)]
    near = [replaces(GPU, process_of, 1.02, POLICY, seed) for seed in range(NUM_RUNS)]
    changed = [first != again for first, again in zip(near[::2], near[1::2], strict=True)]
    return Seen(
        coverage(GPU, process_of, POLICY.fixed_sessions),
        coverage(GPU, process_of, POLICY.looks[-1]),
        sum(ties) / len(ties),
        sum(changed) / len(changed),
    )


def main() -> None:
    """Print the table."""
    print("| sessions | 95 % intervals of 8 that cover | of 32 | ties replaced, no margin | 1.02x: verdict changes |")
    print("|---|---|---|---|---|")
    for name, process_of in KINDS.items():
        seen = look(process_of)
        print(
            f"| {name} | {seen.covered:.1%} | {seen.covered_long:.1%} | {seen.ties_replaced:.1%} | {seen.changed:.1%} |"
        )


if __name__ == "__main__":
    main()

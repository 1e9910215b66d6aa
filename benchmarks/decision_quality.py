"""How often the shipped policy errs, in simulated worlds where the truth is known.

    python benchmarks/decision_quality.py

takes keys through every stage that ``fibc tune`` runs (first rung, screen, confirm, decide, reconfirm, settle), prints
tables, writes them with every count to ``benchmarks/results/decision_quality.{json,md}``, and exits with 1 where a
promise is broken. docs/measuring.md explains the numbers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from scipy.stats import binomtest
from worlds import WORLDS, SimulatedBench, World

from fibc import decide, measure, stats
from fibc.schema.decision import Conditions, Decision, Verdict
from fibc.schema.evaluation import Arm
from fibc.schema.feature import Cell, FeatureKey, Point
from fibc.schema.policy import Policy

RESULTS = Path(__file__).parent / "results" / "decision_quality"

NUM_CANDIDATES = (20, 100, 300)
NUM_TIES = 100

KEY = FeatureKey(Cell(((1, 1),)), (Point((("M", 1),), "end"),), screen_point=0, synthetic=True)
BATCH_KEYS = 50
MAX_KEYS = 10**6
"""Seeds of runs are so far apart."""

CONDITIONS = Conditions(residency="simulated", mode="simulated", timer="simulated", num_threads=1)

Speedups = list[float]


@dataclass(frozen=True)
class Outcome:
    """One key at the end of the protocol.

    Attributes:
        best: Largest true speedup among its candidates.
        verdict: Final.
        true_speedup: Of what is served; 1 where that is native.
        claimed: Published speedup; 1 where native is served.
        revoked: Fresh sessions took a replacement back.
        num_pairs: Pairs of timings that were spent.
    """

    best: float
    verdict: Verdict
    true_speedup: float
    claimed: float
    revoked: bool
    num_pairs: int

    @property
    def replaced(self) -> bool:
        """Whether a candidate is served."""
        return self.verdict is Verdict.REPLACE


def mixed_key(rng: random.Random) -> Speedups:
    """Return true speedups: N(0.9, 0.1) cut at 1, and in half of all keys one to three winners from U(1.01, 1.10)."""
    speedups = [min(1.0, rng.gauss(0.9, 0.1)) for _ in range(rng.choice(NUM_CANDIDATES))]
    if rng.random() < 0.5:
        for place in rng.sample(range(len(speedups)), rng.randint(1, 3)):
            speedups[place] = rng.uniform(1.01, 1.10)
    return speedups


def tied_key(rng: random.Random) -> Speedups:
    """Return the least favourable null: every candidate exactly as fast as native."""
    return [1.0] * NUM_TIES


def tune_key(world: World, speedups: Speedups, policy: Policy, seed: int) -> Outcome:
    """Take one key through all stages."""
    arms = _arms(speedups)
    truth = dict(zip((arm.candidate for arm in arms), speedups, strict=True))
    benches: list[SimulatedBench] = []

    def bench(of: Sequence[Arm]) -> SimulatedBench:
        benches.append(SimulatedBench(world, of, [truth[arm.candidate] for arm in of], 4 * seed + len(benches)))
        return benches[-1]

    values = first_rungs(bench(arms), len(arms), policy, seed)
    finalists = measure.screen(benches[0], arms, values, policy, seed).finalists
    decision = prove(bench, finalists, policy, seed) if finalists else decide.keep_native(KEY, "no finalist")
    replaced = decision.verdict is Verdict.REPLACE
    return Outcome(
        best=max(speedups),
        verdict=decision.verdict,
        true_speedup=truth[decision.candidate] if replaced else 1.0,
        claimed=decision.reconfirm[0].speedup if replaced else 1.0,
        revoked=decision.revoked,
        num_pairs=sum(used.num_pairs for used in benches),
    )


def _arms(speedups: Speedups) -> list[Arm]:
    return [Arm(str(KEY), 0, str(index)) for index in range(len(speedups))]


def first_rungs(bench: SimulatedBench, num_arms: int, policy: Policy, seed: int) -> list[float]:
    """Return the value of every trial, each in a session of its own."""
    rng = random.Random(seed)
    values = []
    for arm in range(num_arms):
        with bench.session(measure.session_seed(seed, "trial", arm)) as session:
            values.append(measure.screen_value(measure.first_rung(session, arm, policy, rng)))
    return values


def prove(
    bench: Callable[[Sequence[Arm]], SimulatedBench], finalists: Sequence[Arm], policy: Policy, seed: int
) -> Decision:
    """Confirm the finalists, decide, and reconfirm the winner."""
    confirmation = measure.confirm(bench(finalists), finalists, policy, seed)[str(KEY)]
    decision = decide.decide(KEY, confirmation, policy, CONDITIONS)
    assert isinstance(decision, Decision), "a cell of one size cannot be split"
    if decision.verdict is not Verdict.REPLACE:
        return decision
    winner = [Arm(str(KEY), 0, decision.candidate)]
    fresh = measure.reconfirm(bench(winner), winner, policy, seed)
    return decide.settle(decision, KEY, fresh.estimates, fresh.failures, CONDITIONS)


@dataclass(frozen=True)
class Quality:
    """Counts over the keys of one world.

    Attributes:
        num_keys: Keys.
        num_null: Keys without a winner.
        num_false: Those of them in which native was replaced.
        num_winner: Keys with a winner.
        num_kept: Those of them in which a truly faster candidate is served.
        num_wrong: Those of them in which a candidate that is no faster is served.
        num_inconclusive: Keys that ended so.
        num_revoked: Replacements that fresh sessions took back.
        claim_bias: Mean of claimed over true speedup, less 1, over all replacements.
        regret: Mean over keys with a winner of how much faster the best candidate is than what is served.
        mean_pairs: Pairs of timings per key.
    """

    num_keys: int
    num_null: int
    num_false: int
    num_winner: int
    num_kept: int
    num_wrong: int
    num_inconclusive: int
    num_revoked: int
    claim_bias: float
    regret: float
    mean_pairs: float


def summarise(outcomes: Sequence[Outcome]) -> Quality:
    """Return the counts of ``outcomes``."""
    null = [outcome for outcome in outcomes if outcome.best <= 1]
    winner = [outcome for outcome in outcomes if outcome.best > 1]
    replaced = [outcome for outcome in outcomes if outcome.replaced]
    return Quality(
        num_keys=len(outcomes),
        num_null=len(null),
        num_false=sum(outcome.replaced for outcome in null),
        num_winner=len(winner),
        num_kept=sum(outcome.replaced and outcome.true_speedup > 1 for outcome in winner),
        num_wrong=sum(outcome.replaced and outcome.true_speedup <= 1 for outcome in winner),
        num_inconclusive=sum(outcome.verdict is Verdict.INCONCLUSIVE for outcome in outcomes),
        num_revoked=sum(outcome.revoked for outcome in outcomes),
        claim_bias=_mean([outcome.claimed / outcome.true_speedup - 1 for outcome in replaced]),
        regret=_mean([outcome.best / outcome.true_speedup - 1 for outcome in winner]),
        mean_pairs=_mean([outcome.num_pairs for outcome in outcomes]),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def screened_only(world: World, speedups: Speedups, policy: Policy, seed: int) -> Outcome:
    """Tune a key the common way: what looked best by more than the margin, claimed from the timings that chose it."""
    arms = _arms(speedups)
    bench = SimulatedBench(world, arms, speedups, 4 * seed)
    values = first_rungs(bench, len(arms), policy, seed)
    screening = measure.screen(bench, arms, values, policy, seed)
    best = screening.finalists[0].candidate if screening.finalists else ""
    value = max((screening.values[int(arm.candidate)] for arm in screening.finalists), default=-math.inf)
    replaced = value > policy.margin
    return Outcome(
        best=max(speedups),
        verdict=Verdict.REPLACE if replaced else Verdict.KEEP_NATIVE,
        true_speedup=speedups[int(best)] if replaced else 1.0,
        claimed=math.exp(value) if replaced else 1.0,
        revoked=False,
        num_pairs=bench.num_pairs,
    )


def pooled(world: World, speedups: Speedups, policy: Policy, seed: int) -> Outcome:
    """Test one candidate with a t-bound over the pairs of one process, as if they were independent."""
    arm = Arm(str(KEY), 0, "0")
    bench = SimulatedBench(world, [arm], speedups[:1], seed)
    with bench.session(seed) as session:
        rng = random.Random(seed)
        many = replace(policy, screen_rounds=policy.looks[0] * policy.pairs_per_session, hopeless=(-math.inf,))
        ratios = stats.log_ratios(measure.first_rung(session, 0, many, rng))
    replaced = stats.lower_bound(ratios, policy.alpha) > policy.margin
    return Outcome(
        best=speedups[0],
        verdict=Verdict.REPLACE if replaced else Verdict.KEEP_NATIVE,
        true_speedup=speedups[0] if replaced else 1.0,
        claimed=math.exp(stats.mean(ratios)) if replaced else 1.0,
        revoked=False,
        num_pairs=bench.num_pairs,
    )


KINDS: dict[str, Callable[[random.Random], Speedups]] = {"mix": mixed_key, "ties": tied_key}
WAYS: dict[str, Callable[[World, Speedups, Policy, int], Outcome]] = {
    "shipped": tune_key,
    "screened only": screened_only,
    "pooled pairs": pooled,
}


@dataclass(frozen=True)
class Case:
    """A way to decide, under a policy, on keys of one kind."""

    name: str
    kind: str
    policy: Policy
    way: str = "shipped"


SHIPPED = Policy(min_speedup=1.01)

CASES = (Case("mix", "mix", SHIPPED), Case("ties", "ties", SHIPPED))
"""What measuring.md makes promises about, in every world."""

VARIATIONS = (
    Case("shipped policy", "mix", SHIPPED),
    Case("nothing ends early in the screen", "mix", replace(SHIPPED, hopeless=(-math.inf,), promote_above=-math.inf)),
    Case("nobody is given up", "mix", replace(SHIPPED, patience=math.inf)),
    Case("claimed from the screen", "mix", SHIPPED, "screened only"),
    Case("ties, no margin", "ties", replace(SHIPPED, min_speedup=1.0)),
    Case("ties, no margin, pairs of one process pooled", "ties", replace(SHIPPED, min_speedup=1.0), "pooled pairs"),
)
"""What the parts of the protocol are for, on each machine with layout offsets of 0.5 %."""

VARIATION_WORLDS = tuple(world for world in WORLDS if world.layout == 0.005)


@dataclass(frozen=True)
class Batch:
    """Keys of one case in one world, which one process works off."""

    case: Case
    world: World
    seeds: range

    def run(self) -> list[Outcome]:
        """Take every key to its end."""
        make, way = KINDS[self.case.kind], WAYS[self.case.way]
        return [way(self.world, make(random.Random(seed)), self.case.policy, seed) for seed in self.seeds]


def run_case(
    case: Case, worlds: Sequence[World], num_keys: int, seed: int, pool: Executor | None = None
) -> dict[World, list[Outcome]]:
    """Return the outcomes of ``num_keys`` keys in each world, the same with and without a pool.

    Every key has a seed of its own, and all cases see the same keys.
    """
    batches = [
        Batch(case, world, range(begin, min(begin + BATCH_KEYS, end)))
        for place, world in enumerate(worlds)
        for end in [seed * MAX_KEYS + (place + 1) * num_keys]
        for begin in range(end - num_keys, end, BATCH_KEYS)
    ]
    outcomes: dict[World, list[Outcome]] = {world: [] for world in worlds}
    results = map(Batch.run, batches) if pool is None else pool.map(Batch.run, batches)
    for batch, done in zip(batches, results, strict=True):
        outcomes[batch.world] += done
    return outcomes


@dataclass(frozen=True)
class Claim:
    """A promise, and whether the numbers keep it."""

    text: str
    kept: bool


def claims(mix: Mapping[World, Quality], ties: Mapping[World, Quality], mix_total: Quality) -> tuple[Claim, ...]:
    """Check what docs/measuring.md promises at a margin of 1 %."""
    rates = {
        world: (mix[world].num_false + ties[world].num_false) / (mix[world].num_null + ties[world].num_null)
        for world in mix
    }
    worst = max(rates.values())
    kept = mix_total.num_kept / max(mix_total.num_winner, 1)
    return (
        Claim(f"false replacements at most 0.2 % in every world: worst {worst:.3%}", worst <= 0.002),
        Claim(f"winners kept at least 95 % over the mix: {kept:.1%}", kept >= 0.95),
        Claim(f"claim bias within 0.1 % over the mix: {mix_total.claim_bias:+.3%}", abs(mix_total.claim_bias) <= 0.001),
    )


def false_rate(quality: Quality) -> tuple[float, float]:
    """Return the share of keys without a winner that were replaced, and its 95 % upper bound (Clopper-Pearson)."""
    if not quality.num_null:
        return 0.0, 1.0
    test = binomtest(quality.num_false, quality.num_null, alternative="less")
    return quality.num_false / quality.num_null, float(test.proportion_ci(0.95).high)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; exit 1 where a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=3000, help="keys of the mix, and as many of ties, in each world")
    parser.add_argument("--variation-keys", type=int, default=600, help="keys of each variation on each machine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=RESULTS, help="without a suffix; .json and .md are added")
    options = parser.parse_args(arguments)

    began = time.monotonic()
    with ProcessPoolExecutor(options.jobs) as pool:
        raw = {case.name: run_case(case, WORLDS, options.keys, options.seed, pool) for case in CASES}
        varied = {
            case.name: run_case(case, VARIATION_WORLDS, options.variation_keys, options.seed + 1, pool)
            for case in VARIATIONS
        }
    report = Report(
        command=" ".join(
            ["python", "benchmarks/decision_quality.py", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        environment=_environment(),
        wall_s=round(time.monotonic() - began),
        worlds={name: {world: summarise(seen) for world, seen in by_world.items()} for name, by_world in raw.items()},
        totals={name: summarise([o for seen in by_world.values() for o in seen]) for name, by_world in raw.items()},
        variations={name: {world: summarise(seen) for world, seen in by.items()} for name, by in varied.items()},
    )
    text = report.markdown()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(report.plain(), indent=1) + "\n")
    options.out.with_suffix(".md").write_text(text)
    print(text)
    return 0 if all(claim.kept for claim in report.claims()) else 1


@dataclass(frozen=True)
class Report:
    """Everything that one run of this benchmark found."""

    command: str
    date: str
    environment: dict[str, str]
    wall_s: int
    worlds: dict[str, dict[World, Quality]]
    totals: dict[str, Quality]
    variations: dict[str, dict[World, Quality]]

    def claims(self) -> tuple[Claim, ...]:
        """Return the promises and whether they are kept."""
        return claims(self.worlds["mix"], self.worlds["ties"], self.totals["mix"])

    def plain(self) -> dict[str, Any]:
        """Return the report as JSON-able data, every count included."""
        return {
            "command": self.command,
            "date": self.date,
            "environment": self.environment,
            "wall_s": self.wall_s,
            "claims": {claim.text: claim.kept for claim in self.claims()},
            "policy": asdict(SHIPPED),
            "results": [
                {"keys": name, "world": asdict(world), **asdict(quality)}
                for name, by_world in self.worlds.items()
                for world, quality in by_world.items()
            ],
            "totals": {name: asdict(quality) for name, quality in self.totals.items()},
            "variations": [
                {"variation": name, "world": asdict(world), **asdict(quality)}
                for name, by_world in self.variations.items()
                for world, quality in by_world.items()
            ],
        }

    def markdown(self) -> str:
        """Return the tables that docs/measuring.md quotes."""
        lines = [
            "# Decision quality of the shipped policy",
            "",
            f"`{self.command}`, {self.date}, {self.wall_s} s. "
            + ", ".join(f"{name} {value}" for name, value in self.environment.items()),
            "",
            *(f"- {'kept' if claim.kept else 'BROKEN'}: {claim.text}" for claim in self.claims()),
            "",
            *_table(
                ("machine", "layout sd", *QUALITY_COLUMNS, "false, 100 exact ties"),
                [
                    (world.name, f"{world.layout:.1%}", *_cells(quality), _false_cell(self.worlds["ties"][world]))
                    for world, quality in self.worlds["mix"].items()
                ]
                + [("all", "", *_cells(self.totals["mix"]), _false_cell(self.totals["ties"]))],
            ),
            "",
            "Variations, layout sd 0.5 %:",
            "",
            *_table(
                ("variation", "machine", *QUALITY_COLUMNS),
                [
                    (name, world.name, *_cells(quality))
                    for name, by_world in self.variations.items()
                    for world, quality in by_world.items()
                ],
            ),
        ]
        return "\n".join(lines) + "\n"


QUALITY_COLUMNS = ("false of null keys", "winners kept", "served no faster", "claim bias", "regret", "pairs a key")


def _cells(quality: Quality) -> tuple[str, ...]:
    none = quality.num_winner == 0
    return (
        _false_cell(quality),
        "-" if none else f"{quality.num_kept / quality.num_winner:.1%}",
        "-" if none else f"{quality.num_wrong}",
        f"{quality.claim_bias:+.3%}",
        "-" if none else f"{quality.regret:.2%}",
        f"{quality.mean_pairs:.0f}",
    )


def _false_cell(quality: Quality) -> str:
    rate, high = false_rate(quality)
    return f"{quality.num_false} of {quality.num_null} ({rate:.2%}, below {high:.2%})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _environment() -> dict[str, str]:
    return {"python": platform.python_version(), "numpy": np.__version__, "scipy": scipy.__version__}


if __name__ == "__main__":
    sys.exit(main())

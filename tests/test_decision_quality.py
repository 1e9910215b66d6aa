"""The shipped policy keeps its promises in simulated worlds, and the simulation notices policies that do not."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import decision_quality
import pytest
from decision_quality import SHIPPED, Case, Outcome, run_case, summarise
from worlds import WORLDS

from fibc.schema.decision import Verdict

HARD_WORLDS = tuple(world for world in WORLDS if world.name in {"typical", "shared CPU"} and world.layout == 0.005)
RESULTS = Path(decision_quality.__file__).parent / "results" / "decision_quality.json"


def run(case: Case, num_keys: int) -> decision_quality.Quality:
    return summarise([outcome for seen in run_case(case, HARD_WORLDS, num_keys, seed=0).values() for outcome in seen])


def test_exact_ties_are_not_replaced() -> None:
    assert run(Case("", "ties", SHIPPED), num_keys=60).num_false == 0


def test_winners_are_kept_and_claims_are_true() -> None:
    quality = run(Case("", "mix", SHIPPED), num_keys=80)
    assert quality.num_false == quality.num_wrong == 0
    assert quality.num_kept / quality.num_winner > 0.85
    assert abs(quality.claim_bias) < 0.005
    assert quality.regret < 0.01


def test_claims_from_the_data_that_chose_the_winner_are_caught() -> None:
    quality = run(Case("", "mix", SHIPPED, way="screened only"), num_keys=40)
    assert quality.num_false / quality.num_null > 0.2
    assert quality.claim_bias > 0.005


def test_pooling_the_pairs_of_one_process_is_caught() -> None:
    policy = replace(SHIPPED, min_speedup=1.0)
    quiet = [world for world in WORLDS if world.name == "quiet" and world.layout == 0.01]
    (outcomes,) = run_case(Case("", "ties", policy, way="pooled pairs"), quiet, 200, seed=0).values()
    assert summarise(outcomes).num_false / 200 > 0.2


def test_an_uncorrected_bound_is_caught() -> None:
    """Twelve bounds share the error of a key. With all of it for each, and no margin, ties are replaced too often."""
    quiet = [world for world in WORLDS if world.name == "quiet" and world.layout == 0.01]
    no_margin = replace(SHIPPED, min_speedup=1.0)
    uncorrected = replace(no_margin, alpha=0.4)
    wrong = {}
    for policy in (no_margin, uncorrected):
        (outcomes,) = run_case(Case("", "ties", policy), quiet, 60, seed=0).values()
        wrong[policy.alpha] = summarise(outcomes).num_false
    assert wrong[0.05] <= 3
    assert wrong[0.4] > wrong[0.05]


def test_keys_have_the_winners_that_the_worlds_define() -> None:
    keys = [decision_quality.mixed_key(random.Random(seed)) for seed in range(400)]
    winners = [[s for s in key if s > 1] for key in keys]
    assert {len(key) for key in keys} == {20, 100, 300}
    assert 0.4 < sum(bool(w) for w in winners) / 400 < 0.6
    assert {len(w) for w in winners} == {0, 1, 2, 3}
    assert all(1.01 <= s <= 1.10 for w in winners for s in w)
    assert decision_quality.tied_key(random.Random(0)) == [1.0] * 100


def test_outcomes_are_counted_as_their_names_say() -> None:
    outcomes = [
        Outcome(1.0, Verdict.REPLACE, 0.99, 1.03, False, 10),
        Outcome(1.0, Verdict.KEEP_NATIVE, 1.0, 1.0, True, 20),
        Outcome(1.1, Verdict.REPLACE, 1.1, 1.1, False, 30),
        Outcome(1.1, Verdict.REPLACE, 0.98, 1.0, False, 40),
        Outcome(1.05, Verdict.INCONCLUSIVE, 1.0, 1.0, False, 50),
    ]
    quality = summarise(outcomes)
    assert (quality.num_keys, quality.num_null, quality.num_false) == (5, 2, 1)
    assert (quality.num_winner, quality.num_kept, quality.num_wrong) == (3, 1, 1)
    assert (quality.num_inconclusive, quality.num_revoked, quality.mean_pairs) == (1, 1, 30)
    assert quality.claim_bias == pytest.approx((1.03 / 0.99 - 1 + 0 + 1.0 / 0.98 - 1) / 3)
    assert quality.regret == pytest.approx((0 + 1.1 / 0.98 - 1 + 0.05) / 3)


def test_a_broken_promise_is_named() -> None:
    good = decision_quality.Quality(200, 100, 0, 100, 96, 0, 0, 0, 0.0002, 0.0, 0.0)
    world = WORLDS[0]
    assert all(claim.kept for claim in decision_quality.claims({world: good}, {world: good}, good))
    bad = replace(good, num_false=1, num_kept=94, claim_bias=0.002)
    assert not any(claim.kept for claim in decision_quality.claims({world: bad}, {world: good}, bad))


def test_the_committed_results_are_of_the_shipped_policy_and_keep_every_promise() -> None:
    report = json.loads(RESULTS.read_text())
    assert report["policy"] == json.loads(json.dumps(asdict(SHIPPED)))
    assert report["claims"]
    assert all(report["claims"].values())
    assert len(report["results"]) == 2 * len(WORLDS)
    assert all(result["num_keys"] >= 3000 for result in report["results"])


def test_a_run_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "quality"
    status = decision_quality.main(["--keys", "2", "--variation-keys", "1", "--jobs", "2", "--out", str(out)])
    printed = capsys.readouterr().out
    report = json.loads(out.with_suffix(".json").read_text())
    assert out.with_suffix(".md").read_text().strip() == printed.strip()
    assert report["command"].startswith("python benchmarks/decision_quality.py --keys 2")
    assert status == (0 if all(report["claims"].values()) else 1)
    assert all(world.name in printed for world in WORLDS)

"""How large a report of a large table is, and how soon it answers in a browser.

    python benchmarks/report_size.py

makes records of a simulated table (60 keys, 60 candidates each, finalists raced and winners reconfirmed), writes the
report, opens it in headless Chromium, waits until its script has run, jumps to the chart of all speedups and waits
until it is drawn; then changes the key of another chart. Prints bytes and seconds, writes them to
``benchmarks/results/<cpu>/report_size.json``, and exits with 1 where a promise is broken: under 8 MB, interactive
within 2 s.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import toys
from browser import Browser, find_chromium

import fibc
from fibc import decide, environment, measure
from fibc.paths import safe_name
from fibc.published import KIND as PUBLISHED
from fibc.records import RecordLog
from fibc.reporting.contenders import estimates
from fibc.schema.candidate import Candidate, Guards, Target, TensorGuard
from fibc.schema.codec import to_plain
from fibc.schema.decision import Conditions, Decision, Verdict
from fibc.schema.evaluation import Arm, Correctness, Evaluation, Pair, SessionSamples, Status
from fibc.schema.feature import Cell, Feature, FeatureKey, Point
from fibc.schema.policy import Policy
from fibc.schema.table import Region, Variant

MAX_BYTES = 8_000_000
MAX_S = 2.0

CONDITIONS = Conditions("A=hot B=cold", "graph", "cuda_event", 1)
FAILED = (Status.COMPILE_ERROR, Status.RESOURCE, Status.INCORRECT_NUMERICAL)

READY = "document.documentElement.dataset.ready === 'yes'"
JUMP = "document.querySelector('.jump a[href$=-s-speed]').click()"
DRAWN = "!!document.querySelector('#t0-speedup[data-drawn]')"


def write_records(path: Path, num_keys: int, num_candidates: int, seed: int = 0) -> None:
    """Write records of a table with ``num_keys`` cells, each searched with ``num_candidates`` trials."""
    rng = random.Random(seed)
    policy = Policy(min_speedup=1.01)
    spec = toys.gemm_table()
    features = (Feature("M", None, tuple(64 * (n + 1) for n in range(num_keys))),)
    log = RecordLog(path, definition=spec.definition_digest, environment="evidence")
    verdicts = RecordLog(path, definition=spec.definition_digest, environment="fingerprint")
    rows, winners = [], {}
    with log, verdicts:
        for first, last in features[0].ranges():
            points = tuple(Point((("M", size),), "end") for size in (first, last))
            key = FeatureKey(Cell(((first, last),)), points, 1, synthetic=True)
            candidates = [_candidate(n, first) for n in range(num_candidates)]
            speedups = sorted((rng.gauss(0.9, 0.12) for _ in candidates), reverse=True)
            rng.shuffle(order := list(range(num_candidates)))
            for n in order:
                log.append("candidate", candidates[n])
                log.append("evaluation", _evaluation(candidates[n], key, speedups[n], rng))
            raced = [*_samples("confirm", key, candidates[:4], speedups, rng)]
            for sample in raced:
                log.append("samples", sample)
            confirmation = measure.replay(raced, (), policy)[str(key)]
            decision = decide.decide(key, confirmation, policy, CONDITIONS, num_splits=decide.MAX_SPLITS)
            assert isinstance(decision, Decision)
            if decision.verdict is Verdict.REPLACE:
                place = next(n for n, item in enumerate(candidates) if item.digest == decision.candidate)
                winners[decision.candidate] = candidates[place]
                fresh = [*_samples("reconfirm", key, [candidates[place]], speedups[place:], rng)]
                for sample in fresh:
                    log.append("samples", sample)
                seen = estimates(fresh, "reconfirm")[str(key)][decision.candidate]
                decision = decide.settle(decision, key, [seen[0], seen[1]], (), CONDITIONS)
            verdicts.append("decision", decision)
            rows.append(decision)
        guards = Guards((TensorGuard(), TensorGuard()), (TensorGuard(),))
        variants = tuple(
            Variant(f"fibc_{digest}", candidate, digest, "sm_90a", guards, True, False)
            for digest, candidate in sorted(winners.items())
        )
        numbers = {variant.candidate.digest: n for n, variant in enumerate(variants)}
        regions = tuple(Region(row.cell, numbers[row.candidate], False) for row in rows if row.candidate)
        table = replace(
            spec,
            definition="simulated_gemm",
            features=features,
            variants=variants,
            rows=tuple(rows),
            regions=regions,
            fingerprint="fingerprint",
            min_speedup=policy.min_speedup,
        )
        log.append(PUBLISHED, {"definition": {}, "table": to_plain(table), "kernels": {}})


def _candidate(number: int, first: int) -> Candidate:
    config = (
        ("block_m", 16 << number % 4),
        ("block_n", 32 << number % 3),
        ("block_k", 64),
        ("num_warps", 4 + number % 5),
        ("num_stages", 2 + number // 12),
        ("split_k", 1 + first % 3),
        ("promotion", number),
    )
    template = ("gemm/triton_tile", "gemm/triton_tma", "gemm/triton_swap", "gemm/triton_stream")[number % 4]
    return Candidate("triton", template, config, f"source {number}", Target("cuda", "sm_90a"))


def _evaluation(candidate: Candidate, key: FeatureKey, speedup: float, rng: random.Random) -> Evaluation:
    failed = rng.random() < 0.05
    status = rng.choice(FAILED) if failed else Status.PASSED
    pairs = () if failed else tuple(_pair(key, speedup, rng, native_first=n % 2 == 0) for n in range(4))
    correctness = None if failed else Correctness(1e-3, 1e-2, 0.4, deterministic=True, num_cases=14)
    log = "ptxas error: Entry function uses too much shared data (0x39c00 bytes, 0x38c00 max)" if failed else ""
    return Evaluation(candidate.digest, str(key), status, log, correctness, pairs, "evidence", rng.uniform(0.1, 2.0))


def _samples(
    stage: str, key: FeatureKey, candidates: list[Candidate], speedups: list[float], rng: random.Random
) -> Iterator[SessionSamples]:
    for session in range(8):
        for candidate, speedup in zip(candidates, speedups, strict=False):
            for point in range(len(key.points)):
                pairs = tuple(_pair(key, speedup, rng, native_first=n % 2 == 0) for n in range(8))
                yield SessionSamples(Arm(str(key), point, candidate.digest), stage, session, session, pairs)


def _pair(key: FeatureKey, speedup: float, rng: random.Random, *, native_first: bool) -> Pair:
    native_s = 1e-5 * (1 + key.cell.bounds[0][1] / 500) * math.exp(rng.gauss(0, 0.01))
    return Pair(native_s, native_s / speedup * math.exp(rng.gauss(0, 0.01)), native_first)


def main() -> int:
    """Measure, print, write; return 1 where a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=60)
    parser.add_argument("--candidates", type=int, default=60)
    parser.add_argument("--opens", type=int, default=5, help="Times the page is opened; the slowest counts.")
    parser.add_argument("--keep", type=Path, help="Keep the page here.")
    parser.add_argument("--no-write", action="store_true", help="Write no results file.")
    options = parser.parse_args()
    chromium = find_chromium()
    if chromium is None:
        print("report_size: needs Chromium (apt-get install chromium)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        records, page = Path(name) / "simulated_gemm.records", options.keep or Path(name) / "report.html"
        write_records(records, options.keys, options.candidates)
        began = time.monotonic()
        fibc.report(records, html=page)
        written_s = time.monotonic() - began
        num_bytes = page.stat().st_size
        ready: list[float] = []
        answers: list[float] = []
        for phone in (False, True):
            for _ in range(options.opens):
                with Browser(chromium) as browser:
                    opened = time.monotonic()
                    browser.open(page, width=390 if phone else 1280, height=844, phone=phone)
                    browser.wait_for(READY)
                    browser.evaluate(JUMP)
                    browser.wait_for(DRAWN)
                    ready.append(time.monotonic() - opened)
                    answers.append(_answer(browser))
                    assert not browser.problems, browser.problems
    facts = environment.detect()
    result = {
        "command": " ".join(["python benchmarks/report_size.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": {**facts.facts(), "chromium": _version(chromium)},
        "keys": options.keys,
        "candidates": options.candidates,
        "bytes": num_bytes,
        "write_s": round(written_s, 2),
        "interactive_s": round(max(ready), 3),
        "interactive_samples_s": [round(value, 3) for value in ready],
        "answer_s": round(max(answers), 3),
        "answer_samples_s": [round(value, 3) for value in answers],
    }
    print(
        f"{options.keys} keys x {options.candidates} candidates: {num_bytes / 1e6:.2f} MB "
        f"(promise {MAX_BYTES / 1e6:g}), written in {written_s:.1f} s, interactive in {max(ready):.2f} s at "
        f"worst, {statistics.median(ready):.2f} s in the median (promise {MAX_S:g}), another key in "
        f"{max(answers):.2f} s"
    )
    if not options.no_write:
        out = Path(__file__).parent / "results" / safe_name(facts.model) / "report_size.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if num_bytes < MAX_BYTES and max(*ready, *answers) < MAX_S else 1


def _version(chromium: str) -> str:
    done = subprocess.run([chromium, "--version"], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def _answer(browser: Browser) -> float:
    """Return the seconds from choosing another key until its chart is drawn."""
    began = time.monotonic()
    browser.evaluate(
        "(() => { const select = document.querySelector('select[data-search]'); select.selectedIndex = 7;"
        " select.dispatchEvent(new Event('change')); })()"
    )
    browser.wait_for("!!document.querySelector('[id$=-trajectory]').data")
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())

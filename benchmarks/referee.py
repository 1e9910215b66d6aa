"""The referee: five ways to pick a kernel on the same candidates, and what becomes of their claims.

    python benchmarks/referee.py                              # on the CPU: four keys, about a quarter of an hour
    python benchmarks/referee.py --target cuda                # on a GPU: twelve keys; go on with the same command
    python benchmarks/referee.py --target cuda --prepare      # only build the candidates; needs no GPU

Every picker gets the same precompiled candidates, the same inputs and the same budget of timings, several times anew:
the least of the medians (as triton.autotune), the least of the minima (Inductor), the least mean (FlashInfer), a fixed
margin of 5 %, and fibc's own policy. contest/pickers.py says what each of them does. Then a referee measures every pick
again, in other processes, with other inputs and at another time. Three controls keep it honest: native hidden under
many names, a planted winner, and kernels that are wrong and fast.

Each unit of work is logged when it is done, and a later run skips it: ``--limit-s`` ends a run after some minutes, with
status 3. Results are written to ``benchmarks/results/<machine>/referee.{json,md,svg}``, with the log beside them. The
status is 1 where a promise of fibc is broken. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import zstandard
from contest import candidates, controls, rounds
from contest.candidates import Bundle
from contest.log import Log
from contest.machine import Machine
from contest.plan import PLANS, Plan
from contest.report import Report
from contest.rounds import Contest, LimitReachedError

from fibc import gpus
from fibc.cache import Cache
from fibc.clock import now
from fibc.environment import Environment, detect
from fibc.errors import FibcError, InputError
from fibc.gpu_lock import lock_device
from fibc.paths import atomic_write, safe_name
from fibc.schema.decision import SESSION
from fibc.settings import DEFAULT_LOCK_WAIT_S

RESULTS = Path(__file__).parent / "results"

UNFINISHED = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is left to do; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options, list(sys.argv[1:] if arguments is None else arguments))
    except FibcError as error:
        print(error, file=sys.stderr)
        return error.exit_status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=tuple(PLANS), default="cpu")
    parser.add_argument("--prepare", action="store_true", help="build the candidates into --bundle, and end")
    parser.add_argument("--bundle", type=Path, help="built candidates; default: made in --work where it is missing")
    parser.add_argument("--work", type=Path, help="directory of the log (default: build/referee-TARGET)")
    parser.add_argument("--results", type=Path, help="directory of the results (default: benchmarks/results/MACHINE)")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no unit after so many seconds")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at once")
    parser.add_argument("--weights", help="N x K of the weights, for example 128x2048,4096x4096")
    parser.add_argument("--sizes", help="M of the keys, for example 1,8,64")
    parser.add_argument("--candidates", type=int, help="of a key")
    parser.add_argument("--repeats", type=int, help="of every picker")
    parser.add_argument("--control-repeats", type=int)
    parser.add_argument("--hidden", type=int, help="names under which native hides")
    parser.add_argument("--planted", type=float, help="true speedup of the planted winner")
    parser.add_argument("--parts", type=int, help="of the referee for a definition, four sessions each")
    parser.add_argument("--seed", type=int)
    return parser


def read_plan(options: argparse.Namespace) -> Plan:
    """Return the target's plan with what the command line changes.

    Raises:
        InputError: If a list is malformed.
    """
    try:
        given = {
            "weights": _weights(options.weights),
            "sizes": options.sizes and tuple(int(size) for size in options.sizes.split(",")),
            "num_candidates": options.candidates,
            "num_repeats": options.repeats,
            "num_control_repeats": options.control_repeats,
            "num_hidden": options.hidden,
            "planted": options.planted,
            "num_parts": options.parts,
            "seed": options.seed,
        }
    except ValueError as error:
        raise InputError(f"--weights, --sizes: {error} (accepted: 128x2048,4096x4096 and 1,8,64)") from error
    return replace(PLANS[options.target], **{name: value for name, value in given.items() if value is not None})


def _weights(text: str | None) -> tuple[tuple[int, int], ...] | None:
    if text is None:
        return None
    pairs = (weight.split("x") for weight in text.split(","))
    return tuple((int(n), int(k)) for n, k in pairs)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    plan = read_plan(options)
    work = options.work or Path("build") / f"referee-{plan.target}"
    bundle_dir = options.bundle or work / "bundle"
    cache = Cache()
    if options.prepare or not (bundle_dir / candidates.INDEX).is_file():
        made = candidates.prepare(plan, detect(), cache, jobs=options.jobs)
        made.save(bundle_dir)
        print(f"{len(made.built)} kernels in {bundle_dir}", file=sys.stderr)
    if options.prepare:
        return 0
    environment = detect(gpu=gpus.find().first() if plan.target == "cuda" else None)
    bundle = candidates.load(bundle_dir)
    _check_bundle(bundle, plan, bundle_dir)
    log = Log(
        work / "referee.jsonl",
        {
            "plan": plan.digest,
            "candidates": bundle.digest,
            "environment": environment.digest,
            **({"session": SESSION} if environment.gpu is not None else {}),
        },
    )
    machine = Machine(plan.target, bundle.built, environment, cache, plan.seed)
    names = [definition.name for definition in plan.definitions]
    entries = [entry for entry in bundle.entries if entry.definition.name in names]
    contest = Contest(plan, entries, machine, log, options.limit_s, say=lambda line: print(line, file=sys.stderr))
    with lock_device(environment.gpu, wait_s=DEFAULT_LOCK_WAIT_S, say=lambda line: print(line, file=sys.stderr)):
        complete = hold(contest)
    facts = {
        "command": f"python benchmarks/referee.py {' '.join(arguments)}".strip(),
        "date": now(),
        "hardware": environment.hardware,
        **environment.facts(),
        **next((record["facts"] for record in log.of("facts")), {}),
    }
    report = Report.of(log, plan, facts, complete=complete)
    directory = options.results or RESULTS / machine_name(environment)
    write(report, log, directory)
    print(report.markdown())
    if not complete:
        print("not complete: the same command goes on", file=sys.stderr)
        return UNFINISHED
    return 1 if any(promise.kept is False for promise in report.promises()) else 0


def _check_bundle(bundle: Bundle, plan: Plan, directory: Path) -> None:
    wanted = {(definition.name, str(key)) for definition in plan.definitions for key in plan.keys}
    there = {(entry.definition.name, key) for entry in bundle.entries for key in entry.candidates}
    if bundle.target != plan.target or not wanted <= there:
        keys = ", ".join(f"{name} M={size}" for name, size in sorted(wanted))
        raise InputError(
            f"{directory}: must hold candidates of {plan.target} for {keys} (remove it, or add --prepare once)"
        )


def hold(contest: Contest) -> bool:
    """Hold the contest, or go on with it; return whether it is over.

    The referee comes last, when the picks lie some time back.
    """
    try:
        rounds.check(contest)
        boards = rounds.boards(contest)
        for board in boards:
            rounds.pick_board(contest, board)
        controls.wrong(contest)
        controls.hidden(contest)
        boards.append(controls.planted(contest))
        rounds.judge(contest, boards)
    except LimitReachedError as error:
        contest.say(str(error))
        return False
    return True


def machine_name(environment: Environment) -> str:
    """Return the name of the machine's directory: the CPU's model, or ``h200``."""
    if environment.gpu is None:
        return safe_name(environment.model)
    return safe_name(environment.gpu.name.removeprefix("NVIDIA ").lower().replace(" ", "-"))


def write(report: Report, log: Log, directory: Path) -> None:
    """Write the results."""
    text = json.dumps(report.to_json(), indent=1) + "\n"
    atomic_write(directory / "referee.json", text.encode())
    atomic_write(directory / "referee.md", report.markdown("referee.svg").encode())
    atomic_write(directory / "referee.svg", report.svg().encode())
    packed = zstandard.ZstdCompressor(level=19).compress(log.path.read_bytes())
    atomic_write(directory / "referee.jsonl.zst", packed)


if __name__ == "__main__":
    sys.exit(main())

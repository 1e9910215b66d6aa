"""One part of the GPU benchmarks: finished rows are kept, and the same command goes on where it was cut off.

    python benchmarks/gpu/run.py suite-4096x4096
    python benchmarks/gpu/run.py norms

A part takes under ten minutes on one GPU with 16 cores. Rows go to --results as JSON lines with their raw samples, and
what a later run goes on from as an archive; benchmarks/gpu/merge.py makes tables of them.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_host
import gpu_norms
import gpu_peers
import gpu_suite
from gpu_context import Context, keep_state, take_state
from gpu_rows import SHAPES

from fibc.errors import FibcError

PARTS: dict[str, Callable[[Context], None]] = {
    "norms": gpu_norms.run,
    "host": gpu_host.run,
    "peers": gpu_peers.run,
}
SUITE = "suite-"


def part(name: str) -> Callable[[Context], None]:
    """Return what runs the part ``name``.

    Raises:
        ValueError: If there is no such part.
    """
    for shape in SHAPES:
        if name == f"{SUITE}{shape.name}":
            return lambda context, shape=shape: gpu_suite.run(context, shape)  # type: ignore[misc]
    if name not in PARTS:
        raise ValueError(f"PART: no such part, got {name!r} (accepted: {', '.join(part_names())})")
    return PARTS[name]


def part_names() -> tuple[str, ...]:
    return (*(f"{SUITE}{shape.name}" for shape in SHAPES), *PARTS)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("part", metavar="PART", help=", ".join(part_names()))
    made.add_argument("--work", type=Path, default=Path("build/gpu"), help="directory to work in")
    made.add_argument("--results", type=Path, default=Path("build/gpu/results"), help="rows and state go here")
    made.add_argument("--state", type=Path, action="append", default=[], help="results of an earlier run to go on from")
    made.add_argument("--compiled", type=Path, help="what `fibc tune --compile-only` filled (its fibc-compiled)")
    made.add_argument("--compiled-only", action="store_true", help="search nothing else")
    made.add_argument("--records", type=Path, action="append", default=[], help="records that modules are made of")
    made.add_argument("--target", default="cuda", help="cuda, or cpu for a walk without a GPU")
    made.add_argument("--trials", type=int, default=24, help="trials per key")
    made.add_argument("--budget-s", type=float, default=400.0, help="for a tune, at most")
    made.add_argument("--deadline-s", type=float, default=570.0, help="for the whole part")
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        run = part(options.part)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    work = options.work / options.part
    context = Context(
        part=options.part,
        work=work,
        results=options.results,
        target=options.target,
        ends=time.monotonic() + options.deadline_s,
        tune={"trials": options.trials, "budget_s": options.budget_s, "compiled_only": options.compiled_only},
        records=tuple(options.records),
    )
    take_state(context, tuple(options.state))
    if options.compiled is not None:
        _take_compiled(options.compiled, context.layout.compiled)
    signal.signal(signal.SIGTERM, _interrupt)  # what stops a part from outside lets it keep its state
    began = time.monotonic()
    try:
        run(context)
    except KeyboardInterrupt:
        context.say(f"{options.part}: interrupted; the same command goes on")
        return 130
    except FibcError as error:
        context.say(f"{options.part}: {error}")
        return error.exit_status
    finally:
        keep_state(context)
        context.say(f"{options.part}: {time.monotonic() - began:.0f} s, rows in {context.log.path}")
    return 0


def _take_compiled(source: Path, target: Path) -> None:
    """Copy candidates that were compiled before to where tunes look for them."""
    if not source.is_dir():
        raise SystemExit(f"--compiled: must be a directory, got {source}")
    shutil.copytree(source, target, dirs_exist_ok=True)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

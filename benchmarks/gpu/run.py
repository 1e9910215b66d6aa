"""One part of the GPU benchmarks: finished rows are kept, and the same command goes on where it was cut off.

    python benchmarks/gpu/run.py norms --compile-only --budget-s 3600      on any machine, once
    python benchmarks/gpu/run.py norms --compiled build/gpu-compiled/norms/fibc-compiled --compiled-only

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_host
import gpu_norms
import gpu_peers
import gpu_suite
from gpu_context import SPLIT, Context, keep_state, take_state
from gpu_rows import SHAPES, Shape, write_gemm
from rich.console import Console

import fibc
from fibc import progress, terminal
from fibc.errors import FibcError
from fibc.settings import DEFAULT_MAX_MB

COMPILED = Path("build/gpu-compiled")
"""Beside build/gpu, so that one part's candidates travel without anything else."""

SUITE = "suite-"


@dataclass(frozen=True)
class Part:
    """A part.

    Attributes:
        run: Runs what is left of it.
        definitions: Writes what it tunes into a directory; returns the files.
    """

    run: Callable[[Context], None]
    definitions: Callable[[Path], Sequence[Path]]


def _suite(shape: Shape) -> Part:
    return Part(lambda context: gpu_suite.run(context, shape), lambda directory: [write_gemm(directory, shape)])


PARTS: dict[str, Part] = {
    **{f"{SUITE}{shape.name}": _suite(shape) for shape in SHAPES},
    "norms": Part(gpu_norms.run, gpu_norms.definitions),
    "host": Part(gpu_host.run, gpu_host.definitions),
    "peers": Part(gpu_peers.run, gpu_peers.definitions),
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("part", metavar="PART", help=", ".join(PARTS))
    made.add_argument("--work", type=Path, default=Path("build/gpu"), help="directory to work in")
    made.add_argument("--results", type=Path, default=Path("build/gpu/results"), help="rows and state go here")
    made.add_argument("--state", type=Path, action="append", default=[], help="results of an earlier run to go on from")
    made.add_argument("--compiled", type=Path, help="what --compile-only filled: a directory named fibc-compiled")
    made.add_argument("--compile-only", action="store_true", help="fill build/gpu-compiled/PART, without a GPU")
    made.add_argument("--arch", default="sm_90a", help="with --compile-only: for what")
    made.add_argument("--max-mb", type=float, default=DEFAULT_MAX_MB, help="with --compile-only: of each definition")
    made.add_argument("--compiled-only", action="store_true", help="search nothing else")
    made.add_argument("--records", type=Path, action="append", default=[], help="records that modules are made of")
    made.add_argument("--target", default="cuda", help="cuda, or cpu for a walk without a GPU")
    made.add_argument("--backends", default="", help="of tunes, separated by commas (default: as `fibc tune`)")
    made.add_argument("--trials", type=int, default=24, help="trials per key")
    made.add_argument("--budget-s", type=float, default=400.0, help="for a tune, at most")
    made.add_argument("--deadline-s", type=float, default=570.0, help="for the whole part")
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if options.part not in PARTS:
        print(f"PART: no such part, got {options.part} (accepted: {', '.join(PARTS)})", file=sys.stderr)
        return 2
    part = PARTS[options.part]
    if options.compile_only:
        return compile_only(options, part)
    work = options.work / options.part
    context = Context(
        part=options.part,
        work=work,
        results=options.results,
        target=options.target,
        ends=time.monotonic() + options.deadline_s,
        tune={
            "trials": options.trials,
            "budget_s": options.budget_s,
            "compiled_only": options.compiled_only,
            "backends": _backends(options),
        },
        records=tuple(options.records),
    )
    take_state(context, tuple(options.state))
    if options.compiled is not None:
        _take_compiled(options.compiled, context.layout.compiled)
    signal.signal(signal.SIGTERM, _interrupt)  # what stops a part from outside lets it keep its state
    began = time.monotonic()
    try:
        part.run(context)
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


def compile_only(options: argparse.Namespace, part: Part) -> int:
    """Compile what a part would ask for into ``build/gpu-compiled/PART``, without a GPU."""
    out = COMPILED / options.part
    with progress.terminal(Console(stderr=True)) as shown:
        for definition in part.definitions(out / "defs"):
            result = fibc.compile_only(
                definition,
                out=out,
                target=f"cuda:{options.arch}",
                split=SPLIT,
                trials=options.trials,
                backends=_backends(options),
                budget_s=options.budget_s,
                max_mb=options.max_mb,
                progress=shown,
            )
            terminal.print_compiled(Console(), result)
            if result.interrupted:
                return 130
    return 0


def _backends(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(name.strip() for name in options.backends.split(",") if name.strip())


def _take_compiled(source: Path, target: Path) -> None:
    """Copy candidates that were compiled before to where tunes look for them."""
    if not source.is_dir():
        raise SystemExit(f"--compiled: must be a directory, got {source}")
    shutil.copytree(source, target, dirs_exist_ok=True)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

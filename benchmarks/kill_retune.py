"""Kills a retune at random moments and looks each time whether a generation serves.

    python benchmarks/kill_retune.py --kills 200

The machine is simulated (tests/simulation.py), all else is real: processes, records, studies, locks, the module's
build, its import and a call. Each night changes a fact of the environment and the truth, so that there is work to do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from simulation import BLOCKS, Machine, write_definition

import fibc
import fibc.installed
from fibc.runtime.package import load, read_table

SIZES = (1, 2, 4, 8)


def in_child(work: Callable[[], None], kill_after_s: float | None = None) -> int:
    """Run ``work`` in a fork, killed after so many seconds; return its wait status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001  a fork may not return into its parent's frames
            traceback.print_exc()
        finally:
            os._exit(status)
    if kill_after_s is not None:
        ends = time.monotonic() + kill_after_s
        while time.monotonic() < ends:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return status
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def night(out: Path, machine: Machine, number: int) -> None:
    """Retune after an upgrade, on a machine where other blocks are the fastest than the night before."""
    rng = random.Random(number)
    best = rng.choice(BLOCKS)
    machine.speedup = lambda block, rows: 1.3 if block == best else 1.1 if block == rows % 6 + 1 else 0.8
    known = dict(fibc.installed.package_facts())
    fibc.installed.package_facts = lambda: {**known, "flashinfer": f"{number}.0"}  # type: ignore[assignment]
    (result,) = fibc.retune(out)
    if result.action != "renewed":
        raise AssertionError(result)


def serves(package: Path) -> None:
    """Import the package and call it, as a server that starts now would."""
    read_table(package)
    x, weight = torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(load(package).run(x, weight), x * weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fibc-kills-")))
        patch = pytest.MonkeyPatch()
        stack.callback(patch.undo)
        patch.setenv("FIBC_CACHE_DIR", str(root / "cache"))
        machine = Machine(root, lambda block, rows: 1.3 if block == 1 else 0.8)
        machine.install(patch)
        definition, out = write_definition(root / "defs", SIZES), root / "out"
        package = out / "fibc_toy"
        whole = (1.0, 0.0, 0.0)

        def tune() -> None:
            fibc.tune(definition, out=out, target="cpu", split=whole)

        if in_child(tune) != 0 or in_child(lambda: serves(package)) != 0:
            raise SystemExit("kill_retune: the first tune failed")
        began = time.monotonic()
        if in_child(lambda: night(out, machine, 0)) != 0:
            raise SystemExit("kill_retune: a night that nobody kills failed")
        night_s = time.monotonic() - began
        ends: Counter[str] = Counter()
        broken = 0
        seen = set()
        window_s = 1.1 * night_s
        for number in range(1, options.kills + 1):
            after_s = rng.uniform(0.0, window_s)
            status = in_child(lambda number=number: night(out, machine, number), after_s)  # type: ignore[misc]
            # Nights get longer as records grow: the window follows, so that every stage is met, publishing included.
            window_s *= 1.03 if os.WIFSIGNALED(status) else 0.85
            ends["killed" if os.WIFSIGNALED(status) else "ended first" if status == 0 else "failed"] += 1
            seen.add((package / "current").resolve().name)
            if in_child(lambda: serves(package)) != 0:
                broken += 1
                print(f"kill_retune: nothing serves after kill {number} at {after_s:.3f} s", file=sys.stderr)
        last = in_child(lambda: night(out, machine, options.kills + 1))
        leftovers = [path for path in out.rglob(".fibc-*") if path.name != ".fibc-lock"]
        print(f"a night takes {night_s:.2f} s; {options.kills} nights: {dict(ends)}; {len(seen)} generations served")
        print(f"{broken} times nothing served; the last night, not killed, {'failed' if last else 'was whole'}")
        print(f"{len(leftovers)} unfinished files are left after it")
        raise SystemExit(1 if broken or last or leftovers or ends["failed"] else 0)


if __name__ == "__main__":
    main()

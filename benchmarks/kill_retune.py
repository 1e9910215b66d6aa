"""Kills a retune at random moments and looks each time whether a generation serves.

    python benchmarks/kill_retune.py --kills 200

The machine is simulated (tests/simulation.py), all else is real: processes, records, studies, locks, the module's
build, its import and a call. Each night changes a fact of the environment and the truth, so that there is work to do.
Every 25 rounds a night is let end, and a fresh copy of the tuned directory is taken, so that records stay short.

What was done is kept in ``--state`` after every round: stopped, killed, or at the end of ``--budget-s`` (exit status
75), the same command goes on. Once all is done the result is written to ``benchmarks/results/<cpu>/kill_retune.json``
and the state removed. Exit status 1 where anything was broken.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from simulation import BLOCKS, Machine, write_definition

import fibc
import fibc.cache_share
import fibc.installed
import fibc.retuning  # here, so that no night spends its first seconds on imports
from fibc import environment
from fibc.paths import TEMPORARY_PREFIX, atomic_write, safe_name
from fibc.runtime.package import load, read_table

SIZES = (1, 2, 4, 8)

CHAPTER = 25
"""Rounds on one copy of the tuned directory."""

EXIT_UNFINISHED = 75
"""EX_TEMPFAIL: the same command goes on."""

PR_SET_PDEATHSIG = 1

NOT_BEGUN, RENAMED = "before its first stage", "after the rename"
"""Phases beside the stages that a night tells of; what is killed in ``publish`` was killed before the rename."""


@dataclass(frozen=True)
class Round:
    """One night, and what served after it.

    Attributes:
        after_s: When it was to be killed.
        end: ``killed``, ``ended first`` or ``failed``.
        phase: Of the kill; empty where the night ended.
        generation: What serves after it.
        is_new: It is this night's.
        served: It was imported, called, and computed what it should.
    """

    after_s: float
    end: str
    phase: str
    generation: str
    is_new: bool
    served: bool


@dataclass
class State:
    """What was done so far.

    Attributes:
        facts: Of the environment.
        night_s: Of a night that nobody kills, on a fresh copy.
        window_s: Kills are within it.
        wholes: Of each finished copy: whether its last night, not killed, was whole, and unfinished files after it.
        took_s: Wall time so far.
        pieces: Times that the command was run.
    """

    seed: int
    facts: dict[str, str]
    night_s: float = 0.0
    window_s: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    wholes: list[tuple[bool, int]] = field(default_factory=list)
    took_s: float = 0.0
    pieces: int = 0

    @property
    def kills(self) -> int:
        """Nights that were killed."""
        return sum(item.end == "killed" for item in self.rounds)

    @property
    def broken(self) -> int:
        """Rounds after which nothing served."""
        return sum(not item.served for item in self.rounds)

    @property
    def holds(self) -> bool:
        """Whether every promise was kept."""
        failed = any(item.end == "failed" for item in self.rounds)
        return not self.broken and not failed and all(whole and not left for whole, left in self.wholes)


class Phase:
    """Progress of a night that tells the parent the stage it is in, through a pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def stage(self, name: str, total: int) -> None:
        os.write(self._descriptor, f"{name}\n".encode())

    def step(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...


def in_child(work: Callable[[], None], kill_after_s: float | None = None) -> int:
    """Run ``work`` in a fork, killed after so many seconds; return its wait status."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            # Where this program is killed itself, no night goes on alone.
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
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


def night(out: Path, machine: Machine, name: str, progress: Phase | None = None) -> None:
    """Retune after an upgrade, on a machine where other blocks are the fastest than the night before."""
    rng = random.Random(name)
    best = rng.choice(BLOCKS)
    machine.speedup = lambda block, rows: 1.3 if block == best else 1.1 if block == rows % 6 + 1 else 0.8
    known = dict(fibc.installed.package_facts())
    fibc.installed.package_facts = lambda: {**known, "flashinfer": name}  # type: ignore[assignment]
    (result,) = fibc.retune(out, progress=progress)
    if result.action != "renewed":
        raise AssertionError(result)


def serves(package: Path) -> None:
    """Import the package and call it, as a server that starts now would."""
    read_table(package)
    x, weight = torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(load(package).run(x, weight), x * weight)


class Killing:
    """The rounds, over a state that is kept in a directory."""

    def __init__(self, root: Path, machine: Machine, seed: int, facts: dict[str, str]) -> None:
        self._root = root
        self._machine = machine
        self._began = time.monotonic()
        self._file = root / "state.json"
        self.state = State(seed, facts)
        if self._file.exists():
            kept = json.loads(self._file.read_text())
            rounds = [Round(**item) for item in kept.pop("rounds")]
            self.state = State(rounds=rounds, **kept)
            if (self.state.seed, self.state.facts) != (seed, facts):
                raise SystemExit(f"kill_retune: {root}: is of another seed or environment (remove it to begin anew)")
        self.state.pieces += 1
        self._took_before_s = self.state.took_s

    def prepare(self) -> None:
        """Tune once, and take the time of a night that nobody kills."""
        if self.state.night_s:
            return
        shutil.rmtree(self._root / "tuned", ignore_errors=True)
        definition, out = write_definition(self._root / "defs", SIZES), self._root / "tuned"

        def tune() -> None:
            fibc.tune(definition, out=out, target="cpu", split=(1.0, 0.0, 0.0))

        if in_child(tune) != 0 or in_child(lambda: serves(out / "fibc_toy")) != 0:
            raise SystemExit("kill_retune: the first tune failed")
        trial = self._copy("trial")
        began = time.monotonic()
        if in_child(lambda: night(trial, self._machine, "trial")) != 0:
            raise SystemExit("kill_retune: a night that nobody kills failed")
        self.state.night_s = round(time.monotonic() - began, 3)
        self.state.window_s = 1.1 * self.state.night_s
        self._keep()

    def round(self) -> None:
        """Kill one night, look what serves, and keep what was seen; at the end of a copy let a night end."""
        state = self.state
        number = len(state.rounds)
        out = self._copy(f"copy-{number // CHAPTER}")
        package = out / "fibc_toy"
        after_s = random.Random(f"{state.seed} {number}").uniform(0.0, state.window_s)
        before = (package / "current").resolve().name
        told, tell = os.pipe()
        os.set_blocking(told, False)
        try:
            status = in_child(lambda: night(out, self._machine, f"{number}.{state.pieces}", Phase(tell)), after_s)
            stages = _read(told).splitlines()
        finally:
            os.close(told)
            os.close(tell)
        generation = (package / "current").resolve().name
        killed = os.WIFSIGNALED(status)
        phase = RENAMED if generation != before else stages[-1] if stages else NOT_BEGUN
        served = in_child(lambda: serves(package)) == 0
        end = "killed" if killed else "ended first" if status == 0 else "failed"
        state.rounds.append(
            Round(round(after_s, 3), end, phase if killed else "", generation, generation != before, served)
        )
        # Nights get longer as records grow: the window follows, so that every stage is met, publishing included.
        state.window_s *= 1.03 if killed else 0.85
        self._keep()

    def end_copy(self) -> None:
        """Let a night end where one is due: after a whole number of copies, or after the last round."""
        number = len(self.state.wholes)
        out = self._copy(f"copy-{number}")
        status = in_child(lambda: night(out, self._machine, f"last.{number}.{self.state.pieces}"))
        whole = status == 0 and in_child(lambda: serves(out / "fibc_toy")) == 0
        left = [path for path in out.rglob(f"{TEMPORARY_PREFIX}*") if path.name != f"{TEMPORARY_PREFIX}lock"]
        self.state.wholes.append((whole, len(left)))
        self.state.window_s = 1.1 * self.state.night_s
        self._keep()

    def copies_to_end(self, *, finished: bool) -> int:
        """Return how many copies have had all their rounds but not their last night."""
        rounds = len(self.state.rounds)
        return (-(-rounds // CHAPTER) if finished else rounds // CHAPTER) - len(self.state.wholes)

    def _copy(self, name: str) -> Path:
        out = self._root / name
        if not out.exists():
            fresh = self._root / "fresh"
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.copytree(self._root / "tuned", fresh, symlinks=True)
            fresh.rename(out)
        return out

    def _keep(self) -> None:
        self.state.took_s = round(self._took_before_s + time.monotonic() - self._began, 1)
        atomic_write(self._file, json.dumps(asdict(self.state)).encode())


def _read(descriptor: int) -> str:
    """Return what is in a pipe now: a compiler that outlives its night must not be waited for."""
    parts = []
    with contextlib.suppress(BlockingIOError):
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    return b"".join(parts).decode()


def result_of(state: State, options: argparse.Namespace) -> dict[str, object]:
    """Return what the results file says."""
    killed = [item for item in state.rounds if item.end == "killed"]
    return {
        "command": f"python benchmarks/kill_retune.py --kills {options.kills} --seed {options.seed}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": state.facts,
        "kills": len(killed),
        "kills_by_phase": dict(Counter(item.phase for item in killed)),
        "nights": dict(Counter(item.end for item in state.rounds)),
        "served": sum(item.served for item in state.rounds),
        "nothing_served": state.broken,
        "served_the_old_one": sum(not item.is_new for item in killed),
        "served_the_new_one": sum(item.is_new for item in killed),
        "generations": len({item.generation for item in state.rounds}),
        "last_nights": [{"whole": whole, "unfinished_files": left} for whole, left in state.wholes],
        "night_s": state.night_s,
        "kill_after_median_s": round(statistics.median(item.after_s for item in killed), 3) if killed else None,
        "took_s": state.took_s,
        "pieces": state.pieces,
        "rounds": [[item.after_s, item.end, item.phase, item.generation, item.served] for item in state.rounds],
    }


def main() -> int:
    """Kill, look, keep; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="Stop after it; the same command goes on.")
    parser.add_argument("--state", type=Path, default=Path("build/kill_retune"))
    parser.add_argument("--out", type=Path, help="Results file. [default: kill_retune.json of this CPU's results]")
    options = parser.parse_args()
    root: Path = options.state.absolute()
    root.mkdir(parents=True, exist_ok=True)
    facts = environment.detect()
    patch = pytest.MonkeyPatch()
    with contextlib.ExitStack() as stack:
        stack.callback(patch.undo)
        patch.setenv("FIBC_CACHE_DIR", str(root / "cache"))
        patch.setattr(fibc.cache_share, "find", lambda *_: None)  # a real measurement, of seconds after each upgrade
        machine = Machine(root, lambda block, rows: 1.3 if block == 1 else 0.8)
        machine.install(patch)
        torch.testing.assert_close(torch.ones(1), torch.ones(1))  # its imports, once for all forks
        began = time.monotonic()
        killing = Killing(root, machine, options.seed, dict(facts.facts()))
        killing.prepare()
        state = killing.state
        while state.kills < options.kills:
            if killing.copies_to_end(finished=False):
                killing.end_copy()
            killing.round()
            if not state.rounds[-1].served:
                print(f"kill_retune: nothing serves after round {len(state.rounds)}", file=sys.stderr)
            if state.kills < options.kills and time.monotonic() - began > options.budget_s:
                print(
                    f"{state.kills} of {options.kills} kills so far, nothing served {state.broken} times; run it again"
                )
                return EXIT_UNFINISHED
        while killing.copies_to_end(finished=True):
            killing.end_copy()
    result = result_of(state, options)
    out: Path = options.out or Path(__file__).parent / "results" / safe_name(facts.model) / "kill_retune.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    rounds = result.pop("rounds")
    lines = ",\n  ".join(map(json.dumps, rounds))  # type: ignore[call-overload]
    out.write_text(f'{json.dumps(result, indent=1)[:-2]},\n "rounds": [\n  {lines}\n ]\n}}\n')
    print(
        f"a night takes {state.night_s:.2f} s; nights: {result['nights']}; {result['generations']} generations served"
    )
    print(f"killed by phase: {result['kills_by_phase']}")
    wholes = sum(whole for whole, _ in state.wholes)
    print(f"{state.broken} times nothing served; {wholes} of {len(state.wholes)} nights that were let end were whole")
    print(f"{sum(left for _, left in state.wholes)} unfinished files are left after them; {state.took_s:.0f} s in all")
    shutil.rmtree(root)
    return 0 if state.holds else 1


if __name__ == "__main__":
    sys.exit(main())

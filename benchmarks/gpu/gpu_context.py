"""What every part of the GPU benchmarks is given: where it works, how long it may, and what it goes on from."""

from __future__ import annotations

import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpu_log import RowLog

import fibc
from fibc.backends.compiled_store import CompiledStore
from fibc.cache import Cache
from fibc.clock import now
from fibc.errors import InputError
from fibc.paths import OutLayout
from fibc.schema.digest import digest_json
from fibc.schema.options import TuneOptions
from fibc.schema.table import DispatchTable
from fibc.task import Task, read_task

STATE = ("fibc-records", "fibc-studies.db")
"""What of an ``--out`` directory a part goes on from: evidence and studies. The rest is made of these again."""

SPLIT = (1.0, 0.0, 0.0)
"""Every recorded size is tuned; what is measured afterwards are sizes that nobody recorded."""


@dataclass
class Context:
    """One run of one part.

    Attributes:
        part: ``suite-4096x4096``, ``norms``, ...
        work: Its own directory: definitions, packages, records.
        results: Where rows and state go.
        target: ``cuda``; ``cpu`` for a walk through the code without a GPU.
        ends: When the part has to be done, by the monotonic clock.
        tune: Options of tunes: trials, budget_s, compiled_only, ...
        records: Files or directories of records that modules may be made of.
        say: Takes a line of progress.
    """

    part: str
    work: Path
    results: Path
    target: str
    ends: float
    tune: dict[str, Any] = field(default_factory=dict)
    records: tuple[Path, ...] = ()
    say: Callable[[str], None] = lambda line: print(line, flush=True)
    cache: Cache = field(default_factory=Cache)

    @property
    def layout(self) -> OutLayout:
        return OutLayout(self.work.absolute() / "out")

    @property
    def log(self) -> RowLog:
        return RowLog(self.results / f"{self.part}.jsonl")

    def left_s(self) -> float:
        """Return the seconds that are left to the part."""
        return max(0.0, self.ends - time.monotonic())

    def options(self, **changed: Any) -> TuneOptions:
        return TuneOptions(**{"target": self.target, "split": SPLIT, **self.tune, **changed})

    def task(self, definition: Path) -> Task:
        """Return the task of a definition, with what was compiled for it."""
        return read_task(definition, None, self.options(), self.cache, CompiledStore(self.layout.compiled))

    def add(self, row: str, kind: str, **fields: Any) -> None:
        """Log a finished row."""
        self.log.add({"part": self.part, "row": row, "kind": kind, "date": now(), **fields})

    def note_environment(self, task: Task) -> None:
        """Log where the part runs, and with what command."""
        facts = {**task.environment.facts(), "native": task.native.name, "fibc": version("fibc")}
        self.add("environment", "environment", facts=facts, command=" ".join(["python", *sys.argv]))

    def tuned(self, definition: Path, *, reserve_s: float) -> DispatchTable | None:
        """Tune what an earlier run has not finished; return the table, None where no module was written.

        Args:
            reserve_s: What the part needs afterwards.

        Raises:
            KeyboardInterrupt: If the tune was interrupted; it is gone on with.
        """
        budget_s = min(float(self.tune.get("budget_s", 1e9)), self.left_s() - reserve_s)
        if budget_s <= 0:
            self.say(f"{definition.stem}: no time left to tune")
            return None
        options = {"target": self.target, "split": SPLIT, **self.tune, "budget_s": budget_s}
        result = fibc.tune(definition, out=self.layout.root, **options)
        if result.interrupted:
            raise KeyboardInterrupt
        if not result.up_to_date:
            self.add(
                f"tune {definition.stem}",
                "tune",
                stage_s=dict(result.stage_s),
                trials=dict(result.trials),
                partial=result.partial,
                notes=list(result.notes),
                budget_s=round(budget_s),
            )
        for note in result.notes:
            self.say(f"note: {note}")
        return result.table

    def package(self, name: str) -> Path | None:
        """Return the package of a definition: of this part, of another one beside it, or made from records."""
        for root in (self.layout.root, *sorted(self.work.parent.glob("*/out"))):
            package = OutLayout(root.absolute()).package(name)
            if (package / "current").is_dir():
                return package
        for records in self.records:
            file = records if records.is_file() else records / f"{name}.records"
            if file.is_file() and file.stem == name:
                try:
                    built = fibc.build(file, out=self.layout.root)
                except InputError as error:
                    self.say(f"{file}: {error}")
                    continue
                return Path(built[0].package)
        return None


def served_digest(table: DispatchTable) -> str:
    """Return what tells a table from one that serves other kernels anywhere."""
    artifacts = [variant.artifact for variant in table.variants]
    return digest_json([[str(region.cell), artifacts[region.variant]] for region in table.regions])


def keep_state(context: Context) -> None:
    """Pack what a later run of the part goes on from."""
    context.results.mkdir(parents=True, exist_ok=True)
    target = context.results / f"{context.part}.state.tar.gz"
    partial = target.with_suffix(".partial")
    with tarfile.open(partial, "w:gz") as archive:
        for name in STATE:
            path = context.layout.root / name
            if path.exists():
                archive.add(path, name)
    partial.replace(target)


def take_state(context: Context, sources: tuple[Path, ...]) -> bool:
    """Unpack the state of an earlier run, and its rows, where this machine has none; return whether there was one."""
    if (context.layout.root / STATE[0]).exists():
        return True
    for source in (context.results, *sources):
        archive, rows = source / f"{context.part}.state.tar.gz", source / f"{context.part}.jsonl"
        if not archive.is_file():
            continue
        context.layout.root.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as packed:
            packed.extractall(context.layout.root, filter="data")
        if rows.is_file() and not context.log.path.exists():
            context.log.path.write_bytes(rows.read_bytes())
        return True
    return False

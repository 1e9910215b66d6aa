"""A FlashInfer-Trace dataset folder, read and written.

::

    definitions/<op_type>/<name>.json
    workloads/<op_type>/<definition>.jsonl
    solutions/<author>/<op_type>/<definition>/<solution>.json
    traces/<author>/<op_type>/<definition>.jsonl        append-only
    blob/workloads/...                                  stored tensors, as the workloads name them

Every name becomes a file name through ``fibc.paths.safe_name``: odd or overlong ones are hashed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fibc.errors import SchemaError
from fibc.paths import atomic_write, safe_name
from fibc.schema.definition import Definition, load_definition, save_definition
from fibc.schema.json_text import read_json, read_json_lines, write_json, write_json_line
from fibc.schema.problems import describe, shown
from fibc.schema.trace import Solution, Trace
from fibc.schema.workload import Workload, load_workloads

M = TypeVar("M", bound=BaseModel)

DEFAULT_AUTHOR = "fibc"


@dataclass(frozen=True)
class Dataset:
    """Everything in a dataset folder that could be read.

    Attributes:
        definitions: By name.
        workloads: By name of the definition.
        solutions: By name.
        traces: Evaluations by name of the definition, in the order of the files.
        problems: What could not be read or contradicts itself, each with its path; it costs only itself.
        num_files: Files that were looked at.
    """

    root: Path
    definitions: Mapping[str, Definition] = field(default_factory=dict)
    workloads: Mapping[str, tuple[Workload, ...]] = field(default_factory=dict)
    solutions: Mapping[str, Solution] = field(default_factory=dict)
    traces: Mapping[str, tuple[Trace, ...]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    num_files: int = 0


def read_dataset(root: Path | str) -> Dataset:
    """Return the dataset in the folder ``root``; a file with a problem is left out and named in ``problems``.

    Raises:
        SchemaError: If ``root`` is no readable directory.
    """
    root = Path(root)
    if not root.is_dir():
        raise SchemaError(f"{root}: must be a directory with definitions/, workloads/, solutions/ or traces/")
    reader = _Reader(root)
    reader.read_definitions()
    reader.read_workloads()
    reader.read_solutions()
    reader.read_traces()
    return Dataset(
        root,
        reader.definitions,
        reader.workloads,
        reader.solutions,
        {name: tuple(traces) for name, traces in reader.traces.items()},
        tuple(reader.problems),
        reader.num_files,
    )


def write_dataset(
    root: Path | str,
    definition: Definition,
    workloads: Iterable[Workload] = (),
    solutions: Iterable[Solution] = (),
    traces: Iterable[Trace] = (),
) -> None:
    """Write what is known of ``definition`` to the dataset folder ``root``; other definitions stay as they are.

    Every file appears whole or not at all. The definition, its workloads and solutions of the same name are replaced,
    traces are added to those that are there; a trace that is there already is not added again. Stored tensors are
    copied with their workloads.

    Raises:
        RecordError: If a file cannot be written; those written before stay.
    """
    root = Path(root)
    definition = definition.first_dialect()
    op_type = safe_name(definition.op_type)
    lines_name = safe_name(definition.name, ".jsonl")
    save_definition(definition, root / "definitions" / op_type / safe_name(definition.name, ".json"))

    lines = []
    for workload in workloads:
        _copy_blobs(workload, root)
        lines.append(write_json_line(_envelope(definition.name, workload)))
    if lines:
        atomic_write(root / "workloads" / op_type / lines_name, _encode("".join(lines)))

    authors: dict[str, str] = {}
    for solution in solutions:
        authors[solution.name] = solution.author
        folder = root / "solutions" / safe_name(solution.author) / op_type / safe_name(definition.name)
        atomic_write(folder / safe_name(solution.name, ".json"), _encode(write_json(solution.to_json()) + "\n"))

    new: dict[str, list[str]] = {}
    for trace in traces:
        author = authors.get(trace.solution or "", DEFAULT_AUTHOR)
        new.setdefault(author, []).append(write_json_line(trace.to_json()))
    for author, added in new.items():
        _append(root / "traces" / safe_name(author) / op_type / lines_name, added)


def _envelope(definition: str, workload: Workload) -> dict[str, Any]:
    envelope: dict[str, Any] = {
        "definition": definition,
        "workload": workload.to_json(),
        "solution": None,
        "evaluation": None,
    }
    if workload.weight != 1:
        envelope["count"] = workload.weight
    if workload.synthesised:
        envelope["synthesised"] = True
    return envelope


def _copy_blobs(workload: Workload, root: Path) -> None:
    for name, spec in workload.inputs.items():
        stored = workload.stored_path(name)
        if stored is None:
            continue
        target = root / spec.model_dump()["path"]
        if not target.exists():
            atomic_write(target, stored.read_bytes())


def _append(path: Path, lines: list[str]) -> None:
    """Add to ``path`` those of ``lines`` that it lacks. The whole file is renamed into place, so that none is torn."""
    before = path.read_bytes() if path.exists() else b""
    known = set(before.splitlines())
    encoded = dict.fromkeys(_encode(line) for line in lines)
    added = b"".join(line for line in encoded if line.rstrip(b"\n") not in known)
    if not added:
        return
    if before and not before.endswith(b"\n"):
        before += b"\n"  # another writer was cut off: its last line stays a problem of its own
    atomic_write(path, before + added)


def _encode(text: str) -> bytes:
    """Return UTF-8; a lone surrogate, such as a compiler's log may hold, becomes its escape."""
    return text.encode("utf-8", "backslashreplace")


class _Reader:
    """Collects what can be read and what cannot."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.definitions: dict[str, Definition] = {}
        self.workloads: dict[str, tuple[Workload, ...]] = {}
        self.solutions: dict[str, Solution] = {}
        self.traces: dict[str, list[Trace]] = {}
        self.problems: list[str] = []
        self.num_files = 0
        self._paths: dict[tuple[str, str], Path] = {}

    def read_definitions(self) -> None:
        for path in self._files("definitions", "*.json"):
            try:
                definition = load_definition(path)
            except SchemaError as error:
                self.problems += error.problems
                continue
            if self._is_new("definition", definition.name, path):
                self.definitions[definition.name] = definition

    def read_workloads(self) -> None:
        for path in self._files("workloads", "*.jsonl"):
            definition = self.definitions.get(path.stem) or self._definition_in(path)
            if definition is None:
                self.problems.append(f"{path}: must be the workloads of a definition in the dataset, got those of none")
                continue
            try:
                workloads = load_workloads(path, definition)
            except SchemaError as error:
                self.problems += error.problems
                continue
            self.workloads[definition.name] = self.workloads.get(definition.name, ()) + workloads

    def read_solutions(self) -> None:
        for path in self._files("solutions", "*.json"):
            try:
                document = read_json(path)
            except SchemaError as error:
                self.problems += error.problems
                continue
            solution = self._build(Solution, document, str(path))
            if solution is None or not self._is_known(solution.definition, str(path)):
                continue
            if self._is_new("solution", solution.name, path):
                self.solutions[solution.name] = solution

    def read_traces(self) -> None:
        for path in self._files("traces", "*.jsonl"):
            for where, document in self._lines(path):
                trace = self._build(Trace, document, where)
                if trace is None or not self._is_known(trace.definition, where):
                    continue
                if trace.is_workload:
                    self.problems.append(f"{where}: evaluation: must be present in a file of traces, got null")
                    continue
                self.traces.setdefault(trace.definition, []).append(trace)

    def _files(self, folder: str, pattern: str) -> list[Path]:
        files = sorted(path for path in (self.root / folder).rglob(pattern) if path.is_file())
        self.num_files += len(files)
        return files

    def _lines(self, path: Path) -> Iterator[tuple[str, Any]]:
        """Yield ``(where, value)`` for the lines of ``path`` that are JSON; the others become problems."""
        try:
            for where, document in read_json_lines(path):
                if isinstance(document, SchemaError):
                    self.problems += document.problems
                else:
                    yield where, document
        except SchemaError as error:
            self.problems += error.problems

    def _definition_in(self, path: Path) -> Definition | None:
        """Return the definition that the first line of ``path`` names: the name of the file may be a hash."""
        for _, document in self._lines(path):
            name = document.get("definition") if isinstance(document, dict) else None
            return self.definitions.get(name) if isinstance(name, str) else None
        return None

    def _build(self, kind: type[M], document: Any, where: str) -> M | None:
        try:
            return kind.model_validate(document)
        except ValidationError as error:
            tags = ("random", "scalar", "safetensors")
            self.problems += [f"{where}: {problem}" for problem in describe(error, tags)]
            return None

    def _is_known(self, definition: str, where: str) -> bool:
        if definition not in self.definitions:
            self.problems.append(f"{where}: definition: must be in the dataset, got {shown(definition)}")
        return definition in self.definitions

    def _is_new(self, kind: str, name: str, path: Path) -> bool:
        first = self._paths.setdefault((kind, name), path)
        if first != path:
            self.problems.append(f"{path}: name: must be unique, got the {kind} {shown(name)} of {first} again")
        return first == path

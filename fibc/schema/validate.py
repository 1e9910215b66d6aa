"""Every problem of every definition and workload file, for ``fibc validate``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fibc.errors import SchemaError
from fibc.schema.dataset import read_dataset
from fibc.schema.definition import Definition, load_definition
from fibc.schema.json_text import read_json_lines
from fibc.schema.problems import shown
from fibc.schema.workload import load_workloads
from fibc.schema.workload_source import SUFFIX

DEFINITIONS = ".json"
WORKLOADS = ".jsonl"


@dataclass(frozen=True)
class Checked:
    """What was looked at and what is wrong with it.

    Attributes:
        num_files: Files that were read.
        problems: Each ``path: where: law, got X``, sorted by file, in the order of each file.
    """

    num_files: int
    problems: tuple[str, ...]


def validate_paths(paths: Iterable[Path | str]) -> Checked:
    """Check definitions (``.json``) and their workloads (``.jsonl``).

    Args:
        paths: Files, and directories that are searched to the bottom. A directory with ``definitions/`` in it is a
            dataset, and its solutions and traces are checked too. Other files in a directory are passed over.
    """
    problems: list[str] = []
    files: dict[Path, None] = {}
    num_dataset_files = 0
    for path in map(Path, paths):
        try:
            roots, inside = _search(path)
        except OSError as error:
            problems.append(f"{error.filename or path}: must be readable, got: {error.strerror or error}")
            continue
        for root in roots:
            dataset = read_dataset(root)
            problems += dataset.problems
            num_dataset_files += dataset.num_files
        files.update(dict.fromkeys(inside))
        if not roots and not inside:
            problems.append(f"{path}: must be or hold definitions (.json) or workloads (.jsonl), got none")
    unique = list({file.resolve(): file for file in files}.values())
    problems += _file_problems(sorted(unique))
    return Checked(len(unique) + num_dataset_files, tuple(problems))


def _search(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the roots of the datasets in ``path``, and the definitions and workload files outside of them."""
    if not path.is_dir():
        is_ours = path.suffix in (DEFINITIONS, WORKLOADS) or not path.exists()
        return [], [path] if is_ours else []
    if (path / "definitions").is_dir():
        return [path], []
    roots: list[Path] = []
    files: list[Path] = []
    for inner in sorted(path.iterdir()):
        if inner.name.startswith(".") or (inner.is_dir() and inner.is_symlink()):  # a link can lead in a circle
            continue
        if inner.is_dir():
            inner_roots, inner_files = _search(inner)
            roots += inner_roots
            files += inner_files
        elif inner.suffix in (DEFINITIONS, WORKLOADS):
            files.append(inner)
    return roots, files


def _file_problems(files: list[Path]) -> Iterator[str]:
    definitions = _Definitions()
    by_file: dict[Path, list[str]] = {}
    for file in files:
        if file.suffix == DEFINITIONS:
            by_file[file] = definitions.add(file)
    for file in files:
        if file.suffix != DEFINITIONS:
            by_file[file] = _workload_problems(file, definitions)
    for file in files:
        yield from by_file[file]


class _Definitions:
    """The definitions of this run, by file and by name."""

    def __init__(self) -> None:
        self._by_file: dict[Path, Definition | None] = {}
        self._by_name: dict[str, tuple[Path, Definition]] = {}

    def add(self, file: Path) -> list[str]:
        """Read ``file`` and return its problems."""
        try:
            definition = load_definition(file)
        except SchemaError as error:
            self._by_file[file] = None
            return list(error.problems)
        self._by_file[file] = definition
        first, _ = self._by_name.setdefault(definition.name, (file, definition))
        if first != file:
            return [f"{file}: name: must be unique, got {shown(definition.name)} of {first} again"]
        return []

    def of_workloads(self, file: Path) -> tuple[bool, Definition | None]:
        """Return whether the definition of the workload file ``file`` is there, and it, where it has no problem.

        It is the one of the same stem beside it, else the one that the first line names, in this run or beside it.
        """
        if file.name.endswith(SUFFIX):
            beside = file.with_name(file.name.removesuffix(SUFFIX) + DEFINITIONS)
            if beside not in self._by_file and beside.is_file():
                self.add(beside)
            if beside in self._by_file:
                return True, self._by_file[beside]
        name = _named_definition(file)
        if name is not None and name not in self._by_name:
            for other in sorted(file.parent.glob(f"*{DEFINITIONS}")):
                if other not in self._by_file:
                    self.add(other)
        if name is not None and name in self._by_name:
            return True, self._by_name[name][1]
        return False, None


def _workload_problems(file: Path, definitions: _Definitions) -> list[str]:
    try:
        found, definition = definitions.of_workloads(file)
        if definition is not None:
            load_workloads(file, definition)
            return []
        unreadable = [
            problem for _, line in read_json_lines(file) if isinstance(line, SchemaError) for problem in line.problems
        ]
    except SchemaError as error:
        return list(error.problems)
    if found:
        return unreadable  # what a broken definition asks of its workloads cannot be said
    stem = file.name.removesuffix(SUFFIX).removesuffix(WORKLOADS)
    return [*unreadable, f"{file}: must belong to a definition, got none: no {stem}{DEFINITIONS} beside it"]


def _named_definition(file: Path) -> str | None:
    for _, document in read_json_lines(file):
        name = document.get("definition") if isinstance(document, dict) else None
        if isinstance(name, str):
            return name
    return None

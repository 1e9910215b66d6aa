"""JSON text from outside, read strictly: every error is a problem with its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from fibc.errors import SchemaError
from fibc.schema.problems import shown

MAX_DEPTH = 64
"""Levels of nesting. The formats need 6; the bound keeps every later walk over a document far from Python's stack."""


MAX_LINE_CHARS = 80
"""Where ``write_json`` breaks lines."""


class _Duplicates:
    """Builds objects and remembers which keys came twice; plain ``json`` keeps the last one silently."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) != len(pairs):
            seen: set[str] = set()
            self.keys += [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
        return built


def parse_json(text: str, where: str, first_line: int | None = None) -> Any:
    """Return the value that ``text`` spells.

    Args:
        where: The file, or the file and line, that problems begin with.
        first_line: For one line of a file of lines, where ``where`` already names the line.

    Raises:
        SchemaError: If it is no JSON (with line and column), has a key twice, a number that JSON does not have, or more
            than ``MAX_DEPTH`` levels.
    """
    duplicates = _Duplicates()
    try:
        value = json.loads(text, object_pairs_hook=duplicates, parse_constant=_no_json_number)
    except json.JSONDecodeError as error:
        place = f"{error.lineno}:{error.colno}" if first_line is None else f"{error.colno}"
        found = shown(text[error.pos : error.pos + 20]) if error.pos < len(text) else "the end"
        raise SchemaError(f"{where}:{place}: must be JSON, got {found} ({error.msg})") from None
    except RecursionError:
        raise SchemaError(f"{where}: must be nested at most {MAX_DEPTH} levels deep, got far more") from None
    except ValueError as error:  # a constant or a number of over 4300 digits
        raise SchemaError(f"{where}: must be JSON, got {error}") from None
    problems = [f"{where}: a key must be unique in its object, got {shown(key)} twice" for key in duplicates.keys]
    if _deeper_than(value, MAX_DEPTH):
        problems.append(f"{where}: must be nested at most {MAX_DEPTH} levels deep, got more")
    if problems:
        raise SchemaError(problems)
    return value


def read_text(path: Path) -> str:
    """Return the text of ``path``.

    Raises:
        SchemaError: If it is missing, unreadable, a directory, or no UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SchemaError(
            f"{path}: must be UTF-8 text, got byte 0x{error.object[error.start]:02x} at offset {error.start} (binary?)"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise SchemaError(f"{path}: must be a readable file, got: {reason}") from None


def is_file(path: Path) -> bool:
    """Return whether ``path`` is a file; one that nothing can have, overlong say, is none."""
    try:
        return path.is_file()
    except OSError:
        return False


def read_json(path: Path) -> Any:
    """Return the value in the JSON file ``path``.

    Raises:
        SchemaError: As ``read_text`` and ``parse_json``.
    """
    return parse_json(read_text(path), str(path))


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield ``(where, value)`` for each line of ``path`` that is not blank; where is ``path:line``.

    A line that is no JSON is yielded as its SchemaError in place of the value, so that a caller can report every line.

    Raises:
        SchemaError: As ``read_text``.
    """
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            yield where, parse_json(line, where, number)
        except SchemaError as error:
            yield where, error


def write_json(value: Any, indent: int = 0) -> str:
    """Return ``value`` as JSON text for people and version control: what fits on a line stands on one."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    fits = indent + len(line) <= MAX_LINE_CHARS
    if (indent and fits) or not value or not isinstance(value, dict | list | tuple):
        return line
    space = " " * (indent + 2)
    if isinstance(value, dict):
        items = [
            f"{json.dumps(key, ensure_ascii=False)}: {write_json(inner, indent + 2)}" for key, inner in value.items()
        ]
        opening, closing = "{", "}"
    else:
        items = [write_json(inner, indent + 2) for inner in value]
        opening, closing = "[", "]"
    body = ",\n".join(space + item for item in items)
    return f"{opening}\n{body}\n{' ' * indent}{closing}"


def write_json_line(value: Any) -> str:
    """Return ``value`` as one line of JSON text with its newline."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"


def _no_json_number(name: str) -> NoReturn:
    raise ValueError(f"{name}, a number that JSON does not have")


def _deeper_than(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for outer in layer
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not layer:
            return False
    return any(isinstance(value, dict | list) for value in layer)

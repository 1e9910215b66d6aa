"""Problems as people read them: ``where: law, got the value seen``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

MAX_SHOWN_CHARS = 60


def shown(value: object) -> str:
    """Return ``value`` as one short printable line."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."


def place(*steps: str | int) -> str:
    """Return the path of a value inside a document: ``inputs.A.shape[1]``. Odd keys are quoted."""
    path = ""
    for step in steps:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += ("." if path else "") + (step if step.isidentifier() else shown(step))
    return path


_LAWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "missing": lambda _: "must be present",
    "string_type": lambda _: "must be a string",
    "int_type": lambda _: "must be an integer",
    "int_from_float": lambda _: "must be an integer",
    "float_type": lambda _: "must be a number",
    "float_parsing": lambda _: "must be a number",
    "finite_number": lambda _: "must be a finite number",
    "bool_type": lambda _: "must be true or false",
    "dict_type": lambda _: "must be an object",
    "model_type": lambda _: "must be an object",
    "model_attributes_type": lambda _: "must be an object",
    "tuple_type": lambda _: "must be a list",
    "list_type": lambda _: "must be a list",
    "string_too_short": lambda _: "must not be empty",
    "too_short": lambda _: "must not be empty",
    "literal_error": lambda ctx: f"must be {ctx['expected']}",
    "enum": lambda ctx: f"must be {ctx['expected']}",
    "union_tag_invalid": lambda ctx: f"{ctx['discriminator']} must be one of {ctx['expected_tags']}",
    "union_tag_not_found": lambda ctx: f"must have a {ctx['discriminator']}",
    "greater_than": lambda ctx: f"must be > {ctx['gt']}",
    "greater_than_equal": lambda ctx: f"must be >= {ctx['ge']}",
    "less_than_equal": lambda ctx: f"must be <= {ctx['le']}",
}
"""What pydantic's error types are called here; any other type keeps pydantic's own words."""


def describe(error: ValidationError, tags: Sequence[str] = ()) -> list[str]:
    """Return one problem for each of ``error``'s, without the file.

    Args:
        tags: Names of union members, which pydantic puts into the path and people do not.
    """
    problems: list[str] = []
    items = error.errors(include_url=False)
    for item in items:
        if item["type"] == "too_short" and any(other["loc"][:-1][: len(item["loc"])] == item["loc"] for other in items):
            continue  # pydantic counts the members that are lawful; the others have problems of their own
        law = _LAWS.get(item["type"])
        words = law(item.get("ctx", {})) if law else item["msg"]
        steps = [step for step in item["loc"] if step not in tags and step != "[key]"]
        seen = "" if item["type"] == "missing" else f", got {shown(_seen(item))}"
        where = place(*steps)
        problems.append(f"{where}: {words}{seen}" if where else f"{words}{seen}")
    return list(dict.fromkeys(problems))


def _seen(item: Any) -> object:
    if item["type"] == "union_tag_invalid":
        return item["ctx"]["tag"]
    return item["input"]

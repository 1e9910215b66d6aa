"""The laws between the fields of a definition, checked on a document of which any field may be missing or wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fibc.errors import SchemaError
from fibc.schema.expression import parse
from fibc.schema.problems import place, shown
from fibc.schema.reference import reference_problems

MAX_SIZE = 2**63 - 1
"""Largest size of an axis, and of a tensor in bytes: both travel as int64."""


def law_problems(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong between the fields of ``document``, of which any may be missing or of a wrong type."""
    axes, inputs, outputs = (_object(document, field) for field in ("axes", "inputs", "outputs"))
    for group, specs in (("inputs", inputs), ("outputs", outputs)):
        for name, spec in specs.items():
            yield from _shape_problems(place(group, name), _list(spec, "shape"), axes)
    for name, spec in outputs.items():
        yield from _alias_problems(name, spec, inputs)
    yield from _double_alias_problems(outputs, inputs)
    reference = document.get("reference")
    if isinstance(reference, str) and inputs:
        yield from reference_problems(reference, tuple(inputs))
    for index, text in enumerate(_list(document, "constraints")):
        if isinstance(text, str):
            yield from _constraint_problems(place("constraints", index), text, axes, inputs)


def _shape_problems(where: str, shape: Collection[Any], axes: Mapping[str, Any]) -> Iterator[str]:
    for index, axis in enumerate(shape):
        if isinstance(axis, str) and axis not in axes:
            yield f"{where}.shape[{index}]: must be a declared axis, got {shown(axis)} (accepted: {_names(axes)})"
    sizes = [_object(axes, axis).get("value") for axis in shape if isinstance(axis, str)]
    num_elements = 1
    for size in sizes:
        num_elements *= size if isinstance(size, int) and size > 0 else 1
    if len(shape) > 1 and num_elements > MAX_SIZE:
        yield f"{where}: must have fewer than 2^63 elements, got {num_elements}"


def _alias_problems(name: str, spec: Any, inputs: Mapping[str, Any]) -> Iterator[str]:
    param = spec.get("param") if isinstance(spec, Mapping) else None
    written = inputs.get(param) if isinstance(param, str) else None
    where = place("outputs", name)
    if isinstance(written, Mapping):
        for field in ("shape", "dtype"):
            if spec.get(field) != written.get(field):
                got = f"got {shown(spec.get(field))} and {shown(written.get(field))}"
                yield f"{where}.{field}: must be that of {param}, the input it is written into, {got}"
    if name in inputs and param != name:
        yield f'{where}: must not have the name of an input, unless it is written into it ("param": {shown(name)})'


def _double_alias_problems(outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> Iterator[str]:
    written: dict[str, str] = {}
    for name, spec in outputs.items():
        param = spec.get("param") if isinstance(spec, Mapping) else None
        if isinstance(param, str) and param in inputs and written.setdefault(param, name) != name:
            yield f"{place('outputs', name)}.param: must be written by one output only, got {shown(param)} again"


def _constraint_problems(where: str, text: str, axes: Mapping[str, Any], inputs: Mapping[str, Any]) -> Iterator[str]:
    try:
        expression = parse(text, {*axes, *inputs})
    except SchemaError as error:
        yield from (f"{where}: {problem}" for problem in error.problems)
        return
    for name in sorted(expression.names_used & axes.keys() & inputs.keys()):
        yield f"{where}: {name} is both an axis and an input, so that the constraint must not name it (rename one)"


def _object(value: Any, field: str) -> Mapping[str, Any]:
    inner = value.get(field) if isinstance(value, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def _list(value: Any, field: str) -> Collection[Any]:
    inner = value.get(field) if isinstance(value, Mapping) else None
    return inner if isinstance(inner, list | tuple) else ()


def _names(axes: Mapping[str, Any]) -> str:
    return ", ".join(axes) or "none is declared"

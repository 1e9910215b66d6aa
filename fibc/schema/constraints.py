"""Whether a definition's constraints hold for a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fibc.schema.definition import Definition
from fibc.schema.expression import parse
from fibc.schema.problems import place, shown


def check_constraints(
    definition: Definition, axes: Mapping[str, int], tensors: Mapping[str, Any] | None = None
) -> list[str]:
    """Return a problem for each constraint that is false, or that cannot be evaluated.

    Args:
        axes: Every var axis, in elements.
        tensors: Inputs by name, of any library. A constraint that names an input which is not here, or is None, is
            not checked.
    """
    values: dict[str, Any] = {name: value for name, value in (tensors or {}).items() if value is not None}
    values |= {**definition.const_axes, **axes}
    problems = []
    names = {*definition.axes, *definition.inputs}
    for index, text in enumerate(definition.constraints):
        expression = parse(text, names)
        if not expression.names_used <= values.keys():
            continue
        where = place("constraints", index)
        used = {name: values[name] for name in sorted(expression.names_used & definition.axes.keys())}
        seen = ", ".join(f"{name}={shown(value)}" for name, value in used.items()) or "these inputs"
        try:
            holds = bool(expression.evaluate(values))
        except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            problems.append(f"{where}: {shown(text)} must be true, got {type(error).__name__}: {error} with {seen}")
            continue
        if not holds:
            problems.append(f"{where}: {shown(text)} must be true, got false with {seen}")
    return problems

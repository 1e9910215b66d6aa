"""What a definition's constraints say about its axes alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from fibc.errors import SchemaError
from fibc.schema.constraints import check_constraints
from fibc.schema.definition import Definition
from fibc.schema.expression import Expression, parse

_DETERMINES = re.compile(r"\s*(?P<axis>[A-Za-z_]\w*)\s*(?P<relation>==|>=)(?P<bound>[^=<>]+)")
"""``len_indptr == batch_size + 1`` or ``state_cache_size >= batch_size``: one axis, then an expression."""


@dataclass(frozen=True)
class _Rule:
    """``axis`` equals ``bound``, or is at least that."""

    axis: str
    equal: bool
    bound: Expression


class AxisLaws:
    """The constraints of a definition that need no tensor: they hold or not, and determine some axes from others."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._rules = tuple(_rules(definition))

    @property
    def determined(self) -> frozenset[str]:
        """The var axes that an equation gives from other axes: ``len_indptr`` in ``len_indptr == batch_size + 1``."""
        return frozenset(rule.axis for rule in self._rules if rule.equal)

    def complete(self, axes: Mapping[str, int], fixed: Collection[str]) -> dict[str, int] | None:
        """Return ``axes`` with those outside ``fixed`` set or raised to what the laws ask, or None where that fails.

        Args:
            axes: A value for each var axis, or for all but those that an equation determines.
            fixed: Axes to leave as they are.
        """
        values = {**self._definition.const_axes, **axes}
        for rule in self._rules:
            if rule.axis in fixed:
                continue
            try:
                bound = rule.bound.evaluate(values)
            except (ArithmeticError, LookupError):  # divides by zero, or needs an axis that nothing determines
                return None
            if not isinstance(bound, int):
                return None
            values[rule.axis] = bound if rule.equal else max(bound, values.get(rule.axis, 1))
        completed = {name: values.get(name, 0) for name in self._definition.var_axes}
        lawful = min(completed.values(), default=1) >= 1 and not check_constraints(self._definition, completed)
        return completed if lawful else None


def _rules(definition: Definition) -> Iterator[_Rule]:
    for text in definition.constraints:
        match = _DETERMINES.fullmatch(text)
        if match is None or match["axis"] not in definition.var_axes:
            continue
        try:
            bound = parse(match["bound"], definition.axes.keys() - {match["axis"]})
        except SchemaError:  # it names a tensor, or the axis itself
            continue
        yield _Rule(match["axis"], match["relation"] == "==", bound)

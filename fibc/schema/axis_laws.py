"""What a definition's constraints say about its axes alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fibc.errors import SchemaError
from fibc.schema.definition import Definition
from fibc.schema.expression import Expression, parse

_DETERMINES = re.compile(r"\s*(?P<axis>[A-Za-z_]\w*)\s*(?P<relation>==|>=)(?P<rest>[^=<>]+)")
"""``len_indptr == batch_size + 1`` or ``state_cache_size >= batch_size``: one axis, then an expression."""


@dataclass(frozen=True)
class _Rule:
    axis: str
    relation: str
    bound: Expression


class AxisLaws:
    """The constraints of a definition that need no tensor: they hold or not, and determine some axes from others."""

    def __init__(self, definition: Definition) -> None:
        self._constants = dict(definition.const_axes)
        self._var_axes = tuple(definition.var_axes)
        names = set(definition.axes)
        self._laws = tuple(
            law for law in (_parse_or_none(text, names) for text in definition.constraints) if law is not None
        )
        self._rules = tuple(rule for text in definition.constraints for rule in self._rules_of(text, names))

    @property
    def determined(self) -> frozenset[str]:
        """The var axes that an equation gives from other axes: ``len_indptr`` in ``len_indptr == batch_size + 1``."""
        return frozenset(rule.axis for rule in self._rules if rule.relation == "==")

    def hold(self, axes: Mapping[str, int]) -> bool:
        """Return whether every law is true for ``axes``, all var axes of the definition."""
        values = {**self._constants, **axes}
        return all(bool(law.evaluate(values)) for law in self._laws)

    def complete(self, axes: Mapping[str, int], fixed: Collection[str]) -> dict[str, int] | None:
        """Return ``axes`` with those outside ``fixed`` set or raised to what the laws ask, or None where that fails.

        Args:
            axes: A value for each var axis, or for all but those that an equation determines.
            fixed: Axes to leave as they are.
        """
        free = dict(axes)
        for rule in self._rules:
            if rule.axis in fixed:
                continue
            bound = rule.bound.evaluate({**self._constants, **free})
            if not isinstance(bound, int):
                return None
            free[rule.axis] = bound if rule.relation == "==" else max(bound, free.get(rule.axis, 1))
        if any(free.get(name, 0) < 1 for name in self._var_axes):
            return None
        return free if self.hold(free) else None

    def _rules_of(self, text: str, names: Collection[str]) -> tuple[_Rule, ...]:
        match = _DETERMINES.fullmatch(text)
        if match is None or match["axis"] not in self._var_axes:
            return ()
        bound = _parse_or_none(match["rest"].strip(), set(names) - {match["axis"]})
        return () if bound is None else (_Rule(match["axis"], match["relation"], bound),)


def _parse_or_none(text: str, names: Collection[str]) -> Expression | None:
    """Return ``text`` parsed, or None where it names anything but ``names`` (then it is a law about tensors)."""
    try:
        return parse(text, names)
    except SchemaError:
        return None

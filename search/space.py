"""A template's space with its constraints parsed: which configs are valid, in which order, and which lie near."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fibc.errors import SchemaError
from fibc.schema.candidate import ConfigValue
from fibc.schema.expression import Expression, parse
from fibc.schema.space import Constraint, Space, Tunable

Config = tuple[tuple[str, ConfigValue], ...]
"""Tunables in the template's order with their values, as in ``Candidate.config``."""


@dataclass(frozen=True)
class Law:
    """A constraint, parsed.

    Attributes:
        depth: How many tunables, in the template's order, must have values before it can be evaluated.
    """

    constraint: Constraint
    expression: Expression
    depth: int

    def holds(self, values: Mapping[str, ConfigValue]) -> bool:
        """Return whether the law holds; one that divides by zero or overflows does not.

        Raises:
            SchemaError: If it compares what has no order, say a word with a number.
        """
        try:
            return bool(self.expression.evaluate(values))
        except ArithmeticError:
            return False
        except (TypeError, AttributeError, IndexError) as error:
            raise SchemaError(f"constraint {self.expression}: cannot be evaluated, got: {error}") from error


class ConfigSpace:
    """The configs of one Space.

    Raises:
        SchemaError: If a constraint lies outside the safe language, or a tunable has no choice or a doubled one.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.template = space.template
        self.tunables = space.tunables
        for tunable in space.tunables:
            if not tunable.choices or len(set(tunable.choices)) != len(tunable.choices):
                raise SchemaError(
                    f"{space.template}: {tunable.name}: needs distinct choices, at least one, got {tunable.choices}"
                )
        self.laws = tuple(self._law(constraint) for constraint in space.constraints)
        self.num_configs = math.prod(len(tunable.choices) for tunable in space.tunables)

    def broken(self, config: Config, *, depth: int | None = None) -> Law | None:
        """Return the first law that ``config`` breaks.

        Args:
            config: Every tunable in order, or only the first ones.
            depth: Look only at laws of this depth; by default at all that the config can decide.
        """
        values = {**self.space.constants, **dict(config)}
        for law in self.laws:
            if (law.depth <= len(config) if depth is None else law.depth == depth) and not law.holds(values):
                return law
        return None

    def holds(self, config: Config) -> bool:
        """Return whether ``config`` names every tunable in order, with one of its choices, and breaks no law."""
        return (
            len(config) == len(self.tunables)
            and all(
                name == tunable.name and any(_same(value, choice) for choice in tunable.choices)
                for (name, value), tunable in zip(config, self.tunables, strict=True)
            )
            and self.broken(config) is None
        )

    def configs(self) -> Iterator[Config]:
        """Yield every valid config lazily, first choices first; a partial config that breaks a law is not extended."""
        if self.broken((), depth=0) is None:
            yield from self._extend(())

    def default(self) -> Config | None:
        """Return the first valid config: the defaults, unless they break a law. None where none is valid."""
        return next(self.configs(), None)

    def near(self, config: Config, rng: random.Random) -> Iterator[Config]:
        """Yield every other valid config: those that differ in one tunable first, small steps of integers before large.

        Ties are in the order of ``rng``.
        """
        indexes = range(len(self.tunables))
        for distance in range(1, len(self.tunables) + 1):
            moved: list[tuple[int, float, Config]] = []
            for changed in itertools.combinations(indexes, distance):
                others = (
                    [value for value in self.tunables[i].choices if not _same(value, config[i][1])] for i in changed
                )
                for values in itertools.product(*others):
                    other = list(config)
                    for i, value in zip(changed, values, strict=True):
                        other[i] = (other[i][0], value)
                    steps = sum(_steps(self.tunables[i], config[i][1], other[i][1]) for i in changed)
                    moved.append((steps, rng.random(), tuple(other)))
            for _, _, candidate in sorted(moved, key=lambda item: item[:2]):
                if self.broken(candidate) is None:
                    yield candidate

    def _extend(self, partial: Config) -> Iterator[Config]:
        if len(partial) == len(self.tunables):
            yield partial
            return
        tunable = self.tunables[len(partial)]
        for choice in tunable.choices:
            longer = (*partial, (tunable.name, choice))
            if self.broken(longer, depth=len(longer)) is None:
                yield from self._extend(longer)

    def _law(self, constraint: Constraint) -> Law:
        names = [tunable.name for tunable in self.tunables]
        try:
            expression = parse(constraint.expression, {*names, *self.space.constants})
        except SchemaError as error:
            raise SchemaError(f"{self.template}: constraint: {problem}" for problem in error.problems) from error
        depth = max((i + 1 for i, name in enumerate(names) if name in expression.names_used), default=0)
        return Law(constraint, expression, depth)


def ordered(tunable: Tunable) -> tuple[int, ...] | None:
    """Return the choices in ascending order where all are integers, and None where they have no order."""
    integers = [choice for choice in tunable.choices if isinstance(choice, int) and not isinstance(choice, bool)]
    return tuple(sorted(integers)) if len(integers) == len(tunable.choices) else None


def _same(left: ConfigValue, right: ConfigValue) -> bool:
    """Equality that tells True from 1."""
    return left == right and type(left) is type(right)


def _steps(tunable: Tunable, left: ConfigValue, right: ConfigValue) -> int:
    order = ordered(tunable)
    if order is None:
        return 1
    return abs(order.index(int(left)) - order.index(int(right)))

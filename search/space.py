"""A template's space with its constraints parsed: which configs are valid, in which order, and which lie near."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter

from fibc.errors import SchemaError
from fibc.schema.candidate import ConfigValue
from fibc.schema.expression import Expression, parse
from fibc.schema.space import Config, Constraint, Space, Start, Tunable

__all__ = ["Config", "ConfigSpace", "Law", "ordered"]

DRAWS = 200
"""Uniform draws of a valid config before one is searched for: a space whose laws leave one in a hundred still gives
one in 87 % of cases."""

_first = itemgetter(0)

_Move = tuple[int, tuple[str, ConfigValue]]
"""Steps of a tunable's value, and the tunable with the value that it comes to."""


@dataclass(frozen=True)
class Law:
    """A constraint, parsed.

    Attributes:
        depth: How many tunables, in the template's order, must have values before it can be evaluated.
        names: The tunables that it looks at. They are few, and a search asks about thousands of neighbours.
        known: The answer by their values.
    """

    constraint: Constraint
    expression: Expression
    depth: int

    names: tuple[str, ...]
    known: dict[tuple[ConfigValue, ...], bool] = field(default_factory=dict, repr=False, compare=False)

    def holds(self, values: Mapping[str, ConfigValue]) -> bool:
        """Return whether the law holds; one that divides by zero or overflows does not. Asked once for equal values.

        Raises:
            SchemaError: If it compares what has no order, say a word with a number.
        """
        place = tuple([values[name] for name in self.names])
        if (known := self.known.get(place)) is not None:
            return known
        self.known[place] = held = self._holds(values)
        return held

    def _holds(self, values: Mapping[str, ConfigValue]) -> bool:
        try:
            return bool(self.expression.evaluate(values))
        except ArithmeticError:
            return False
        except (TypeError, AttributeError, IndexError) as error:
            raise SchemaError(f"constraint {self.expression}: cannot be evaluated, got: {error}") from error


class ConfigSpace:
    """The configs of one Space.

    Raises:
        SchemaError: If a constraint lies outside the safe language, if a guess asks for other names than constants, or
            if a tunable has no choice or a doubled one.
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
        self._starts = tuple(filter(self._is_for, space.starts))
        self._only = None if space.configs is None else frozenset(map(_typed, space.configs))
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
        """Return whether ``config`` is one of the space: names every tunable in order, with one of its choices, and
        breaks no law."""
        return (
            (self._only is None or _typed(config) in self._only)
            and len(config) == len(self.tunables)
            and all(
                name == tunable.name and any(_same(value, choice) for choice in tunable.choices)
                for (name, value), tunable in zip(config, self.tunables, strict=True)
            )
            and self.broken(config) is None
        )

    def configs(self) -> Iterator[Config]:
        """Yield every valid config lazily, first choices first; a partial config that breaks a law is not extended."""
        if self.space.configs is not None:
            yield from filter(self.holds, self.space.configs)
        else:
            yield from self._with({})

    def starts(self) -> Iterator[Config]:
        """Yield what to try first, each once: the valid guesses, then the first choices that break no law."""
        found: dict[Config, None] = {}
        for start in self._starts:
            fixed = dict(start.values)
            if (config := next(self._with(fixed), None)) is not None and config not in found:
                found[config] = None
                yield config
        if (first := next(self.configs(), None)) is not None and first not in found:
            yield first

    def default(self) -> Config | None:
        """Return the config to try first. None where none is valid."""
        return next(self.starts(), None)

    def draw(self, rng: random.Random) -> Config | None:
        """Return a valid config at random, uniformly where ``DRAWS`` draws hit one; None where none is valid."""
        if self.space.configs is not None:
            valid = list(self.configs())
            return rng.choice(valid) if valid else None
        for _ in range(DRAWS):
            config = tuple((tunable.name, rng.choice(tunable.choices)) for tunable in self.tunables)
            if self.broken(config) is None:
                return config
        shuffled = tuple(replace(t, choices=tuple(rng.sample(t.choices, len(t.choices)))) for t in self.tunables)
        return ConfigSpace(replace(self.space, tunables=shuffled, starts=())).default()

    def near(self, config: Config, rng: random.Random) -> Iterator[Config]:
        """Yield every other valid config: those that differ in one tunable first, small steps of integers before large.

        Ties are in the order of ``rng``.
        """
        if self.space.configs is not None:
            others = [other for other in self.configs() if _typed(other) != _typed(config)]
            away = {other: (*self._moved(config, other), rng.random()) for other in others}
            yield from sorted(others, key=away.__getitem__)
            return
        moves: list[list[_Move]] = [
            [(_steps(tunable, value, other), (name, other)) for other in tunable.choices if not _same(value, other)]
            for tunable, (name, value) in zip(self.tunables, config, strict=True)
        ]
        values = {**self.space.constants, **dict(config)}
        places_of = {tunable.name: place for place, tunable in enumerate(self.tunables)}
        broken = [{places_of[name] for name in law.names} for law in self.laws if not law.holds(values)]
        for distance in range(1, len(self.tunables) + 1):
            moved: list[tuple[int, float, tuple[int, ...], tuple[_Move, ...]]] = []
            for changed in itertools.combinations(range(len(self.tunables)), distance):
                if any(places.isdisjoint(changed) for places in broken):
                    continue  # a law that is broken stays so
                for taken in itertools.product(*(moves[i] for i in changed)):
                    moved.append((sum(map(_first, taken)), rng.random(), changed, taken))
            moved.sort(key=itemgetter(0, 1))
            for _, _, changed, taken in moved:
                places = list(config)
                for i, (_, place) in zip(changed, taken, strict=True):
                    places[i] = place
                candidate = tuple(places)
                if self.broken(candidate) is None:
                    yield candidate

    def _moved(self, config: Config, other: Config) -> tuple[int, float]:
        """Return how many tunables differ, and by how many steps together."""
        steps = [
            _steps(tunable, left, right)
            for tunable, (_, left), (_, right) in zip(self.tunables, config, other, strict=True)
            if not _same(left, right)
        ]
        return len(steps), sum(steps)

    def _with(self, fixed: Mapping[str, ConfigValue]) -> Iterator[Config]:
        """Yield every valid config that has the values ``fixed``."""
        if self.space.configs is not None:
            for config in self.configs():
                if all(_same(value, fixed.get(name, value)) for name, value in config):
                    yield config
        elif self.broken((), depth=0) is None:
            yield from self._extend((), fixed)

    def _extend(self, partial: Config, fixed: Mapping[str, ConfigValue]) -> Iterator[Config]:
        if len(partial) == len(self.tunables):
            yield partial
            return
        tunable = self.tunables[len(partial)]
        for choice in tunable.choices:
            if not _same(choice, fixed.get(tunable.name, choice)):
                continue
            longer = (*partial, (tunable.name, choice))
            if self.broken(longer, depth=len(longer)) is None:
                yield from self._extend(longer, fixed)

    def _is_for(self, start: Start) -> bool:
        """Return whether ``start`` is a guess for the constants of this space."""
        if not start.when:
            return True
        try:
            expression = parse(start.when, set(self.space.constants))
        except SchemaError as error:
            raise SchemaError(f"{self.template}: start: {problem}" for problem in error.problems) from error
        when = Constraint(start.when, "a guess is for some sizes")
        return Law(when, expression, depth=0, names=()).holds(self.space.constants)

    def _law(self, constraint: Constraint) -> Law:
        names = [tunable.name for tunable in self.tunables]
        try:
            expression = parse(constraint.expression, {*names, *self.space.constants})
        except SchemaError as error:
            raise SchemaError(f"{self.template}: constraint: {problem}" for problem in error.problems) from error
        depth = max((i + 1 for i, name in enumerate(names) if name in expression.names_used), default=0)
        return Law(constraint, expression, depth, tuple(name for name in names if name in expression.names_used))


def ordered(tunable: Tunable) -> tuple[int, ...] | None:
    """Return the choices in ascending order where all are integers, and None where they have no order."""
    integers = [choice for choice in tunable.choices if isinstance(choice, int) and not isinstance(choice, bool)]
    return tuple(sorted(integers)) if len(integers) == len(tunable.choices) else None


def _typed(config: Config) -> tuple[tuple[str, ConfigValue, bool], ...]:
    """Return ``config`` such that equality tells True from 1."""
    return tuple((name, value, isinstance(value, bool)) for name, value in config)


def _same(left: ConfigValue, right: ConfigValue) -> bool:
    """Equality that tells True from 1."""
    return left == right and type(left) is type(right)


def _steps(tunable: Tunable, left: ConfigValue, right: ConfigValue) -> int:
    order = ordered(tunable)
    if order is None:
        return 1
    return abs(order.index(int(left)) - order.index(int(right)))

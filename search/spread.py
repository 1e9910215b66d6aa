"""Configs spread over the spaces of all keys: what a later search would ask for first, then what lies far from it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fibc.schema.candidate import ConfigValue
from fibc.schema.space import Config, Space, Tunable
from fibc.search.space import ConfigSpace, ordered
from fibc.search.study import open_study

DRAWN = 12
"""Valid configs that are drawn for the next one; the furthest from those that are there is taken (Mitchell's best
candidate). More of them gain little: the spread of 16 configs no longer changes from 10 on."""


@dataclass(frozen=True)
class Planned:
    """A config to compile.

    Attributes:
        key: Index of the key that asks for it.
        designed: A search asks for it before anything is measured; else it fills a space.
    """

    key: int
    template: str
    config: Config
    designed: bool


def plan(keys: Sequence[Sequence[Space]], *, seed: int, per_template: int) -> Iterator[Planned]:
    """Yield configs, each of a template once, in the order in which they should be compiled.

    First every key's default of every template, then their other guesses, then the rest of every key's design, then
    round by round a config for each key and template that has fewer than ``per_template`` valid ones, whoever asked
    for them: a config is compiled once whatever the number of keys. So wherever it is cut, every key has its share. A
    config that wins at one key and is valid at its neighbour is a warm start there, and is there.

    Args:
        keys: The spaces of each key, in the order of tuning.
        seed: Of the draws. Equal arguments give equal plans.
        per_template: Valid configs that every key shall find of every template.
    """
    filling = _Filling(keys, seed)
    guesses = [[list(ConfigSpace(space).starts()) for space in spaces] for spaces in keys]
    for rank in range(max((len(own) for key in guesses for own in key), default=0)):
        for index, spaces in enumerate(keys):
            for space, own in zip(spaces, guesses[index], strict=True):
                if rank < len(own):
                    yield from filling.take(index, space.template, own[rank], designed=True)
    for index, spaces in enumerate(keys):
        for template, config in _design(spaces, f"plan {index}", seed):
            yield from filling.take(index, template, config, designed=True)
    while found := list(filling.round(per_template)):
        yield from found


def _design(spaces: Sequence[Space], name: str, seed: int) -> list[tuple[str, Config]]:
    """Return what a study of these spaces asks for before it is told anything."""
    study = open_study(None, name, spaces, seed=seed, trials=sys.maxsize)
    return [(proposal.template, proposal.config) for proposal in study.ask_batch(study.num_design)]


class _Filling:
    """The configs that are planned so far, by template and by key."""

    def __init__(self, keys: Sequence[Sequence[Space]], seed: int) -> None:
        self._spaces = [{space.template: ConfigSpace(space) for space in spaces} for spaces in keys]
        self._taken: dict[str, dict[Config, None]] = {}
        self._valid: list[dict[str, list[Config]]] = [{name: [] for name in spaces} for spaces in self._spaces]
        self._full: set[tuple[int, str]] = set()
        self._rng = random.Random(seed)

    def take(self, key: int, template: str, config: Config, *, designed: bool) -> Iterator[Planned]:
        """Yield the config where it is new."""
        taken = self._taken.setdefault(template, {})
        if config in taken:
            return
        taken[config] = None
        for spaces, valid in zip(self._spaces, self._valid, strict=True):
            if template in spaces and spaces[template].holds(config):
                valid[template].append(config)
        yield Planned(key, template, config, designed)

    def round(self, per_template: int) -> Iterator[Planned]:
        """Yield one config for each key and template that has too few; none is left where this yields nothing."""
        for index, spaces in enumerate(self._spaces):
            for template, space in spaces.items():
                if len(self._valid[index][template]) >= per_template or (index, template) in self._full:
                    continue
                config = self._next(space, self._valid[index][template])
                if config is None:
                    self._full.add((index, template))
                else:
                    yield from self.take(index, template, config, designed=False)

    def _next(self, space: ConfigSpace, there: Sequence[Config]) -> Config | None:
        """Return the valid config that lies furthest from those that are there, of some that are drawn."""
        known = self._taken.get(space.template, {})
        drawn = [config for _ in range(DRAWN) if (config := space.draw(self._rng)) is not None]
        fresh = [config for config in dict.fromkeys(drawn) if config not in known]
        if fresh:
            apart = {c: min((_distance(space.tunables, c, other) for other in there), default=0.0) for c in fresh}
            return max(fresh, key=apart.__getitem__)
        return next((near for config in drawn[:1] for near in space.near(config, self._rng) if near not in known), None)


def _distance(tunables: Sequence[Tunable], left: Config, right: Config) -> float:
    """Return how far two configs lie apart: a whole range of integers counts as much as another word."""
    return sum(
        _apart(tunable, value, other) for tunable, (_, value), (_, other) in zip(tunables, left, right, strict=True)
    )


def _apart(tunable: Tunable, left: ConfigValue, right: ConfigValue) -> float:
    order = ordered(tunable)
    if left == right or order is None:
        return float(left != right)
    return abs(order.index(int(left)) - order.index(int(right))) / (len(order) - 1)

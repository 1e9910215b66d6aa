"""Plans of what to compile: every key finds its share of every template, and configs lie far apart."""

from __future__ import annotations

import itertools
import random
from collections import Counter

from fibc.schema.space import Config, Constraint, Space, Tunable
from fibc.search.space import ConfigSpace
from fibc.search.spread import Planned, plan

TILE = (Tunable("block_m", (16, 32, 64, 128)), Tunable("block_n", (64, 32, 128, 256)), Tunable("stages", (3, 2, 4, 5)))


def spaces(size: int) -> tuple[Space, ...]:
    """A template whose tiles fit the size, and one for small sizes only."""
    fits = Constraint("block_m < 2 * size or block_m == 16", "a tile is not far larger than the rows")
    small = Constraint("size <= 16", "for few rows")
    return (
        Space("t/tile", TILE, (fits,), {"size": size}),
        Space("t/vector", (Tunable("rows", (1, 2, 4, 8)),), (small,), {"size": size}),
    )


KEYS = [spaces(size) for size in (4096, 64, 16, 1)]


def planned(per_template: int = 16, seed: int = 0) -> list[Planned]:
    return list(plan(KEYS, seed=seed, per_template=per_template))


def test_equal_arguments_give_equal_plans_and_another_seed_another_one() -> None:
    assert planned() == planned()
    assert planned() != planned(seed=1)


def test_a_config_is_planned_once() -> None:
    counts = Counter((item.template, item.config) for item in planned())
    assert set(counts.values()) == {1}


def test_every_key_finds_as_many_configs_of_a_template_as_were_asked_for_or_all_there_are() -> None:
    found = planned(per_template=16)
    for space in itertools.chain.from_iterable(KEYS):
        here = ConfigSpace(space)
        valid = [item for item in found if item.template == space.template and here.holds(item.config)]
        assert len(valid) >= min(16, sum(1 for _ in here.configs())), space.constants


def test_what_is_planned_for_a_key_is_valid_there() -> None:
    for item in planned():
        space = next(space for space in KEYS[item.key] if space.template == item.template)
        assert ConfigSpace(space).holds(item.config)


def test_defaults_come_first_then_designs_then_what_fills() -> None:
    found = planned(per_template=40)
    defaults = {(space.template, ConfigSpace(space).default()) for spaces in KEYS for space in spaces} - {
        ("t/vector", None)
    }
    assert {(item.template, item.config) for item in found[: len(defaults)]} == defaults
    flags = [item.designed for item in found]
    assert flags == sorted(flags, reverse=True)
    assert not all(flags)


def test_a_plan_of_more_begins_with_the_plan_of_less() -> None:
    less, more = planned(per_template=4), planned(per_template=16)
    assert more[: len(less)] == less


def test_what_fills_a_space_lies_further_apart_than_uniform_draws() -> None:
    space = Space("t/wide", tuple(Tunable(name, tuple(range(1, 10))) for name in "abcd"), (), {})
    drawn = [item.config for item in plan([(space,)], seed=3, per_template=48) if not item.designed]
    here, rng = ConfigSpace(space), random.Random(3)
    uniform: list[Config] = []
    while len(uniform) < len(drawn):
        config = here.draw(rng)
        assert config is not None
        uniform.append(config)
    assert least_gap(drawn) > least_gap(uniform)


def least_gap(configs: list[Config]) -> float:
    """Return the mean distance of a config to its nearest other one."""

    def apart(left: Config, right: Config) -> int:
        return sum(abs(int(a) - int(b)) for (_, a), (_, b) in zip(left, right, strict=True))

    return sum(min(apart(c, o) for o in configs if o is not c) for c in configs) / len(configs)

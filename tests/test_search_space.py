"""Valid configs of a space: counted, enumerated and found near another one, against brute force."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fibc.errors import SchemaError
from fibc.schema.space import Constraint, Space, Start, Tunable
from fibc.search.pruning import Census, census, count_valid
from fibc.search.space import Config, ConfigSpace

TILE = Space(
    "gemm/tile",
    (
        Tunable("block_m", (4, 8, 16)),
        Tunable("block_n", (64, 32, 128)),
        Tunable("packed", (False, True)),
        Tunable("order", ("rows", "columns")),
    ),
    (
        Constraint("block_m * block_n <= 1024", "accumulators do not fit the registers"),
        Constraint("not packed or N % block_n == 0", "a packed panel needs whole blocks"),
        Constraint('order == "rows" or packed', "columns are read from a packed panel only"),
    ),
    {"N": 4096 + 32},
)


def brute_force(space: Space) -> list[Config]:
    """Every valid config, from Python's own evaluation of the same expressions."""
    names = [tunable.name for tunable in space.tunables]
    valid = []
    for values in itertools.product(*(tunable.choices for tunable in space.tunables)):
        config = dict(zip(names, values, strict=True))
        scope = {**space.constants, **config}
        if all(eval(law.expression, {"__builtins__": {}}, dict(scope)) for law in space.constraints):  # noqa: S307
            valid.append(tuple(config.items()))
    return valid


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    tunables = tuple(
        Tunable(name, tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True)))) for name in names
    )
    terms = st.sampled_from([*names, "N", "3"])
    comparison = st.tuples(
        terms, st.sampled_from(["+", "*", "%"]), terms, st.sampled_from(["<", "<=", "==", "!=", ">"]), terms
    )
    laws = draw(st.lists(comparison.map(" ".join), max_size=3))
    return Space("t", tunables, tuple(Constraint(law, f"needs {law}") for law in laws), {"N": draw(st.integers(1, 9))})


@given(spaces())
def test_enumeration_gives_exactly_the_valid_configs_in_the_order_of_choices(space: Space) -> None:
    assert list(ConfigSpace(space).configs()) == brute_force(space)


@given(spaces())
def test_a_census_adds_up(space: Space) -> None:
    counted = census(space)
    assert counted.valid == len(brute_force(space)) == count_valid(space)
    assert counted.valid + sum(number for _, number in counted.rejected) == counted.total


@given(spaces(), st.randoms(use_true_random=False))
def test_near_gives_every_other_valid_config_once_and_nearer_ones_first(space: Space, rng: random.Random) -> None:
    config = tuple((tunable.name, rng.choice(tunable.choices)) for tunable in space.tunables)
    near = list(ConfigSpace(space).near(config, rng))
    assert sorted(near) == sorted(set(brute_force(space)) - {config})
    changed = [sum(left != right for left, right in zip(config, other, strict=True)) for other in near]
    assert changed == sorted(changed)


def test_near_takes_small_steps_of_integers_first_however_choices_are_written() -> None:
    space = Space("t", (Tunable("rows", (8, 1, 4, 2)),), (), {})
    near = ConfigSpace(space).near((("rows", 1),), random.Random(0))
    assert [config[0][1] for config in near] == [2, 4, 8]


@given(spaces())
def test_the_default_is_the_first_valid_config(space: Space) -> None:
    assert ConfigSpace(space).default() == next(iter(brute_force(space)), None)


def test_a_census_says_what_each_constraint_took() -> None:
    assert census(TILE) == Census(
        "gemm/tile",
        36,
        len(brute_force(TILE)),
        (
            ("a packed panel needs whole blocks", 10),
            ("columns are read from a packed panel only", 8),
            ("accumulators do not fit the registers", 4),
        ),
    )
    assert str(census(TILE)).startswith("gemm/tile: 14 of 36 configs; 10 pruned: a packed panel needs whole blocks; ")


def test_a_config_holds_only_with_its_own_names_order_choices_and_types() -> None:
    space = ConfigSpace(TILE)
    good: Config = (("block_m", 4), ("block_n", 64), ("packed", False), ("order", "rows"))
    assert space.holds(good)
    assert not space.holds(good[:-1])
    assert not space.holds((good[1], good[0], *good[2:]))
    assert not space.holds((("block_m", 5), *good[1:]))
    assert not space.holds((*good[:2], ("packed", 0), good[3]))
    assert not space.holds((("block_m", 16), ("block_n", 128), *good[2:]))


def test_a_space_of_millions_is_enumerated_lazily_and_pruned_early() -> None:
    many = tuple(Tunable(f"t{i}", tuple(range(1, 11))) for i in range(8))
    only = Constraint("t0 == 7", "seven only")
    deep = tuple(Constraint(f"t{i} == t0", f"t{i} is as t0") for i in range(1, 8))
    assert next(ConfigSpace(Space("t", many, (only,), {})).configs()) == (
        ("t0", 7),
        *((f"t{i}", 1) for i in range(1, 8)),
    )
    assert census(Space("t", many, (only, *deep), {})).valid == 1


def test_a_law_over_constants_alone_prunes_everything_at_once() -> None:
    space = Space(
        "t", (Tunable("rows", (1, 2, 4)),), (Constraint("N % 8 == 0", "N must be a multiple of 8"),), {"N": 12}
    )
    assert census(space).rejected == (("N must be a multiple of 8", 3),)
    assert ConfigSpace(space).default() is None


def test_a_law_that_divides_by_zero_does_not_hold() -> None:
    space = Space("t", (Tunable("rows", (0, 2)),), (Constraint("4 % rows == 0", "rows divide 4"),), {})
    assert list(ConfigSpace(space).configs()) == [(("rows", 2),)]


@pytest.mark.parametrize("expression", ["rows ** 2 < 4", "__import__('os')", "columns > 1", "rows.real", "(" * 500])
def test_a_constraint_outside_the_safe_language_is_refused_with_its_template(expression: str) -> None:
    with pytest.raises(SchemaError, match=r"^gemm/matvec: constraint: "):
        ConfigSpace(Space("gemm/matvec", (Tunable("rows", (1, 2)),), (Constraint(expression, ""),), {}))


def test_a_constraint_that_compares_a_word_with_a_number_is_refused() -> None:
    space = Space("t", (Tunable("order", ("rows",)),), (Constraint("order < 3", ""),), {})
    with pytest.raises(SchemaError, match=r"constraint order < 3: cannot be evaluated"):
        ConfigSpace(space).default()


@pytest.mark.parametrize("choices", [(), (1, 2, 1)])
def test_a_tunable_without_distinct_choices_is_refused(choices: tuple[int, ...]) -> None:
    with pytest.raises(SchemaError, match=r"^t: rows: needs distinct choices, at least one, got "):
        ConfigSpace(Space("t", (Tunable("rows", choices),), (), {}))


def test_a_space_of_given_configs_holds_these_alone() -> None:
    every = brute_force(TILE)
    given_ones = (every[5], every[1], every[9])
    broken = (("block_m", 16), ("block_n", 128), ("packed", False), ("order", "rows"))
    held = ConfigSpace(replace(TILE, configs=(*given_ones, broken)))
    assert tuple(held.configs()) == given_ones
    assert held.default() == given_ones[0]
    assert [config for config in every if held.holds(config)] == [every[1], every[5], every[9]]
    rng = random.Random(0)
    assert {held.draw(rng) for _ in range(50)} == set(given_ones)
    assert list(held.near(every[1], rng)) in ([every[5], every[9]], [every[9], every[5]])
    counted = census(replace(TILE, configs=(*given_ones, broken)))
    assert (counted.total, counted.valid) == (4, 3)
    assert counted.rejected == (("accumulators do not fit the registers", 1),)


def test_given_configs_are_found_nearest_first() -> None:
    space = Space("t", (Tunable("a", (1, 2, 3, 4)), Tunable("b", (1, 2, 3, 4))), (), {})
    far, one_off, two_off = ((("a", a), ("b", b)) for a, b in ((4, 4), (1, 2), (1, 3)))
    held = ConfigSpace(replace(space, configs=(far, two_off, one_off)))
    assert list(held.near((("a", 1), ("b", 1)), random.Random(0))) == [one_off, two_off, far]


@given(spaces(), st.integers(0, 2**32 - 1))
def test_a_draw_is_valid_where_anything_is(space: Space, seed: int) -> None:
    drawn = ConfigSpace(space).draw(random.Random(seed))
    every = brute_force(space)
    assert drawn in every if every else drawn is None


# Starts ---------------------------------------------------------------------------------------------------------------


def started(*starts: Start) -> list[dict[str, object]]:
    return [dict(config) for config in ConfigSpace(replace(TILE, starts=starts)).starts()]


def test_a_start_names_some_tunables_and_the_laws_choose_the_others() -> None:
    found = started(Start("N > 4096", (("block_m", 16),)), Start("True", (("packed", True), ("block_n", 32))))
    assert found == [
        {"block_m": 16, "block_n": 64, "packed": False, "order": "rows"},
        {"block_m": 4, "block_n": 32, "packed": True, "order": "rows"},
        {"block_m": 4, "block_n": 64, "packed": False, "order": "rows"},
    ]


def test_starts_for_other_constants_or_against_a_law_or_twice_are_passed_over() -> None:
    found = started(
        Start("N < 4096", (("block_m", 8),)),
        Start("N // 0 > 0", (("block_m", 8),)),
        Start("True", (("block_m", 16), ("block_n", 128))),
        Start("True", (("packed", 1),)),
        Start("True", (("block_m", 4),)),
    )
    assert found == [{"block_m": 4, "block_n": 64, "packed": False, "order": "rows"}]


def test_the_first_valid_start_is_the_default_and_draws_do_not_know_of_it() -> None:
    space = replace(TILE, starts=(Start("True", (("block_m", 16), ("block_n", 32))),))
    default = ConfigSpace(space).default()
    assert default is not None
    assert dict(default)["block_m"] == 16
    left, right = random.Random(1), random.Random(1)
    assert [ConfigSpace(space).draw(left) for _ in range(20)] == [ConfigSpace(TILE).draw(right) for _ in range(20)]
    assert list(ConfigSpace(space).configs()) == brute_force(TILE)


def test_of_listed_configs_those_that_a_start_names_come_first() -> None:
    given_ones = tuple(brute_force(TILE)[:6])
    chosen = given_ones[4]
    listed = ConfigSpace(replace(TILE, configs=given_ones, starts=(Start("True", chosen),)))
    assert list(listed.starts()) == [chosen, given_ones[0]]


def test_a_start_that_asks_for_a_tunable_is_refused() -> None:
    with pytest.raises(SchemaError, match="block_m"):
        ConfigSpace(replace(TILE, starts=(Start("block_m > 4", (("block_m", 8),)),)))

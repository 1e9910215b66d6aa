"""The spaces of Triton's GEMM templates, held against what an H200 showed: the best that was measured comes early."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from kernel_calls import gemm, key

from fibc.backends.triton import TritonBackend
from fibc.cache import Cache
from fibc.schema.candidate import ConfigValue
from fibc.schema.space import Config, Tunable
from fibc.search.pruning import count_valid
from fibc.search.space import ConfigSpace
from fibc.search.study import open_study

MEASURED = Path(__file__).parent.parent / "benchmarks" / "results" / "h200" / "candidates_triton.jsonl"
H200_SMS = 132
FIRST_OF_TEMPLATE = 3
"""Trials of its template in which the best measured config of a key must be."""

FIRST_OF_KEY = 5
"""Trials of the key, over all templates, in which it must be."""

Timing = tuple[float, str, dict[str, str]]
"""Microseconds, template, and the text of each tunable's value."""


def _timings() -> Iterator[tuple[str, float, list[Timing]]]:
    """Yield each measured key (``MxNxK``) with native's time and every candidate's, fastest first."""
    for line in map(json.loads, MEASURED.read_text().splitlines()):
        if line["kind"] == "us":
            found: list[Timing] = []
            for name, us in line["value"].items():
                if match := re.match(r"(gemm/\w+)\((.*)\) for", name):
                    values = dict(item.split("=") for item in match[2].split(", "))
                    found.append((us, match[1], values))
            yield line["about"], line["value"]["native"], sorted(found, key=lambda timing: timing[0])


TIMINGS = {about: (native, found) for about, native, found in _timings()}


def _value(tunable: Tunable, text: str) -> ConfigValue:
    return next((choice for choice in tunable.choices if str(choice) == text), text)


@cache
def _backend() -> TritonBackend:
    return TritonBackend(Cache(), num_sms=H200_SMS)


@cache
def _spaces(size: int, n: int, k: int) -> dict[str, ConfigSpace]:
    found, _ = _backend().spaces(gemm(n, k, "bfloat16"), key(size))
    return {space.template: ConfigSpace(space) for space in found}


def _config(space: ConfigSpace, values: dict[str, str]) -> Config:
    return tuple((tunable.name, _value(tunable, values[tunable.name])) for tunable in space.tunables)


def test_every_suite_key_of_few_rows_was_measured() -> None:
    assert len(TIMINGS) == 38
    assert sum(len(found) for _, found in TIMINGS.values()) == 291


@pytest.mark.parametrize("about", TIMINGS)
def test_the_best_measured_config_is_tried_among_the_first(about: str) -> None:
    m, n, k = map(int, about.split("x"))
    spaces = _spaces(m, n, k)
    _, [(_, template, values), *_] = TIMINGS[about]
    best = _config(spaces[template], values)
    assert spaces[template].holds(best)
    study = open_study(None, about, [space.space for space in spaces.values()], trials=60)
    asked = [(proposal.template, proposal.config) for proposal in study.ask_batch(FIRST_OF_KEY)]
    assert (template, best) in asked
    assert best in [config for name, config in asked if name == template][:FIRST_OF_TEMPLATE]


@pytest.mark.parametrize("about", TIMINGS)
def test_the_first_trial_of_the_best_template_is_near_the_best(about: str) -> None:
    m, n, k = map(int, about.split("x"))
    _, timings = TIMINGS[about]
    best_us, template, _ = timings[0]
    space = _spaces(m, n, k)[template]
    defaults = [us for us, name, values in timings if name == template and _config(space, values) == space.default()]
    if defaults:  # else it was found elsewhere, see the comments of the templates
        assert defaults[0] <= best_us * 1.05


SHAPES = ((4096, 4096), (5120, 8192), (1024, 4096), (14336, 4096), (64, 16384), (40, 511), (151936, 4096))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_every_size_of_any_shape_has_a_choice_of_configs(shape: tuple[int, int], dtype: str) -> None:
    for size in (1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 450, 1024, 4096):
        spaces, _ = _backend().spaces(gemm(*shape, dtype), key(size))
        counts = {space.template: count_valid(space) for space in spaces}
        assert 8 <= sum(counts.values()) <= 2000, (size, counts)


def test_the_matrix_vector_class_is_for_one_row_and_for_more_where_arithmetic_is_little() -> None:
    def rows(size: int, n: int, k: int) -> set[ConfigValue]:
        return {dict(config)["rows"] for config in _spaces(size, n, k)["gemm/triton_matvec"].configs()}

    assert rows(1, 28672, 4096) == {1}
    assert rows(2, 4096, 4096) == {2}
    assert rows(3, 4096, 4096) == rows(4, 4096, 4096) == rows(2, 6144, 4096) == set()
    assert rows(3, 1024, 4096) == rows(4, 1024, 4096) == {4}
    assert rows(16, 128, 2048) == {4, 8, 16}
    assert rows(16, 256, 7168) == rows(17, 128, 2048) == set()


def test_what_was_never_near_native_is_in_no_space() -> None:
    assert _spaces(64, 28672, 4096)["gemm/triton_stream"].default() is None
    assert _spaces(256, 4096, 4096)["gemm/triton_swap"].default() is None
    large = [dict(config) for config in _spaces(128, 6144, 4096)["gemm/triton_tma"].configs()]
    assert all(config["block_n"] != 256 and config["block_m"] != 256 for config in large)
    few = [dict(config) for config in _spaces(16, 4096, 4096)["gemm/triton_swap"].configs()]
    assert {config["loads"] for config in few} == {"pointers"}

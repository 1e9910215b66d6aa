"""msgpack records: what is written is read again, and torn bytes are an error that callers can name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fibc.schema.callspec import Argument, Axis, CallSpec
from fibc.schema.candidate import Candidate, ConfigValue, Target
from fibc.schema.codec import decode, encode, from_plain, to_plain
from fibc.schema.decision import Decision, Verdict
from fibc.schema.digest import DIGEST_CHARS, digest_json, digest_text
from fibc.schema.evaluation import Correctness, Evaluation, Pair, Status
from fibc.schema.feature import Cell, FeatureKey, Point

names = st.text(st.characters(codec="utf-8"), max_size=8)
counts = st.integers(-(2**63), 2**63 - 1)
numbers = st.floats(allow_nan=False)
config_values: st.SearchStrategy[ConfigValue] = st.booleans() | counts | names

axes = st.builds(Axis, names, st.none() | counts)
arguments = st.builds(
    Argument, names, names, names, st.lists(counts, max_size=3).map(tuple), st.booleans(), st.none() | counts
)
specs = st.builds(
    CallSpec,
    names,
    st.lists(axes, max_size=3).map(tuple),
    st.lists(arguments, max_size=3).map(tuple),
    st.lists(arguments, max_size=3).map(tuple),
)
candidates = st.builds(
    Candidate,
    names,
    names,
    st.lists(st.tuples(names, config_values), max_size=4).map(tuple),
    names,
    st.builds(Target, names, names),
)
evaluations = st.builds(
    Evaluation,
    names,
    names,
    st.sampled_from(Status),
    names,
    st.none() | st.builds(Correctness, numbers, numbers, numbers, st.booleans(), counts),
    st.lists(st.builds(Pair, numbers, numbers, st.booleans()), max_size=3).map(tuple),
    names,
    numbers,
)


@given(st.one_of(specs, candidates, evaluations))
def test_a_value_survives_a_round_trip_with_its_types(value: Any) -> None:
    data = encode(value)
    again = decode(type(value), data)
    assert again == value
    assert encode(again) == data
    assert from_plain(type(value), to_plain(value)) == value


@given(candidates)
def test_true_and_one_stay_different_configs(candidate: Candidate) -> None:
    again = decode(Candidate, encode(candidate))
    assert [type(value) for _, value in again.config] == [type(value) for _, value in candidate.config]
    assert again.digest == candidate.digest


def test_nested_records_survive_a_round_trip() -> None:
    cell = Cell(((1, 4), (5, 8)))
    point = Point((("M", 3),), "tune", 2.0, "u1")
    decision = Decision(cell, Verdict.KEEP_NATIVE, "", (), (), "a tie", synthetic=True)
    for value in (decision, FeatureKey(cell, (point,), 0, synthetic=False)):
        again = decode(type(value), encode(value))
        assert again == value
    assert decode(Decision, encode(decision)).verdict is Verdict.KEEP_NATIVE


@pytest.mark.parametrize("error", [math.inf, -math.inf, math.nan])
def test_errors_that_are_no_numbers_survive(error: float) -> None:
    again = decode(Correctness, encode(Correctness(error, 0.0, 0.0, True, 1)))
    assert again.max_absolute_error == error or (math.isnan(error) and math.isnan(again.max_absolute_error))


@given(st.binary(max_size=64))
def test_any_bytes_are_a_value_or_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(CallSpec, data)


@given(specs, st.data())
def test_torn_bytes_are_a_value_error(spec: CallSpec, data: st.DataObject) -> None:
    whole = encode(spec)
    kept = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ValueError):
        decode(CallSpec, whole[:kept])


def test_another_types_record_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="validation error"):
        decode(CallSpec, encode(Axis("M", 3)))


@given(st.lists(st.text(max_size=4), max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_different_parts_have_different_digests(first: list[str], second: list[str]) -> None:
    assert (digest_text(*first) == digest_text(*second)) == (first == second)
    assert len(digest_text(*first)) == DIGEST_CHARS


def test_a_digest_ignores_the_order_of_a_mapping_and_no_other_order() -> None:
    assert digest_json({"a": 1, "b": [1, 2]}) == digest_json({"b": [1, 2], "a": 1})
    assert digest_json({"a": 1, "b": [1, 2]}) != digest_json({"a": 1, "b": [2, 1]})
    assert digest_json([1]) != digest_json([True]) != digest_json(["1"])

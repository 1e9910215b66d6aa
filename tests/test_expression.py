"""The safe language of constraints: what it means, and what it refuses."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fibc.errors import SchemaError
from fibc.schema.expression import MAX_CHARS, MAX_NESTING, parse

VALUES: dict[str, Any] = {"M": 7, "N": 4096, "zero": 0, "layout": "rows", "flag": True}


@dataclass(frozen=True)
class Sample:
    """An expression with the value that Python's own operators give it; None where it divides by zero."""

    text: str
    value: Any


def _apply(symbol: str, function: Callable[[Any, Any], Any]) -> Callable[[tuple[Sample, Sample]], Sample]:
    def build(sides: tuple[Sample, Sample]) -> Sample:
        left, right = sides
        text = f"({left.text} {symbol} {right.text})"
        if left.value is None or right.value is None or (symbol in ("//", "%", "/") and right.value == 0):
            return Sample(text, None)
        return Sample(text, function(left.value, right.value))

    return build


_OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "/": operator.truediv,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

_leaves = st.one_of(
    st.integers(0, 2**40).map(lambda value: Sample(str(value), value)),
    st.sampled_from(["M", "N", "zero"]).map(lambda name: Sample(name, VALUES[name])),
)


def _grow(inner: st.SearchStrategy[Sample]) -> st.SearchStrategy[Sample]:
    pairs = st.tuples(inner, inner)
    return st.one_of([pairs.map(_apply(symbol, function)) for symbol, function in _OPERATORS.items()])


samples = st.recursive(_leaves, _grow, max_leaves=8)


@given(samples)
def test_arithmetic_and_comparison_mean_what_python_means(sample: Sample) -> None:
    expression = parse(sample.text, VALUES)
    if sample.value is None:
        with pytest.raises(ZeroDivisionError):
            expression.evaluate(VALUES)
    else:
        try:
            assert expression.evaluate(VALUES) == sample.value
        except OverflowError:
            assert isinstance(sample.value, int | float | bool)  # a product beyond 2^127 on the way


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0 < M <= 7 < N", True),
        ("0 < M < 7 < 1 // zero", False),
        ("M == 8 or N == 4096 and not flag", False),
        ("zero == 0 or 1 // zero", True),
        ("zero != 0 and 1 // zero == 1", False),
        ("-M + 8 == 1", True),
        ("min(M, N, 3) == 3 and max(M, N) == N", True),
        ("M in (1, 7) and M not in [8, N]", True),
        ("layout == 'rows'", True),
        ("layout in ('columns', 'tiles')", False),
        ("  M == 7  ", True),
    ],
)
def test_logic_is_pythons_and_stops_early(text: str, value: bool) -> None:
    assert parse(text, VALUES).evaluate(VALUES) == value


def test_tensors_are_indexed_sliced_and_measured() -> None:
    values = {"indptr": torch.tensor([0, 3, 5, 9]), "weight": torch.zeros(2, 6, 4), "total": 9, "half": 3}
    for text in (
        "total == indptr[-1].item()",
        "indptr[0].item() == 0",
        "weight.shape[1] == 2 * half",
        "weight.shape[-1] == 4",
        "max(indptr[1:] - indptr[:-1]) <= 4",
        "min(indptr) >= 0",
    ):
        assert bool(parse(text, values).evaluate(values)) is True, text
    assert bool(parse("max(indptr[1:] - indptr[:-1]) <= 3", values).evaluate(values)) is False


def test_it_tells_the_names_it_needs() -> None:
    assert parse("M * N >= block_m + indptr[-1].item()", ["M", "N", "block_m", "indptr", "other"]).names_used == {
        "M",
        "N",
        "block_m",
        "indptr",
    }


def test_it_survives_pickling() -> None:
    expression = pickle.loads(pickle.dumps(parse("M % 7 == 0", VALUES)))
    assert expression == parse("M % 7 == 0", VALUES)
    assert expression.evaluate({"M": 14}) is True


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("__import__('os').system('x')", "system"),
        ("M.__class__ == 1", "M.__class__"),
        ("M ** N == 1", "M ** N"),
        ("1 << 62 == M", "1 << 62"),
        ("M & 1 == 1", "1"),
        ("'a' * N == 1", "'a'"),
        ("layout < 'rows'", "'rows'"),
        ("open('x')", "open('x')"),
        ("min(*M)", "*M"),
        ("[x for x in M]", "for x in M"),
        ("lambda: M", "lambda: M"),
        ("M if N else 0", "M if N else 0"),
        ("M is N", "M is N"),
        ("M.shape", "M.shape"),
        ("M.item", "M.item"),
        ("M.item(0)", "M.item(0)"),
        ("M[N]", "'N'"),
        ("M[::2]", "::2"),
        ("M[0:N]", "0:N"),
        ("M in N", "'N'"),
        ("(M, N) == 1", "(M, N)"),
        ("f'{M}' == 1", "{M}"),
        ("1.5 < M", "1.5"),
        ("... == M", "..."),
        ("M == missing", "missing"),
    ],
)
def test_what_lies_outside_is_refused_with_the_offending_part(text: str, token: str) -> None:
    with pytest.raises(SchemaError) as caught:
        parse(text, VALUES)
    assert any(token in problem.removeprefix(repr(text)) for problem in caught.value.problems)


def test_every_offending_part_is_named_at_once() -> None:
    with pytest.raises(SchemaError) as caught:
        parse("M ** 2 == missing and other.data == 1", VALUES)
    text = str(caught.value)
    assert all(token in text for token in ("'M ** 2'", "'missing'", "'other.data'"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "M ==",
        "M; N",
        "M := 3",
        "M\0",
        "\ud800",
        "(" * 300,
        "-" * 900 + "M",
        "not " * 200 + "M",
        "(" * (MAX_NESTING + 60) + "M" + ")" * (MAX_NESTING + 60) + " + -" * (MAX_NESTING + 1) + "M",
        "9" * 200,
        "M" * (MAX_CHARS + 1),
    ],
)
def test_broken_and_absurd_text_is_a_problem_and_no_crash(text: str) -> None:
    with pytest.raises(SchemaError):
        parse(text, VALUES)


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        parse(text, VALUES)
    except SchemaError as error:
        assert error.problems


def test_integers_stay_bounded_while_evaluating() -> None:
    names = {"big": 2**63 - 1}
    assert parse("big * big > big", names).evaluate(names) is True
    with pytest.raises(OverflowError):
        parse("big * big * big > big", names).evaluate(names)


def test_text_never_meets_arithmetic() -> None:
    with pytest.raises(TypeError):
        parse("layout * N == M", VALUES).evaluate(VALUES)

"""Literals are exact and nothing undefined is rendered."""

from __future__ import annotations

import ctypes
import math
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fibc import toolchain
from fibc.errors import SchemaError
from fibc.render import Renderer, c_bool, c_float, c_int, c_string


@pytest.fixture
def render(tmp_path: Path) -> Renderer:
    for name, text in {
        "good.j2": "{% if wide %}\nint {{ name }} = {{ value | c_int }};\n{% endif %}\n",
        "include.j2": '{% include "absent.j2" %}',
        "syntax.j2": "\n\n{% for %}\n",
    }.items():
        (tmp_path / name).write_text(text)
    return Renderer([tmp_path])


def test_a_template_is_rendered_without_lines_of_its_own(render: Renderer) -> None:
    assert render("good.j2", {"wide": True, "name": "x", "value": 3}) == "int x = 3;\n"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("good.j2", {"wide": True, "name": "x"}, r"good\.j2: cannot be rendered: 'value' is undefined"),
        ("good.j2", {"name": "x", "value": 3}, r"good\.j2: cannot be rendered: 'wide' is undefined"),
        ("good.j2", {"wide": True, "name": "x", "value": True}, r"good\.j2: .*needs an int, got True"),
        ("include.j2", {}, r"absent\.j2: template not found"),
        ("syntax.j2", {}, r"syntax\.j2:3: "),
        ("absent.j2", {}, r"absent\.j2: template not found"),
    ],
)
def test_a_template_that_cannot_be_rendered_says_where(
    name: str, values: dict[str, object], message: str, render: Renderer
) -> None:
    with pytest.raises(SchemaError, match=message):
        render(name, values)


def test_literals_compile_to_the_values_they_were_made_of(tmp_path: Path) -> None:
    ints = [0, -1, 2**31, -(2**31), 2**63 - 1, -(2**63) + 1]
    texts = ['plain "quoted" \\ ??/ end', "Ümlaut\n\ttab \x00 0123"]
    text = "\n".join(
        [f"static_assert({c_int(i)} == {i}LL && sizeof({c_int(i)}) == {8 if abs(i) >= 2**31 else 4});" for i in ints]
        + [f"static_assert(sizeof({c_string(t)}) == {len(t.encode()) + 1});" for t in texts]
        + [f"static_assert({c_bool(True)} && !{c_bool(False)});", f"static_assert({c_float(0.1)} == 0.1f);"]
    )
    source = tmp_path / "literals.cpp"
    source.write_text(text)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    done = subprocess.run([toolchain.find().cxx, *flags, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_float_literal_is_the_nearest_float32(value: float) -> None:
    literal = c_float(value)
    assert literal.endswith("f")
    assert ctypes.c_float(float(literal[:-1])).value == value


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_no_literal_stands_for_what_is_not_finite(value: float) -> None:
    with pytest.raises(ValueError, match="needs a finite value"):
        c_float(value)


def test_values_of_another_kind_are_refused() -> None:
    with pytest.raises(TypeError, match="needs an int"):
        c_int(True)
    with pytest.raises(ValueError, match="64 bits"):
        c_int(2**63)
    with pytest.raises(TypeError, match="needs a bool"):
        c_bool(1)  # type: ignore[arg-type]

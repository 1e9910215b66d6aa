"""A template's launch table is checked whole, and its expressions mean the same in C++ as in Python."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fibc import toolchain
from fibc.backends.launch_code import cpp, fixed_int
from fibc.errors import SchemaError
from fibc.schema.candidate import ConfigValue
from fibc.schema.expression import parse
from fibc.schema.template import load_template

GOOD = """\
summary = "adds"
source = "a test"
op_types = ["add"]
needs = "sm_90a"
const_axes = ["H"]

[dtypes]
T = ["float32", "bfloat16"]

[inputs]
X = { shape = ["R", "H"], alignment_bytes = 16 }

[outputs]
Y = { shape = ["R", "H"], in_place_of = "X" }

[tunables]
block = [64, 32]
loads = ["pointers", "maps"]

[[constraints]]
expression = "block * T_bytes <= shared_bytes_max and num_sms > 1 and l2_bytes > registers_max"
message = "a block fits"

[launch]
function = "add"
num_warps = "block // 16"
grid = ["cdiv(R, block)", "H // block"]
scratch_bytes = "R * 4"
requires = ["R <= 100"]
arguments = [
  { name = "x", tensor = "X", when = "loads == 'pointers'" },
  { name = "x", descriptor = "X", block = ["block", 64], when = "loads == 'maps'" },
  { name = "counters", workspace = "counters" },
  { name = "rows", value = "R" },
]
"""


def problems(root: Path, text: str) -> list[str]:
    path = root / "family" / "add.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.with_name("add.py.j2").write_text("# a kernel\n")
    try:
        load_template(path, root)
    except SchemaError as error:
        return [problem.removeprefix(f"{path}: ") for problem in error.problems]
    return []


def test_a_lawful_launch_has_no_problem(tmp_path: Path) -> None:
    assert problems(tmp_path, GOOD) == []
    template = load_template(tmp_path / "family" / "add.toml", tmp_path)
    assert (template.backend, template.kind, template.source_name) == ("triton", "cuda", "family/add.py.j2")
    assert template.outputs["Y"].in_place_of == "X"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("[launch]", "[lunch]", "lunch: Extra inputs are not permitted"),
        ('function = "add"\n', "", "launch.function: must be present"),
        ('needs = "sm_90a"', 'needs = "avx2"', "needs: must be an architecture, got 'avx2' (accepted: sm_80"),
        ("num_sms > 1", "lanes > 1", "constraints[0].expression:"),
        ('"block // 16"', '"R // 16"', "launch.num_warps: 'R // 16': must be a known name, got 'R'"),
        ('"cdiv(R, block)", "H // block"', '"cdiv(R)"', "launch.grid[0]: 'cdiv(R)': must stay in the language"),
        ('"cdiv(R, block)", "H // block"', '"1", "1", "1", "1"', "launch.grid:"),
        ('"R * 4"', '"Q * 4"', "launch.scratch_bytes: 'Q * 4': must be a known name, got 'Q'"),
        ('"R <= 100"', '"R <="', "launch.requires[0]: 'R <=': must be an expression"),
        ('tensor = "X", when', 'tensor = "Z", when', "launch.arguments[0]: must be a role, got 'Z' (accepted: X, Y)"),
        ('block = ["block", 64]', 'block = ["block"]', "launch.arguments[1].block: must have 2 sizes like X, got 1"),
        ("\"loads == 'maps'\"", '"R == 1"', "launch.arguments[1].when: 'R == 1': must be a known name"),
        (
            'workspace = "counters"',
            'workspace = "all"',
            "launch.arguments[2].workspace: must be 'counters' or 'scratch'",
        ),
        ('value = "R"', 'value = "R", tensor = "X"', "launch.arguments[3]: must have one of tensor, descriptor"),
        ('value = "R"', 'value = "R", type = "i8"', "launch.arguments[3].type: must be 'i32' or 'i64'"),
        ('name = "rows"', 'name = "counters"', "launch.arguments: must have different names, got counters twice"),
        ('in_place_of = "X"', 'in_place_of = "Q"', "outputs.Y.in_place_of: must be an input, got 'Q' (accepted: X)"),
        ("alignment_bytes = 16", 'in_place_of = "X"', "inputs.X.in_place_of: must be absent, only outputs are written"),
        ("block = [64, 32]", "num_sms = [64, 32]", "tunables.num_sms: must be a lower-case name that nothing else"),
    ],
)
def test_a_problem_of_a_launch_is_told_with_its_path(old: str, new: str, problem: str, tmp_path: Path) -> None:
    assert old in GOOD
    assert any(seen.startswith(problem) for seen in problems(tmp_path, GOOD.replace(old, new, 1)))


def test_a_source_of_two_backends_is_a_problem(tmp_path: Path) -> None:
    assert problems(tmp_path, GOOD) == []
    (tmp_path / "family" / "add.cu.j2").write_text("// another\n")
    assert problems(tmp_path, GOOD)[0] == (
        "add.cpp.j2 or add.py.j2 or add.cu.j2 or add.lt.cpp.j2: must be beside it, and one of them only"
    )


def test_a_launch_is_for_triton_alone(tmp_path: Path) -> None:
    path = tmp_path / "add.toml"
    path.write_text(GOOD.replace('needs = "sm_90a"', ""))
    path.with_name("add.cu.j2").write_text("// a kernel\n")
    with pytest.raises(
        SchemaError, match=r"launch: must be there in a template with a \.py\.j2 source, and only there"
    ):
        load_template(path, tmp_path)


VALUES: dict[str, ConfigValue] = {"block": 48, "split": 1, "big": 2**33, "flag": True, "T": "float16"}
AXES = {"M": 0, "N": 1}

_leaves = st.sampled_from(["M", "N", "block", "split", "big", "flag", "0", "1", "7", "4096"])
_terms = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "*", "==", "<", "<=", "!="]), inner),
        st.builds("({} // {})".format, inner, st.sampled_from(["block", "3", "N"])),
        st.builds("({} % {})".format, inner, st.sampled_from(["block", "3", "N"])),
        st.builds("{}({}, {})".format, st.sampled_from(["min", "max"]), inner, inner),
        st.builds("cdiv({}, {})".format, inner, st.sampled_from(["block", "3", "N"])),
    ),
    max_leaves=6,
)

PROGRAM = """\
#include <cstdint>
#include <cstdio>
namespace {{
[[maybe_unused]] constexpr int64_t cdiv(int64_t a, int64_t b) {{ return (a + b - 1) / b; }}
[[maybe_unused]] constexpr int64_t min(int64_t a, int64_t b) {{ return a < b ? a : b; }}
[[maybe_unused]] constexpr int64_t max(int64_t a, int64_t b) {{ return a < b ? b : a; }}
struct Call {{ const int64_t* axes; }};
}}
int main() {{
  const int64_t axes[] = {{{m}, {n}}};
  const Call value{{axes}};
  const Call* call = &value;
{lines}
}}
"""


@settings(max_examples=4)
@given(st.lists(_terms, min_size=40, max_size=40), st.integers(0, 10**6), st.integers(1, 10**6))
def test_an_expression_means_in_cpp_what_it_means_in_python(
    tmp_path_factory: pytest.TempPathFactory, terms: list[str], m: int, n: int
) -> None:
    names = {**VALUES, "M": m, "N": n}
    values = {term: int(parse(term, names).evaluate(names)) for term in terms}  # type: ignore[call-overload]
    small = {term: value for term, value in values.items() if _reach(term, names) < 2**62}
    assert _run_cpp(tmp_path_factory.mktemp("program"), list(small), m, n) == list(small.values())


def _reach(term: str, names: dict[str, ConfigValue]) -> int:
    """Return a bound of every value on the way: no sum or quotient of numbers from 2 on exceeds their product."""
    leaves = [word for word in re.findall(r"\w+", term) if word not in {"min", "max", "cdiv"}]
    return math.prod(max(2, int(names.get(word, word))) for word in leaves)


def test_a_law_holds_in_cpp_where_it_holds_in_python(tmp_path: Path) -> None:
    laws = [
        "M < 5 and N == 1",
        "M < 5 or N == 1",
        "M == 3 and N == 7 and block == 48",
        "flag and M <= N",
        "M > N or flag",
    ]
    names = {**VALUES, "M": 3, "N": 7}
    assert _run_cpp(tmp_path, laws, 3, 7) == [int(bool(parse(law, names).evaluate(names))) for law in laws]


def _run_cpp(work: Path, texts: list[str], m: int, n: int) -> list[int]:
    lines = "\n".join(f'  std::printf("%lld\\n", static_cast<long long>({cpp(text, VALUES, AXES)}));' for text in texts)
    (work / "program.cpp").write_text(PROGRAM.format(m=m, n=n, lines=lines))
    subprocess.run([toolchain.find().cxx, "-O0", "-w", work / "program.cpp", "-o", work / "program"], check=True)
    done = subprocess.run([work / "program"], capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.parametrize("text", ["max(M)", "M[0]", "T == 'float16'", "not M", "M / 2", "M < N < 3"])
def test_what_cpp_has_no_word_for_is_refused(text: str) -> None:
    with pytest.raises(SchemaError, match="must be arithmetic, a comparison, cdiv, min or max of two numbers"):
        cpp(text, VALUES, AXES)


def test_what_is_fixed_is_an_integer() -> None:
    assert fixed_int("cdiv(block, 5) * 2", VALUES) == 20
    assert fixed_int(7, VALUES) == 7
    assert fixed_int("T == 'float16'", VALUES) == 1
    with pytest.raises(SchemaError, match=r"must be an integer, got 9\.6"):
        fixed_int("block / 5", VALUES)

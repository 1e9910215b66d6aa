"""A template's TOML is checked whole, and matches definitions by roles, shapes and dtypes, never by names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import GEMM_REFERENCE, NORM_REFERENCE, define, gemm, rmsnorm

from fibc.backends.match import Match, match
from fibc.backends.templates import BUILTIN_TEMPLATES
from fibc.errors import SchemaError
from fibc.schema.definition import Definition
from fibc.schema.template import Template, load_template, load_templates

GOOD = """\
summary = "doubles"
source = "a test"
op_types = ["double"]
const_axes = ["H"]

[dtypes]
T = ["float32", "bfloat16"]

[inputs]
X = { shape = ["R", "H"], layout = "rows" }

[outputs]
Y = { shape = ["R", "H"] }

[tunables]
unroll = [2, 1]

[[constraints]]
expression = "unroll * lanes <= H and size >= 1 and T_bytes <= 4"
message = "a step fits in a row"
"""

BUILTIN = {template.name: template for template in load_templates((BUILTIN_TEMPLATES,))}
OF_THE_CPU = {name: template for name, template in BUILTIN.items() if template.backend == "cpu"}


def _write(root: Path, text: str, name: str = "family/double") -> Path:
    path = root / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.with_name(f"{path.stem}.cpp.j2").write_text("// nothing\n")
    return path


def _problems(root: Path, text: str) -> list[str]:
    path = _write(root, text)
    with pytest.raises(SchemaError) as caught:
        load_template(path, root)
    assert all(problem.startswith(f"{path}: ") for problem in caught.value.problems)
    return [problem.removeprefix(f"{path}: ") for problem in caught.value.problems]


def test_a_template_is_named_by_its_place_and_its_first_choices_are_the_default(tmp_path: Path) -> None:
    template = load_template(_write(tmp_path, GOOD), tmp_path)
    assert template.name == "family/double"
    assert template.tunables == {"unroll": (2, 1)}
    assert template.axes == ("R", "H")
    assert template.laws()[0].message == "a step fits in a row"


def test_the_digest_follows_both_files(tmp_path: Path) -> None:
    path = _write(tmp_path, GOOD)
    first = load_template(path, tmp_path).digest
    path.with_name("double.cpp.j2").write_text("// another\n")
    second = load_template(path, tmp_path).digest
    path.write_text(GOOD + "\n")
    assert len({first, second, load_template(path, tmp_path).digest}) == 3


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('summary = "doubles"\n', "", "summary: must be present"),
        ("op_types = [", "op_type = [", "op_type: Extra inputs are not permitted"),
        ('op_types = ["double"]', "op_types = []", "op_types: must not be empty"),
        ("[2, 1]", "[]", "tunables.unroll: must be a list of different integers, booleans or strings"),
        ("[2, 1]", "[2, 2]", "tunables.unroll: must be a list of different integers"),
        ("[2, 1]", "[2, true]", "tunables.unroll: must be a list of different integers"),
        ("[2, 1]", "[2, 1.5]", "tunables.unroll: must be a list of different integers"),
        ("unroll = [2, 1]", "H = [2, 1]", "tunables.H: must be a lower-case name that nothing else"),
        ("unroll = [2, 1]", "size = [2, 1]", "tunables.size: must be a lower-case name that nothing else"),
        ("unroll *", "unrolled *", "constraints[0].expression: 'unrolled * lanes"),
        ("unroll *", "__import__('os') *", "constraints[0].expression:"),
        ("const_axes", 'needs = "sse9"\nconst_axes', "needs: must be an ISA level, got 'sse9' (accepted: avx2, avx512"),
        ('const_axes = ["H"]', 'const_axes = ["H", "Q"]', "const_axes: must be axes of a shape, got Q"),
        ('"float32", "bfloat16"', '"float31"', "dtypes.T: must be dtypes, got float31"),
        ('layout = "rows"', 'layout = "tiles"', "inputs.X.layout: must be 'contiguous' or 'rows'"),
        ('layout = "rows"', "alignment_bytes = 0", "inputs.X.alignment_bytes: must be >= 1"),
        ('layout = "rows"', 'dtype = "U"', "inputs.X.dtype: must be known, got 'U'"),
        ('Y = { shape = ["R", "H"] }', 'Y = { shape = ["R", "Z"] }', "outputs: axis Z must occur in an input too"),
        ("Y = {", "X = {", "outputs.X: must not be the name of an input as well"),
        (
            "[[constraints]]",
            '[[starts]]\nwhen = "True"\nvalues = {}\n[[constraints]]',
            "starts[0].values: must not be empty",
        ),
        (
            "[[constraints]]",
            '[[starts]]\nwhen = "True"\nvalues = { unroll = 3 }\n[[constraints]]',
            "starts[0].values.unroll: must be a choice of a tunable, got 3 (accepted: 2, 1)",
        ),
        (
            "[[constraints]]",
            '[[starts]]\nwhen = "True"\nvalues = { rolled = 1 }\n[[constraints]]',
            "starts[0].values.rolled: must be a choice of a tunable, got 1 (accepted: tunables: unroll)",
        ),
        (
            "[[constraints]]",
            '[[starts]]\nwhen = "unroll == 1"\nvalues = { unroll = 1 }\n[[constraints]]',
            "starts[0].when: 'unroll == 1'",
        ),
        ("const_axes", 'constants = ["pi"]\nconst_axes', "constants[0]: must be 'eps'"),
        ("const_axes", 'name = "x"\nconst_axes', "name: must be absent, it follows from the file"),
        (
            "const_axes",
            "shortlist = [{ unroll = 3 }]\nconst_axes",
            "shortlist[0]: must have tunables' choices, got unroll",
        ),
        (
            "const_axes",
            "shortlist = [{ rolls = 2 }]\nconst_axes",
            "shortlist[0]: must have tunables' choices, got rolls",
        ),
        ("const_axes", "shortlist = [{ unroll = 2 }]\nconst_axes", "shortlist: must be there only beside a .cu.j2"),
        ("summary =", "summary ==", "must be TOML in UTF-8"),
    ],
)
def test_a_problem_is_told_with_its_path(old: str, new: str, problem: str, tmp_path: Path) -> None:
    assert old in GOOD
    assert any(seen.startswith(problem) for seen in _problems(tmp_path, GOOD.replace(old, new, 1)))


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    bad = GOOD.replace("[2, 1]", "[]").replace('op_types = ["double"]', "op_types = []")
    problems = _problems(tmp_path, bad)
    assert [problem.split(":")[0] for problem in problems] == ["op_types", "tunables.unroll"]


def test_a_source_that_is_missing_is_told(tmp_path: Path) -> None:
    path = _write(tmp_path, GOOD)
    path.with_name("double.cpp.j2").unlink()
    with pytest.raises(SchemaError, match=r"double\.cpp\.j2 or double\.py\.j2 or .*: must be beside it"):
        load_template(path, tmp_path)


def test_a_template_of_cublaslt_is_a_gemm(tmp_path: Path) -> None:
    path = _write(tmp_path, GOOD.replace("unroll * lanes", "unroll * num_sms"))
    path.with_name("double.cpp.j2").rename(path.with_name("double.lt.cpp.j2"))
    with pytest.raises(SchemaError, match="must be over the axes M, N and K with a dtype variable T"):
        load_template(path, tmp_path)


def test_two_templates_of_one_name_and_a_root_without_any_are_problems(tmp_path: Path) -> None:
    _write(tmp_path / "one", GOOD)
    _write(tmp_path / "two", GOOD)
    (tmp_path / "none").mkdir()
    with pytest.raises(SchemaError) as caught:
        load_templates((tmp_path / "one", tmp_path / "two", tmp_path / "none"))
    duplicate, empty = caught.value.problems
    assert "template family/double exists already" in duplicate
    assert empty.startswith(f"{tmp_path / 'none'}: must be a directory that holds templates")


def _served(definition: Definition) -> set[str]:
    return {name for name, template in OF_THE_CPU.items() if isinstance(match(template, definition), Match)}


@pytest.mark.parametrize(
    ("definition", "templates"),
    [
        (gemm(4096, 4096, "bfloat16"), {"gemm/matvec", "gemm/tile", "gemm/packed", "gemm/amx"}),
        (gemm(37, 11, "float32"), {"gemm/matvec", "gemm/tile", "gemm/packed"}),
        (gemm(37, 11, "int8"), set()),
        (rmsnorm(5120, "float32", fused=False), {"rmsnorm/one_pass", "rmsnorm/two_pass"}),
        (rmsnorm(5120, "float16", fused=True), {"fused_add_rmsnorm/one_pass", "fused_add_rmsnorm/two_pass"}),
    ],
)
def test_builtin_templates_serve_their_family_at_any_size(definition: Definition, templates: set[str]) -> None:
    assert _served(definition) == templates


_names = st.lists(
    st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True).map(lambda n: f"v_{n}"), min_size=6, unique=True
)


@settings(max_examples=30)
@given(
    _names, st.integers(1, 10**6), st.integers(1, 10**6), st.permutations(["A", "B"]), st.permutations(["M", "N", "K"])
)
def test_names_and_orders_do_not_matter(names: list[str], n: int, k: int, inputs: list[str], axes: list[str]) -> None:
    called = dict(zip(("M", "N", "K", "A", "B", "C"), names, strict=False))
    sizes = {"M": None, "N": n, "K": k}
    shapes = {"A": ("M", "K"), "B": ("N", "K"), "C": ("M", "N")}
    dtype = "float16"
    definition = define(
        "gemm",
        {called[axis]: sizes[axis] for axis in axes},
        {called[role]: (tuple(called[axis] for axis in shapes[role]), dtype) for role in inputs},
        {called["C"]: (tuple(called[axis] for axis in shapes["C"]), dtype)},
        f"import torch\n\ndef run({', '.join(called[role] for role in inputs)}):\n"
        f"    return torch.matmul({called['A']}, {called['B']}.T)\n",
    )
    found = match(BUILTIN["gemm/matvec"], definition)
    assert isinstance(found, Match), found
    assert found.axes == {axis: called[axis] for axis in ("M", "K", "N")}
    assert found.inputs == {role: inputs.index(role) for role in ("A", "B")}


def _gemm_with(**changed: tuple[tuple[str, ...] | None, str]) -> Definition:
    tensors = {"A": (("M", "K"), "float32"), "B": (("N", "K"), "float32"), "C": (("M", "N"), "float32"), **changed}
    axes: dict[str, int | None] = {"M": None, "N": 8, "K": 16, "L": None}
    inputs = {name: tensors[name] for name in ("A", "B")}
    return define("gemm", axes, inputs, {"C": tensors["C"]}, GEMM_REFERENCE)


@pytest.mark.parametrize(
    ("template", "definition", "reason"),
    [
        ("gemm/tile", rmsnorm(8, "float32", fused=False), "serves op_type gemm, the definition is rmsnorm"),
        (
            "rmsnorm/one_pass",
            rmsnorm(8, "float32", fused=True),
            "serves 2 inputs (X, WEIGHT), the definition has 3",
        ),
        ("gemm/tile", _gemm_with(A=(("M", "N"), "float32")), "B = B: needs shape [N, K] with K = N, has [N, K]"),
        ("gemm/tile", _gemm_with(A=(("K",), "float32")), "A = A: needs shape [M, K], has [K]"),
        ("gemm/tile", _gemm_with(A=(None, "float32")), "A = A: needs a tensor [M, K], is a Python scalar"),
        ("gemm/tile", _gemm_with(C=(("L", "N"), "float32")), "C = C: needs shape [M, N] with M = M, has [L, N]"),
        (
            "gemm/tile",
            _gemm_with(B=(("L", "K"), "float32"), C=(("M", "L"), "float32")),
            "N = L: needs a constant axis",
        ),
        (
            "gemm/tile",
            _gemm_with(A=(("K", "K"), "float32"), C=(("K", "N"), "float32")),
            "M = K: needs a variable axis",
        ),
        ("gemm/amx", _gemm_with(), "A = A: needs bfloat16 or float16, is float32"),
        (
            "gemm/tile",
            _gemm_with(B=(("N", "K"), "float16")),
            "B = B: needs float32 like the tensors before it, is float16",
        ),
    ],
)
def test_a_mismatch_says_why(template: str, definition: Definition, reason: str) -> None:
    assert match(BUILTIN[template], definition) == reason


def test_an_output_in_place_of_an_input_is_a_mismatch() -> None:
    definition = gemm(8, 8, "float32")
    outputs = {"C": definition.outputs["C"].model_copy(update={"param": "A"})}
    assert match(BUILTIN["gemm/tile"], definition.model_copy(update={"outputs": outputs})) == (
        "writes fresh outputs, output C is written in place of A"
    )


@pytest.mark.parametrize("eps", ["1e-5", "1e-06"])
def test_a_norms_epsilon_comes_from_the_reference(eps: str) -> None:
    definition = rmsnorm(64, "float32", fused=False)
    other = definition.model_copy(update={"reference": definition.reference.replace("1e-5", eps)})
    found = match(BUILTIN["rmsnorm/one_pass"], other)
    assert isinstance(found, Match)
    assert found.constants == {"eps": float(eps)}


@pytest.mark.parametrize("eps", ["None", "1e-5\nepsilon = 1e-6"])
def test_a_norm_without_one_epsilon_is_a_mismatch(eps: str) -> None:
    text = NORM_REFERENCE.format(arguments="x, weight", sum="x.float()").replace("1e-5", eps)
    definition = rmsnorm(64, "float32", fused=False).model_copy(update={"reference": text})
    assert match(BUILTIN["rmsnorm/one_pass"], definition) == "needs one epsilon, the reference states none or several"


def test_every_builtin_template_says_what_it_is_and_where_it_comes_from() -> None:
    assert set(BUILTIN) >= {"gemm/matvec", "gemm/tile", "gemm/packed", "rmsnorm/one_pass", "fused_add_rmsnorm/two_pass"}
    for template in BUILTIN.values():
        assert isinstance(template, Template)
        assert template.summary
        assert template.source
        assert all(law.message for law in template.constraints)

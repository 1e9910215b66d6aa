"""Definitions: both dialects are read, every problem is reported, nothing is lost."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fibc.errors import SchemaError
from fibc.schema.callspec import Argument, Axis, CallSpec
from fibc.schema.codec import decode, encode
from fibc.schema.definition import MAX_NAME_CHARS, Definition, is_safe_name, load_definition, save_definition

CONTRACTS = Path(__file__).parent / "data" / "contracts.jsonl"


def contracts() -> list[dict[str, Any]]:
    """Return public contracts, with a reference that takes their inputs."""
    documents = [json.loads(line) for line in CONTRACTS.read_text().splitlines()]
    for document in documents:
        document["reference"] = f"def run({', '.join(document['inputs'])}):\n    raise NotImplementedError\n"
    return documents


def gemm() -> dict[str, Any]:
    return {
        "name": "gemm_n8_k4",
        "op_type": "gemm",
        "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 8}, "K": {"type": "const", "value": 4}},
        "inputs": {
            "A": {"shape": ["M", "K"], "dtype": "bfloat16"},
            "B": {"shape": ["N", "K"], "dtype": "bfloat16"},
        },
        "outputs": {"C": {"shape": ["M", "N"], "dtype": "bfloat16"}},
        "reference": "def run(A, B):\n    return A @ B.T\n",
    }


def changed(*path: str, to: Any) -> dict[str, Any]:
    """Return the gemm with the value at ``path`` replaced."""
    document = gemm()
    inner = document
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = to
    return document


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def problems_of(document: Any) -> tuple[str, ...]:
    with pytest.raises(SchemaError) as caught:
        Definition.model_validate(document)
    return caught.value.problems


IN_PLACE: dict[str, Any] = {
    "name": "fused_add_rmsnorm_h8",
    "description": "Fused Add + RMSNorm.",
    "op_type": "rmsnorm",
    "tags": ["fi_api:flashinfer.norm.fused_add_rmsnorm"],
    "axes": {"batch_size": {"type": "var"}, "hidden_size": {"type": "const", "value": 8, "description": "width"}},
    "inputs": {
        "hidden_states": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16"},
        "residual": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16"},
        "scale": {"shape": None, "dtype": "float32", "optional": True},
    },
    "outputs": {
        "output": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16", "param": "out"},
        "residual": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16", "param": "residual"},
    },
    "reference": (
        "from __future__ import annotations\n\ndef _helper(x):\n    return x\n\n"
        "def _norm_reference(hidden_states, residual, scale=None):\n    return hidden_states, residual\n"
    ),
    "check": "def check(reference_outputs, actual_outputs):\n    return True\n",
    "init": "def init(*, batch_size, seed=0):\n    return {}\n",
}
"""The dialect of FlashInfer's own dumper."""


@pytest.mark.parametrize("document", contracts(), ids=lambda document: str(document["name"]))
def test_public_contracts_are_read_and_written_without_loss(document: dict[str, Any], tmp_path: Path) -> None:
    definition = Definition.model_validate(document)
    assert definition.to_json() == document
    save_definition(definition, tmp_path / "definition.json")
    assert json.loads((tmp_path / "definition.json").read_text()) == document
    again = load_definition(tmp_path / "definition.json")
    assert again == definition
    assert again.digest == definition.digest
    assert list(again.inputs) == list(document["inputs"])


@pytest.mark.parametrize("document", contracts(), ids=lambda document: str(document["name"]))
def test_a_call_spec_agrees_with_its_contract(document: dict[str, Any]) -> None:
    spec = Definition.model_validate(document).call_spec()
    assert [axis.name for axis in spec.axes] == list(document["axes"])
    assert [axis.value for axis in spec.axes] == [axis.get("value") for axis in document["axes"].values()]
    for group, arguments in (("inputs", spec.inputs), ("outputs", spec.outputs)):
        assert [argument.name for argument in arguments] == list(document[group])
        for argument, tensor in zip(arguments, document[group].values(), strict=True):
            assert [spec.axes[index].name for index in argument.axes] == (tensor["shape"] or [])
            assert argument.dtype == tensor["dtype"]
            assert (argument.kind == "scalar") == (tensor["shape"] is None)


def test_scalars_zero_d_tensors_and_in_place_outputs_are_told_apart() -> None:
    document = changed("inputs", "scale", to={"shape": None, "dtype": "float32"})
    document["inputs"]["seed"] = {"shape": [], "dtype": "int64", "optional": True}
    document["outputs"]["A_new"] = {"shape": ["M", "K"], "dtype": "bfloat16", "param": "A"}
    document["reference"] = "def run(A, B, scale, seed=None):\n    return A @ B.T, A\n"
    axes = (Axis("M", None), Axis("N", 8), Axis("K", 4))
    inputs = (
        Argument("A", "tensor", "bfloat16", (0, 2)),
        Argument("B", "tensor", "bfloat16", (1, 2)),
        Argument("scale", "scalar", "float32"),
        Argument("seed", "scalar_tensor", "int64", optional=True),
    )
    outputs = (
        Argument("C", "tensor", "bfloat16", (0, 1)),
        Argument("A_new", "tensor", "bfloat16", (0, 2), alias=0),
    )
    assert Definition.model_validate(document).call_spec() == CallSpec("gemm_n8_k4", axes, inputs, outputs)


def test_axes_and_shapes_are_resolved() -> None:
    definition = Definition.model_validate(gemm())
    assert definition.const_axes == {"N": 8, "K": 4}
    assert definition.var_axes == ("M",)
    assert definition.shape_of(definition.outputs["C"], {"M": 3}) == (3, 8)
    assert definition.entry_point == "run"


# The second dialect ---------------------------------------------------------------------------------------------------


def test_the_second_dialect_is_read_without_loss() -> None:
    definition = Definition.model_validate(IN_PLACE)
    assert definition.to_json() == IN_PLACE
    assert definition.entry_point == "_norm_reference"
    assert definition.inputs["scale"].optional
    assert definition.alias_of("residual") == "residual"
    assert definition.alias_of("output") is None  # "out" is a buffer of the caller, and no input


def test_the_first_dialect_is_written(tmp_path: Path) -> None:
    definition = Definition.model_validate(IN_PLACE)
    save_definition(definition, tmp_path / "norm.json")
    written = json.loads((tmp_path / "norm.json").read_text())
    assert list(written["outputs"]) == ["output", "residual_out"]
    assert {name: written[name] for name in ("check", "init", "inputs", "axes", "tags")} == {
        name: IN_PLACE[name] for name in ("check", "init", "inputs", "axes", "tags")
    }
    namespace: dict[str, Any] = {}
    exec(written["reference"], namespace)  # noqa: S102 - written by this test
    assert namespace["run"]("h", "r", None) == ("h", "r")
    again = load_definition(tmp_path / "norm.json")
    assert again.entry_point == "run"
    assert again.alias_of("residual_out") == "residual"
    assert again.digest == definition.digest


# Identity -------------------------------------------------------------------------------------------------------------


def test_null_lists_are_accepted_and_stay_null() -> None:
    document = gemm() | {"tags": None, "constraints": None, "description": None}
    definition = Definition.model_validate(document)
    assert definition.tags == () and definition.constraints == ()
    assert definition.to_json() == document


@given(json_values)
def test_unknown_fields_are_kept_at_every_level(value: Any) -> None:
    document = gemm() | {"x_producer": value}
    document["axes"]["M"]["x_range"] = value
    document["inputs"]["A"]["x_layout"] = value
    assert Definition.model_validate(document).to_json() == document


def test_a_changed_copy_forgets_what_the_original_knew() -> None:
    definition = Definition.model_validate(gemm())
    before = (definition.digest, definition.entry_point, definition.const_axes, definition.var_axes)
    wider = Definition.model_validate(changed("axes", "N", "value", to=9))
    copied = definition.model_copy(update={"axes": wider.axes, "reference": "def other(A, B):\n    return A\n"})
    assert (copied.digest, copied.entry_point, copied.const_axes["N"]) != (before[0], before[1], before[2]["N"])
    assert copied.entry_point == "other" and copied.const_axes["N"] == 9
    assert before == (definition.digest, definition.entry_point, definition.const_axes, definition.var_axes)


@pytest.mark.parametrize(
    "document",
    [
        changed("name", to="other"),
        changed("axes", "N", "value", to=9),
        changed("inputs", "A", "dtype", to="float16"),
        changed("inputs", "B", "optional", to=True),
        changed("reference", to="def run(A, B):\n    return B @ A.T\n"),
        changed("constraints", to=["M > 1"]),
        changed("inputs", to={name: gemm()["inputs"][name] for name in ("B", "A")})
        | {"reference": "def run(*inputs):\n    return inputs\n"},
    ],
)
def test_the_digest_follows_what_changes_the_meaning(document: dict[str, Any]) -> None:
    assert Definition.model_validate(document).digest != Definition.model_validate(gemm()).digest


def test_the_digest_ignores_what_does_not_change_the_meaning() -> None:
    document = gemm() | {"description": "words", "tags": ["model:x"], "constraints": None, "x_extra": 1}
    document["axes"]["M"]["description"] = "rows"
    document["inputs"]["A"]["description"] = "activations"
    assert Definition.model_validate(document).digest == Definition.model_validate(gemm()).digest


def test_a_definition_is_frozen_hashable_and_travels_as_bytes() -> None:
    definition = Definition.model_validate(gemm())
    with pytest.raises(ValueError, match="frozen"):
        definition.name = "other"
    assert {definition: 1}[Definition.model_validate(gemm())] == 1
    assert decode(Definition, encode(definition)).digest == definition.digest


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "where", "seen"),
    [
        (changed("name", to="../x"), "name", "'../x'"),
        (changed("name", to="a;b"), "name", "'a;b'"),
        (changed("name", to="n" * (MAX_NAME_CHARS + 1)), "name", "nnn..."),
        (changed("name", to="a\n"), "name", "'a\\n'"),
        (changed("name", to="Grö"), "name", "'Grö'"),
        (changed("name", to="__init__"), "name", "'__init__'"),
        (changed("name", to=""), "name", "''"),
        (changed("name", to=3), "name", "3"),
        (changed("op_type", to=""), "op_type", "''"),
        (changed("op_type", to="a\x1b[31m"), "op_type", "'a\\x1b[31m'"),
        (changed("axes", to=[]), "axes", "[]"),
        (changed("axes", "M", to={"type": "range"}), "axes.M", "'range'"),
        (changed("axes", "M", to={}), "axes.M", "{}"),
        (changed("axes", "N", to={"type": "const"}), "axes.N.value", "present"),
        (changed("axes", "N", "value", to=-1), "axes.N.value", "-1"),
        (changed("axes", "N", "value", to=2**63), "axes.N.value", str(2**63)),
        (changed("axes", "N", "value", to=True), "axes.N.value", "True"),
        (changed("axes", "N", "value", to="8"), "axes.N.value", "'8'"),
        (changed("axes", "N", "value", to=8.0), "axes.N.value", "8.0"),
        (changed("axes", "a b", to={"type": "var"}), "axes.'a b'", "'a b'"),
        (changed("inputs", "A", "dtype", to="fp16"), "inputs.A.dtype", "'fp16'"),
        (changed("inputs", "A", "shape", to=["M", "Q"]), "inputs.A.shape[1]", "'Q'"),
        (changed("inputs", "A", "shape", to=["M", 4]), "inputs.A.shape[1]", "4"),
        (changed("inputs", "A", "shape", to="M"), "inputs.A.shape", "'M'"),
        (changed("inputs", "A", to={"dtype": "int8"}), "inputs.A.shape", "present"),
        (changed("inputs", "A", to=None), "inputs.A", "null"),
        (changed("inputs", to={}), "inputs", "{}"),
        (changed("outputs", to={}), "outputs", "{}"),
        (changed("outputs", to={"C": {"shape": [], "dtype": "f3"}}), "outputs", "'f3'"),
        (changed("inputs", "lambda", to=gemm()["inputs"]["A"]), "inputs.lambda", "keyword"),
        (changed("outputs", "A", to=gemm()["outputs"]["C"]), "outputs.A", "an input"),
        (changed("outputs", "C", "param", to="A"), "outputs.C.shape", "['M', 'N'] and ['M', 'K']"),
        (
            changed("outputs", to={name: gemm()["inputs"]["A"] | {"param": "A"} for name in ("C", "D")}),
            "outputs.D.param",
            "'A' again",
        ),
        (changed("tags", to="x"), "tags", "'x'"),
        (changed("tags", to=[1]), "tags[0]", "1"),
        (changed("constraints", to=["M.__class__"]), "constraints[0]", "M.__class__"),
        (changed("constraints", to=["M == 1", "Q == 1"]), "constraints[1]", "'Q'"),
        (changed("reference", to=""), "reference", "none"),
        (changed("reference", to="def run(A, B:\n  pass"), "reference:1:", "def run(A, B:"),
        (changed("reference", to="def run(A, B):\n    return A\nreturn 1\n"), "reference:3:", "return 1"),
        (changed("reference", to="x = 1\n"), "reference", "none"),
        (changed("reference", to="def run(A):\n    return A\n"), "reference: run", "(A)"),
        (changed("reference", to="def run(A, B, C):\n    return A\n"), "reference: run", "(A, B, C)"),
        (
            changed("reference", to="def run(B, A):\n    return A\n"),
            "reference: run",
            "order of the inputs (A, B), got (B, A)",
        ),
        (changed("reference", to="def run(A, B, *, eps):\n    return A\n"), "reference: run", "keyword-only eps"),
        (changed("reference", to="def A(A, B):\n    return A\n"), "reference: A", "the name of an input"),
        (changed("reference", to="a\0b"), "reference", "null bytes"),
        (changed("reference", to="\ud800"), "reference", "surrogates"),
        (changed("reference", to="not " * 100_000 + "1"), "reference", "too many levels"),
        (changed("reference", to="x" + ".a" * 400_000), "reference", "too many levels"),
        (changed("reference", to=None), "reference", "null"),
        ([], "", "[]"),
        (None, "", "null"),
        ("gemm", "", "'gemm'"),
    ],
)
def test_one_broken_law_is_one_clear_problem(document: Any, where: str, seen: str) -> None:
    (problem,) = [line for line in problems_of(document) if line.startswith(where)]
    assert seen in problem
    assert "must" in problem


@pytest.mark.parametrize("field", ["name", "op_type", "axes", "inputs", "outputs", "reference"])
def test_a_missing_field_is_named(field: str) -> None:
    document = gemm()
    del document[field]
    assert f"{field}: must be present" in problems_of(document)


def test_an_axis_and_an_input_of_one_name_make_a_constraint_ambiguous() -> None:
    document = changed("inputs", "M", to={"shape": None, "dtype": "int32"}) | {"constraints": ["M > 1"]}
    document["reference"] = "def run(A, B, M):\n    return A\n"
    assert problems_of(document) == (
        "constraints[0]: M is both an axis and an input, so that the constraint must not name it (rename one)",
    )


def test_a_weight_of_more_than_int64_elements_is_refused() -> None:
    document = changed("axes", "N", "value", to=2**62)
    assert problems_of(document) == (f"inputs.B: must have fewer than 2^63 elements, got {2**64}",)


def test_all_problems_come_at_once_with_the_path(tmp_path: Path) -> None:
    document = changed("inputs", "A", to={"shape": ["M", "Q"], "dtype": "f3"})
    document["axes"]["N"]["type"] = "constant"
    document |= {"name": "../x", "constraints": ["import os"], "reference": "def run(A, B):\n  return (\n"}
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    with pytest.raises(SchemaError) as caught:
        load_definition(path)
    problems = caught.value.problems
    assert all(problem.startswith(f"{path}: ") for problem in problems)
    found = [problem.removeprefix(f"{path}: ").split(":")[0] for problem in problems]
    assert found == ["name", "axes.N", "inputs.A.dtype", "inputs.A.shape[1]", "reference", "constraints[0]"]


@given(json_values, st.sampled_from(sorted(gemm())))
def test_any_value_in_any_field_is_accepted_or_refused_with_a_problem(value: Any, field: str) -> None:
    document = copy.deepcopy(gemm())
    document[field] = value
    try:
        Definition.model_validate(document)
    except SchemaError as error:
        assert error.problems


@given(st.text(max_size=140))
def test_a_safe_name_is_an_ascii_identifier(name: str) -> None:
    expected = name.isascii() and name.isidentifier() and len(name) <= 128 and not name.startswith("__")
    assert is_safe_name(name) == expected


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "place", "words"),
    [
        (b'{"name": "x",\n "op_type" 3}', ":2:12", "must be JSON, got '3}'"),
        (b"", ":1:1", "got the end"),
        (b'{"name": NaN}', "", "NaN"),
        (b"\x7fELF\x02\x01\x01\xff\xfe", "", "UTF-8"),
        (b"[" * 100_000, "", "64 levels"),
        (b"[" * 70 + b"]" * 70, "", "64 levels"),
        (b"9" * 5000, "", "must be JSON"),
        (b'{"name": "a", "name": "b"}', "", "'name' twice"),
        (b'{"axes": {"M": {"type": "var"}, "M": {"type": "var"}}}', "", "'M' twice"),
    ],
)
def test_a_file_that_is_no_json_is_a_problem_with_its_place(
    data: bytes, place: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    with pytest.raises(SchemaError) as caught:
        load_definition(path)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}{place}: ")
    assert words in problem


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "gemm.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(gemm()).encode())
    assert load_definition(path) == Definition.model_validate(gemm())


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_cannot_be_read_is_a_problem(name: str, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="must be a readable file"):
        load_definition(tmp_path / name)


def test_the_reference_is_never_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    source = f"open({str(canary)!r}, 'w').write('ran')\ndef run(A, B):\n    return A\n"
    assert Definition.model_validate(changed("reference", to=source)).entry_point == "run"
    assert not canary.exists()

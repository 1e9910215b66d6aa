"""Workloads: every problem of every line is reported, weights and stored tensors are understood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from fibc.errors import SchemaError
from fibc.schema.constraints import check_constraints
from fibc.schema.definition import Definition
from fibc.schema.workload import (
    RandomInput,
    SafetensorsInput,
    ScalarInput,
    Workload,
    load_workloads,
    merge_duplicates,
    read_workload,
)
from fibc.schema.workload_source import MAX_SWEEP_BYTES, SWEEP_SIZES, find_workloads, synthetic_sweep

DATA = Path(__file__).parent / "data"

RANDOM = {"type": "random"}


def public_definitions() -> dict[str, Definition]:
    definitions = {}
    for line in (DATA / "contracts.jsonl").read_text().splitlines():
        document = json.loads(line)
        document["reference"] = f"def run({', '.join(document['inputs'])}):\n    raise NotImplementedError\n"
        definitions[document["name"]] = Definition.model_validate(document)
    return definitions


def gemm() -> Definition:
    return Definition.model_validate(
        {
            "name": "gemm_n8_k4",
            "op_type": "gemm",
            "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 8}, "K": {"type": "const", "value": 4}},
            "inputs": {"A": {"shape": ["M", "K"], "dtype": "float16"}, "B": {"shape": ["N", "K"], "dtype": "float16"}},
            "outputs": {"C": {"shape": ["M", "N"], "dtype": "float16"}},
            "reference": "def run(A, B):\n    return A @ B.T\n",
        }
    )


def paged() -> Definition:
    """Return a definition with a scalar, an optional input and constraints on axes and tensors."""
    return Definition.model_validate(
        {
            "name": "paged",
            "op_type": "gqa_paged",
            "axes": {name: {"type": "var"} for name in ("batch_size", "len_indptr", "num_kv_indices")},
            "constraints": ["len_indptr == batch_size + 1", "num_kv_indices == kv_indptr[-1].item()"],
            "inputs": {
                "kv_indptr": {"shape": ["len_indptr"], "dtype": "int32"},
                "kv_indices": {"shape": ["num_kv_indices"], "dtype": "int32"},
                "sm_scale": {"shape": None, "dtype": "float32"},
                "causal": {"shape": None, "dtype": "bool", "optional": True},
            },
            "outputs": {"out": {"shape": ["batch_size"], "dtype": "float32"}},
            "reference": "def run(kv_indptr, kv_indices, sm_scale, causal):\n    return kv_indptr\n",
        }
    )


def gemm_line(**changes: Any) -> dict[str, Any]:
    workload = {"uuid": "u1", "axes": {"M": 3}, "inputs": {"A": RANDOM, "B": RANDOM}} | changes
    return {"definition": "gemm_n8_k4", "workload": workload, "solution": None, "evaluation": None}


def paged_line(**changes: Any) -> dict[str, Any]:
    return {
        "uuid": "u1",
        "axes": {"batch_size": 2, "len_indptr": 3, "num_kv_indices": 5},
        "inputs": {
            "kv_indptr": RANDOM,
            "kv_indices": RANDOM,
            "sm_scale": {"type": "scalar", "value": 0.5},
        },
    } | changes


def write_lines(path: Path, *lines: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def problems_of(document: Any, definition: Definition, root: Path = Path()) -> tuple[str, ...]:
    with pytest.raises(SchemaError) as caught:
        read_workload(document, definition, root)
    return caught.value.problems


# Reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((DATA / "trace-workloads").iterdir()), ids=lambda path: str(path.stem))
def test_public_workloads_are_read_and_written_without_loss(path: Path) -> None:
    workloads = load_workloads(path, public_definitions()[path.stem])
    documents = [json.loads(line)["workload"] for line in path.read_text().splitlines()]
    assert [workload.to_json() for workload in workloads] == documents
    assert all(workload.weight == 1 and not workload.synthesised for workload in workloads)


def test_an_envelope_and_a_bare_line_say_the_same(tmp_path: Path) -> None:
    bare = gemm_line()["workload"]
    path = write_lines(tmp_path / "w.jsonl", gemm_line(), "", bare | {"uuid": "u2"})
    first, second = load_workloads(path, gemm())
    assert (first.axes, first.inputs) == (second.axes, second.inputs)
    assert first == Workload("u1", {"M": 3}, {"A": RandomInput(), "B": RandomInput()})


def test_a_count_beside_a_workload_is_its_weight() -> None:
    assert read_workload(gemm_line() | {"count": 12}, gemm(), Path()).weight == 12
    assert read_workload(gemm_line(count=2.5), gemm(), Path()).weight == 2.5


def test_an_empty_batch_is_lawful() -> None:
    assert read_workload(gemm_line(axes={"M": 0}), gemm(), Path()).axes == {"M": 0}


def test_an_optional_input_may_be_left_out_and_extras_are_kept() -> None:
    document = paged_line(x_source="vllm")
    workload = read_workload(document, paged(), Path())
    assert list(workload.inputs) == ["kv_indptr", "kv_indices", "sm_scale"]
    assert workload.inputs["sm_scale"] == ScalarInput(value=0.5)
    assert workload.to_json() == document


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (gemm_line() | {"definition": "other"}, "definition: must be 'gemm_n8_k4', got 'other'"),
        (gemm_line() | {"solution": "s"}, "solution: must be null in a file of workloads, got 's'"),
        (gemm_line() | {"workload": None}, "workload: must be an object, got null"),
        (gemm_line() | {"count": 0}, "count: must be a number > 0, got 0"),
        (gemm_line() | {"count": "3"}, "count: must be a number > 0, got '3'"),
        (gemm_line(uuid=""), "uuid: must be 1 to 128 printable characters, got ''"),
        (gemm_line(uuid=7), "uuid: must be a string, got 7"),
        (gemm_line(axes={}), "axes.M: must be present"),
        (gemm_line(axes=[]), "axes: must be an object, got []"),
        (gemm_line(axes={"M": -3}), "axes.M: must be >= 0, got -3"),
        (gemm_line(axes={"M": 2**63}), f"axes.M: must be below 2^63, got {2**63}"),
        (gemm_line(axes={"M": 2.0}), "axes.M: must be an integer, got 2.0"),
        (gemm_line(axes={"M": True}), "axes.M: must be an integer, got True"),
        (gemm_line(axes={"M": None}), "axes.M: must be an integer, got null"),
        (gemm_line(axes={"M": 2**62}), f"axes: inputs.A must be below 2^63 bytes, got {2**65}"),
        (gemm_line(axes={"M": 3, "N": 8}), "axes.N: must not be given, it is const 8, got 8"),
        (gemm_line(axes={"M": 3, "Q": 8}), "axes.Q: must be a var axis of gemm_n8_k4, got 8 (accepted: M)"),
        (gemm_line(inputs={"A": RANDOM}), "inputs.B: must be present"),
        (gemm_line(inputs=None), "inputs: must be an object, got null"),
        (
            gemm_line(inputs={"A": RANDOM, "B": RANDOM, "D": RANDOM}),
            "inputs.D: must be an input of gemm_n8_k4 (accepted: A, B)",
        ),
        (
            gemm_line(inputs={"A": {"type": "zeros"}, "B": RANDOM}),
            "inputs.A: 'type' must be one of 'random', 'scalar', 'safetensors', got 'zeros'",
        ),
        (
            gemm_line(inputs={"A": {"type": "scalar", "value": 1}, "B": RANDOM}),
            "inputs.A: must be random or safetensors, as a tensor of shape ['M', 'K'], got scalar",
        ),
        (
            gemm_line(
                inputs={"A": {"type": "safetensors", "path": "../../etc/passwd", "tensor_key": "k"}, "B": RANDOM}
            ),
            "inputs.A.path: must be a relative path without .., got '../../etc/passwd'",
        ),
        (
            gemm_line(inputs={"A": {"type": "safetensors", "path": "/x", "tensor_key": "k"}, "B": RANDOM}),
            "inputs.A.path: must be a relative path without .., got '/x'",
        ),
        ([], "must be an object, got []"),
    ],
)
def test_one_broken_law_is_one_clear_problem(document: Any, problem: str) -> None:
    assert problem in problems_of(document, gemm())


@pytest.mark.parametrize(
    ("value", "dtype_law"),
    [("x", "inputs.sm_scale"), (True, "a float32"), (None, "inputs.sm_scale")],
)
def test_a_scalar_fits_its_dtype(value: Any, dtype_law: str) -> None:
    inputs = paged_line()["inputs"] | {"sm_scale": {"type": "scalar", "value": value}}
    assert any(dtype_law in problem for problem in problems_of(paged_line(inputs=inputs), paged()))


def test_a_constraint_between_axes_must_hold() -> None:
    axes = {"batch_size": 2, "len_indptr": 4, "num_kv_indices": 5}
    assert problems_of(paged_line(axes=axes), paged()) == (
        "constraints[0]: 'len_indptr == batch_size + 1' must be true, got false with batch_size=2, len_indptr=4",
    )


def test_every_problem_of_every_line_comes_with_its_path(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "w.jsonl",
        gemm_line(axes={"M": -3, "Q": 1}, inputs={}),
        "{broken",
        gemm_line(uuid="good"),
        gemm_line() | {"definition": "other"},
    )
    with pytest.raises(SchemaError) as caught:
        load_workloads(path, gemm())
    assert caught.value.problems == (
        f"{path}:1: axes.M: must be >= 0, got -3",
        f"{path}:1: axes.Q: must be a var axis of gemm_n8_k4, got 1 (accepted: M)",
        f"{path}:1: inputs.A: must be present",
        f"{path}:1: inputs.B: must be present",
        f"{path}:2:2: must be JSON, got 'broken' (Expecting property name enclosed in double quotes)",
        f"{path}:4: definition: must be 'gemm_n8_k4', got 'other'",
    )


def test_an_empty_file_is_a_problem(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "w.jsonl", "", " ")
    with pytest.raises(SchemaError, match="at least one workload"):
        load_workloads(path, gemm())


def test_one_uuid_belongs_to_one_call(tmp_path: Path) -> None:
    same = write_lines(tmp_path / "same.jsonl", gemm_line(), gemm_line())
    assert len(load_workloads(same, gemm())) == 2
    two = write_lines(tmp_path / "two.jsonl", gemm_line(), gemm_line(axes={"M": 4}))
    with pytest.raises(SchemaError, match="'u1': must belong to one call"):
        load_workloads(two, gemm())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ABM") | st.text(max_size=4), inner),
    max_leaves=6,
)


@given(json_values, st.sampled_from(["uuid", "axes", "inputs", "count"]))
def test_any_value_in_any_field_is_read_or_refused_with_a_problem(value: Any, field: str) -> None:
    try:
        read_workload(gemm_line(**{field: value}), gemm(), Path())
    except SchemaError as error:
        assert error.problems


# Stored tensors -------------------------------------------------------------------------------------------------------


def stored_line(path: str, key: str = "A") -> dict[str, Any]:
    return gemm_line(inputs={"A": {"type": "safetensors", "path": path, "tensor_key": key}, "B": RANDOM})


def test_stored_tensors_are_found_below_the_datasets_root(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "workloads" / "gemm" / "gemm_n8_k4.jsonl", stored_line("./blob/a.safetensors"))
    (workload,) = load_workloads(lines, gemm())
    assert workload.inputs["A"] == SafetensorsInput(path="./blob/a.safetensors", tensor_key="A")
    assert workload.stored_path("A") is None
    (tmp_path / "blob").mkdir()
    save_file({"A": np.zeros((3, 4), np.float16)}, tmp_path / "blob" / "a.safetensors")
    (workload,) = load_workloads(lines, gemm())
    assert workload.stored_path("A") == tmp_path / "blob" / "a.safetensors"
    assert workload.stored_path("B") is None


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (np.zeros((3, 5), np.float16), "must have shape [M, K] = [3, 4], got a stored [3, 5]"),
        (np.zeros((2, 4), np.float16), "must have shape [M, K] = [3, 4], got a stored [2, 4]"),
        (np.zeros((3, 4), np.float32), "must be float16, got a stored float32"),
    ],
)
def test_a_stored_tensor_that_contradicts_the_axes_is_a_problem(
    stored: np.ndarray[Any, Any], words: str, tmp_path: Path
) -> None:
    save_file({"A": stored}, tmp_path / "a.safetensors")
    assert problems_of(stored_line("a.safetensors"), gemm(), tmp_path) == (f"inputs.A: {words}",)


def test_a_stored_path_that_no_file_can_have_is_an_absent_file() -> None:
    assert read_workload(stored_line("a" * 5000), gemm(), Path()).stored_path("A") is None


def test_a_missing_key_and_a_broken_file_are_problems(tmp_path: Path) -> None:
    save_file({"A": np.zeros((3, 4), np.float16)}, tmp_path / "a.safetensors")
    (problem,) = problems_of(stored_line("a.safetensors", "B"), gemm(), tmp_path)
    assert problem == "inputs.A.tensor_key: must be in the file, got 'B' (accepted: A)"
    (tmp_path / "b.safetensors").write_bytes(b"torn")
    (problem,) = problems_of(stored_line("b.safetensors"), gemm(), tmp_path)
    assert problem.startswith("inputs.A.path: must be a readable safetensors file, got 'b.safetensors'")


# Constraints on tensors -----------------------------------------------------------------------------------------------


def test_constraints_are_checked_against_real_tensors() -> None:
    axes = {"batch_size": 2, "len_indptr": 3, "num_kv_indices": 5}
    assert check_constraints(paged(), axes, {"kv_indptr": torch.tensor([0, 2, 5], dtype=torch.int32)}) == []
    assert check_constraints(paged(), axes, {"kv_indptr": torch.tensor([0, 2, 6], dtype=torch.int32)}) == [
        "constraints[1]: 'num_kv_indices == kv_indptr[-1].item()' must be true, got false with num_kv_indices=5"
    ]
    assert check_constraints(paged(), axes, {"kv_indptr": np.array([0, 5], np.int32)}) == []
    assert check_constraints(paged(), axes, {"kv_indptr": None}) == []


def test_a_constraint_that_cannot_be_evaluated_is_a_problem() -> None:
    axes = {"batch_size": 2, "len_indptr": 3, "num_kv_indices": 5}
    (problem,) = check_constraints(paged(), axes, {"kv_indptr": torch.zeros(0, dtype=torch.int32)})
    assert "IndexError" in problem
    (problem,) = check_constraints(paged(), axes, {"kv_indptr": 3})
    assert "TypeError" in problem


# Duplicates -----------------------------------------------------------------------------------------------------------


def test_duplicates_are_kept_until_they_are_merged_and_weights_add_up() -> None:
    inputs: dict[str, Any] = {"A": RandomInput(), "B": RandomInput()}
    workloads = [
        Workload("b", {"M": 4}, inputs, weight=2),
        Workload("a", {"M": 4}, inputs, weight=3),
        Workload("c", {"M": 2}, inputs),
        Workload("d", {"M": 4}, inputs | {"A": SafetensorsInput(path="p", tensor_key="k")}),
    ]
    merged = merge_duplicates(workloads)
    assert [(w.uuid, w.axes["M"], w.weight) for w in merged] == [("c", 2, 1), ("a", 4, 5), ("d", 4, 1)]
    assert merge_duplicates(reversed(workloads)) == merged


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), max_size=12))
def test_merging_keeps_the_total_weight_and_leaves_no_duplicate(calls: list[tuple[int, int]]) -> None:
    workloads = [Workload(f"u{i}", {"M": size}, {}, weight=weight) for i, (size, weight) in enumerate(calls)]
    merged = merge_duplicates(workloads)
    assert sum(w.weight for w in merged) == sum(weight for _, weight in calls)
    assert len({w.axes["M"] for w in merged}) == len(merged) == len({size for size, _ in calls})
    assert merge_duplicates(merged) == merged


# Where workloads come from --------------------------------------------------------------------------------------------


def test_an_explicit_file_comes_before_one_beside_the_definition(tmp_path: Path) -> None:
    definition = tmp_path / "defs" / "gemm.json"
    assert find_workloads(definition, gemm()) is None
    write_lines(tmp_path / "defs" / "gemm_n8_k4.jsonl", gemm_line(uuid="by-name"))
    found = find_workloads(definition, gemm())
    assert found is not None and found[0][0].uuid == "by-name"
    write_lines(tmp_path / "defs" / "gemm.workloads.jsonl", gemm_line(uuid="beside"))
    found = find_workloads(definition, gemm())
    assert found is not None and found[0][0].uuid == "beside" and "beside the definition" in found[1]
    explicit = write_lines(tmp_path / "other.jsonl", gemm_line(uuid="explicit"))
    found = find_workloads(definition, gemm(), explicit)
    assert found is not None and found[0][0].uuid == "explicit" and str(explicit) in found[1]


def test_a_dataset_has_the_workloads_of_its_definitions(tmp_path: Path) -> None:
    write_lines(tmp_path / "workloads" / "gemm" / "gemm_n8_k4.jsonl", gemm_line(uuid="in-dataset"))
    found = find_workloads(tmp_path / "definitions" / "gemm" / "gemm_n8_k4.json", gemm())
    assert found is not None and found[0][0].uuid == "in-dataset"
    for directory in (tmp_path, tmp_path / "workloads", tmp_path / "workloads" / "gemm"):
        found = find_workloads("elsewhere/gemm.json", gemm(), directory)
        assert found is not None and found[0][0].uuid == "in-dataset"


def test_an_explicit_directory_without_workloads_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"must hold the workloads of gemm_n8_k4, got none of gemm\.workloads\.jsonl"):
        find_workloads("gemm.json", gemm(), tmp_path)
    with pytest.raises(SchemaError, match="must be a readable file"):
        find_workloads("gemm.json", gemm(), tmp_path / "missing.jsonl")
    with pytest.raises(SchemaError, match="must be a readable file"):
        find_workloads("gemm.json", gemm(), tmp_path / ("a" * 5000))


def test_a_sweep_is_synthetic_deterministic_and_takes_every_size() -> None:
    sweep = synthetic_sweep(gemm())
    assert tuple(workload.axes["M"] for workload in sweep) == SWEEP_SIZES
    assert all(workload.synthesised for workload in sweep)
    assert sweep == synthetic_sweep(gemm())
    assert len({workload.uuid for workload in sweep}) == len(sweep)
    renamed = gemm().model_copy(update={"name": "other"})
    assert not {workload.uuid for workload in synthetic_sweep(renamed)} & {workload.uuid for workload in sweep}


@pytest.mark.parametrize("definition", public_definitions().values(), ids=lambda definition: str(definition.name))
def test_a_sweep_obeys_the_constraints_and_fits_into_memory(definition: Definition) -> None:
    for workload in synthetic_sweep(definition):
        document = {"definition": definition.name, "workload": workload.to_json()}
        assert read_workload(document, definition, Path()).axes == workload.axes
        shapes = [definition.shape_of(spec, workload.axes) or () for spec in definition.outputs.values()]
        assert sum(int(np.prod(shape)) for shape in shapes) <= MAX_SWEEP_BYTES

"""Dataset folders: what is written is read again, and one bad file costs only itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fibc.errors import RecordError, SchemaError
from fibc.schema.dataset import read_dataset, write_dataset
from fibc.schema.definition import Definition, load_definition
from fibc.schema.trace import Solution, Trace
from fibc.schema.workload import RandomInput, SafetensorsInput, Workload

RANDOM = {"type": "random"}


def definition(name: str = "gemm_n8_k4", **changes: Any) -> Definition:
    document: dict[str, Any] = {
        "name": name,
        "op_type": "gemm",
        "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 8}, "K": {"type": "const", "value": 4}},
        "inputs": {"A": {"shape": ["M", "K"], "dtype": "float16"}, "B": {"shape": ["N", "K"], "dtype": "float16"}},
        "outputs": {"C": {"shape": ["M", "N"], "dtype": "float16"}},
        "reference": "def run(A, B):\n    return A @ B.T\n",
    }
    return Definition.model_validate(document | changes)


def workload(uuid: str = "u1", size: int = 3, **changes: Any) -> Workload:
    return Workload(uuid, {"M": size}, {"A": RandomInput(), "B": RandomInput()}, **changes)


def solution(name: str = "s1", of: str = "gemm_n8_k4", author: str = "fibc") -> Solution:
    return Solution.model_validate(
        {
            "name": name,
            "definition": of,
            "author": author,
            "spec": {"language": "cpp", "target_hardware": ["cpu"], "entry_point": "kernel.cpp::f"},
            "sources": [{"path": "kernel.cpp", "content": "int f;\n"}],
        }
    )


def trace(of: str = "s1", uuid: str = "u1", log: str = "", definition_name: str = "gemm_n8_k4") -> Trace:
    return Trace.model_validate(
        {
            "definition": definition_name,
            "workload": {"uuid": uuid, "axes": {"M": 3}, "inputs": {"A": RANDOM, "B": RANDOM}},
            "solution": of,
            "evaluation": {
                "status": "PASSED",
                "environment": {"hardware": "a CPU", "libs": {}},
                "timestamp": "2026-11-30T00:00:00Z",
                "log": log,
                "correctness": {"max_relative_error": 0.0, "max_absolute_error": 0.0, "extra": {"fibc": {"n": 8}}},
                "performance": {"latency_ms": 0.1, "reference_latency_ms": 0.2, "speedup_factor": 2.0},
            },
        }
    )


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    recorded = [workload(), workload("u2", 5, weight=7.0), workload("u3", 9, synthesised=True)]
    write_dataset(tmp_path, definition(), recorded, [solution()], [trace(), trace(uuid="u2")])
    assert files_below(tmp_path) == [
        "definitions/gemm/gemm_n8_k4.json",
        "solutions/fibc/gemm/gemm_n8_k4/s1.json",
        "traces/fibc/gemm/gemm_n8_k4.jsonl",
        "workloads/gemm/gemm_n8_k4.jsonl",
    ]
    dataset = read_dataset(tmp_path)
    assert dataset.problems == ()
    assert dataset.num_files == 4
    assert dataset.definitions == {"gemm_n8_k4": definition()}
    assert dataset.workloads == {"gemm_n8_k4": tuple(recorded)}
    assert dataset.solutions["s1"].to_json() == solution().to_json()
    assert dataset.traces == {"gemm_n8_k4": (trace(), trace(uuid="u2"))}


def test_destination_passing_style_is_always_in_the_file(tmp_path: Path) -> None:
    write_dataset(tmp_path, definition(), solutions=[solution()])
    written = json.loads((tmp_path / "solutions/fibc/gemm/gemm_n8_k4/s1.json").read_text())
    assert written["spec"]["destination_passing_style"] is True


def test_traces_are_added_and_never_twice(tmp_path: Path) -> None:
    path = tmp_path / "traces/fibc/gemm/gemm_n8_k4.jsonl"
    write_dataset(tmp_path, definition(), traces=[trace()])
    first = path.read_bytes()
    write_dataset(tmp_path, definition(), traces=[trace(), trace(uuid="u2"), trace(uuid="u2")])
    assert path.read_bytes().startswith(first)
    assert [found.workload.uuid for found in read_dataset(tmp_path).traces["gemm_n8_k4"]] == ["u1", "u2"]
    before = path.stat().st_ino
    write_dataset(tmp_path, definition(), traces=[trace()])
    assert path.stat().st_ino == before  # nothing new, so nothing is written


def test_a_torn_last_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "traces/fibc/gemm/gemm_n8_k4.jsonl"
    write_dataset(tmp_path, definition(), traces=[trace()])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    write_dataset(tmp_path, definition(), traces=[trace(uuid="u2")])
    dataset = read_dataset(tmp_path)
    assert [found.workload.uuid for found in dataset.traces["gemm_n8_k4"]] == ["u1", "u2"]
    (problem,) = dataset.problems
    assert problem.startswith(f"{path}:2:")


def test_a_log_of_any_bytes_is_written(tmp_path: Path) -> None:
    write_dataset(tmp_path, definition(), traces=[trace(log="caf\u00e9 \ud800 \0 \u2028 line")])
    (found,) = read_dataset(tmp_path).traces["gemm_n8_k4"]
    assert found.evaluation is not None
    assert found.evaluation.log.startswith("caf\u00e9 ") and found.evaluation.log.endswith(" \0 \u2028 line")


def test_the_second_dialect_is_written_as_the_first(tmp_path: Path) -> None:
    second = definition(reference="def matmul(A, B):\n    return A @ B.T\n")
    write_dataset(tmp_path, second)
    first = load_definition(tmp_path / "definitions/gemm/gemm_n8_k4.json")
    assert first.entry_point == "run"
    assert first.digest == second.digest


def test_stored_tensors_travel_with_their_workload(tmp_path: Path) -> None:
    save_file({"A": np.ones((3, 4), np.float16)}, tmp_path / "a.safetensors")
    inputs: dict[str, Any] = {"A": SafetensorsInput(path="a.safetensors", tensor_key="A"), "B": RandomInput()}
    write_dataset(tmp_path / "out", definition(), [Workload("u1", {"M": 3}, inputs, root=str(tmp_path))])
    (found,) = read_dataset(tmp_path / "out").workloads["gemm_n8_k4"]
    stored = found.stored_path("A")
    assert stored is not None and stored.read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_odd_and_overlong_names_become_safe_file_names(tmp_path: Path) -> None:
    odd = definition(op_type="../mixed ops")
    long_name = "s" * 300
    write_dataset(
        tmp_path / "out", odd, [workload()], [solution(long_name, author="../me"), solution("a/b")], [trace(long_name)]
    )
    assert all(name.startswith("out/") for name in files_below(tmp_path))
    assert all(len(part.encode()) <= 255 for name in files_below(tmp_path) for part in name.split("/"))
    dataset = read_dataset(tmp_path / "out")
    assert dataset.problems == ()
    assert set(dataset.solutions) == {long_name, "a/b"}
    assert len(dataset.workloads["gemm_n8_k4"]) == len(dataset.traces["gemm_n8_k4"]) == 1


def test_one_bad_file_costs_only_itself(tmp_path: Path) -> None:
    write_dataset(tmp_path, definition(), [workload()], [solution()], [trace()])
    write_dataset(tmp_path, definition("other"), [workload()], [solution("s2", "other")])
    (tmp_path / "definitions/gemm/broken.json").write_text("{")
    (tmp_path / "definitions/gemm/lawless.json").write_text(json.dumps(definition().to_json() | {"name": "a b"}))
    (tmp_path / "solutions/fibc/gemm/broken.json").write_text(json.dumps(solution("s3").to_json() | {"spec": {}}))
    (tmp_path / "solutions/fibc/gemm/orphan.json").write_text(json.dumps(solution("s4", "nobody").to_json()))
    (tmp_path / "workloads/gemm/nobody.jsonl").write_text(json.dumps({"definition": "nobody"}) + "\n")
    with (tmp_path / "workloads/gemm/other.jsonl").open("a") as lines:
        lines.write(json.dumps({"definition": "other", "workload": {"uuid": "u9", "axes": {"M": -1}}}) + "\n")
    with (tmp_path / "traces/fibc/gemm/gemm_n8_k4.jsonl").open("a") as lines:
        lines.write(json.dumps(trace().to_json() | {"solution": None, "evaluation": None}) + "\n")
        lines.write(json.dumps(trace(definition_name="nobody").to_json()) + "\n")
    (tmp_path / "traces/fibc/binary.jsonl").write_bytes(b"\xff\xfe\x00")

    dataset = read_dataset(tmp_path)
    assert set(dataset.definitions) == {"gemm_n8_k4", "other"}
    assert set(dataset.solutions) == {"s1", "s2"}
    assert set(dataset.workloads) == {"gemm_n8_k4"}
    assert dataset.traces == {"gemm_n8_k4": (trace(),)}
    for expected in (
        "definitions/gemm/broken.json:1:2: must be JSON",
        "definitions/gemm/lawless.json: name: must be an identifier",
        "solutions/fibc/gemm/broken.json: spec.language: must be present",
        "solutions/fibc/gemm/orphan.json: definition: must be in the dataset, got 'nobody'",
        "workloads/gemm/nobody.jsonl: must be the workloads of a definition in the dataset",
        "workloads/gemm/other.jsonl:2: axes.M: must be >= 0, got -1",
        "traces/fibc/gemm/gemm_n8_k4.jsonl:2: evaluation: must be present",
        "traces/fibc/gemm/gemm_n8_k4.jsonl:3: definition: must be in the dataset, got 'nobody'",
        "traces/fibc/binary.jsonl: must be UTF-8 text",
    ):
        assert any(problem.startswith(f"{tmp_path}/{expected}") for problem in dataset.problems), expected


def test_duplicate_names_are_problems_that_name_both_files(tmp_path: Path) -> None:
    write_dataset(tmp_path, definition(), solutions=[solution()])
    for folder, name, text in (
        ("definitions/copy", "z.json", json.dumps(definition().to_json())),
        ("solutions/you", "z.json", json.dumps(solution().to_json())),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).write_text(text)
    dataset = read_dataset(tmp_path)
    assert len(dataset.problems) == 2
    for problem, first in zip(dataset.problems, ("definitions/copy/z.json", "solutions/fibc/"), strict=True):
        assert "must be unique" in problem and f"{tmp_path}/{first}" in problem


def test_an_unwritable_folder_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RecordError, match="file"):
        write_dataset(tmp_path / "file", definition())


def test_a_root_that_is_no_directory_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="must be a directory"):
        read_dataset(tmp_path / "missing")

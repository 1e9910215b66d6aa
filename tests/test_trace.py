"""Solutions and traces: the format's rules, and what fibc's own evidence becomes in it."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import toys
from pydantic import BaseModel, ValidationError

from fibc.schema.candidate import Candidate, Target
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Correctness, Evaluation, Pair, Status
from fibc.schema.export import solution_name, to_solution, to_trace, workload_at
from fibc.schema.feature import Point
from fibc.schema.problems import describe
from fibc.schema.table import NativeSource
from fibc.schema.trace import Solution, Trace
from fibc.schema.workload import Workload

DEFINITION = Definition.model_validate(
    {
        "name": "gemm_n8_k4",
        "op_type": "gemm",
        "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 8}, "K": {"type": "const", "value": 4}},
        "inputs": {"A": {"shape": ["M", "K"], "dtype": "float16"}, "B": {"shape": ["N", "K"], "dtype": "float16"}},
        "outputs": {"C": {"shape": ["M", "N"], "dtype": "float16"}},
        "reference": "def run(A, B):\n    return A @ B.T\n",
    }
)
CANDIDATE = Candidate("cpu", "gemm/matvec", (("block_m", 4),), "0123456789abcdef", Target("cpu", "avx512"))
NATIVE = NativeSource("torch.matmul(A, B.T)", "def call(A, B):\n    return A @ B.T\n", "builtin", "feedfacefeedface")
POINT = Point((("M", 3),), "tune")
COMPARISON = replace(
    toys.COMPARISON, point=POINT, speedup=1.5, ci_low=1.4, ci_high=1.6, native_us=30.0, candidate_us=20.0
)


def solution() -> dict[str, Any]:
    return {
        "name": "s1",
        "definition": "gemm_n8_k4",
        "author": "someone",
        "spec": {"language": "triton", "target_hardware": ["cuda"], "entry_point": "main.py::run"},
        "sources": [{"path": "main.py", "content": "def run(A, B): ..."}],
    }


def trace(status: str = "PASSED") -> dict[str, Any]:
    evaluation: dict[str, Any] = {
        "status": status,
        "environment": {"hardware": "NVIDIA H200", "libs": {"torch": "2.13.0"}},
        "timestamp": "2026-11-30T00:00:00Z",
        "log": "",
        "correctness": {"max_relative_error": 0.25, "max_absolute_error": 0.5, "extra": None},
        "performance": {"latency_ms": 0.02, "reference_latency_ms": 0.03, "speedup_factor": 1.5},
    }
    workload = {"uuid": "u1", "axes": {"M": 3}, "inputs": {"A": {"type": "random"}, "B": {"type": "random"}}}
    return {"definition": "gemm_n8_k4", "workload": workload, "solution": "s1", "evaluation": evaluation}


def problems_of(kind: type[BaseModel], document: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(document)
    return describe(caught.value, ("random", "scalar", "safetensors"))


def evaluation(status: Status, *, pairs: int = 3, correctness: Correctness | None = None) -> Evaluation:
    passed = status is Status.PASSED
    timings = tuple(Pair(30e-6 + i * 1e-6, 20e-6 + i * 1e-6, i % 2 == 0) for i in range(pairs)) if passed else ()
    found = Correctness(0.5, 0.25, 0.8, True, 12) if passed and correctness is None else correctness
    return Evaluation(CANDIDATE.digest, "1..4", status, "log text", found, timings, "env", 1.0)


def exported(record: Evaluation) -> Trace | None:
    return to_trace(
        DEFINITION,
        workload_at({"M": 3}, DEFINITION),
        CANDIDATE,
        record,
        NATIVE,
        hardware="a CPU",
        libs={"torch": "2.13.0"},
        timestamp="2026-11-30T00:00:00Z",
        comparisons=[COMPARISON],
        digests={"harness": "beef"},
    )


# The format's rules ---------------------------------------------------------------------------------------------------


def test_a_trace_and_a_solution_are_read_and_written_without_loss() -> None:
    document = trace() | {"x_extra": [1, {"a": None}]}
    document["evaluation"]["correctness"]["extra"] = {"fibc": {"sessions": 8}, "other": [1.5]}
    assert Trace.model_validate(document).to_json() == document
    written = Solution.model_validate(solution() | {"x_extra": 1}).to_json()
    expected = solution() | {"x_extra": 1}
    expected["spec"]["destination_passing_style"] = True  # always written: readers differ in their default
    assert written == expected


def test_errors_that_are_no_numbers_are_strings_in_the_file() -> None:
    document = trace("INCORRECT_NUMERICAL")
    document["evaluation"] |= {
        "performance": None,
        "correctness": {"max_relative_error": "NaN", "max_absolute_error": "Infinity"},
    }
    read = Trace.model_validate(document)
    assert read.evaluation is not None and read.evaluation.correctness is not None
    assert math.isnan(read.evaluation.correctness.max_relative_error)
    assert json.loads(json.dumps(read.to_json(), allow_nan=False)) == document


@pytest.mark.parametrize(
    ("status", "has_correctness", "has_performance"),
    [
        ("PASSED", True, True),
        ("INCORRECT_NUMERICAL", True, False),
        ("INCORRECT_SHAPE", False, False),
        ("INCORRECT_DTYPE", False, False),
        ("RUNTIME_ERROR", False, False),
        ("COMPILE_ERROR", False, False),
        ("TIMEOUT", False, False),
    ],
)
@pytest.mark.parametrize("with_correctness", [True, False])
@pytest.mark.parametrize("with_performance", [True, False])
def test_a_status_asks_for_its_fields_and_no_others(
    status: str, has_correctness: bool, has_performance: bool, with_correctness: bool, with_performance: bool
) -> None:
    document = trace(status)
    if not with_correctness:
        document["evaluation"]["correctness"] = None
    if not with_performance:
        document["evaluation"]["performance"] = None
    if (with_correctness, with_performance) == (has_correctness, has_performance):
        assert Trace.model_validate(document).to_json() == document
    else:
        (problem,) = problems_of(Trace, document)
        assert problem.startswith("evaluation: ") and status in problem


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("evaluation", "status"), "FAST", "evaluation.status: must be 'PASSED'"),
        (("evaluation", "timestamp"), "", "evaluation.timestamp: must not be empty"),
        (
            ("evaluation", "correctness", "max_absolute_error"),
            -1,
            "evaluation.correctness.max_absolute_error: must be >= 0",
        ),
        (("evaluation", "performance", "latency_ms"), -1, "evaluation.performance.latency_ms: must be >= 0"),
        (("evaluation", "performance", "latency_ms"), math.inf, "evaluation.performance.latency_ms: must be a finite"),
        (("workload", "axes", "M"), -1, "workload.axes.M: must be >= 0"),
        (("workload", "inputs", "A"), {}, "workload.inputs.A: must have a 'type'"),
        (("definition",), "../x", "definition: must be an identifier"),
        (("evaluation",), None, "solution and evaluation: must both be present"),
    ],
)
def test_a_trace_that_breaks_a_rule_is_a_problem(path: tuple[str, ...], value: Any, problem: str) -> None:
    document = trace()
    inner = document
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    (found,) = problems_of(Trace, document)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"name": ""}, "name: must not be empty"),
        ({"sources": []}, "sources: must not be empty"),
        ({"sources": [{"path": "../main.py", "content": "x"}]}, "sources[0].path: must be a relative path without .."),
        ({"sources": [{"path": "/main.py", "content": "x"}]}, "sources[0].path: must be a relative path without .."),
        ({"sources": [{"path": "other.py", "content": "x"}]}, "spec.entry_point: must name one of the sources"),
        ({"sources": [{"path": "main.py", "content": "x"}] * 2}, "sources: paths must be unique"),
        ({"spec": solution()["spec"] | {"entry_point": "run"}}, "spec.entry_point: must be file::symbol"),
        ({"spec": solution()["spec"] | {"language": "perl"}}, "spec.language: must be 'python'"),
        ({"spec": solution()["spec"] | {"target_hardware": []}}, "spec.target_hardware: must not be empty"),
        ({"spec": solution()["spec"] | {"binding": "ctypes"}}, "spec.binding: must be 'tvm-ffi' or 'torch'"),
    ],
)
def test_a_solution_that_breaks_a_rule_is_a_problem(changes: dict[str, Any], problem: str) -> None:
    (found,) = problems_of(Solution, copy.deepcopy(solution()) | changes)
    assert found.startswith(problem)


# Export ---------------------------------------------------------------------------------------------------------------


def test_a_variant_is_a_solution_with_its_source() -> None:
    headers = {"fibc/kernel_abi.h": "/* abi */\n"}
    made = to_solution(
        DEFINITION, CANDIDATE, "int x;\n", language="cpp", file="kernel.cpp", entry="fibc_abc", headers=headers
    )
    plain = made.to_json()
    assert plain["name"] == solution_name(DEFINITION, CANDIDATE) == f"gemm_n8_k4_{CANDIDATE.digest}"
    assert plain["spec"] == {
        "language": "cpp",
        "target_hardware": ["cpu"],
        "entry_point": "kernel.cpp::fibc_abc",
        "dependencies": [],
        "destination_passing_style": True,
        "binding": None,
    }
    assert [source["path"] for source in plain["sources"]] == ["kernel.cpp", "fibc/kernel_abi.h"]
    assert plain["sources"][0]["content"] == "int x;\n"


def test_a_passed_evaluation_is_a_trace_with_its_interval() -> None:
    made = exported(evaluation(Status.PASSED))
    assert made is not None
    plain = json.loads(json.dumps(made.to_json(), allow_nan=False))
    performance = plain["evaluation"]["performance"]
    assert performance["latency_ms"] == pytest.approx(0.021)
    assert performance["reference_latency_ms"] == pytest.approx(0.031)
    assert performance["speedup_factor"] == pytest.approx(31 / 21)
    assert plain["evaluation"]["correctness"]["max_absolute_error"] == 0.5
    extra = plain["evaluation"]["correctness"]["extra"]["fibc"]
    assert extra["native"] == NATIVE.name
    assert extra["reference_latency_of"] == "native"
    assert (extra["comparisons"][0]["ci_low"], extra["comparisons"][0]["ci_high"]) == (1.4, 1.6)
    assert extra["digests"] == {
        "harness": "beef",
        "definition": DEFINITION.digest,
        "candidate": CANDIDATE.digest,
        "source": CANDIDATE.source_digest,
        "native": NATIVE.digest,
        "environment": "env",
    }


@pytest.mark.parametrize("status", Status)
def test_every_status_is_a_lawful_trace_or_none(status: Status) -> None:
    made = exported(evaluation(status))
    if status is Status.REJECTED:
        assert made is None
        return
    assert made is not None and made.evaluation is not None
    expected = "RUNTIME_ERROR" if status in (Status.CRASH, Status.RESOURCE) else status.value
    assert made.evaluation.status == expected
    assert made.evaluation.log == "log text"
    assert Trace.model_validate(made.to_json()) is not None
    assert json.dumps(made.to_json(), allow_nan=False)


def test_a_pass_that_was_never_timed_is_no_trace() -> None:
    assert exported(evaluation(Status.PASSED, pairs=0)) is None


def test_a_synthetic_point_has_a_uuid_of_its_own() -> None:
    first, second = workload_at({"M": 3}, DEFINITION), workload_at({"M": 4}, DEFINITION)
    assert isinstance(first, Workload) and first.synthesised
    assert first.uuid == workload_at({"M": 3}, DEFINITION).uuid != second.uuid

"""``fibc validate``: every problem of every file, in a stable order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fibc.schema.validate import validate_paths


def gemm(**changes: Any) -> dict[str, Any]:
    return {
        "name": "gemm",
        "op_type": "gemm",
        "axes": {"M": {"type": "var"}, "K": {"type": "const", "value": 4}},
        "inputs": {"A": {"shape": ["M", "K"], "dtype": "float16"}},
        "outputs": {"C": {"shape": ["M", "K"], "dtype": "float16"}},
        "reference": "def run(A):\n    return A\n",
    } | changes


def line(size: int = 3, definition: str = "gemm") -> dict[str, Any]:
    workload = {"uuid": f"u{size}", "axes": {"M": size}, "inputs": {"A": {"type": "random"}}}
    return {"definition": definition, "workload": workload, "solution": None, "evaluation": None}


def write(path: Path, *documents: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_good_files_have_no_problem_and_are_counted_once(tmp_path: Path) -> None:
    definition = write(tmp_path / "gemm.json", gemm())
    write(tmp_path / "gemm.workloads.jsonl", line())
    (tmp_path / "README.md").write_text("passed over")
    (tmp_path / "kernel.toml").write_text("passed over")
    checked = validate_paths([tmp_path, definition, tmp_path / ".." / tmp_path.name])
    assert checked.problems == ()
    assert checked.num_files == 2


def test_every_problem_of_every_file_is_reported_in_order_of_the_files(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", gemm(name="../a", op_type=""))
    b = write(tmp_path / "b.json", gemm(name="b"))
    b_lines = write(tmp_path / "b.workloads.jsonl", line(-1, "b"), line(3, "gemm"))
    c = write(tmp_path / "sub" / "c.json", gemm(name="b"))
    d = tmp_path / "sub" / "d.json"
    d.write_text("{")
    checked = validate_paths([tmp_path])
    assert checked.num_files == 5
    assert [problem.split(": ")[0] for problem in checked.problems] == [
        str(a), str(a), str(b_lines) + ":1", str(b_lines) + ":2", str(c), f"{d}:1:2",
    ]  # fmt: skip
    assert checked.problems[4] == f"{c}: name: must be unique, got 'b' of {b} again"
    assert validate_paths([tmp_path]) == checked


def test_workloads_find_their_definition_beside_them_or_by_name(tmp_path: Path) -> None:
    write(tmp_path / "one" / "gemm.json", gemm())
    beside = write(tmp_path / "one" / "gemm.workloads.jsonl", line(-1))
    named = write(tmp_path / "one" / "traffic.jsonl", line(-2))
    elsewhere = write(tmp_path / "two" / "other.jsonl", line(-3))
    assert validate_paths([beside]).problems == (f"{beside}:1: axes.M: must be >= 0, got -1",)
    assert validate_paths([named]).problems == (f"{named}:1: axes.M: must be >= 0, got -2",)
    assert validate_paths([tmp_path]).problems[-1] == f"{elsewhere}:1: axes.M: must be >= 0, got -3"
    assert validate_paths([elsewhere]).problems == (
        f"{elsewhere}: must belong to a definition, got none: no other.json beside it",
    )


def test_workloads_of_a_broken_definition_are_still_read_as_json(tmp_path: Path) -> None:
    write(tmp_path / "gemm.json", gemm(op_type=""))
    lines = write(tmp_path / "gemm.workloads.jsonl", line())
    with lines.open("a") as file:
        file.write("{torn\n")
    problems = validate_paths([tmp_path]).problems
    assert [problem.split(": ")[0] for problem in problems] == [f"{tmp_path}/gemm.json", f"{lines}:2:2"]


def test_a_dataset_is_checked_with_its_solutions_and_traces(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "dataset"
    write(root / "definitions" / "gemm" / "gemm.json", gemm())
    write(root / "workloads" / "gemm" / "gemm.jsonl", line())
    write(root / "solutions" / "me" / "s.json", {"name": "s"})
    write(root / "traces" / "me" / "gemm.jsonl", line())
    checked = validate_paths([tmp_path])
    assert checked.num_files == 4
    files = {problem.split(": ")[0].removeprefix(f"{root}/") for problem in checked.problems}
    assert files == {"solutions/me/s.json", "traces/me/gemm.jsonl:1"}


def test_a_path_without_anything_to_check_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    toml = tmp_path / "kernel.toml"
    toml.write_text("")
    missing = tmp_path / "missing.json"
    checked = validate_paths([tmp_path / "empty", toml, missing])
    assert checked.problems == (
        f"{tmp_path}/empty: must be or hold definitions (.json) or workloads (.jsonl), got none",
        f"{toml}: must be or hold definitions (.json) or workloads (.jsonl), got none",
        f"{missing}: must be a readable file, got: No such file or directory",
    )


def test_links_that_lead_in_a_circle_end(tmp_path: Path) -> None:
    write(tmp_path / "gemm.json", gemm())
    (tmp_path / "loop").symlink_to(tmp_path)
    assert validate_paths([tmp_path]).problems == ()

"""What a sanitizer finds costs the finalist; what it is asked and what ran is on record. The tool is a script here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulation import Machine, block_of, write_definition
from test_evaluate import NATIVE_SOURCE, REFERENCE, artifact, definition, point

import fibc
from fibc import cuda_toolchain, sanitizer
from fibc import sanitize as sanitizing
from fibc.errors import EvaluationError, InputError, ToolchainError
from fibc.records import RecordLog
from fibc.sanitizer import FINDING_STATUS, Sanitizer
from fibc.schema import codec
from fibc.schema.decision import Verdict
from fibc.schema.evaluation import Status
from fibc.schema.feature import FeatureKey
from fibc.schema.result import TuneResult
from fibc.schema.sanitized import Sanitized
from fibc.shop import Shop
from fibc.worker import Setup

HERE = Path(__file__).parent

SCRIPT = """#!{python}
import json, os, subprocess, sys
if "--version" in sys.argv:
    print("NVIDIA (R) Compute Sanitizer\\nCopyright (c) 2020-2026 NVIDIA Corporation\\nVersion 2026.4.0.0 (build 1)")
    sys.exit()
start = sys.argv.index({python!r})
options = sys.argv[1:start]
with open(os.environ["FIBC_TEST_ASKED"], "a") as asked:
    json.dump([options, sys.argv[start:], os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"]], asked)
    asked.write("\\n")
done = subprocess.run(sys.argv[start:])
tool, status = (options[options.index(name) + 1] for name in ("--tool", "--error-exitcode"))
if tool == os.environ.get("FIBC_TEST_FINDS"):
    print("========= Invalid __global__ write of size 4 bytes")
    sys.exit(int(status))
sys.exit(done.returncode)
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sanitizer:
    """The script, found on PATH."""
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text(SCRIPT.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(program.parent), os.environ["PATH"]]))
    monkeypatch.setenv("FIBC_TEST_ASKED", str(tmp_path / "asked"))
    return sanitizer.find()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "hostile.so"
    include = HERE.parent / "csrc" / "include"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", f"-I{include}", HERE / "hostile.c", "-o", path], check=True)
    return path


SETUP = Setup(
    definition=definition(REFERENCE).to_json(),
    native_source=NATIVE_SOURCE,
    harness_path=str(HERE / "standin_harness.py"),
    workloads={},
    num_threads=1,
    num_copies=1,
    keep_bytes=1 << 20,
    data_bytes=1 << 30,
    seed=0,
)


def run(tool: Sanitizer, library: Path, symbol: str, *, setup: Setup = SETUP, timeout_s: float = 60) -> Sanitized:
    return sanitizer.sanitize(tool, setup, "candidate", artifact(library, symbol), point(3), timeout_s=timeout_s)


def asked(tmp_path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]


def test_a_sound_finalist_is_called_once_under_each_tool(tool: Sanitizer, library: Path, tmp_path: Path) -> None:
    assert str(tool) == "compute-sanitizer 2026.4.0.0"
    found = run(tool, library, "good")
    tools = ("memcheck", "initcheck", "racecheck")
    assert found == Sanitized("good", "candidate", "rows=3", str(tool), tools, Status.PASSED, "")
    seen = asked(tmp_path)
    assert [options[:4] for options, _, _ in seen] == [
        ["--tool", name, "--error-exitcode", str(FINDING_STATUS)] for name in tools
    ]
    assert {tuple(command[:-1]) for _, command, _ in seen} == {(sys.executable, "-P", "-m", "fibc.sanitize_child")}
    assert not any(Path(command[-1]).exists() for _, command, _ in seen), "no request is left behind"
    assert {caching for _, _, caching in seen} == {"1"}, "every tensor is an allocation of its own"


def test_a_finding_ends_the_runs_and_is_told(
    tool: Sanitizer, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIBC_TEST_FINDS", "initcheck")
    found = run(tool, library, "good")
    assert (found.status, found.tools) == (Status.RUNTIME_ERROR, ("memcheck", "initcheck"))
    assert "--tool initcheck found something" in found.log
    assert "Invalid __global__ write of size 4 bytes" in found.log
    assert len(asked(tmp_path)) == 2


@pytest.mark.parametrize(
    ("symbol", "status", "said"),
    [
        ("endless", Status.TIMEOUT, "--tool memcheck took longer than 3 s"),
        ("exits", Status.RUNTIME_ERROR, "--tool memcheck ended with status 3"),
        ("loses_context", Status.RUNTIME_ERROR, "the kernel did nothing"),
    ],
)
def test_a_finalist_that_fails_under_a_tool_is_blamed(
    tool: Sanitizer, library: Path, symbol: str, status: Status, said: str
) -> None:
    found = run(tool, library, symbol, timeout_s=3 if status is Status.TIMEOUT else 60)
    assert (found.status, found.tools) == (status, ("memcheck",))
    assert said in found.log


def test_what_fails_before_the_candidate_is_called_is_nobodys_fault(tool: Sanitizer, library: Path) -> None:
    with pytest.raises(EvaluationError, match="--sanitize: must start, and did not"):
        run(tool, library, "good", setup=replace(SETUP, harness_path="/nowhere.py"))


def test_a_tool_that_starts_nothing_and_says_that_all_is_well_is_not_believed(tool: Sanitizer, library: Path) -> None:
    tool.path.write_text(
        "#!/bin/sh\necho '========= Target application terminated before first instrumented API call'\n"
    )
    with pytest.raises(EvaluationError, match="terminated before first instrumented API call"):
        run(tool, library, "good")


def test_a_library_is_held_to_memcheck_alone(library: Path) -> None:
    made = replace(artifact(library, "good"), resources={"kind": "library"})
    assert sanitizer.tools_for(made) == ("memcheck",)


def test_a_missing_sanitizer_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    for name in ("system_roots", "wheel_roots"):
        monkeypatch.setattr(cuda_toolchain, name, lambda: [])
    with pytest.raises(ToolchainError, match=r"--sanitize: needs compute-sanitizer, found none .*pip install"):
        sanitizer.find()


# In a tune ------------------------------------------------------------------------------------------------------------

BEST, SECOND = 3, 4


@pytest.fixture
def machine(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path, lambda block, rows: {BEST: 1.3, SECOND: 1.2}.get(block, 0.9))
    made.install(monkeypatch)
    monkeypatch.setattr("fibc.task._sanitizer", lambda options, gpu: FAKE if options.sanitize else None)
    return made


FAKE = Sanitizer(Path("/nowhere"), "1.0")


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], Counter[int]]:
    """Return a function that has one block found out, and counts what is run."""

    def install(bad: int | None) -> Counter[int]:
        runs: Counter[int] = Counter()

        def call(shop: Shop, tool: Sanitizer, candidate: str, key: FeatureKey) -> Sanitized | None:
            def run(tool: Sanitizer, setup: Any, name: str, made: Any, where: Any, *, timeout_s: float) -> Sanitized:
                assert 0 < timeout_s <= 300
                block = block_of(shop.candidates[name])
                runs[block] += 1
                status = Status.RUNTIME_ERROR if block == bad else Status.PASSED
                log = "Invalid write" if block == bad else ""
                return Sanitized(made.digest, name, str(where), str(tool), sanitizer.TOOLS, status, log)

            monkeypatch.setattr(sanitizer, "sanitize", run)
            return sanitizing.sanitize(shop, tool, candidate, key)

        monkeypatch.setattr("fibc.key_search.sanitize", call)
        return runs

    return install


def tune(tmp_path: Path, **options: Any) -> TuneResult:
    path = write_definition(tmp_path / "defs", (1, 2, 4))
    return fibc.tune(path, out=tmp_path / "out", target="cpu", split=(1.0, 0.0, 0.0), **options)


def served(result: TuneResult) -> set[int]:
    assert result.table is not None
    return {int(dict(variant.candidate.config)["block"]) for variant in result.table.variants}


def test_a_finding_costs_the_best_finalist_and_the_second_best_serves(
    machine: Machine, finds: Callable[[int | None], Counter[int]], tmp_path: Path
) -> None:
    runs = finds(BEST)
    result = tune(tmp_path, sanitize=True)
    assert served(result) == {SECOND}
    assert max(runs.values()) == 1, "a binary is run once, whatever the number of keys"
    assert result.trials["RUNTIME_ERROR"] >= 1
    assert result.table is not None
    said = "compute-sanitizer 1.0: of 1 variants 1 by memcheck, 1 by initcheck, 1 by racecheck"
    assert result.table.environment["sanitizer"] == said
    (path,) = (tmp_path / "out" / "fibc-records").glob("*.records")
    records = [r for r in RecordLog(path, definition="", environment="").read() if r.kind == "sanitized"]
    found = [codec.from_plain(Sanitized, record.value) for record in records]
    assert len(found) == sum(runs.values())
    assert [item.log for item in found if item.status is not Status.PASSED] == ["Invalid write"]


def test_a_table_that_nobody_sanitized_is_not_up_to_date_and_what_was_found_is_remembered(
    machine: Machine, finds: Callable[[int | None], Counter[int]], tmp_path: Path
) -> None:
    finds(None)
    plain = tune(tmp_path)
    assert plain.table is not None
    assert "sanitizer" not in plain.table.environment
    runs = finds(None)
    assert served(tune(tmp_path, sanitize=True)) == {BEST}
    assert runs[BEST] == 1
    runs = finds(None)
    assert tune(tmp_path, sanitize=True).up_to_date
    assert not tune(tmp_path, sanitize=True, trials=8).up_to_date
    assert not runs, "the records have it"


def test_finalists_for_which_no_time_is_left_do_not_race(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fibc.key_search.sanitize", lambda *_: None)
    result = tune(tmp_path, sanitize=True)
    assert result.partial
    assert result.table is not None
    assert {row.verdict for row in result.table.rows} == {Verdict.INCONCLUSIVE}


def test_a_cpu_has_no_sanitizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--sanitize: needs a GPU"):
        tune(tmp_path, sanitize=True)

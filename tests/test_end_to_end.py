"""The whole path with real compilers and processes; verdicts are the machine's business, everything else is ours."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fibc.cache import Cache
from fibc.environment import detect
from fibc.gate import gate_digest
from fibc.records import RecordLog
from fibc.runtime.package import load, read_table
from fibc.schema.dataset import read_dataset

pytestmark = pytest.mark.e2e

REFERENCE = """
import torch

EPS = 1e-6


def run(x, residual, weight):
    total = x.to(torch.float32) + residual.to(torch.float32)
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
    return (total * scale * weight.to(torch.float32)).to(x.dtype)
"""


RANDOM = {"type": "random"}


def write_definition(directory: Path) -> Path:
    """Write an operator that no file in defs/ holds: another hidden size, float32, names of its own."""
    directory.mkdir(parents=True)
    tensor = {"shape": ["tokens", "width"], "dtype": "float32"}
    definition = {
        "name": "my_norm_w320",
        "op_type": "rmsnorm",
        "axes": {"tokens": {"type": "var"}, "width": {"type": "const", "value": 320}},
        "inputs": {"x": tensor, "residual": tensor, "weight": {"shape": ["width"], "dtype": "float32"}},
        "outputs": {"y": tensor},
        "reference": REFERENCE,
    }
    path = directory / "my norm.json"
    path.write_text(json.dumps(definition))
    lines = [
        {
            "uuid": f"w{size}",
            "axes": {"tokens": size},
            "inputs": {name: {"type": "random"} for name in definition["inputs"]},
        }
        for size in (1, 2, 5, 6)
    ]
    path.with_suffix(".workloads.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a space in its name, a definition, and a cache in which the A/A gate has passed."""
    root = tmp_path_factory.mktemp("end to end")
    cache = Cache(root / "cache")
    cache.put_json("gate", gate_digest(detect().digest), {"passed": True, "text": "passed before this test"})
    write_definition(root / "defs")
    done = run_fibc(root, "tune", "defs/my norm.json", "--out", "build", "--trials", "4", "--json")
    assert done.returncode == 0, done.stderr
    (root / "result.json").write_text(done.stdout)
    yield root


def run_fibc(root: Path, *arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", "fibc.cli", *arguments],
        cwd=root,
        env={**os.environ, "FIBC_CACHE_DIR": str(root / "cache"), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def result(site: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((site / "result.json").read_text())
    return loaded


def test_an_operator_outside_defs_tunes_without_a_code_change(site: Path) -> None:
    found = result(site)
    assert found["module"] == "fibc_my_norm_w320"
    assert found["trials"]["PASSED"] > 0, found["trials"]
    assert set(found["trials"]) == {"PASSED"}
    assert [row["cell"]["bounds"] for row in found["table"]["rows"]] == [[[1, 1]], [[2, 2]], [[3, 4]], [[5, 6]]]


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 6, 7, 100])
def test_the_module_computes_what_the_reference_says_inside_and_outside_its_cells(site: Path, tokens: int) -> None:
    module = load(site / "build" / "fibc_my_norm_w320")
    generator = torch.Generator().manual_seed(tokens)
    x, residual = torch.randn(2, tokens, 320, generator=generator)
    weight = torch.randn(320, generator=generator)
    total = (x + residual).double()
    expected = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    torch.testing.assert_close(module.run(x, residual, weight), expected.float(), rtol=2e-5, atol=2e-5)
    assert module.explain(x, residual, weight)["reason"]


def test_the_package_works_alone_where_it_was_copied_without_fibc_and_without_a_compiler(
    site: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "другое место"
    shutil.copytree(site / "build" / "fibc_my_norm_w320", elsewhere / "fibc_my_norm_w320", symlinks=True)
    program = (
        "import sys, torch\n"
        "import fibc_my_norm_w320 as op\n"
        "x, r, w = torch.randn(2, 320), torch.randn(2, 320), torch.ones(320)\n"
        "t = x + r\n"
        "torch.testing.assert_close(op.run(x, r, w), t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6))\n"
        "assert 'fibc' not in sys.modules, 'fibc was imported'\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=elsewhere,
        env={**env, "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(site).encode() not in b"".join(
        path.read_bytes() for path in elsewhere.rglob("*") if path.is_file() and not path.is_symlink()
    ), "a path of the machine that built it is inside"


def test_running_again_is_up_to_date(site: Path) -> None:
    done = run_fibc(site, "tune", "defs/my norm.json", "--out", "build", "--trials", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["up_to_date"]


def test_explain_reads_the_table_and_one_call(site: Path) -> None:
    done = run_fibc(site, "explain", "build/fibc_my_norm_w320")
    assert done.returncode == 0, done.stderr
    assert "cells replaced" in done.stdout
    done = run_fibc(site, "explain", "build/fibc_my_norm_w320", "--axes", "tokens=100")
    assert "native" in done.stdout
    assert "no cell holds these sizes" in done.stdout


def test_everything_that_was_seen_is_in_out(site: Path) -> None:
    table = read_table(site / "build" / "fibc_my_norm_w320")
    log = RecordLog(
        site / "build" / "fibc-records" / "my_norm_w320.records", definition=table.definition_digest, environment=""
    )
    kinds = {record.kind for record in log.read()}
    assert {"candidate", "evaluation", "samples", "decision", "finalists"} <= kinds
    dataset = read_dataset(site / "build" / "fibc-dataset")
    assert not dataset.problems
    assert len(dataset.traces["my_norm_w320"]) == result(site)["trials"]["PASSED"]


def test_a_second_definition_shares_the_out(site: Path) -> None:
    document = json.loads((site / "defs" / "my norm.json").read_text()) | {"name": "my_norm_again"}
    (site / "defs" / "again.json").write_text(json.dumps(document))
    shutil.copy(site / "defs" / "my norm.workloads.jsonl", site / "defs" / "again.workloads.jsonl")
    done = run_fibc(site, "tune", "defs/again.json", "--out", "build", "--trials", "1", "--budget-s", "15")
    assert done.returncode == 0, done.stderr
    for name in ("my_norm_w320", "my_norm_again"):
        assert (
            load(site / "build" / f"fibc_{name}").run(torch.ones(1, 320), torch.ones(1, 320), torch.ones(320)).sum() > 0
        )


def test_ctrl_c_ends_a_run_at_once_leaves_no_process_and_the_next_run_goes_on(site: Path, tmp_path: Path) -> None:
    command = ["tune", "defs/my norm.json", "--out", str(tmp_path / "build"), "--trials", "4"]
    running = subprocess.Popen(
        [sys.executable, "-m", "fibc.cli", *command],
        cwd=site,
        env={**os.environ, "FIBC_CACHE_DIR": str(site / "cache"), "COLUMNS": "160"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert running.stderr is not None
    seen = []
    for line in running.stderr:  # the first key is searched, the others are not
        seen.append(line)
        if "trials" in line:
            break
    began = time.monotonic()
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: the whole group, workers included
    output, errors = running.communicate(timeout=60)
    assert running.returncode == 130, output + errors
    assert time.monotonic() - began < 30
    assert "Traceback" not in errors, errors
    with pytest.raises(ProcessLookupError):
        os.killpg(running.pid, 0)
    assert not list((tmp_path / "build").glob("fibc_*/")), "no module without evidence"
    log = RecordLog(tmp_path / "build" / "fibc-records" / "my_norm_w320.records", definition="", environment="")
    kept = sum(record.kind == "evaluation" for record in log.read())
    assert kept >= 1
    done = run_fibc(site, *command, "--json")
    assert done.returncode == 0, done.stderr
    assert sum(record.kind == "evaluation" for record in log.read()) >= kept


def test_a_night_on_real_processes_shows_the_winners_again_and_everything_verifies(site: Path, tmp_path: Path) -> None:
    shutil.copytree(site / "build", tmp_path / "build", symlinks=True)
    package = tmp_path / "build" / "fibc_my_norm_w320"
    before = read_table(package)
    began = time.monotonic()
    done = run_fibc(site, "retune", str(package), "--json")
    took_s = time.monotonic() - began
    assert json.loads(done.stdout)["packages"][0]["action"] == "unchanged", done.stderr
    assert took_s < 5.0
    done = run_fibc(site, "retune", str(package), "--max-age", "0s", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (night,) = json.loads(done.stdout)["packages"]
    assert night["action"] == "renewed"
    assert night["num_rechecked"] == sum(row.verdict.value == "replace" for row in before.rows)
    assert night["num_held"] + len(night["retuned"]) == night["num_rechecked"]
    after = read_table(package)
    assert after.created > before.created
    assert [row.cell for row in after.rows if not row.confirm] == [row.cell for row in before.rows if not row.confirm]
    x, residual, weight = torch.randn(2, 320), torch.randn(2, 320), torch.ones(320)
    total = x + residual
    torch.testing.assert_close(
        load(package).run(x, residual, weight), total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
    )
    done = run_fibc(site, "verify", str(package), "--rebuild", "--json")
    assert done.returncode == 0, done.stdout
    assert {item["verdict"] for item in json.loads(done.stdout)["packages"][0]["items"]} == {"same"}
    done = run_fibc(site, "rollback", str(package))
    assert done.returncode == 0, done.stderr
    assert read_table(package) == before
    done = run_fibc(site, "status", str(package), "--json")
    (state,) = json.loads(done.stdout)["packages"]
    assert (state["match"], len(state["later"])) == ("same", 1)

"""A retune that is killed at any moment leaves a generation that serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parent.parent


def kill_retune(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    places = ["--state", str(directory / "state"), "--out", str(directory / "result.json")]
    return subprocess.run(
        [sys.executable, "benchmarks/kill_retune.py", *places, *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_twenty_kills_leave_a_generation_that_serves_each_time_and_go_on_where_they_were_stopped(
    tmp_path: Path,
) -> None:
    done = kill_retune(tmp_path, "--kills", "20", "--budget-s", "15")
    assert done.returncode == 75, done.stdout + done.stderr
    assert not (tmp_path / "result.json").exists()
    kept = json.loads((tmp_path / "state" / "state.json").read_text())["rounds"]
    assert 1 <= len(kept) < 20
    done = kill_retune(tmp_path, "--kills", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["kills"], result["nothing_served"], result["pieces"]) == (20, 0, 2)
    assert result["rounds"][: len(kept)] == [
        [item[name] for name in ("after_s", "end", "phase", "generation", "served")] for item in kept
    ]
    assert sum(result["kills_by_phase"].values()) == 20
    assert len(result["kills_by_phase"]) >= 3, "kills meet several phases"
    assert result["served_the_old_one"] + result["served_the_new_one"] == 20
    assert result["last_nights"] == [{"whole": True, "unfinished_files": 0}]
    assert not (tmp_path / "state").exists()


def test_the_state_of_other_kills_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "state.json").write_text(json.dumps({"seed": 1, "facts": {}, "rounds": []}))
    done = kill_retune(tmp_path, "--kills", "1")
    assert done.returncode == 1
    assert "is of another seed or environment (remove it to begin anew)" in done.stderr

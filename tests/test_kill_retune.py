"""A retune that is killed at any moment leaves a generation that serves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.e2e
def test_twenty_kills_at_random_moments_leave_a_generation_that_serves_each_time() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/kill_retune.py", "--kills", "20"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    killed = re.search(r"'killed': (\d+)", done.stdout)
    assert killed is not None
    assert int(killed[1]) >= 10, done.stdout
    assert "0 times nothing served" in done.stdout

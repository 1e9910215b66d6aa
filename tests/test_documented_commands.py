"""Every shell block of README, the operators' page and the report's page runs as written, in a home of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from documentation import ROOT, Block
from documented import APART, OPERATORS, README, REPORT, block_of, run_blocks, shell_of
from documented_checks import cron_fields, pod_command, unit_commands

from fibc.cache import Cache
from fibc.codegen.generations import generations
from fibc.environment import detect
from fibc.gate import gate_digest
from fibc.runtime.package import read_table

pytestmark = pytest.mark.e2e

GEMM, NORM = "fibc_gemm_bf16_n4096_k4096", "fibc_fused_add_rmsnorm_h4096"


class Home:
    """What a user has after `make tune`: a checkout with .venv, defs and build.

    The definitions are those of defs/ with few workloads, and the GEMM is a small one under the name of the large.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        cache = Cache(root / "cache")
        cache.put_json("gate", gate_digest(detect().digest), {"passed": True, "text": "passed before this test"})
        self._make_venv()
        _write(root / "defs", "gemm", {"N": 64, "K": 64}, ({"M": 4},))
        _write(root / "defs", "fused_add_rmsnorm", {}, ({"batch_size": 7},))
        (root / "benchmarks").symlink_to(ROOT / "benchmarks")
        self.shell("fibc tune defs/gemm.json --out build/ --trials 3")

    def _make_venv(self) -> None:
        venv = self.root / ".venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=120)
        site = next((venv / "lib").glob("python*/site-packages"))
        # This checkout, and the dependencies of this environment; an editable fibc in there is not seen through it.
        (site / "checkout.pth").write_text(f"{ROOT}\n{sysconfig.get_paths()['purelib']}\n")
        program = venv / "bin" / "fibc"
        program.write_text(f"#!{venv}/bin/python\nimport sys\nfrom fibc.cli import main\nsys.exit(main())\n")
        program.chmod(0o755)

    def shell(self, text: str) -> str:
        """Run ``text`` as a user types it, stopping at the first command that fails; return what it printed."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FIBC_", "PYTHON"))}
        paths = {"PATH": f"{self.root}/.venv/bin:{os.environ['PATH']}", "HOME": str(self.root)}
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", text],
            cwd=self.root,
            env={**kept, **paths, "FIBC_CACHE_DIR": f"{self.root}/cache", "COLUMNS": "160"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    def run(self, block: Block, replaced: dict[str, str] | None = None) -> str:
        """Run a block of a page, with names of the page's site replaced by names of this one."""
        text = shell_of(block)
        for name, here in (replaced or {}).items():
            assert name in text, f"{block}: {name} is not there"
            text = text.replace(name, here)
        return self.shell(text)

    def night(self) -> None:
        """Let a night show every winner again, so that each package has an earlier generation."""
        self.shell("fibc retune build/ --max-age 0s")

    def newest(self) -> None:
        """Let the newest generations serve."""
        for package in (self.root / "build").glob("fibc_*"):
            names = [item.name for item in generations(package)]
            self.shell(f"fibc rollback build/{package.name} --to {names[-1]}")


def _write(defs: Path, name: str, sizes: dict[str, int], workloads: tuple[dict[str, int], ...]) -> None:
    defs.mkdir(exist_ok=True)
    document = json.loads((ROOT / "defs" / f"{name}.json").read_text())
    for axis, size in sizes.items():
        document["axes"][axis]["value"] = size
    (defs / f"{name}.json").write_text(json.dumps(document))
    inputs = {tensor: {"type": "random"} for tensor in document["inputs"]}
    lines = [{"uuid": f"w{number}", "axes": axes, "inputs": inputs} for number, axes in enumerate(workloads)]
    (defs / f"{name}.workloads.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The home, after the blocks of README have run in their order."""
    made = Home(tmp_path_factory.mktemp("home"))
    printed = {}
    for block in run_blocks(README):
        if block.first.startswith("fibc status"):
            made.night()  # what the block goes back from
        printed[block.first] = made.run(block)
    (started,) = (text for first, text in printed.items() if first.startswith(". .venv"))
    (nightly,) = (text for first, text in printed.items() if first.startswith("fibc status"))
    (made.root / "started.txt").write_text(started)
    (made.root / "nightly.txt").write_text(nightly)
    return made


def test_readmes_blocks_tune_serve_explain_and_report(home: Home) -> None:
    started = (home.root / "started.txt").read_text()
    assert read_table(home.root / "build" / NORM).definition == "fused_add_rmsnorm_h4096"
    assert "cells replaced" in started
    assert "4 files, 0 problems" in started
    assert "fibc-report.html" in started.splitlines()
    assert "fused_add_rmsnorm_h4096" in (home.root / "fibc-report.html").read_text()


def test_readmes_night_changes_nothing_and_goes_back(home: Home) -> None:
    nightly = (home.root / "nightly.txt").read_text()
    for name in (GEMM, NORM):
        definition = name.removeprefix("fibc_")
        assert nightly.count(f"{definition}: unchanged: nothing has changed") == 2, nightly
        assert len(generations(home.root / "build" / name)) == 2
    assert nightly.count("serves from the next import on") == 2


def test_the_blocks_for_operators_run_in_their_order(home: Home) -> None:
    home.newest()
    ran = []
    for block in run_blocks(OPERATORS):
        if "--to gd0c8" in block.text:
            home.newest()
            first = generations(home.root / "build" / GEMM)[0].name
            home.run(block, {"gd0c8": first[:8]})
        else:
            home.run(block)
        ran.append(block.first)
    assert len(ran) == 5, ran
    metrics = (home.root / "build" / "fibc.prom").read_text()
    assert f'fibc_readable{{definition="{GEMM.removeprefix("fibc_")}",generation="g' in metrics


def test_the_blocks_about_reports_run(home: Home) -> None:
    home.newest()
    for name, number in (("before", 0), ("after", 1)):
        shutil.copytree(home.root / "build", home.root / name, symlinks=True)
        generation = generations(home.root / "build" / GEMM)[number].name
        home.shell(f"fibc rollback {name}/{GEMM} --to {generation}")
    for block in run_blocks(REPORT):
        home.run(block)
    for file in ("tune.html", "candidates.csv", "comment.md"):
        assert (home.root / file).stat().st_size > 100, file


# What cannot run as it stands: its commands, with the places of this home ---------------------------------------------

PLACES = {
    "/opt/fibc/bin/": ".venv/bin/",
    "/srv/fibc/build": "build",
    "/shared/fibc/$(hostname -s)/build": "build",
    "/var/lib/node_exporter": "build",
    "/var/lib/fibc": "build",
    "/tables": "build",
}


def _here(command: str) -> str:
    for place, here in PLACES.items():
        command = command.replace(place, here)
    assert "/srv" not in command.replace("/usr", ""), command
    return command


def _block(kind: str) -> Block:
    return block_of(next(entry for entry in APART if entry.kind == kind))


COMMANDS: dict[str, Callable[[Block], tuple[str, ...]]] = {
    "service": unit_commands,
    "cron": lambda block: (cron_fields(block.text)[2],),
    "slurm": lambda block: (f'srun() {{ "$@"; }}\n{block.text}',),
    "kubernetes": lambda block: (" ".join(pod_command(block)),),
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_commands_of_timers_run(home: Home, kind: str) -> None:
    commands = COMMANDS[kind](_block(kind))
    assert commands
    for command in commands:
        home.shell(_here(command))
    if kind == "service":
        assert "fibc_readable" in (home.root / "build" / "fibc.prom").read_text()
    if kind == "cron":
        assert "unchanged" in (home.root / "build" / "fibc-retune.log").read_text()


def test_a_night_reads_the_dump_that_an_application_writes(home: Home) -> None:
    program = _here(_block("python").text)
    home.shell(f"PYTHONPATH=build python - <<'PY'\n{program}\nPY")
    printed = home.shell("fibc retune build/ --stats build/stats.json")
    assert printed.count(": unchanged: ") == 2

"""The command line: exit statuses, one clear message per problem, nothing but JSON where JSON is asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from simulation import write_definition

from fibc import cli, toolchain

DEFS = Path(__file__).parent.parent / "defs"


@dataclass(frozen=True)
class Done:
    """What one command line ended with."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def fibc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run the command line in this process."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["fibc", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        code = ended.value.code
        return Done(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run


Fibc = Callable[..., Done]


def refused(done: Done) -> str:
    """Return the message of a run that refused bad input."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
    return done.stderr


def edited(tmp_path: Path, **changes: Any) -> Path:
    path = write_definition(tmp_path / "defs", (1, 2))
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--trials", "0"), "--trials"),
        (("--budget-s", "-1"), "--budget-s"),
        (("--timeout-s", "0"), "--timeout-s"),
        (("--min-speedup", "0.5"), "--min-speedup"),
        (("--mode", "hot"), "--mode"),
        (("--sanitize", "--target", "cpu"), "--sanitize: needs a GPU"),
        (("--mode", "graph", "--target", "cpu"), "--mode: needs a GPU for graph"),
        (("--alpha", "0.7"), "--alpha"),
        (("--split", "0.5,0.5"), "--split"),
        (("--split", "a,b,c"), "--split"),
        (("--jobs", "0"), "--jobs"),
        (("--backends", "tpu"), "unknown backend"),
        (("--target", "tpu"), "--target"),
        (("--target", "cuda:sm_1"), "cuda:sm_90a"),
        (("--native", "no.such.module"), "--native"),
        (("--workloads", "/no/such/file"), "/no/such/file"),
        (("--templates", "/no/such/dir"), "/no/such/dir"),
        (("--trials", "many"), "--trials"),
    ],
)
def test_an_option_out_of_range_is_one_message_and_exit_2(
    fibc: Fibc, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    path = write_definition(tmp_path / "defs", (1, 2))
    stderr = refused(fibc("tune", path, "--out", tmp_path / "out", *options))
    assert message in stderr
    assert not (tmp_path / "out").exists()


def test_several_bad_options_are_reported_together(fibc: Fibc, tmp_path: Path) -> None:
    path = write_definition(tmp_path / "defs", (1,))
    stderr = refused(fibc("tune", path, "--out", tmp_path / "out", "--trials", "0", "--alpha", "2"))
    assert "--trials" in stderr
    assert "--alpha" in stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "../x"}, "name"),
        ({"reference": "def run(x, weight:\n"}, "reference"),
        ({"reference": "x = 1\n"}, "run"),
        ({"constraints": ["__import__('os').system('true')"]}, "constraints"),
        ({"outputs": {"y": {"shape": ["rows", "nowhere"], "dtype": "float32"}}}, "nowhere"),
    ],
)
def test_a_bad_definition_is_refused_with_its_path(
    fibc: Fibc, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = edited(tmp_path, **changes)
    stderr = refused(fibc("tune", path, "--out", tmp_path / "out"))
    assert str(path) in stderr
    assert message in stderr
    assert not (tmp_path / "out").exists()


def test_a_missing_definition_is_refused(fibc: Fibc, tmp_path: Path) -> None:
    assert "nothing.json" in refused(fibc("tune", tmp_path / "nothing.json", "--out", tmp_path / "out"))


def test_a_missing_compiler_says_what_installs_one(fibc: Fibc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_definition(tmp_path / "defs", (1,))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    toolchain._find.cache_clear()
    stderr = refused(fibc("tune", path, "--out", tmp_path / "out"))
    assert "apt-get install" in stderr


def test_a_dry_run_prints_one_json_object_and_does_nothing(fibc: Fibc, tmp_path: Path) -> None:
    done = fibc("tune", DEFS / "gemm.json", "--out", tmp_path / "out", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)["plan"]
    assert plan["workloads"] == 32
    assert plan["keys"] == 21
    assert not (tmp_path / "out").exists()


def test_validate_passes_the_shipped_definitions_and_counts_what_is_wrong_elsewhere(fibc: Fibc, tmp_path: Path) -> None:
    done = fibc("validate", DEFS)
    assert done.returncode == 0, done.stdout
    assert "0 problems" in done.stdout
    bad = edited(tmp_path, name="a;b")
    done = fibc("validate", bad)
    assert done.returncode == 2
    assert str(bad) in done.stdout


def test_doctor_names_the_machine_and_the_compiler(fibc: Fibc) -> None:
    done = fibc("doctor", "--json")
    examined = json.loads(done.stdout)
    assert done.returncode == (1 if examined["missing"] else 0)
    assert examined["facts"]["torch"]
    assert "A/A gate" in examined["facts"]


def test_the_version_is_printed(fibc: Fibc) -> None:
    done = fibc("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("fibc 0.")


def test_explain_says_which_templates_match_a_definition_and_why_the_others_do_not(fibc: Fibc) -> None:
    done = fibc("explain", DEFS / "rmsnorm.json", "--json")
    assert done.returncode == 0, done.stderr
    explained = json.loads(done.stdout)
    assert "rmsnorm/one_pass" in explained["matches"]
    reasons = dict(explained["mismatches"])
    assert "gemm" in reasons["gemm/matvec"]


def test_explain_refuses_what_is_neither_package_nor_definition(fibc: Fibc, tmp_path: Path) -> None:
    assert "must be" in refused(fibc("explain", tmp_path / "nothing"))


def test_what_was_only_compiled_is_one_json_object_or_a_table(
    fibc: Fibc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from simulation import Machine

    Machine(tmp_path, lambda block, rows: 1.0).install(monkeypatch)
    path = write_definition(tmp_path / "defs", (1, 2))
    command = ("tune", path, "--out", tmp_path / "out", "--compile-only", "--target", "cpu")
    done = fibc(*command, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["templates"][0]["compiled"] == 6
    done = fibc(*command)
    assert done.returncode == 0
    assert "toy/kernel         6       0         0" in done.stdout
    assert f"store     {tmp_path / 'out' / 'fibc-compiled'}" in done.stdout
    assert refused(fibc("tune", path, "--out", tmp_path / "out", "--compile-only")).startswith("fibc: --compile-only")


def test_records_that_are_not_there_cannot_be_built(fibc: Fibc, tmp_path: Path) -> None:
    assert "found none" in refused(fibc("build", tmp_path / "no.records", "--out", tmp_path / "out"))


H200 = Path(__file__).parent.parent / "benchmarks" / "results" / "h200"


def test_report_prints_one_json_object_and_writes_nothing_else(
    fibc: Fibc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = fibc("report", H200, "--json", "--fraction", "0.3")
    assert done.returncode == 0
    assert [table["definition"] for table in json.loads(done.stdout)["tables"]] == [
        "fused_add_rmsnorm_h4096",
        "gemm_bf16_n4096_k4096",
    ]
    assert list(tmp_path.iterdir()) == []
    assert "--fraction" in refused(fibc("report", H200, "--json", "--fraction", "3"))
    assert "must be there" in refused(fibc("report", tmp_path / "none", "--json"))


def test_report_without_plotly_says_what_to_install(
    fibc: Fibc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    assert 'pip install "fibc[report]"' in refused(fibc("report", H200, "--html", tmp_path / "a.html"))
    done = fibc("report", H200, "--markdown", tmp_path / "a.md")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'a.md'}\n")


def test_reproduce_counts_figures_and_fails_where_one_differs(fibc: Fibc, tmp_path: Path) -> None:
    text = H200 / "tune_fused_add_rmsnorm_h4096.txt"
    done = fibc("reproduce", text)
    assert done.returncode == 0
    assert "figures:" in done.stdout
    assert "0 differs" in done.stdout
    (tmp_path / text.name).write_text(text.read_text().replace("291 PASSED", "292 PASSED"))
    (tmp_path / "fused_add_rmsnorm_h4096.records").symlink_to(H200 / "fused_add_rmsnorm_h4096.records")
    done = fibc("reproduce", tmp_path / text.name, "--json")
    assert done.returncode == 1
    (differs,) = [item for item in json.loads(done.stdout)["figures"] if item["outcome"] == "differs"]
    assert (differs["said"], differs["regenerated"]) == ("292", "291")

"""The commands that look after tables: what they print, and the statuses that alarms go by."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulation import Machine, write_definition

import fibc
import fibc.installed
from fibc import cli, prometheus
from fibc.schema.observed import Observed
from fibc.schema.upkeep import PackageStatus


@pytest.fixture(autouse=True)
def _wide(shared_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path, lambda block, rows: {1: 1.3, 2: 1.2}.get(block, 0.8))
    made.install(monkeypatch)
    path = write_definition(tmp_path / "defs", (1, 2, 4))
    fibc.tune(path, out=tmp_path / "out", target="cpu", split=(1.0, 0.0, 0.0))
    return made


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    def call(command: str, *options: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["fibc", command, str(tmp_path / "out"), *options])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), capsys.readouterr().out

    return call


def upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(fibc.installed.package_facts())
    monkeypatch.setattr(fibc.installed, "package_facts", lambda: {**known, "flashinfer": "99.0"})


def test_a_night_from_its_first_look_to_the_way_back(
    machine: Machine, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = run("status")
    assert code == 0
    assert re.search(r"toy +g[0-9a-f]{16} .*3 of 3 +same +0 before", text)
    code, text = run("retune")
    assert code == 0
    assert text.startswith("toy: unchanged: nothing has changed")

    upgrade(monkeypatch)
    machine.speedup = lambda block, rows: 0.8 if block == 1 and rows == 1 else {1: 1.3, 2: 1.2}.get(block, 0.8)
    code, text = run("status")
    assert "flashinfer: not installed -> 99.0" in text
    code, text = run("retune", "--check")
    assert code == 3
    assert "toy: checked: flashinfer: not installed -> 99.0" in text
    assert "2 of 3 winners hold, 1 cells would flip, 1 to search" in text
    code, text = run("retune", "--json")
    assert code == 0
    (night,) = json.loads(text)["packages"]
    assert [flip["cell"] for flip in night["flips"]] == ["1"]
    assert night["generation"].startswith("g")
    assert run("retune", "--check")[0] == 0

    code, text = run("rollback")
    assert (code, "serves from the next import on" in text) == (0, True)
    code, text = run("status", "--json")
    (state,) = json.loads(text)["packages"]
    assert (len(state["later"]), state["match"]) == (1, "changed")
    assert run("rollback")[0] == 2
    assert run("verify")[0] == 0
    code, text = run("gc", "--keep", "1")
    assert (code, text) == (0, "toy: nothing removed\n")


def test_flips_are_printed_with_what_was_shown_then_and_now(
    machine: Machine, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade(monkeypatch)
    machine.speedup = lambda block, rows: 0.8 if block == 1 and rows == 1 else {1: 1.3, 2: 1.2}.get(block, 0.8)
    code, text = run("retune")
    assert code == 0
    assert "  1: toy/kernel(block=1) -> toy/kernel(block=2)" in text
    assert re.search(r"then 1\.\d\d\dx \(1\.\d+ to 1\.\d+\) at rows=1", text)
    assert re.search(r"now  0\.[78]\d\dx \(0\.\d+ to 0\.\d+\) at rows=1", text)
    assert re.search(r"new  1\.\d\d\dx", text)
    assert "why  fresh sessions did not show the winner faster than native" in text


def test_a_night_says_what_it_took_and_what_was_discarded_as_a_tune_does(
    machine: Machine, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert re.search(r"toy: tune of 20.* \d+ trials, \d+ pairs, seed 0, on ", run("status")[1])
    upgrade(monkeypatch)
    machine.observed = Observed(40, 2, {"an XID event (79)": 1})
    shown = "1 of 40 timed pairs discarded (1 for an XID event (79)), 2 under the software power cap"
    code, text = run("retune", "--check")
    assert f"  gpu {shown}\n" in text
    code, text = run("retune")
    assert code == 0
    assert f"  gpu {shown}\n" in text
    assert re.search(r"  time check \d+ s, recheck \d+ s, publish \d+ s; seed 0, on .+\n", text)
    code, text = run("status")
    assert re.search(r"toy: retune of 20.*\(flashinfer: not installed -> 99.0\): ", text)
    assert text.endswith(f"; {shown}\n")
    (state,) = json.loads(run("status", "--json")[1])["packages"]
    assert state["run"]["observed"]["discarded"] == {"an XID event (79)": 1}
    assert (state["run"]["kind"], state["run"]["seed"], len(state["run"]["devices"])) == ("retune", 0, 1)


def test_a_report_shows_the_night_that_published_the_table_as_json_and_on_its_page(
    machine: Machine, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("plotly", reason='the page needs plotly (pip install "fibc[report]")')

    def reported(name: str) -> tuple[dict[str, Any], str]:
        page = tmp_path / f"{name}.html"
        code, text = run("report", "--json", "--html", str(page))
        assert code == 0
        return json.loads(text)["tables"][0], page.read_text()

    tuned, page = reported("tune")
    assert (tuned["run"]["kind"], tuned["run"]["observed"], tuned["sets"]["tune"]) == ("tune", "", 3)
    assert "<dt>what</dt><dd>tune</dd>" in page
    upgrade(monkeypatch)
    machine.observed = Observed(40, 2, {"an XID event (79)": 1})
    assert run("retune")[0] == 0
    table, page = reported("night")
    shown = "1 of 40 timed pairs discarded (1 for an XID event (79)), 2 under the software power cap"
    assert (table["run"]["kind"], table["run"]["observed"]) == ("retune", shown)
    assert table["run"]["reasons"] == ["flashinfer: not installed -> 99.0"]
    assert (table["run"]["devices"], table["sets"]) == (tuned["run"]["devices"], tuned["sets"])
    assert set(table["cost"]["stages"]) == {"check", "recheck", "publish"}
    assert 0 < table["cost"]["num_pairs"]["recheck"] < sum(tuned["cost"]["num_pairs"].values())
    facts = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]*)</dd>", page[page.index("The run that published it") :]))
    assert facts["what"].startswith("retune, which measures some cells")
    assert (facts["why"], facts["seed"]) == ("flashinfer: not installed -&gt; 99.0", "0")
    assert (facts["observed"], facts["devices"]) == (shown, table["run"]["devices"][0])


def test_statuses_are_those_of_the_table(machine: Machine, run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    assert run("retune", "--max-age", "soon")[0] == 2
    assert run("retune", "--force", "9")[0] == 1, "a package that cannot be done is work that failed"
    table = (tmp_path / "out" / "fibc_toy" / "current").resolve() / "table.msgpack"
    table.write_bytes(b"torn")
    assert run("status")[0] == 1
    assert run("verify")[0] == 1
    assert run("retune")[0] == 1


def test_metrics_are_what_prometheus_reads(machine: Machine, run: Callable[..., tuple[int, str]]) -> None:
    code, text = run("status", "--prometheus")
    assert code == 0
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'fibc_\w+\{definition="toy",generation="g[0-9a-f]{16}"\} [0-9.]+', s) for s in samples)
    assert any(line.startswith("fibc_cells_replaced{") and line.endswith(" 3") for line in samples)
    assert text.count("# TYPE") == len(prometheus.METRICS) == len(samples)
    odd = prometheus.render([PackageStatus('a"b\\c', "", problem="torn")])
    assert 'definition="a\\"b\\\\c"' in odd
    assert 'fibc_readable{definition="a\\"b\\\\c",generation=""} 0' in odd

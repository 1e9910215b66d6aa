"""The page that `fibc report` writes, as a browser shows it: light and dark, wide and on a phone, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, find_chromium
from simulation import Machine, write_definition

import fibc
from fibc.reporting.data import ReportData
from fibc.schema.evaluation import Status

pytest.importorskip("plotly", reason='the page needs plotly (pip install "fibc[report]")')

H200 = Path(__file__).parent.parent / "benchmarks" / "results" / "h200"

WIDE, PHONE = 1280, 390

DRAWN = "[...document.querySelectorAll('.chart')].every((element) => element.dataset.drawn === '{}')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    with Browser(chromium) as opened:
        yield opened


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ReportData]:
    """The page of two real tunes on a GPU, and its numbers."""
    page = tmp_path_factory.mktemp("report") / "h200.html"
    return page, fibc.report(H200, html=page, fraction=0.3)


def shown(browser: Browser, page: Path, width: int, *, dark: bool = False) -> None:
    """Open a page and draw every chart of it."""
    phone = width == PHONE
    browser.open(page, width=width, height=900, dark=dark, phone=phone)
    browser.resize(width, int(browser.evaluate("document.documentElement.scrollHeight")) + 500, phone=phone)
    browser.wait_for(DRAWN.format("dark" if dark else "light"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, PHONE], ids=["wide", "phone"])
def test_the_page_is_whole_at_every_width_and_theme(
    browser: Browser, recorded: tuple[Path, ReportData], width: int, dark: bool
) -> None:
    page, data = recorded
    shown(browser, page, width, dark=dark)
    assert browser.problems == []
    assert browser.requests == [], "the page loads nothing"
    assert browser.evaluate("document.documentElement.scrollWidth") == width, "nothing overflows sideways"
    charts = browser.evaluate("[...document.querySelectorAll('.chart')].map((e) => e.getBoundingClientRect().width)")
    assert len(charts) >= 6 * len(data.tables)
    assert all(0 < chart <= width for chart in charts)
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(15, 18, 22)" if dark else "rgb(246, 247, 248)")
    ink = browser.evaluate("document.querySelector('.chart text.xtitle').style.fill")
    assert ink == ("rgb(156, 167, 179)" if dark else "rgb(89, 99, 110)"), "charts follow the theme"


def test_tables_and_charts_show_the_numbers_of_the_records(browser: Browser, recorded: tuple[Path, ReportData]) -> None:
    page, data = recorded
    shown(browser, page, WIDE)
    for index, table in enumerate(data.tables):
        rows = browser.evaluate(
            f"[...document.querySelectorAll('#t{index}-s-serves tbody tr')]"
            ".map((row) => [0, 3, 4].map((cell) => row.children[cell].textContent.trim()))"
        )
        assert rows == [
            [cell.cell, f"{cell.weakest.value:.3f}x", f"{cell.weakest.low:.3f} to {cell.weakest.high:.3f}"]
            if cell.weakest
            else [cell.cell, "-", "-"]
            for cell in table.cells
        ]
        drawn = browser.evaluate(
            f"Object.fromEntries(document.getElementById('t{index}-speedup').data"
            ".flatMap((trace) => [...trace.x].map((x, i) => [trace.y[i], x]).filter((pair) => pair[1] !== null)))"
        )
        assert drawn == {cell.cell: cell.weakest.value for cell in table.cells if cell.weakest}
        served = browser.evaluate(
            f"[...document.getElementById('t{index}-latency').data.find((trace) => trace.name === 'served').y]"
        )
        assert sorted(served) == sorted(point.served_us for point in table.latencies)
        trials = browser.evaluate(
            f"document.getElementById('t{index}-search').data[0].z.flat().filter((z) => z !== null).length"
        )
        assert trials == sum(len(search.trials) for search in table.searches)


def test_a_reader_picks_a_key_moves_f_and_switches_the_theme(
    browser: Browser, recorded: tuple[Path, ReportData]
) -> None:
    page, data = recorded
    shown(browser, page, WIDE)
    search = data.tables[1].searches[3]
    browser.evaluate(
        f"(() => {{ const select = document.getElementById('t1-key'); select.value = {search.key!r};"
        " select.dispatchEvent(new Event('change')); })()"
    )
    best = browser.evaluate(
        "[...document.getElementById('t1-trajectory').data.find((trace) => trace.name === 'best so far').y].at(-1)"
    )
    assert best == pytest.approx(search.best, abs=1e-4)
    end = data.tables[0].end_to_end
    assert end is not None
    assert f"f = 30 %: the application {end.estimate:.3f}x as fast" in browser.evaluate("document.body.innerText")
    browser.evaluate(
        "(() => { const f = document.getElementById('t0-f'); f.value = 50; f.dispatchEvent(new Event('input')); })()"
    )
    expected = 1 / (1 - 0.5 * (1 - 1 / end.speedup))
    assert f"f = 50 %: the application {expected:.3f}x as fast" in browser.evaluate("document.body.innerText")
    browser.evaluate("document.getElementById('theme').click()")
    browser.wait_for(DRAWN.format("dark"))
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 22)"
    assert browser.problems == []


def test_text_from_records_is_text_and_never_a_page(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure's log and a workload's name come from outside."""
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    statuses, unbuildable = {2: Status.CRASH}, frozenset({4})
    machine = Machine(tmp_path, lambda block, rows: 1.3 if block == 1 else 0.8, statuses, unbuildable, log=hostile)
    machine.install(monkeypatch)
    monkeypatch.setenv("FIBC_CACHE_DIR", str(tmp_path / "cache"))
    out = tmp_path / "out"
    fibc.tune(write_definition(tmp_path / "defs", (1, 2, 4)), out=out, target="cpu", split=(1.0, 0.0, 0.0), jobs=1)
    page = tmp_path / "report.html"
    data = fibc.report(out, html=page)
    shown(browser, page, PHONE)
    assert browser.problems == []
    assert browser.evaluate("document.images.length") == 0
    examples = browser.evaluate(
        "[...document.querySelectorAll('td[data-label=\"For example\"]')].map((cell) => cell.textContent)"
    )
    assert hostile in examples
    bars = browser.evaluate("[...document.getElementById('t0-failures').data[0].x]")
    assert bars == [item.count for item in data.tables[0].failures]
    assert browser.evaluate("document.documentElement.scrollWidth") == PHONE

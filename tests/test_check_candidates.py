"""The check of prebuilt candidates without a GPU: its log, what it skips, and workers that die or hang."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import check_candidates
import pytest
from candidate_calls import WrongError
from check_candidates import Log

WORKER = """\
import json, os, sys, time

log, plan = sys.argv[sys.argv.index("--out") + 1], sys.argv[1]
lines = [json.loads(line) for line in open(log)] if os.path.exists(log) else []
done = {line["about"] for line in lines if line["kind"] in ("passed", "failed")}

def add(**fact):
    with open(log, "a") as file:
        file.write(json.dumps(fact) + "\\n")

for name, what in json.load(open(plan)).items():
    if name not in done:
        if what == "outside":
            os._exit(3)
        add(kind="begin", about=name, value="check")
        if what == "dies":
            os.abort()
        if what == "hangs":
            time.sleep(600)
        add(kind="passed", about=name, value=0.5)
"""
"""Stands in for a worker: does with each candidate what the plan says."""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in where the parent starts workers from."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr(check_candidates, "__file__", str(script))
    return script


def watched(tmp_path: Path, plan: Mapping[str, str]) -> tuple[int, Log]:
    """Run the parent over a plan, and return its status and what the log has then."""
    at, out = tmp_path / "plan.json", tmp_path / "results.jsonl"
    at.write_text(json.dumps(plan))
    options = argparse.Namespace(folder=at, out=out, limit_s=60.0)
    return check_candidates.watch(options, [str(at), "--out", str(out)]), Log(out)


def test_a_candidate_that_dies_costs_itself_and_no_other(worker: Path, tmp_path: Path) -> None:
    status, log = watched(tmp_path, {"first": "passes", "second": "dies", "third": "passes"})
    assert status == 0
    assert log.of("passed") == {"first": 0.5, "third": 0.5}
    assert log.of("failed") == {"second": "died in check with -6"}


def test_a_candidate_that_hangs_is_stopped_and_passed_over(
    worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_candidates, "PATIENCE_S", 3.0)
    began = time.monotonic()
    status, log = watched(tmp_path, {"first": "hangs", "second": "passes"})
    assert status == 0
    assert time.monotonic() - began > 2.5, "a worker may say nothing for three seconds"
    assert log.of("failed") == {"first": "hung in check"}
    assert log.of("passed") == {"second": 0.5}


def test_a_worker_that_ends_outside_of_every_candidate_is_not_started_again(worker: Path, tmp_path: Path) -> None:
    status, log = watched(tmp_path, {"first": "passes", "second": "outside"})
    assert status == 1
    assert log.of("failed") == {}


def test_what_an_earlier_run_knows_is_not_tried_again(worker: Path, tmp_path: Path) -> None:
    watched(tmp_path, {"first": "passes", "second": "dies"})
    before = len(Log(tmp_path / "results.jsonl").lines)
    status, log = watched(tmp_path, {"first": "dies", "second": "dies", "third": "passes"})
    assert status == 0
    assert [(line["kind"], line["about"]) for line in log.lines[before:]] == [("begin", "third"), ("passed", "third")]


def test_a_log_says_by_kind_what_it_knows_and_what_began_without_an_end(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    assert log.open() is None
    log.add(kind="begin", about="a", value="check")
    assert Log(log.path).open() == ("check", "a")
    log.add(kind="passed", about="a", value=0.25)
    assert Log(log.path).open() is None
    log.add(kind="us", about="1x2x3", value={"native": 5.0})
    again = Log(log.path)
    assert again.lines == log.lines
    assert (again.of("passed"), again.of("us")) == ({"a": 0.25}, {"1x2x3": {"native": 5.0}})


# What a worker does ---------------------------------------------------------------------------------------------------


class FakeKernel:
    """A candidate that needs no GPU."""

    any_shape = False
    dtype = None

    def __init__(self, entry: Mapping[str, Any], folder: Path) -> None:
        self.name: str = entry["name"]
        self.keys = [tuple(key) for key in entry["keys"]]

    def prepare(self, device: int) -> int:
        return 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Stand in for all that needs a GPU, and return what was checked and timed."""
    seen: dict[str, list[Any]] = {"checked": [], "timed": []}

    def check(kernel: FakeKernel, rows: int, n: int, k: int) -> float:
        seen["checked"].append((kernel.name, rows))
        if kernel.name == "wrong":
            raise WrongError("1 of 4 exact sums are wrong")
        return rows / 8

    def time_key(kernels: Sequence[FakeKernel], key: tuple[int, int, int], dtype: object) -> dict[str, float]:
        seen["timed"].append((key, [kernel.name for kernel in kernels]))
        return {"native": 8.0, "read 1": 2.0, **{kernel.name: 4.0 for kernel in kernels}}

    monkeypatch.setattr(check_candidates, "gpu", SimpleNamespace(init=lambda: None, get_device_name=lambda: "fake"))
    for name, stand_in in (("Kernel", FakeKernel), ("check", check), ("time_key", time_key)):
        monkeypatch.setattr(check_candidates, name, stand_in)
    monkeypatch.setattr(check_candidates, "check_graph", lambda kernel, rows, n, k: None)
    monkeypatch.setattr(check_candidates, "_time_host", lambda kernels, log: None)
    return seen


def worked(tmp_path: Path, names: Sequence[str], limit_s: float = 60.0) -> Log:
    """Run a worker over candidates of two keys each, and return the log."""
    entries = [{"name": name, "keys": [(1, 2, 3), (4, 2, 3)]} for name in names]
    (tmp_path / "manifest.json").write_text(json.dumps(entries))
    out = tmp_path / "results.jsonl"
    options = argparse.Namespace(folder=tmp_path, out=out, only="", check_only=False, limit_s=limit_s)
    assert check_candidates.work(options) == 0
    return Log(out)


def test_a_worker_checks_at_each_key_and_below_and_times_only_what_passed(
    device: dict[str, list[Any]], tmp_path: Path
) -> None:
    log = worked(tmp_path, ["right", "wrong"])
    assert device["checked"] == [("right", 1), ("right", 4), ("wrong", 1)]
    assert log.of("passed") == {"right": 0.5}
    assert log.of("failed") == {"wrong": "1 of 4 exact sums are wrong"}
    assert device["timed"] == [((1, 2, 3), ["right"]), ((4, 2, 3), ["right"])]
    assert log.of("us") == {about: {"native": 8.0, "read 1": 2.0, "right": 4.0} for about in ("1x2x3", "4x2x3")}


def test_a_worker_goes_on_where_an_earlier_one_ended(device: dict[str, list[Any]], tmp_path: Path) -> None:
    first = worked(tmp_path, ["right", "wrong"], limit_s=-1.0)
    assert (first.of("passed"), first.of("us")) == ({"right": 0.5}, {})
    device["checked"].clear()
    log = worked(tmp_path, ["right", "wrong"])
    assert device["checked"] == []
    assert len(log.of("us")) == 2
    assert len(worked(tmp_path, ["right", "wrong"]).lines) == len(log.lines)


def test_a_key_whose_timing_hung_is_not_timed_again(device: dict[str, list[Any]], tmp_path: Path) -> None:
    Log(tmp_path / "results.jsonl").add(kind="failed", about="1x2x3", value="hung in timing")
    worked(tmp_path, ["right"])
    assert device["timed"] == [((4, 2, 3), ["right"])]


def test_a_summary_has_the_three_fastest_beside_native_and_the_best_read() -> None:
    found = {"native": 8.0, "read a": 3.0, "read b": 2.0, "w": 16.0, "x": 10.0, "y": 4.0, "z": 5.0}
    assert check_candidates.summary((4, 16, 32), found) == [
        "M=4 16x32: native 8.00 us, a read 2.00 us, 4 candidates",
        "  2.000 4.00 us y",
        "  1.600 5.00 us z",
        "  0.800 10.00 us x",
    ]

"""Results files made again from their raw samples: what is right is same, what was altered differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import fibc
from fibc.errors import InputError
from fibc.reporting.figures import Outcome, Reproduction
from fibc.reporting.printed import parse

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
H200 = RESULTS / "h200"
CPU = next(RESULTS.glob("Intel*"))
GEMM = H200 / "tune_gemm_bf16_n4096_k4096.txt"

TEXTS = sorted(path for path in RESULTS.glob("*/*tune*.txt"))


def differing(made: Reproduction) -> list[str]:
    return [str(item) for item in made.figures if item.outcome is Outcome.DIFFERS]


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: f"{path.parent.name[:5]}-{path.stem}")
def test_every_figure_of_a_committed_tune_is_made_again(text: Path) -> None:
    made = fibc.reproduce(text)
    assert differing(made) == []
    assert made.counts[Outcome.SAME] >= 100
    assert made.holds


def test_all_figures_of_a_tune_on_an_h200_have_samples() -> None:
    made = fibc.reproduce(GEMM)
    by_name = {(item.where, item.name): item for item in made.figures}
    assert by_name["cell 1", "speedup"].regenerated == "1.330"
    assert by_name["cell 4097..5120", "95 % interval"].regenerated == "1.013 - 1.014"
    assert by_name["cell 4097..5120", "serves"].regenerated.startswith("gemm/triton_tma(block_m=128")
    assert by_name["table", "expected false replacements"].regenerated == "1.25"
    assert by_name["gate", "native looks faster than itself"].regenerated == "1 of 40"
    assert by_name["test M=8", "speedup"].regenerated == "1.150"
    assert by_name["trials", "PASSED"].regenerated == "466"
    assert made.counts[Outcome.NO_SAMPLES] == 0


@pytest.mark.parametrize(
    ("said", "altered", "where"),
    [
        ("1.330  1.317", "1.430  1.317", "cell 1: speedup 1.430: differs, regenerated 1.330"),
        ("1.159 - 1.175", "1.158 - 1.175", "cell 2: 95 % interval 1.158 - 1.175: differs, regenerated 1.159 - 1.175"),
        ("best 1.13x", "best 1.23x", "search of 2: best 1.23: differs, regenerated 1.13"),
        ("466 PASSED", "467 PASSED", "trials: PASSED 467: differs, regenerated 466"),
        ("7 of 27 cells", "8 of 27 cells", "table: cells replaced 8 of 27: differs, regenerated 7 of 27"),
        ("at most 0.995x at M=6145", "at most 1.995x at M=6145", "cell 6145..8192: reason"),
        ("10.6    1.159", "10.6    1.169", "test M=4: speedup 1.169: differs, regenerated 1.159"),
    ],
)
def test_an_altered_figure_differs(tmp_path: Path, said: str, altered: str, where: str) -> None:
    text = GEMM.read_text()
    assert said in text
    (tmp_path / GEMM.name).write_text(text.replace(said, altered, 1))
    shutil.copy(H200 / "gemm_bf16_n4096_k4096.records", tmp_path)
    made = fibc.reproduce(tmp_path / GEMM.name)
    assert [line[: len(where)] for line in differing(made)] == [where]
    assert not made.holds


def test_medians_of_a_benchmark_are_made_again(tmp_path: Path) -> None:
    made = fibc.reproduce(CPU / "dispatch_overhead.json")
    assert made.counts == {Outcome.SAME: 24}
    document = json.loads((CPU / "dispatch_overhead.json").read_text())
    document["results"][0]["added_ns"] += 1
    (tmp_path / "altered.json").write_text(json.dumps(document))
    assert differing(fibc.reproduce(tmp_path / "altered.json")) == [
        "hit, 4 tensors, grad mode on: added_ns 257.9: differs, regenerated 256.9"
    ]


def test_a_result_without_raw_samples_says_what_makes_it_anew() -> None:
    made = fibc.reproduce(RESULTS / "decision_quality.json")
    assert not made.holds
    assert "python benchmarks/decision_quality.py" in made.notes[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [("none.txt", "found none"), ("alone.txt", "needs its raw samples beside"), ("x.md", "text")],
)
def test_what_is_no_results_file_is_refused(tmp_path: Path, name: str, message: str) -> None:
    if name != "none.txt":
        (tmp_path / name).write_text("nothing")
    with pytest.raises(InputError, match=message):
        fibc.reproduce(tmp_path / name)


def test_a_device_that_is_not_at_hand_is_said() -> None:
    made = fibc.reproduce(H200 / "tune_fused_add_rmsnorm_h4096.txt", measure=True)
    assert made.measured == ()
    assert "not measured: the device is not at hand" in made.notes[0]
    old = fibc.reproduce(CPU / "tune_fused_add_rmsnorm_h4096.txt", measure=True)
    assert "from before fibc kept kernels" in old.notes[0]


def test_lines_wrapped_at_a_narrow_terminal_are_read_as_far_as_they_go() -> None:
    printed = parse((CPU / "tune_gemm_bf16_n4096_k4096.txt").read_text())
    assert printed.min_speedup == 1.02
    assert (len(printed.rows), printed.replaced, printed.expected) == (21, "10 of 21", "0.60")
    assert printed.rows[0].serves == "gemm/matvec(ro…"

"""The GPU benchmarks, all of them that needs no GPU: sizes, rows, resume, tables, merging, and what travels."""

from __future__ import annotations

import ast
import json
import math
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import gpu_autotune
import gpu_context
import gpu_host
import gpu_limits
import gpu_measure
import gpu_norms
import gpu_peers
import gpu_rows
import gpu_suite
import gpu_tables
import merge
import pytest
import run
import zstandard
from gpu_autotune import Tunable
from gpu_context import Context
from gpu_log import RowLog, read_rows
from gpu_measure import Call
from gpu_rows import SHAPES, TUNED_SIZES, UNSEEN_SIZES, Shape
from simulation import QUIET, Machine
from test_compile_only import needs_triton
from worlds import SimulatedBench

from fibc import stats
from fibc.bench import Bench
from fibc.codegen.build import build
from fibc.runtime.package import read_table
from fibc.schema.candidate import Artifact
from fibc.schema.capture_sizes import CAPTURE_SIZES
from fibc.schema.cells import default_features
from fibc.schema.definition import load_definition
from fibc.schema.evaluation import Arm
from fibc.schema.feature import FeatureKey
from fibc.schema.sets import split
from fibc.schema.workload import load_workloads
from fibc.task import read_task

GPU = Path(__file__).parent.parent / "benchmarks" / "gpu"
SMALL = Shape(16, 8)


pytestmark = pytest.mark.usefixtures("shared_cache")


# Sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_unseen_sizes_are_no_point_of_any_key_but_for_the_end_of_a_cell_that_is_said(
    tmp_path: Path, shape: Shape
) -> None:
    """M = 3 is the first size of the cell 3..4, whatever is recorded: it is measured, and counted apart."""
    assert gpu_rows.seen_among(gpu_rows.write_gemm(tmp_path, shape), UNSEEN_SIZES) == (3,)


def test_unseen_sizes_are_neither_recorded_nor_sizes_of_graphs() -> None:
    assert not set(UNSEEN_SIZES) & {*TUNED_SIZES, *CAPTURE_SIZES}
    assert len(set(UNSEEN_SIZES)) == 9


def test_every_recorded_size_is_tuned(tmp_path: Path) -> None:
    path = gpu_rows.write_gemm(tmp_path, SHAPES[0])
    definition = load_definition(path)
    workloads = load_workloads(path.with_suffix(".workloads.jsonl"), definition)
    sets = split(workloads, gpu_context.SPLIT, default_features(definition, workloads))
    assert [workload.axes["M"] for workload in sets.tune] == list(TUNED_SIZES)
    assert not sets.boundary
    assert not sets.test


def test_a_weight_shape_is_gemm_with_another_n_and_k_and_its_files_are_always_the_same(tmp_path: Path) -> None:
    path = gpu_rows.write_gemm(tmp_path / "a", Shape(256, 7168))
    definition, original = load_definition(path), load_definition(gpu_rows.DEFS / "gemm.json")
    assert dict(definition.const_axes) == {"N": 256, "K": 7168}
    assert definition.reference == original.reference
    assert definition.inputs == original.inputs
    again = gpu_rows.write_gemm(tmp_path / "b", Shape(256, 7168))
    for suffix in (".json", ".workloads.jsonl"):
        assert path.with_suffix(suffix).read_bytes() == again.with_suffix(suffix).read_bytes()


def test_a_part_without_a_gpu_says_what_it_needs_and_keeps_its_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run.main(["suite-128x2048", *options]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "suite-128x2048: target cuda: needs an NVIDIA GPU" in capsys.readouterr().out
    assert (tmp_path / "results" / "suite-128x2048.state.tar.gz").is_file()
    assert run.main(["suite", *options]) == 2


def test_there_is_a_part_for_each_weight_and_one_for_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(run.PARTS) == [*(f"suite-{shape.name}" for shape in SHAPES), "norms", "host", "peers"]
    assert run.main(["suite"]) == 2
    assert "no such part, got suite (accepted: suite-6144x4096, " in capsys.readouterr().err


def test_what_a_part_tunes_can_be_compiled_first(tmp_path: Path) -> None:
    for name, part in run.PARTS.items():
        paths = part.definitions(tmp_path / name)
        assert [load_definition(path).name for path in paths] == [path.stem for path in paths]
        assert len(paths) == {"norms": 2, "peers": len(gpu_rows.PEER_SHAPES)}.get(name, 1)


def test_peers_have_at_least_twelve_rows_that_the_suite_has_too() -> None:
    assert len(gpu_rows.PEER_SHAPES) * len(gpu_rows.PEER_SIZES) >= 12
    assert set(gpu_rows.PEER_SHAPES) <= set(SHAPES)
    assert set(gpu_rows.PEER_SIZES) <= set(TUNED_SIZES)


# Limits ---------------------------------------------------------------------------------------------------------------


def test_the_recorded_read_limit_goes_through_its_points_and_rises() -> None:
    for num_bytes, us in gpu_limits.READ_US:
        assert gpu_limits.recorded_read_us(num_bytes) == pytest.approx(us)
    times = [gpu_limits.recorded_read_us(1e6 * size) for size in range(1, 300)]
    assert times == sorted(times)


def test_a_gemm_is_limited_by_the_read_of_its_weight_or_by_arithmetic() -> None:
    assert gpu_limits.gemm_limit_us(1, 4096, 4096, 12.96) == (12.96, "read")
    limit_us, what = gpu_limits.gemm_limit_us(4096, 4096, 4096, 12.96)
    assert what == "compute"
    assert limit_us == pytest.approx(2 * 4096**3 / 790e12 * 1e6)


# Rows that are finished -----------------------------------------------------------------------------------------------


def test_of_rows_with_one_name_the_last_counts_and_a_torn_line_is_no_row(tmp_path: Path) -> None:
    log = RowLog(tmp_path / "part.jsonl")
    log.add({"row": "M=1", "table": "a"})
    log.add({"row": "M=4", "table": "a"})
    with log.path.open("a") as file:
        file.write('{"row": "M=8", "tab')
    assert list(log.rows()) == ["M=1", "M=4"]
    log.add({"row": "M=1", "table": "b"})
    assert log.has("M=1", table="b")
    assert not log.has("M=1", table="a")
    assert not log.has("M=8")
    assert list(log.rows()) == ["M=1", "M=4"]


# Measuring, on a simulated machine ------------------------------------------------------------------------------------


class FakeEvaluator:
    """Times calls whose true speedups a test states, by name and size."""

    facts: Mapping[str, str] = {"residency": "A=hot B=cold", "mode": "graph", "timer": "cuda_event", "threads": "1"}

    def __init__(self, speedup: Callable[[str, int], float]) -> None:
        self._speedup = speedup
        self.sizes: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def bench(
        self, arms: Sequence[Arm], artifacts: Mapping[str, Artifact], keys: Sequence[FeatureKey], *, fresh_process: bool
    ) -> Bench:
        assert fresh_process
        assert all(artifacts[arm.candidate].is_python for arm in arms)
        self.sizes += [key.cell.bounds[0][0] for key in keys]
        speedups = [self._speedup(arm.candidate.rpartition(" at ")[0], int(arm.key)) for arm in arms]
        return SimulatedBench(QUIET, arms, speedups, 7)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path, lambda block, rows: 1.3 if block == 3 else 0.9)
    made.install(monkeypatch)
    return made


def context(tmp_path: Path, part: str = "suite-16x8", **fields: Any) -> Context:
    lines: list[str] = []
    return Context(
        part=part,
        work=tmp_path / "work" / part,
        results=tmp_path / "results",
        target="cpu",
        ends=time.monotonic() + fields.pop("seconds", 1000.0),
        tune={"trials": 6},
        say=lines.append,
        **fields,
    )


def test_rows_have_the_speedup_of_each_call_with_its_interval_and_every_sample(tmp_path: Path) -> None:
    task = context(tmp_path).task(gpu_rows.write_gemm(tmp_path / "defs", SMALL, (1, 8)))
    evaluator: Any = FakeEvaluator(lambda name, m: {"served": 1.2, "peer": 0.8}[name] * (1.1 if m == 8 else 1.0))
    calls = {m: [Call("served", "f"), Call("peer", "g")] for m in (1, 8)}
    rows = gpu_measure.measure_rows(evaluator, task, [1, 8], calls, "test")
    for (m, name), row in rows.items():
        true = {"served": 1.2, "peer": 0.8}[name] * (1.1 if m == 8 else 1.0)
        assert row["speedup"] == pytest.approx(true, rel=0.01)
        assert row["ci_low"] < row["speedup"] < row["ci_high"]
        assert row["upper"] > row["speedup"]
        assert (row["n_sessions"], len(row["samples"]), len(row["effects"])) == (8, 8, 8)
        pairs = [pair for sample in row["samples"] for pair in sample["pairs"]]
        assert len(pairs) == row["n_pairs"] == 64
        assert sum(first for _, _, first in pairs) == 32
    relative = gpu_measure.against(rows[1, "served"], rows[1, "peer"])
    assert relative["speedup"] == pytest.approx(1.5, rel=0.01)
    assert relative["ci_low"] < 1.5 * 1.01
    assert relative["ci_high"] > 1.5 * 0.99


def test_a_part_tunes_measures_and_goes_on_where_it_was_cut_off(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speedup = {1: 1.3, 4: 1.2, 8: 1.1, 3: 1.25, 7: 1.05}
    evaluator = FakeEvaluator(lambda name, m: speedup[m])
    monkeypatch.setattr(gpu_suite, "evaluator_of", lambda *_, **__: evaluator)
    sizes: dict[str, Any] = {"tuned": (1, 4, 8), "unseen": (3, 7)}
    monkeypatch.setattr(gpu_suite, "RESERVE_S", 0.0)

    monkeypatch.setattr(gpu_suite, "GROUP_S", 1e9)  # no time for rows
    gpu_suite.run(context(tmp_path), SMALL, **sizes)
    assert not evaluator.sizes
    rows = context(tmp_path).log.rows()
    assert [name for name, row in rows.items() if row["kind"] == "cell"] == [
        "cell 1",
        "cell 2",
        "cell 3..4",
        "cell 5..8",
    ]
    assert rows["tune gemm_bf16_n16_k8"]["trials"]["PASSED"] > 0

    monkeypatch.setattr(gpu_suite, "GROUP_S", 0.0)
    machine.asked.clear()
    gpu_suite.run(context(tmp_path), SMALL, **sizes)
    assert not machine.asked["trials"], "nothing is tuned again"
    rows = context(tmp_path).log.rows()
    measured = {row["m"]: row for row in rows.values() if row["kind"] in ("tuned", "unseen", "end")}
    assert {m: row["kind"] for m, row in measured.items()} == {
        1: "tuned",
        4: "tuned",
        8: "tuned",
        7: "unseen",
        3: "end",
    }
    for m, row in measured.items():
        assert row["speedup"] == pytest.approx(speedup[m], rel=0.01)
        assert row["serves"] == "toy/kernel(block=3)"
    assert evaluator.sizes == [1, 4, 8, 7, 3]

    gpu_suite.run(context(tmp_path), SMALL, **sizes)
    assert evaluator.sizes == [1, 4, 8, 7, 3], "finished rows are not measured again"

    del speedup[4]
    machine.speedup = lambda block, rows: 1.4 if block == 5 else 0.9
    speedup[4] = 1.4
    shutil.rmtree(context(tmp_path).layout.root)
    gpu_suite.run(context(tmp_path), SMALL, **sizes)
    assert evaluator.sizes[5:] == [1, 4, 8, 7, 3], "another table is measured anew"
    assert "block=5" in context(tmp_path).log.rows()["M=4"]["serves"]
    assert "## " in gpu_tables.suite_text({"suite-4096x4096": context(tmp_path).log.rows()})


def test_a_call_is_python_source_that_finds_the_calls_of_the_benchmarks() -> None:
    artifact = Call("served", "gpu_calls.served('/x')").artifact()
    assert artifact.is_python
    tree = ast.parse(artifact.source)
    assert any(
        isinstance(node, ast.Assign) and ast.unparse(node) == "call = gpu_calls.served('/x')" for node in tree.body
    )


# State that travels ---------------------------------------------------------------------------------------------------


def test_state_and_rows_of_an_earlier_run_are_gone_on_with_elsewhere(tmp_path: Path) -> None:
    first = context(tmp_path)
    (first.layout.root / "fibc-records").mkdir(parents=True)
    (first.layout.root / "fibc-records" / "toy.records").write_bytes(b"records")
    (first.layout.root / "fibc-compiled").mkdir()
    first.add("M=1", "tuned", m=1)
    gpu_context.keep_state(first)
    with tarfile.open(first.results / "suite-16x8.state.tar.gz") as archive:
        assert archive.getnames() == ["fibc-records", "fibc-records/toy.records"], "what can be made again stays"
    there = context(tmp_path / "there")
    assert gpu_context.take_state(there, (first.results,))
    assert (there.layout.root / "fibc-records" / "toy.records").read_bytes() == b"records"
    assert there.log.rows() == first.log.rows()
    assert not gpu_context.take_state(context(tmp_path / "nothing"), ())


def test_state_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    here = context(tmp_path)
    (here.layout.root / "fibc-records").mkdir(parents=True)
    gpu_context.keep_state(here)
    (here.layout.root / "fibc-records" / "newer.records").write_bytes(b"newer")
    assert gpu_context.take_state(here, ())
    assert (here.layout.root / "fibc-records" / "newer.records").exists()


# Host cost ------------------------------------------------------------------------------------------------------------


class SteppingClock:
    """A harness whose calls take as long as their argument says."""

    def __init__(self) -> None:
        self.calls = 0

    def time_calls(self, call: Callable[..., Any], calls: Sequence[tuple[Any, ...]], start: int, inner: int) -> float:
        self.calls += inner
        return float(calls[0][0])


def test_host_costs_are_taken_from_rounds_in_random_order_with_nothing_queued() -> None:
    clock, waits = SteppingClock(), []
    ways = {"slow": (print, (5e-6,)), "fast": (print, (2e-6,))}
    samples = gpu_host.time_host(ways, clock, lambda: waits.append(clock.calls), blocks=3, rounds=4, inner=10)
    assert {name: [len(block) for block in blocks] for name, blocks in samples.items()} == dict.fromkeys(ways, [4] * 3)
    assert waits == [10 * index for index in range(25)], "the device is waited for before every sample"
    assert gpu_host.summary(samples["slow"])["us"] == pytest.approx(5.0)
    assert gpu_host.summary(samples["fast"])["ci_high"] == pytest.approx(2.0)


def test_every_kind_of_variant_is_hit_at_a_size_of_its_own(machine: Machine, tmp_path: Path) -> None:
    here = context(tmp_path, part="host")
    task = here.task(gpu_rows.write_gemm(tmp_path / "defs", SMALL, (1, 16)))
    kinds = gpu_host.make_kinds(task)
    assert [(kind.name, kind.rows, kind.workspace) for kind in kinds] == [("toy/kernel", 1, False)]
    table = gpu_host.table_of(task, kinds)
    assert [(str(region.cell), region.variant) for region in table.regions] == [("1", 0)]
    objects = {kind.artifact.symbol: Path(kind.artifact.object_path) for kind in kinds}
    package = here.layout.package(task.definition.name)
    build(table, objects, package, here.cache)
    assert read_table(package).variants[0].candidate == kinds[0].candidate


def test_the_extension_that_only_launches_builds(tmp_path: Path) -> None:
    module = gpu_host.build_launch_alone(tmp_path)
    assert {"prepare", "launch"} <= set(dir(module))


# triton.autotune over a template --------------------------------------------------------------------------------------

RENDERED = """\
# Generated by fibc: do not edit.
import triton
import triton.language as tl

N = tl.constexpr(256)
BLOCK_M = tl.constexpr({block_m})
SPLIT_LENGTH = tl.constexpr(512)  # of K


@triton.jit
def gemm(a, b, c, counters, num_rows):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M){tail}
"""


def rendered(block_m: int, tail: str = "") -> gpu_autotune.Lifted:
    return gpu_autotune.lift(RENDERED.format(block_m=block_m, tail=tail))


def test_constants_that_configs_differ_in_become_parameters() -> None:
    lifted = rendered(64)
    assert dict(lifted.constants) == {"BLOCK_M": "64", "SPLIT_LENGTH": "512"}
    assert lifted.parameters == ("a", "b", "c", "counters", "num_rows")
    assert "N = tl.constexpr(256)" in lifted.text
    assert lifted.text == rendered(128).text


def test_an_autotuned_kernel_has_the_configs_of_the_most_frequent_text() -> None:
    kernels = [
        Tunable(rendered(64), 4, 3),
        Tunable(rendered(32, " + 0"), 4, 3),
        Tunable(rendered(128), 8, 2),
        Tunable(rendered(64), 4, 3),
        Tunable(rendered(16), 2, 5),
    ]
    text, num = gpu_autotune.autotuned_text(kernels, "(1,)", "a, b, c, c, num_rows", most=2)
    assert num == 2
    tree = ast.parse(text)
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "gemm")
    assert [argument.arg for argument in function.args.args] == [
        *("a", "b", "c", "counters", "num_rows"),
        *("BLOCK_M", "SPLIT_LENGTH"),
    ]
    assert 'triton.Config({"BLOCK_M": 64, "SPLIT_LENGTH": 512}, num_warps=4, num_stages=3)' in text
    assert "BLOCK_M = tl.constexpr" not in text
    with pytest.raises(ValueError, match="at least one kernel"):
        gpu_autotune.autotuned_text([], "(1,)", "a", most=2)


COMPILE = """\
import importlib.util, json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
path, name, signature, constants = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
spec = importlib.util.spec_from_file_location("kernels", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
kernel = getattr(module, name)
kernel = getattr(kernel, "fn", kernel) if not hasattr(kernel, "arg_names") or hasattr(kernel, "configs") else kernel
types = {n: signature.get(n, "constexpr") for n in kernel.arg_names}
compiled = triton.compile(ASTSource(kernel, types, constants, {}), target=GPUTarget("cuda", 90, 32))
print(len(compiled.asm["cubin"]))
"""


def compiled_bytes(path: Path, name: str, signature: Mapping[str, str], constants: Mapping[str, int]) -> int:
    """Compile a kernel for sm_90 in a child; return the size of its cubin."""
    command = [sys.executable, "-c", COMPILE, str(path), name, json.dumps(signature), json.dumps(constants)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


@needs_triton
def test_the_kernel_that_only_reads_compiles() -> None:
    signature = {"data": "*i32", "out": "*i32", "num_words": "i32"}
    assert compiled_bytes(GPU / "gpu_kernels.py", "_read", signature, {"BLOCK": 1024}) > 1000


@needs_triton
def test_the_template_compiles_as_an_autotuned_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = context(tmp_path, part="peers")
    here.target = "cuda:sm_90a"
    definition = gpu_rows.write_gemm(tmp_path / "defs", Shape(256, 512), (1, 64))
    task = read_task(
        definition, None, here.options(trials=1, backends=("triton",), timeout_s=300.0), here.cache, needs_device=False
    )
    monkeypatch.setattr(gpu_peers, "PLANNED", 4)
    path = gpu_peers.autotuned(here, task, 16)
    assert path is not None
    text = path.read_text()
    assert 1 <= text.count("triton.Config(") <= gpu_peers.NUM_CONFIGS
    first = text[text.index("triton.Config({") + len("triton.Config(") :].split("}")[0] + "}"
    signature = {"a": "*bf16", "b": "*bf16", "c": "*bf16", "counters": "*i32", "scratch": "*fp32", "num_rows": "i32"}
    assert compiled_bytes(path, "gemm", signature, ast.literal_eval(first)) > 1000


# Tables ---------------------------------------------------------------------------------------------------------------


def numbers(speedup: float, native_us: float = 20.0, spread: float = 0.01) -> dict[str, Any]:
    effects = [math.log(speedup) + spread * (index - 3.5) / 8 for index in range(8)]
    low, high = stats.interval(effects, 0.95)
    return {
        "speedup": speedup,
        "ci_low": math.exp(low),
        "ci_high": math.exp(high),
        "upper": math.exp(stats.upper_bound(effects, 0.05)),
        "native_us": native_us,
        "candidate_us": native_us / speedup,
        "n_sessions": 8,
        "n_pairs": 64,
        "mode": "graph",
        "timer": "cuda_event",
        "residency": "A=hot B=cold",
        "effects": effects,
        "samples": [],
    }


ENVIRONMENT = {
    "row": "environment",
    "kind": "environment",
    "date": "2026-12-01T00:00:00",
    "facts": {"gpu": "NVIDIA H200", "driver": "580", "torch": "2.11.0"},
    "command": "python benchmarks/gpu/run.py PART",
}


def suite_rows(shape: Shape, tuned: float = 1.10, unseen: float = 1.06) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {"environment": dict(ENVIRONMENT)}
    rows["read limit"] = {"row": "read limit", "kind": "limit", "date": "2026-12-01", "read_us": 13.0}
    for kind, speedup, sizes in (
        ("tuned", tuned, TUNED_SIZES),
        ("unseen", unseen, UNSEEN_SIZES[1:]),
        ("end", 1.2, (3,)),
    ):
        for m in sizes:
            rows[f"M={m}"] = {
                **{"row": f"M={m}", "kind": kind, "date": "2026-12-01", "m": m, "n": shape.n, "k": shape.k},
                **{"serves": "gemm/triton_tile(block_m=16)", "table": "t"},
                **numbers(speedup),
            }
    rows["cell 1"] = {
        **{
            "row": "cell 1",
            "kind": "cell",
            "date": "2026-12-01",
            "verdict": "replace",
            "replaced": True,
            "reason": "shown",
        },
        **{"synthetic": False, "partial": False, "revoked": False},
        **{"confirm": [numbers(1.10)], "reconfirm": [numbers(1.11)]},
    }
    return rows


def test_the_suite_table_has_a_row_per_size_with_its_ceiling_and_says_what_was_reached() -> None:
    parts = {f"suite-{shape.name}": suite_rows(shape) for shape in SHAPES}
    text = gpu_tables.suite_text(parts)
    row = next(line for line in text.splitlines() if line.startswith("| 1 | tuned"))
    assert row.startswith("| 1 | tuned | 20.00 | 18.18 | 1.100 | ")
    assert "| 13.00 read | 0.715 | gemm/triton_tile(block_m=16) |" in row
    assert (
        "- geometric mean of native / served, tuned sizes (60 of 60 rows): 1.100 (goal: at least 1.09; holds)" in text
    )
    assert "sizes that tuning never saw (48 of 48 rows): 1.060 (goal: at least 1.05; holds)" in text
    assert "percent (0 beyond doubt): 0.000 (goal: at most 1; holds)" in text
    assert "- M = 3: an end of a cell, so tuning saw it; native / served 1.200 over 6 rows." in text
    assert (
        "least part of the cold-read limit, M = 1, large weights (4 rows): 0.715 (goal: at least 0.9; not reached)"
        in text
    )
    assert "gpu NVIDIA H200; driver 580; torch 2.11.0." in text
    assert text.count("8 sessions, 64 pairs a row; mode graph, timer cuda_event") == 1


def test_a_suite_that_is_not_finished_says_how_many_rows_there_are() -> None:
    rows = suite_rows(SHAPES[0], tuned=1.02)
    del rows["M=4096"]
    rows["M=1"] = {**rows["M=1"], "failed": "CRASH: ended by SIGSEGV\nand more"}
    for name in numbers(1.0):
        rows["M=1"].pop(name, None)
    text = gpu_tables.suite_text({"suite-6144x4096": rows})
    assert "(8 of 60 rows): 1.020 (goal: at least 1.09; not reached)" in text
    assert "failed: CRASH: ended by SIGSEGV |" in text


def test_sizes_slower_than_native_are_counted_and_those_beyond_doubt_told_apart() -> None:
    rows = suite_rows(SHAPES[0])
    rows["M=7"] |= numbers(0.95)
    rows["M=13"] |= numbers(0.98, spread=0.2)
    text = gpu_tables.suite_text({"suite-6144x4096": rows})
    assert "percent (1 beyond doubt): 25.000 (goal: at most 1; not reached)" in text


def test_the_norm_table_has_the_part_of_copy_bandwidth_and_why_a_peer_is_missing() -> None:
    row: dict[str, Any] = {
        **{"row": "x rows=8192", "kind": "norm", "date": "2026-12-01", "definition": "fused_add_rmsnorm", "rows": 8192},
        **{"served": numbers(1.5, 96.0), "peers": {"copy": numbers(1.6, 96.0)}, "against": {}},
        "flashinfer": "not installed here",
    }
    text = gpu_tables.norms_text({"norms": {"environment": ENVIRONMENT, row["row"]: row}})
    assert "| fused_add_rmsnorm | 8192 | 96.00 | 64.00 | 1.500 | " in text
    assert "| not installed here | 60.00 | 0.938 |" in text
    row["against"] = {"flashinfer": {"speedup": 1.04, "ci_low": 1.03, "ci_high": 1.05}}
    assert "| 1.040 (1.030 - 1.050) |" in gpu_tables.norms_text({"norms": {row["row"]: row}})


def test_the_host_table_is_sorted_and_holds_the_slowest_kind_to_its_promise() -> None:
    rows: dict[str, dict[str, Any]] = {
        name: {"row": name, "kind": "host", "date": "2026-12-01", "us": us, "ci_low": us - 0.1, "ci_high": us + 0.1}
        for name, us in (
            ("torch.mm(out=)", 10.6),
            ("run_out, gemm/triton_tile", 3.6),
            ("run_out, gemm/triton_tma", 4.3),
            ("run_out, gemm/triton_tile, split K", 5.0),
        )
    }
    uses = {"prepared": [{"ms": {"import": 2.0, "prepare": 5.0}}], "--unprepared": [{"ms": {"import": 3.0}}]}
    rows["first use"] = {"row": "first use", "kind": "first_use", "date": "2026-12-01", "variants": 4, "uses": uses}
    text = gpu_tables.host_text({"host": rows})
    assert text.index("3.60") < text.index("4.30") < text.index("10.60")
    assert "the slowest kind, us: 4.300 (goal: at most 4.2; not reached)" in text
    assert "| prepared | 2.00 | 5.00 |" in text
    assert "| unprepared | 3.00 | - |" in text


def test_the_peer_table_compares_with_native_and_with_the_served_module() -> None:
    row: dict[str, Any] = {
        **{"row": "4096x4096 M=1", "kind": "peer", "date": "2026-12-01", "m": 1, "n": 4096, "k": 4096},
        "calls": {
            "torch.compile": numbers(0.9),
            "triton.autotune": {"failed": "RUNTIME_ERROR: no"},
            "served": numbers(1.2),
        },
        "against": {"torch.compile": {"speedup": 1.2 / 0.9, "ci_low": 1.32, "ci_high": 1.35}},
    }
    text = gpu_tables.peers_text({"peers": {row["row"]: row}})
    assert "| 4096 x 4096 | 1 | 20.00 | 1.200 (" in text
    assert "; 1.333 | failed: RUNTIME_ERROR: no |" in text
    assert "torch.compile: geometric mean 0.900 over 1 rows, 1 slower than native by over 1 %." in text
    assert "cuBLASLt best-of-heuristic is left for later" in text


# Merging --------------------------------------------------------------------------------------------------------------


def write_part(directory: Path, part: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows.values()))


def test_parts_are_merged_into_tables_raw_rows_and_records(tmp_path: Path) -> None:
    write_part(tmp_path / "one", "suite-6144x4096", suite_rows(SHAPES[0]))
    write_part(tmp_path / "two", "suite-4096x4096", suite_rows(SHAPES[1]))
    (tmp_path / "toy.records").write_bytes(b"evidence")
    with tarfile.open(tmp_path / "two" / "suite-4096x4096.state.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "toy.records", "fibc-records/toy.records")
    written = merge.merge([tmp_path / "one", tmp_path / "two"], tmp_path / "out")
    assert [str(path.relative_to(tmp_path / "out")) for path in written] == [
        "raw/suite-4096x4096.jsonl.zst",
        "raw/suite-6144x4096.jsonl.zst",
        "records/toy.records",
        "suite.md",
    ]
    assert (tmp_path / "out" / "records" / "toy.records").read_bytes() == b"evidence"
    raw = read_rows([tmp_path / "out" / "raw" / "suite-6144x4096.jsonl.zst"])
    assert raw == suite_rows(SHAPES[0])
    text = (tmp_path / "out" / "suite.md").read_text()
    assert "## 6144 x 4096" in text
    assert "(20 of 60 rows)" in text


def test_merging_again_with_what_was_merged_gives_the_same_bytes(tmp_path: Path) -> None:
    write_part(tmp_path / "one", "suite-6144x4096", suite_rows(SHAPES[0]))
    first = {path.name: path.read_bytes() for path in merge.merge([tmp_path / "one"], tmp_path / "out")}
    second = {path.name: path.read_bytes() for path in merge.merge([tmp_path / "out"], tmp_path / "out")}
    assert first == second


def test_of_a_row_that_two_runs_have_the_later_counts(tmp_path: Path) -> None:
    old, new = suite_rows(SHAPES[0], tuned=1.01), suite_rows(SHAPES[0], tuned=1.30)
    for row in new.values():
        row["date"] = "2026-12-05"
    del new["M=4"]
    write_part(tmp_path / "old", "suite-6144x4096", old)
    write_part(tmp_path / "new", "suite-6144x4096", new)
    for order in (["old", "new"], ["new", "old"]):
        rows = merge.read_parts([tmp_path / name for name in order])["suite-6144x4096"]
        assert rows["M=1"]["speedup"] == 1.30
        assert rows["M=4"]["speedup"] == 1.01


def test_what_is_too_large_to_keep_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_part(tmp_path / "one", "norms", {"environment": ENVIRONMENT})
    monkeypatch.setattr(merge, "MAX_BYTES", 100)
    assert merge.main([str(tmp_path / "one"), "--out", str(tmp_path / "out")]) == 1
    assert "must stay under 100 bytes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert merge.main([str(tmp_path / "empty"), "--out", str(tmp_path / "out")]) == 1


def test_raw_rows_are_compressed(tmp_path: Path) -> None:
    rows = suite_rows(SHAPES[0])
    data = merge.packed(rows)
    assert len(data) < 0.3 * len(zstandard.ZstdDecompressor().decompress(data))


# On a machine without network -----------------------------------------------------------------------------------------


def test_a_part_runs_from_a_checkout_with_wheels_beside_it(tmp_path: Path) -> None:
    """A stand-in for Python tells what it was asked to run, and that fibc's version is found where it would look."""
    checkout = tmp_path / "checkout"
    (checkout / "benchmarks" / "gpu").mkdir(parents=True)
    shutil.copy(GPU / "on_machine.sh", checkout / "benchmarks" / "gpu")
    shutil.copy(GPU.parent.parent / "pyproject.toml", checkout)
    (checkout / "gpu-wheels").mkdir()
    (checkout / "gpu-wheels" / "optuna-5.0-py3-none-any.whl").touch()
    stand_in = tmp_path / "python"
    stand_in.write_text(
        '#!/bin/sh\nif [ "$2" = pip ]; then echo "pip $*"; else echo "path $PYTHONPATH"; echo "run $*"; fi\n'
    )
    stand_in.chmod(0o755)
    command = ["sh", "benchmarks/gpu/on_machine.sh", "norms", str(tmp_path / "results"), "--trials", "8"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(stand_in)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    pip, path, ran = done.stdout.splitlines()
    assert "--no-index --no-deps" in pip
    assert pip.endswith("gpu-wheels/optuna-5.0-py3-none-any.whl")
    site = checkout / "build" / "gpu-site"
    assert path == f"path {checkout}:{site}"
    assert ran == f"run benchmarks/gpu/run.py norms --results {tmp_path / 'results'} --trials 8"
    found = subprocess.run(
        [sys.executable, "-S", "-c", "import importlib.metadata as m; print(m.version('fibc'))"],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip()
    again = subprocess.run(command[:3], cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    assert "pip" not in again.stdout.split("\n")[0], "wheels are installed once"


def test_scripts_are_plain_shell() -> None:
    for script in GPU.glob("*.sh"):
        assert subprocess.run(["sh", "-n", script], check=False).returncode == 0


def test_unused_parts_of_the_norms_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(gpu_norms, "NAMES", ("no_such_norm",))
    here = context(tmp_path, part="norms")
    here.say = said.append
    gpu_norms.run(here)
    assert said == ["no_such_norm: defs has no such definition, left out"]

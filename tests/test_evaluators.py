"""What an evaluator is made of: all that a task says of measuring, by one function."""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulation import Machine, SimulatedBackend

import fibc.task
from fibc import cache_share, evaluators, gpus, inputs
from fibc.cache import Cache
from fibc.environment import Environment
from fibc.evaluators import GPU_TIMEOUT_S, evaluator_of, evaluator_on
from fibc.schema import codec
from fibc.schema.options import MODES, TuneOptions
from fibc.schema.silicon import Gpu
from fibc.schema.table import NativeSource
from fibc.task import Task, read_task
from fibc.worker import Setup

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
HERE = Environment("test", ("avx2",), 2 * MIB, 480 * MIB, 3)
SHARE_BYTES = 150 * MIB
NATIVE = NativeSource("mine", "def call(A, B):\n    return A @ B.T\n", "option", "digest")

MEASURED: dict[str, tuple[str, Any]] = {
    "native": ("cpu", "torch.matmul"),
    "target": ("cpu", "cuda:sm_90a"),
    "mode": ("cuda:sm_90a", "eager"),
    "timeout_s": ("cpu", 3.0),
    "seed": ("cpu", 7),
}
"""Options that say how something is measured: a target, and a value that is not the default there."""

NOT_MEASURED: dict[str, Any] = {
    "backends": ("cpu",),
    "templates": ("more",),
    "trials": 3,
    "budget_s": 9.0,
    "min_speedup": 1.5,
    "alpha": 0.01,
    "alpha_table": True,
    "split": (1.0, 0.0, 0.0),
    "storage": "sqlite:///studies.db",
    "jobs": 1,
    "fresh": True,
    "dry_run": True,
    "compiled_only": True,
    "sanitize": True,
    "on_change": "native",
}
"""Options that say what is searched, decided or written; a sanitizer is given the evaluator's setup as it is."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with three threads, and a third of a large cache."""
    monkeypatch.setattr(fibc.task, "make_backends", lambda *_: (SimulatedBackend(Machine(tmp_path, lambda *_: 1.0)),))
    monkeypatch.setattr(fibc.task, "detect", lambda *, gpu: replace(HERE, gpu=gpu))
    monkeypatch.setattr(cache_share, "find", lambda environment, cache: SHARE_BYTES)
    monkeypatch.setattr("fibc.codegen.harness.build", lambda cache: tmp_path / "harness.so")


def task_of(tmp_path: Path, target: str = "cpu", **options: Any) -> Task:
    chosen = TuneOptions(**{"target": target, **options})
    return read_task(ROOT / "defs" / "gemm.json", None, chosen, Cache(tmp_path / "cache"), needs_device=False)


def asked(tmp_path: Path, target: str = "cpu", **options: Any) -> tuple[Setup, float]:
    """Return what workers are told, and the limit of a pair."""
    made = evaluator_of(task_of(tmp_path, target, **options), Cache(tmp_path / "cache"))
    return made.setup, made.timeout_s


def test_every_option_of_a_tune_is_known_to_matter_for_measuring_or_not() -> None:
    known = sorted([*MEASURED, *NOT_MEASURED])
    assert known == sorted(field.name for field in dataclasses.fields(TuneOptions))


@pytest.mark.parametrize("name", MEASURED)
def test_an_option_that_says_how_to_measure_reaches_the_evaluator(name: str, tmp_path: Path) -> None:
    target, value = MEASURED[name]
    assert asked(tmp_path, **{"target": target, name: value}) != asked(tmp_path, target)


@pytest.mark.parametrize("name", NOT_MEASURED)
def test_another_option_changes_nothing_of_a_measurement(name: str, tmp_path: Path) -> None:
    assert asked(tmp_path, **{name: NOT_MEASURED[name]}) == asked(tmp_path)


def test_an_evaluator_of_a_cpu_has_what_its_task_says(tmp_path: Path) -> None:
    task = task_of(tmp_path, timeout_s=40.0, seed=11)
    setup, timeout_s = asked(tmp_path, timeout_s=40.0, seed=11)
    weight_bytes = 4096 * 4096 * 2
    assert (timeout_s, setup.seed, setup.device, setup.mode, setup.num_threads) == (40.0, 11, "cpu", "eager", 3)
    assert setup.num_copies == -(-4 * SHARE_BYTES // weight_bytes) == 19, "of the cache's share, not of the cache"
    assert setup.definition == task.definition.to_json()
    assert setup.native_source == task.native.source
    assert list(setup.workloads) == [workload.uuid for workload in task.workloads]
    assert setup.harness_path == str(tmp_path / "harness.so")


@pytest.mark.parametrize("mode", MODES)
def test_an_evaluator_of_a_gpu_has_what_its_task_says(mode: str, tmp_path: Path) -> None:
    setup, timeout_s = asked(tmp_path, "cuda:sm_90a", mode=mode)
    gpu = gpus.stand_in("sm_90a")
    validity = gpu.validity
    copies = inputs.num_copies(task_of(tmp_path).definition, validity.l2_bytes, validity.memory_bytes)
    assert (setup.device, setup.mode, setup.num_threads, timeout_s) == ("cuda", mode, 3, GPU_TIMEOUT_S)
    assert setup.gpu == codec.to_plain(gpu)
    assert setup.num_copies == copies, "the share of a CPU's cache says nothing of a GPU"


def test_a_shorter_limit_of_the_options_holds_on_a_gpu_too(tmp_path: Path) -> None:
    assert asked(tmp_path, "cuda:sm_90a", timeout_s=4.0)[1] == 4.0


def test_native_gpu_and_limit_can_be_others_and_the_rest_stays(tmp_path: Path) -> None:
    cache, task = Cache(tmp_path / "cache"), task_of(tmp_path, "cuda:sm_90a")
    second: Gpu = replace(gpus.stand_in("sm_90a"), ordinal=1)
    plain, other = evaluator_of(task, cache), evaluator_of(task, cache, native=NATIVE, gpu=second, timeout_s=240.0)
    assert other.timeout_s == 240.0, "for what compiles itself first"
    assert other.setup == replace(plain.setup, native_source=NATIVE.source, gpu=codec.to_plain(second))


def test_without_a_task_the_same_things_are_said(tmp_path: Path) -> None:
    for target in ("cpu", "cuda:sm_90a"):
        task, cache = task_of(tmp_path, target), Cache(tmp_path / "cache")
        options = task.options
        made = evaluator_on(
            task.environment,
            task.definition,
            task.native,
            cache,
            seed=options.seed,
            mode=task.mode,
            timeout_s=options.timeout_s,
            workloads=task.workloads,
        )
        assert (made.setup, made.timeout_s) == asked(tmp_path, target)


def test_nothing_but_this_module_constructs_an_evaluator() -> None:
    made = Path(evaluators.__file__).resolve()
    files = [path for name in ("fibc", "search", "codegen", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    assert made in files
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        if path != made
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Evaluator"
    ]
    assert found == [], "evaluator_of and evaluator_on carry everything through"

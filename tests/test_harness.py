"""The harness of tuning workers: candidates called by value and into outputs, timing in C."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import toys

from fibc import toolchain
from fibc.codegen import harness
from fibc.schema.callspec import CallSpec
from fibc.schema.codec import encode
from fibc.validation import filled_allocations


@pytest.fixture(scope="module")
def built(toy_packages: toys.Packages) -> ModuleType:
    path = harness.build(toy_packages.cache)
    assert path.is_relative_to(toy_packages.cache.root), "it was built with fibc's own objects, for all tests"
    assert harness.build(toy_packages.cache) == path
    spec = importlib.util.spec_from_file_location(harness.MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def library(toy_packages: toys.Packages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("library") / "toys.so"
    subprocess.run([toolchain.find().cxx, "-shared", toy_packages.kernels, "-o", path], check=True)
    return path


def bind(built: ModuleType, library: Path, symbol: str, spec: CallSpec = toys.GEMM_SPEC) -> Any:
    return built.bind(str(library), f"fibc_toy_{symbol}", encode(spec))


def matrices(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, toys.GEMM_K), torch.randn(toys.GEMM_N, toys.GEMM_K)


def test_a_candidate_runs_by_value_and_into_outputs(built: ModuleType, library: Path) -> None:
    a, b = matrices(33)
    run = bind(built, library, "parallel")
    torch.testing.assert_close(run(a, b), a @ b.T + 2)
    torch.testing.assert_close(run(B=b, A=a), a @ b.T + 2)
    out = torch.full((33, toys.GEMM_N), torch.nan)
    assert run.run_out(a, b, out) is None
    torch.testing.assert_close(out, a @ b.T + 2)


def test_what_a_candidate_allocates_is_filled_where_a_judge_asks_for_it(built: ModuleType, library: Path) -> None:
    """By way of torch's allocator, whichever interface the harness uses."""
    a, b = matrices(3)
    run = bind(built, library, "nothing")
    built.fill_allocations(True)
    try:
        with filled_allocations():
            assert run(a, b).isnan().all()
            torch.testing.assert_close(bind(built, library, "parallel")(a, b), a @ b.T + 2)
    finally:
        built.fill_allocations(False)


def test_a_candidate_writes_in_place(built: ModuleType, library: Path) -> None:
    x, state, bias = torch.randn(3, 5), torch.randn(3, 5), torch.tensor(0.25)
    expected = state + x * 2 + 1.25
    out, same = bind(built, library, "update", toys.UPDATE_SPEC)(x, state, 2, bias, torch.ones(3, 5, dtype=torch.bool))
    assert same is state
    torch.testing.assert_close(out, x * 2 + 1.25)
    torch.testing.assert_close(state, expected)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_thread_count_is_the_callers(built: ModuleType, library: Path, num_threads: int) -> None:
    a, b = matrices(10)
    built.set_num_threads(num_threads)
    try:
        torch.testing.assert_close(bind(built, library, "parallel")(a, b), a @ b.T + 2)
    finally:
        built.set_num_threads(0)


def test_a_call_that_contradicts_the_definition_says_so(built: ModuleType, library: Path) -> None:
    a, b = matrices(2)
    run = bind(built, library, "plain")
    with pytest.raises(RuntimeError, match="toy_gemm: run: a tensor has another dtype than the definition"):
        run(a.double(), b)
    with pytest.raises(RuntimeError, match="toy_gemm: run: sizes contradict the definition"):
        run(a[:, :2], b)
    with pytest.raises(RuntimeError, match="toy_gemm: run_out: a tensor has another number of axes"):
        run.run_out(a, b, torch.empty(3))
    with pytest.raises(RuntimeError, match="toy_gemm: run: the variant declined the call"):
        bind(built, library, "declines")(a, b)


def test_a_library_or_symbol_that_is_not_there_is_named(built: ModuleType, library: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot load: .*gone\.so"):
        bind(built, library.with_name("gone.so"), "plain")
    with pytest.raises(ValueError, match="exports no symbol fibc_toy_nothere"):
        bind(built, library, "nothere")


def test_timing_rotates_over_the_calls_from_the_start_given(built: ModuleType) -> None:
    seen: list[int] = []
    seconds = built.time_calls(seen.append, [(0,), (1,), (2,)], 2, 7)
    assert seen == [2, 0, 1, 2, 0, 1, 2]
    assert seconds > 0


def test_an_error_ends_the_timing(built: ModuleType) -> None:
    with pytest.raises(ZeroDivisionError):
        built.time_calls(lambda: 1 / 0, [()], 0, 3)
    with pytest.raises(ValueError, match="needs at least one call"):
        built.time_calls(lambda: None, [], 0, 3)


def test_timing_drops_results_as_they_come(built: ModuleType) -> None:
    alive = 0
    most = 0

    class Result:
        def __init__(self) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    built.time_calls(Result, [()], 0, 50)
    assert (alive, most) == (0, 1)


def test_many_calls_rotate_without_a_clock(built: ModuleType) -> None:
    seen: list[int] = []
    assert built.call_many(seen.append, [(0,), (1,)], 1, 3) is None
    assert seen == [1, 0, 1]


def test_a_kernel_for_gpus_needs_a_driver_and_its_entries(
    built: ModuleType, library: Path, toy_packages: toys.Packages, tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA driver")
    kernels = toys.compile_cuda_launchers(tmp_path, b"no device code")
    path = tmp_path / "rows.so"
    subprocess.run(
        [toolchain.find().cxx, "-shared", "-nostartfiles", "-Wl,-z,defs", kernels, "-o", path, "-lc"], check=True
    )
    with pytest.raises(ValueError, match=r"fibc_toy_rows: no CUDA driver in this process \(libcuda\.so\.1\)"):
        built.bind(str(path), "fibc_toy_rows", encode(toys.ROWS_SPEC), "cuda:0")
    with pytest.raises(ValueError, match="exports no symbol fibc_toy_plain_workspace"):
        built.bind(str(library), "fibc_toy_plain", encode(toys.GEMM_SPEC), "cuda:0")

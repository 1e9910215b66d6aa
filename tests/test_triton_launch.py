"""A launcher over a fake driver: grid, memory, attributes and every parameter of a call are what the TOML says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kernel_abi as abi
import pytest
import torch
from kernel_calls import fused_in_place, gemm, key

from fibc import toolchain
from fibc.backends.triton import TritonBackend
from fibc.cache import Cache
from fibc.paths import INCLUDE
from fibc.schema.candidate import Artifact, ConfigValue
from fibc.schema.definition import Definition
from fibc.search.space import ConfigSpace

pytest.importorskip("triton", reason='needs Triton: pip install "fibc[cuda]"')
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the process would meet the real driver")

FAKE_H200 = "90,132,62914560,150000000000"

CALL = """
import ctypes, json, sys
job = json.loads(sys.argv[1])
import kernel_abi as abi
driver = ctypes.CDLL("libcuda.so.1")
driver.fake_make_current(0)
kernel = abi.entries(job["library"], job["symbol"])
inputs, outputs = (abi.array([abi.Tensor(address) for address in group]) for group in job["tensors"])
cuda = abi.Cuda(7, 0, 0, 0xC0000, 0x50000)
call = ctypes.byref(abi.Call(inputs, outputs, None, abi.int64s(job["axes"]), None, 1, ctypes.pointer(cuda)))
print("status", kernel.call(call), "workspace", kernel.workspace(call), flush=True)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a fake libcuda.so.1."""
    directory = tmp_path_factory.mktemp("driver")
    source = Path(__file__).parent / "cpp" / "fake_cuda.cpp"
    command = [toolchain.find().cxx, "-std=c++17", f"-I{INCLUDE}", "-shared", "-fPIC", source, "-o"]
    subprocess.run([*map(str, command), directory / "libcuda.so.1"], check=True)
    return directory


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> TritonBackend:
    return TritonBackend(Cache(tmp_path_factory.mktemp("cache")))


def built(backend: TritonBackend, definition: Definition, template: str, **changed: ConfigValue) -> Artifact:
    spaces, _ = backend.spaces(definition, key(64))
    space = next(space for space in spaces if space.template == template)
    config = ConfigSpace(space).default() or tuple((item.name, item.choices[0]) for item in space.tunables)
    candidate = backend.candidate(definition, template, dict(config) | changed)
    artifact = backend.build(definition, [candidate], timeout_s=60, jobs=1)[candidate.digest]
    assert isinstance(artifact, Artifact), artifact.log
    return artifact


def call(
    driver: Path, artifact: Artifact, tensors: Sequence[Sequence[int]], axes: Sequence[int], sizes: Sequence[int]
) -> list[str]:
    """Call the artifact's entry once; return what the driver was asked and what the call answered."""
    job = {"library": artifact.library_path, "symbol": artifact.symbol, "tensors": tensors, "axes": axes}
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(driver),
        "PYTHONPATH": str(Path(abi.__file__).parent),
        "FAKE_GPUS": FAKE_H200,
        "FAKE_PARAMETERS": ",".join(map(str, sizes)),
    }
    command: list[Any] = [sys.executable, "-c", CALL, json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_pointers_sizes_and_a_workspace_are_passed_in_order(driver: Path, backend: TritonBackend) -> None:
    definition = gemm(96, 256, "float16")
    tile = {"block_m": 16, "block_n": 32, "block_k": 64, "split_k": 2, "num_stages": 3}
    artifact = built(backend, definition, "gemm/triton_swap", **tile, pdl=True, loads="pointers")
    said = call(driver, artifact, [[0xA0, 0xB0], [0xE0]], [40, 96, 256], [8, 8, 8, 8, 8, 4, 8, 8])
    assert said[-3:] == [
        "parameters 00000000000000a0 00000000000000b0 00000000000000e0 00000000000c0000 0000000000050000 00000028 "
        "0000000000000000 0000000000000000",
        f"launch 3 3 2 x 128, shared {artifact.resources['shared_bytes']}, stream 7, gpu 0, attribute 6",
        f"status 0 workspace {3 * 3 * 2 * 16 * 32 * 4}",
    ]


def test_tensor_maps_are_made_of_the_calls_tensors(driver: Path, backend: TritonBackend) -> None:
    definition = gemm(192, 256, "bfloat16")
    tile = {"block_m": 64, "block_n": 128, "block_k": 64, "num_warps": 4, "num_stages": 3, "store_parts": 2}
    artifact = built(backend, definition, "gemm/triton_tma", **tile, promotion=256)
    of_a_map = [128, 4, 4, 8, 8]
    said = call(driver, artifact, [[0xA00, 0xB00], [0xE00]], [100, 192, 256], [*of_a_map * 3, 8, 8, 4, 8, 8])
    assert [line for line in said if line.startswith("map")] == [
        "map of 0xa00, dtype 9, swizzle 3, promotion 2: 256/64 100/64 by 512",
        "map of 0xb00, dtype 9, swizzle 3, promotion 3: 256/64 192/128 by 512",
        "map of 0xe00, dtype 9, swizzle 3, promotion 2: 192/64 100/64 by 384",
    ]
    mapped = "09" * 128
    assert said[-3].split() == [
        "parameters",
        *(mapped, f"{100:08x}", f"{256:08x}", f"{256:016x}", f"{1:016x}"),
        *(mapped, f"{192:08x}", f"{256:08x}", f"{256:016x}", f"{1:016x}"),
        *(mapped, f"{100:08x}", f"{192:08x}", f"{192:016x}", f"{1:016x}"),
        *(f"{0xC0000:016x}", f"{0x50000:016x}", f"{100:08x}", f"{0:016x}", f"{0:016x}"),
    ]
    assert said[-2].startswith("launch 4 1 1 x 128, shared ")
    assert said[-1] == "status 0 workspace 0"


def test_an_output_in_place_and_programs_that_stay(driver: Path, backend: TritonBackend) -> None:
    definition = fused_in_place(128, "bfloat16")
    rows = {"block_h": 128, "block_rows": 2, "programs_per_sm": 2, "num_stages": 3, "num_warps": 4}
    artifact = built(backend, definition, "fused_add_rmsnorm/triton_rows_inplace", **rows)
    said = call(driver, artifact, [[0x10, 0x20, 0x30], [0x10, 0x20]], [5000, 128], [8, 8, 8, 8, 8, 4, 8, 8])
    pointers = [f"{address:016x}" for address in (0x10, 0x20, 0x30, 0x10, 0x20)]
    assert said[-3].split() == ["parameters", *pointers, f"{5000:08x}", f"{0:016x}", f"{0:016x}"]
    assert said[-2].startswith("launch 264 1 1 x 128, ")


def test_what_an_int32_or_a_grid_cannot_hold_is_declined(driver: Path, backend: TritonBackend) -> None:
    definition = fused_in_place(128, "bfloat16")
    row = built(backend, definition, "fused_add_rmsnorm/triton_row_inplace")
    rows = built(backend, definition, "fused_add_rmsnorm/triton_rows_inplace", block_h=128, programs_per_sm=2)
    tensors = [[0x10, 0x20, 0x30], [0x10, 0x20]]
    for artifact, num_rows, status in ((row, 2**31 - 1, 0), (row, 2**31, 1), (rows, 2**31, 1), (row, 0, 0)):
        said = call(driver, artifact, tensors, [num_rows, 128], [8])
        assert said[-1] == f"status {status} workspace 0"
        assert any(line.startswith("launch") for line in said) == (status == 0 and num_rows > 0)

"""A module with a variant that calls cuBLASLt, over a fake driver: another version of it costs that variant alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_cublaslt
import pytest
import toys
from fake_cublaslt import Fake
from kernel_calls import gemm, machine

from fibc import toolchain
from fibc.backends.cublaslt import CublasLtBackend
from fibc.backends.cublaslt_algorithm import Algorithm
from fibc.codegen.build import build
from fibc.gpus import join_version
from fibc.paths import INCLUDE
from fibc.runtime import oracle, read_table
from fibc.runtime.oracle import Surroundings, TensorFacts
from fibc.schema.candidate import Artifact
from fibc.schema.silicon import CudaValidity

pytestmark = pytest.mark.e2e

H200 = CudaValidity("sm_90a", 90, 132, 60 << 20, 150 * 10**9)

ROWS = (1, 4, 5, 6, 8, 1000)

SCRIPT = """
import ctypes, json, sys, warnings
sys.path.insert(0, sys.argv[1])
import torch
ctypes.CDLL(sys.argv[2])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import fibc_toy_rows as op
    said = [op.prepare(0), op.environment["devices"]["cuda:0"], op.environment["here"]["cublas"]]
    sys.path.insert(0, sys.argv[3])
    import fake_gpu
    gpu = fake_gpu.FakeGpu()
    said.append({rows: op.explain(gpu.tensor(rows, 10))["reason"] for rows in map(int, sys.argv[4:])})
print(json.dumps([*said, [str(warning.message) for warning in caught]]))
"""


@pytest.fixture(scope="session")
def package(toy_packages: toys.Packages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The row sums: up to 4 rows by a kernel, from 5 rows on by a launcher of cuBLASLt 13.0.2."""
    backend = CublasLtBackend(machine(), toy_packages.cache)
    config = {"library": "13.0.2", "algorithm": str(Algorithm("f32", 0, bytes(range(64))))}
    definition = gemm(8, 8, "float32")
    candidate = backend.candidate(definition, "gemm/cublaslt", config)
    built = backend.build(definition, [candidate], timeout_s=60, jobs=1)[candidate.digest]
    assert isinstance(built, Artifact)
    table = toys.rows_table(H200)
    rows = next(variant for variant in table.variants if variant.symbol == "fibc_toy_rows")
    calls = replace(rows, symbol=built.symbol, candidate=candidate, artifact=built.digest, library="cuBLASLt 13.0.2")
    variants = tuple(sorted((rows, calls), key=lambda variant: variant.symbol))
    served = list(zip(table.rows, table.regions, (rows, calls), strict=False))
    changed = replace(
        table,
        variants=variants,
        rows=tuple(replace(row, candidate=variant.candidate.digest) for row, _, variant in served),
        regions=tuple(replace(region, variant=variants.index(variant)) for _, region, variant in served),
    )
    root = tmp_path_factory.mktemp("with_library")
    objects = {
        rows.symbol: toys.compile_cuda_launchers(root, b"no device code"),
        built.symbol: Path(built.object_path),
    }
    build(changed, objects, root / "fibc_toy_rows", toy_packages.cache)
    return root / "fibc_toy_rows"


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    """The library, with a fake driver beside it."""
    directory = tmp_path_factory.mktemp("library")
    source = Path(__file__).parent / "cpp" / "fake_cuda.cpp"
    command: list[str | Path] = [toolchain.find().cxx, "-std=c++17", f"-I{INCLUDE}", "-shared", "-fPIC", source]
    command += ["-o", directory / "libcuda.so.1"]
    subprocess.run(command, check=True)
    return fake_cublaslt.compile_fake(directory, toolchain.find().cxx)


@pytest.mark.parametrize(("here", "served"), [("13.0.2", True), ("13.0.3", False)])
def test_a_variant_of_another_library_version_declines_and_the_others_serve(
    package: Path, fake: Fake, here: str, served: bool
) -> None:
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(fake.directory),
        "FAKE_GPUS": "90,132,62914560,150000000000",
        "FAKE_VERSION": str(join_version(here)),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, package.parent, fake.torch, Path(__file__).parent, *map(str, ROWS)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said: list[Any] = json.loads(done.stdout.splitlines()[-1])
    prepared, device, found, explained, warned = said
    table = read_table(package)
    (symbol,) = (variant.symbol for variant in table.variants if variant.library)
    assert (prepared, device["reason"], found) == (True, "hit", here)
    assert device["declined"] == ([] if served else [symbol])
    message = (
        f"fibc_toy_rows: cuda:0: needs cuBLASLt 13.0.2, torch has loaded {here} (tune again): {symbol}; "
        "their calls go to the native kernel, x.float().sum(-1)"
    )
    assert warned == ([] if served else [message])
    around = Surroundings(isa=(), declined={"cuda:0": device["declined"]})
    foreseen = {
        str(rows): oracle.choose(table, [TensorFacts((rows, 10), (10, 1), "float32", "cuda:0")], around).reason
        for rows in ROWS
    }
    assert explained == foreseen, "module and oracle decide alike"
    assert set(foreseen.values()) == ({"hit", "region"} if served else {"hit", "load", "region"})

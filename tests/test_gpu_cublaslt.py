"""cuBLASLt's algorithms on a real GPU: what the heuristic returns is right, can be captured, and is timed beside torch.

pytest -m gpu tests/test_gpu_cublaslt.py -s
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from kernel_calls import gemm
from module_calls import host_us
from torch import Tensor

from fibc import gpus, inputs
from fibc.backends.cublaslt import CublasLtBackend
from fibc.backends.cublaslt_heuristic import Heuristic, Problem, Ranked, Unanswered
from fibc.bound import unit_roundoff
from fibc.cache import Cache
from fibc.codegen import harness
from fibc.environment import detect
from fibc.schema.candidate import Artifact
from fibc.schema.codec import encode
from fibc.schema.definition import Definition
from fibc.schema.feature import Cell, FeatureKey, Point
from fibc.timing import Harness, Side, Timer
from fibc.timing_cuda import make_meter
from fibc.worker import load_harness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS = (1, 16, 33, 256, 1000)
DTYPES = ("bfloat16", "float16", "float32")
N, K = 4096, 4096
DECLINED = "the variant declined the call"

TIMED = tuple(int(size) for size in os.environ.get("FIBC_TEST_ROWS", "1,16,33,64,128,256,1000").split(","))
"""Sizes of the timing table."""


@dataclass(frozen=True)
class Built:
    """An algorithm that can be called.

    Attributes:
        text: As a config holds it.
        call: By value, with ``run_out`` as a method.
    """

    text: str
    artifact: Artifact
    call: Any


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cublaslt")


@pytest.fixture(scope="session")
def asked(root: Path) -> Heuristic:
    return Heuristic(Cache(root / "cache"), gpus.find().first(), gpus.cublas_version())


@pytest.fixture(scope="session")
def backend(root: Path, asked: Heuristic) -> CublasLtBackend:
    return CublasLtBackend(detect(gpu=gpus.find().first()), Cache(root / "cache"), heuristic=asked)


@pytest.fixture(scope="session")
def loaded(root: Path) -> Harness:
    """The harness."""
    return load_harness(harness.build(Cache(root / "cache")))


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """Products of float32 are made in float32, and gradients are not asked for."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad():
        yield
    torch.backends.cuda.matmul.allow_tf32 = before


def key(m: int) -> FeatureKey:
    return FeatureKey(Cell(((m, m),)), (Point((("M", m),), "end"),), 0, True)


def algorithms(backend: CublasLtBackend, loaded: Harness, definition: Definition, m: int) -> tuple[Built, ...]:
    """Return every algorithm that is offered at ``m``, built and loaded."""
    spaces, mismatches = backend.spaces(definition, key(m))
    assert not mismatches, mismatches
    (space,) = spaces
    library, choices = space.tunables
    configs = [{"library": library.choices[0], "algorithm": choice} for choice in choices.choices]
    candidates = [backend.candidate(definition, space.template, config) for config in configs]
    artifacts = backend.build(definition, candidates, timeout_s=60, jobs=os.cpu_count() or 1)
    built = []
    for config, candidate in zip(configs, candidates, strict=True):
        artifact = artifacts[candidate.digest]
        assert isinstance(artifact, Artifact), artifact
        call = loaded.bind(artifact.library_path, artifact.symbol, encode(definition.call_spec()), "cuda")
        built.append(Built(str(config["algorithm"]), artifact, call))
    return tuple(built)


def operands(m: int, n: int, k: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    a = torch.randn(m, k, device="cuda", generator=generator).to(dtype)
    b = (torch.randn(n, k, device="cuda", generator=generator) / k**0.5).to(dtype)
    return a, b


def worst(out: Tensor, a: Tensor, b: Tensor) -> float:
    """Return the largest error as a part of what sums in float32, rounded once, may have (``fibc/bound.py``)."""
    exact = a.double() @ b.double().T
    terms = a.double().abs() @ b.double().abs().T
    gamma = a.shape[-1] * 2.0**-24
    bound = unit_roundoff(out.dtype) * exact.abs() + 2 * gamma * terms + 2.0**-126
    assert not out.isnan().any()
    return float(((out.double() - exact).abs() / bound).max())


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_algorithm_is_right_at_the_size_it_is_returned_for(
    backend: CublasLtBackend, loaded: Harness, dtype: str, m: int
) -> None:
    definition = gemm(N, K, dtype)
    a, b = operands(m, N, K, getattr(torch, dtype))
    found = algorithms(backend, loaded, definition, m)
    print(f"\n{dtype} M={m}: {len(found)} algorithms")
    for item in found:
        out = item.call(a, b)
        assert (out.shape, out.dtype) == ((m, N), a.dtype)
        assert worst(out, a, b) <= 1.0, item.text
        assert torch.equal(out, item.call(a, b)), f"{item.text} is not deterministic"


def test_an_algorithm_is_right_at_every_other_size_or_declines(backend: CublasLtBackend, loaded: Harness) -> None:
    definition = gemm(N, K, "bfloat16")
    declined = 0
    calls = 0
    for item in algorithms(backend, loaded, definition, 33):
        for m in (*ROWS, 2, 7, 65, 513, 4099):
            a, b = operands(m, N, K, torch.bfloat16)
            calls += 1
            try:
                out = item.call(a, b)
            except RuntimeError as error:
                assert DECLINED in str(error)
                declined += 1
                continue
            assert worst(out, a, b) <= 1.0, (item.text, m)
    print(f"\n{declined} of {calls} calls at other sizes were declined")


def test_an_odd_k_is_right(backend: CublasLtBackend, loaded: Harness) -> None:
    definition = gemm(512, 511, "bfloat16")
    a, b = operands(33, 512, 511, torch.bfloat16)
    for item in algorithms(backend, loaded, definition, 33):
        assert worst(item.call(a, b), a, b) <= 1.0, item.text


def test_a_captured_call_replays_with_new_inputs(backend: CublasLtBackend, loaded: Harness) -> None:
    definition = gemm(N, K, "bfloat16")
    for m in (1, 16, 33, 256):
        a, b = operands(m, N, K, torch.bfloat16)
        other, _ = operands(m, N, K, torch.bfloat16, seed=1)
        for item in algorithms(backend, loaded, definition, m):
            out = torch.empty(m, N, device="cuda", dtype=torch.bfloat16)
            item.call.run_out(a, b, out)
            expected = item.call(other, b)
            static = a.clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(3):
                    item.call.run_out(static, b, out)
            static.copy_(other)
            out.fill_(torch.nan)
            for _ in range(2):
                graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, expected), item.text


FIRST = """
import sys
from pathlib import Path
import torch
from fibc.codegen import harness
from fibc.cache import Cache
from fibc.worker import load_harness
loaded = load_harness(harness.build(Cache(Path(sys.argv[1]))))
a = torch.randn(33, {k}, device="cuda").bfloat16()
b = (torch.randn({n}, {k}, device="cuda") / {k} ** 0.5).bfloat16()
out = torch.empty(33, {n}, device="cuda", dtype=torch.bfloat16)
call = loaded.bind(sys.argv[2], sys.argv[3], bytes.fromhex(sys.argv[4]), "cuda")  # prepares, and no more
graph = torch.cuda.CUDAGraph()
with torch.no_grad(), torch.cuda.graph(graph):
    call.run_out(a, b, out)
graph.replay()
torch.cuda.synchronize()
error = (out.double() - a.double() @ b.double().T).abs().max().item()
print(error)
"""


def test_the_first_call_of_a_process_may_be_captured(backend: CublasLtBackend, loaded: Harness, root: Path) -> None:
    definition = gemm(N, K, "bfloat16")
    first, *_, last = algorithms(backend, loaded, definition, 33)
    for item in (first, last):
        spec = encode(definition.call_spec()).hex()
        command = [sys.executable, "-c", FIRST.format(n=N, k=K), str(root / "cache")]
        done = subprocess.run(
            [*command, item.artifact.library_path, item.artifact.symbol, spec],
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) < 0.05


def test_two_streams_at_once_do_not_share_a_workspace(backend: CublasLtBackend, loaded: Harness) -> None:
    definition = gemm(N, K, "bfloat16")
    for item in algorithms(backend, loaded, definition, 16):
        if not item.artifact.resources["workspace_bytes"]:
            continue
        pairs = [operands(16, N, K, torch.bfloat16, seed) for seed in (2, 3)]
        expected = [item.call(*pair) for pair in pairs]
        streams = [torch.cuda.Stream() for _ in pairs]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        outs: list[list[Tensor]] = [[], []]
        for _ in range(50):
            for stream, pair, out in zip(streams, pairs, outs, strict=True):
                with torch.cuda.stream(stream):
                    out.append(item.call(*pair))
        torch.cuda.synchronize()
        for out, right in zip(outs, expected, strict=True):
            assert all(torch.equal(each, right) for each in out), item.text


def test_the_version_is_that_of_torchs_copy(backend: CublasLtBackend, loaded: Harness) -> None:
    definition = gemm(N, K, "bfloat16")
    version = gpus.cublas_version()
    spaces, _ = backend.spaces(definition, key(16))
    assert spaces[0].tunables[0].choices == (version,)
    other = gpus.split_version(gpus.join_version(version) + 1)
    config = {"library": other, "algorithm": spaces[0].tunables[1].choices[0]}
    candidate = backend.candidate(definition, "gemm/cublaslt", config)
    built = backend.build(definition, [candidate], timeout_s=60, jobs=1)[candidate.digest]
    assert isinstance(built, Artifact)
    with pytest.raises(RuntimeError, match="calls another version of a library"):
        loaded.bind(built.library_path, built.symbol, encode(definition.call_spec()), "cuda")


def test_what_a_call_costs_the_host(backend: CublasLtBackend, loaded: Harness) -> None:
    definition = gemm(128, 2048, "bfloat16")
    a, b = operands(1, 128, 2048, torch.bfloat16)
    out = torch.empty(1, 128, device="cuda", dtype=torch.bfloat16)
    costs = {"torch.mm(out=)": host_us(lambda: torch.mm(a, b.T, out=out))}
    for item in algorithms(backend, loaded, definition, 1):
        workspace = "with workspace" if item.artifact.resources["workspace_bytes"] else "without workspace"
        costs.setdefault(f"run_out, {workspace}", host_us(partial(item.call.run_out, a, b, out)))
    print(f"\nhost us a call: { {name: round(cost, 2) for name, cost in costs.items()} }")


def test_what_the_question_costs(root: Path) -> None:
    """Prints the seconds of the child that asks, and how many algorithms there are under each limit."""
    gpu = gpus.find().first()
    fresh = Heuristic(Cache(root / "fresh"), gpu, gpus.cublas_version())
    began = time.monotonic()
    found = fresh.algorithms([Problem(33, N, K, "bfloat16", "f32")])
    assert not isinstance(found, Unanswered), found
    print(f"\none child: {time.monotonic() - began:.1f} s, {len(found)} algorithms at M=33")


def _native(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b.T)


def _describe(ranked: Sequence[Ranked], text: str) -> str:
    facts = next((item for item in ranked if str(item.algorithm) == text), None)
    if facts is None:
        return ""
    config = {name: value for name, value in facts.config.items() if value > 0}
    return f"waves {facts.waves:.2f} " + " ".join(f"{name}={value}" for name, value in config.items())


@pytest.mark.parametrize("m", TIMED)
def test_every_algorithm_is_timed_beside_torch(
    backend: CublasLtBackend, asked: Heuristic, loaded: Harness, m: int
) -> None:
    """Prints a table; nothing is claimed. Weights rotate over more than L2, calls are captured into a graph."""
    definition = gemm(N, K, "bfloat16")
    found = algorithms(backend, loaded, definition, m)
    ranked = asked.algorithms([Problem(m, N, K, "bfloat16", "f32")])
    assert not isinstance(ranked, Unanswered)
    properties = torch.cuda.get_device_properties(0)
    before = torch.cuda.current_stream()
    timer = Timer(
        definition,
        definition.call_spec(),
        _native,
        lambda point, made: dict(inputs.make(definition, dict(point.axes), 0, None, made, device="cuda")),
        num_copies=inputs.num_copies(definition, properties.L2_cache_size, properties.total_memory),
        keep_bytes=8 << 30,
        seed=0,
        meter=make_meter("graph"),
    )
    try:
        point = Point((("M", m),), "end")
        sides = {index: Side(point, item.call, True) for index, item in enumerate(found)}
        inner = timer.inner(loaded, point)
        rows = []
        for index, item in enumerate(found):
            pairs = [timer.pair(loaded, index, sides, native_first=bool(turn % 2), inner=inner) for turn in range(12)]
            native, own = (median(side) * 1e6 for side in zip(*pairs, strict=True))
            rows.append((native / own, native, own, item.text, _describe(ranked, item.text)))
    finally:
        torch.cuda.set_stream(before)
    print(f"\nM={m} N={N} K={K} bfloat16, cuBLASLt {gpus.cublas_version()}, {inner} calls a sample")
    for rank, (speedup, native, own, text, facts) in enumerate(rows):
        print(f"  #{rank:<2} {own:8.2f} us  torch.mm {native:8.2f} us  {speedup:6.3f}x  {text[:44]:44}  {facts}")


def test_rows_with_gaps_and_wider_outputs_are_right_or_declined(backend: CublasLtBackend, loaded: Harness) -> None:
    definition = gemm(N, K, "bfloat16")
    m = 33
    declined = 0
    found = algorithms(backend, loaded, definition, m)
    for gap in (8, 64, 1, 3):  # the last two leave rows at odd addresses, and are declined
        wide_a, wide_b = operands(m, N, K + gap, torch.bfloat16)
        a, b = wide_a[:, :K], wide_b[:, :K]
        for item in found:
            wide = torch.full((m, N + gap), torch.nan, device="cuda", dtype=torch.bfloat16)
            try:
                item.call.run_out(a, b, wide[:, :N])
            except RuntimeError as error:
                assert DECLINED in str(error)
                declined += 1
                continue
            assert gap % 8 == 0
            assert worst(wide[:, :N], a, b) <= 1.0, (item.text, gap)
            assert wide[:, N:].isnan().all()
    print(f"\n{declined} of {4 * len(found)} calls with gaps between rows were declined")

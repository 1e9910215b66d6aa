"""Triton kernels in Triton's interpreter against a float64 reference, within a bound from K and dtype.

The interpreter runs programs one after another, so it shows arithmetic, masks and the order of splits, and no races.
bfloat16 is left out: the interpreter's dot is wrong there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import interpreted
import pytest
import torch
from kernel_calls import fused_in_place, gemm, rmsnorm

from fibc.backends.templates import BUILTIN_TEMPLATES
from fibc.backends.triton import TritonBackend
from fibc.cache import Cache
from fibc.schema.candidate import ConfigValue
from fibc.schema.definition import Definition
from fibc.schema.template import load_templates

pytest.importorskip("triton", reason='needs Triton: pip install "fibc[cuda]"')

DTYPES = {"float32": torch.float32, "float16": torch.float16}
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11}
HALF_SUBNORMAL = {"float32": 2.0**-150, "float16": 2.0**-25}
TEMPLATES = {template.name: template for template in load_templates((BUILTIN_TEMPLATES,), "triton")}
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """A template on one contract and size, with a config that differs from all first choices by ``changed``."""

    template: str
    dtype: str
    rows: int
    shape: tuple[int, ...]
    changed: Mapping[str, ConfigValue] = field(default_factory=dict, hash=False)

    @property
    def definition(self) -> Definition:
        if self.template.startswith("gemm/"):
            return gemm(self.shape[0], self.shape[1], self.dtype)
        if self.in_place:
            return fused_in_place(self.shape[0], self.dtype)
        return rmsnorm(self.shape[0], self.dtype, fused=self.template.startswith("fused"))

    @property
    def in_place(self) -> bool:
        return self.template.endswith("_inplace")

    @property
    def operands(self) -> list[tuple[int, ...]]:
        """Shapes of the inputs."""
        if self.template.startswith("gemm/"):
            return [(self.rows, self.shape[1]), self.shape]
        rows = [(self.rows, self.shape[0])] * (1 if self.template.startswith("rmsnorm") else 2)
        return [*rows, self.shape]

    @property
    def config(self) -> dict[str, ConfigValue]:
        return {name: choices[0] for name, choices in TEMPLATES[self.template].tunables.items()} | dict(self.changed)

    def __str__(self) -> str:
        changes = "-".join(f"{name}={value}" for name, value in self.changed.items())
        return f"{self.template}-{self.dtype}-{self.rows}x{'x'.join(map(str, self.shape))}-{changes}"


def _gemm_cases() -> Iterator[Case]:
    tile = {"block_m": 16, "block_n": 32, "block_k": 64, "group_m": 2}
    yield Case("gemm/triton_tile", "float16", 33, (40, 511), tile)
    yield Case("gemm/triton_tile", "float32", 33, (64, 128), tile | {"split_k": 2})
    yield Case("gemm/triton_tile", "float16", 3, (40, 200), tile | {"split_k": 3, "evict_b": "evict_first"})
    tma = {"block_m": 16, "block_n": 32, "block_k": 64, "group_m": 2, "flatten": False}
    yield Case("gemm/triton_tma", "float16", 33, (72, 200), tma)
    yield Case("gemm/triton_tma", "float16", 33, (72, 200), tma | {"split_k": 2, "store_parts": 1})
    yield Case("gemm/triton_tma", "float16", 3, (40, 520), tma | {"split_k": 4})
    yield Case("gemm/triton_tma", "float32", 33, (72, 100), tma | {"store_parts": 1, "flatten": True})
    swap = {"block_n": 32, "block_m": 16, "block_k": 64}
    yield Case("gemm/triton_swap", "float16", 1, (64, 128), swap)
    yield Case("gemm/triton_swap", "float32", 3, (40, 511), swap | {"split_k": 4})
    yield Case("gemm/triton_swap", "float16", 33, (40, 511), swap | {"split_k": 7, "block_n": 16})
    yield Case("gemm/triton_swap", "float16", 33, (40, 200), swap | {"split_k": 3, "loads": "maps"})
    stream: dict[str, ConfigValue] = {"block_n": 16, "block_m": 16, "block_k": 64, "loads": "pointers"}
    yield Case("gemm/triton_stream", "float16", 33, (40, 511), stream)
    yield Case("gemm/triton_stream", "float32", 3, (40, 200), stream | {"programs_per_sm": 3})
    yield Case("gemm/triton_stream", "float16", 3, (72, 200), stream | {"programs_per_sm": 3, "loads": "maps"})
    atomic = {"block_n": 16, "block_m": 16, "block_k": 64}
    yield Case("gemm/triton_splitk_atomic", "float16", 33, (40, 511), atomic | {"split_k": 7})
    yield Case("gemm/triton_splitk_atomic", "float32", 3, (16, 128), atomic | {"split_k": 2})
    matvec = {"block_n": 4, "block_k": 128}
    yield Case("gemm/triton_matvec", "float16", 1, (40, 511), matvec)
    yield Case("gemm/triton_matvec", "float32", 1, (39, 256), matvec | {"fold": 1})
    yield Case("gemm/triton_matvec", "float16", 3, (39, 511), matvec | {"rows": 4, "split_k": 2})
    yield Case("gemm/triton_matvec", "float32", 33, (8, 256), matvec | {"rows": 16, "split_k": 2, "num_stages": 3})


def _norm_cases() -> Iterator[Case]:
    for family in ("rmsnorm/triton_{}", "fused_add_rmsnorm/triton_{}", "fused_add_rmsnorm/triton_{}_inplace"):
        yield Case(family.format("row"), "float16", 3, (83,), {"chunk": 64})
        yield Case(family.format("row"), "float32", 33, (128,), {"chunk": 128})
        rows: dict[str, ConfigValue] = {"block_h": 128, "block_rows": 4}
        yield Case(family.format("rows"), "float16", 33, (83,), rows)
        yield Case(family.format("rows"), "float32", 3, (128,), rows | {"programs_per_sm": 1})
        yield Case(family.format("two_pass"), "float16", 3, (83,), {"chunk": 32})
        yield Case(family.format("two_pass"), "float32", 1, (128,), {"chunk": 32})


GEMMS = tuple(_gemm_cases())
NORMS = tuple(_norm_cases())

Results = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> TritonBackend:
    return TritonBackend(Cache(tmp_path_factory.mktemp("cache")), num_sms=2)


def _random(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def _guarded(shape: tuple[int, int], dtype: str) -> torch.Tensor:
    """Return a poisoned output between two poisoned rows of the same storage."""
    return torch.full((shape[0] + 2, shape[1]), torch.nan, dtype=DTYPES[dtype])[1:-1]


def _run_of(
    backend: TritonBackend, case: Case, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> interpreted.Run:
    definition = case.definition
    candidate = backend.candidate(definition, case.template, case.config)
    axes = {definition.var_axes[0]: case.rows}
    return interpreted.Run(backend, definition, candidate, axes, inputs, outputs, repeats=1 if case.in_place else 2)


@pytest.mark.e2e
def test_a_gemm_is_within_the_bound_of_its_sums_and_leaves_its_counters_zero(
    backend: TritonBackend, tmp_path: Path
) -> None:
    operands = {case: [_random(shape, case.dtype, i) for i, shape in enumerate(case.operands)] for case in GEMMS}
    outputs = {case: _guarded((case.rows, case.shape[0]), case.dtype) for case in GEMMS}
    runs = [_run_of(backend, case, operands[case], [outputs[case]]) for case in GEMMS]
    for case, result in zip(GEMMS, interpreted.run(runs, tmp_path), strict=True):
        a, b = (operand.double() for operand in operands[case])
        exact, magnitude = a @ b.T, a.abs() @ b.abs().T
        # k products and sums in float32 in any order (Higham, theorem 3.1), then one rounding to the dtype.
        bound = (case.shape[1] + 2) * 2.0**-24 * magnitude + 1.01 * UNIT_ROUNDOFF[case.dtype] * exact.abs()
        assert bool(((result["C"].double() - exact).abs() <= bound + HALF_SUBNORMAL[case.dtype]).all()), case
        assert int(result["counters"].abs().max()) == 0, case
        width = case.shape[0]
        whole = result["C"].as_strided((case.rows + 2, width), (width, 1), 0)
        assert bool(whole[[0, -1]].isnan().all()), case


@pytest.mark.e2e
def test_a_norm_is_within_the_bound_of_its_arithmetic(backend: TritonBackend, tmp_path: Path) -> None:
    operands = {case: [_random(shape, case.dtype, i) for i, shape in enumerate(case.operands)] for case in NORMS}
    runs = []
    for case in NORMS:
        x = operands[case][0].clone()
        inputs = [x, *(operand.clone() for operand in operands[case][1:])]
        runs.append(_run_of(backend, case, inputs, inputs[:2] if case.in_place else [torch.full_like(x, torch.nan)]))
    for case, result in zip(NORMS, interpreted.run(runs, tmp_path), strict=True):
        *added, weight = (operand.double() for operand in operands[case])
        total = sum(added[1:], added[0])
        exact = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight
        # Half of the hidden / 2 + 1 roundings of the mean of squares, four more, and the one to the dtype.
        relative = (case.shape[0] / 4 + 5) * 2.0**-24 + UNIT_ROUNDOFF[case.dtype]
        # The sum itself is rounded to float32: beside a factor of at most sqrt(hidden) / |total|.
        cancelled = 2.0**-24 * math.sqrt(case.shape[0]) * weight.abs()
        bound = 1.01 * relative * exact.abs() + cancelled + HALF_SUBNORMAL[case.dtype]
        assert bool(((result["Y"].double() - exact).abs() <= bound).all()), case
        if case.in_place:
            assert torch.equal(result["SUM"], total.float().to(DTYPES[case.dtype])), case


def test_every_template_is_run_in_two_dtypes() -> None:
    run = {(case.template, case.dtype) for case in (*GEMMS, *NORMS)}
    assert run == {(name, dtype) for name in TEMPLATES for dtype in DTYPES}

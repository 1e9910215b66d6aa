"""Kernels of every template, dtype and ISA level against a float64 reference, within a bound from K and dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kernel_calls import backend_for, call_kernel, default_config, gemm, own_levels, rmsnorm, space_of

from fibc.backends.base import BuildFailure
from fibc.cache import Cache
from fibc.schema.candidate import Artifact, ConfigValue
from fibc.schema.definition import Definition

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
HALF_SUBNORMAL = {"float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LEVELS = own_levels()

ODD = (37, 83)
"""N and K that leave a rest in every block and every vector."""
LONG = (96, 320)
"""Three products of float16 parts need K of at least 256."""
HIDDEN = 83
ALIGNED_HIDDEN = 128
"""Streaming stores need whole cache lines."""
SIZE = 64


@dataclass(frozen=True)
class Case:
    """A kernel to build: a template on one contract, with a config that differs from the default by ``changed``."""

    isa: str
    template: str
    dtype: str
    shape: tuple[int, ...]
    changed: tuple[tuple[str, ConfigValue], ...] = ()

    @property
    def definition(self) -> Definition:
        if self.template.startswith("gemm/"):
            return gemm(self.shape[0], self.shape[1], self.dtype)
        return rmsnorm(self.shape[0], self.dtype, fused=self.template.startswith("fused"))

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return "-".join([self.isa, self.template, self.dtype, sizes, *(f"{n}={v}" for n, v in self.changed)])


def _cases() -> Iterator[Case]:
    for isa in ("avx2", "avx512"):
        for dtype in DTYPES:
            yield Case(isa, "gemm/matvec", dtype, ODD)
    for template, one, other in (("gemm/tile", "float16", "bfloat16"), ("gemm/packed", "bfloat16", "float16")):
        yield Case("avx2", template, one, ODD)
        yield Case("avx512", template, other, ODD)
    for dtype in ("float16", "bfloat16"):
        yield Case("amx_bf16", "gemm/amx", dtype, ODD)
    for template in ("gemm/matvec", "gemm/tile"):
        yield Case("avx512_bf16", template, "bfloat16", ODD)
    yield Case("amx_bf16", "gemm/amx", "bfloat16", LONG, (("n_tiles", 4), ("m_tiles", 1), ("group", 4)))
    yield Case("amx_bf16", "gemm/amx", "float16", LONG, (("prefetch_lines", 8),))
    yield Case("avx512_bf16", "gemm/matvec", "bfloat16", LONG, (("rows", 8), ("cols", 3), ("prefetch_bytes", 512)))
    yield Case("avx512", "gemm/tile", "float16", LONG, (("split", "m"), ("unroll", 2)))
    yield Case("avx2", "gemm/packed", "float32", LONG, (("split", "m"), ("row_vectors", 1), ("cols", 12)))

    for dtype in DTYPES:
        yield Case("avx512", "fused_add_rmsnorm/one_pass", dtype, (HIDDEN,))
    yield Case("avx512", "fused_add_rmsnorm/two_pass", "bfloat16", (HIDDEN,))
    yield Case("avx2", "fused_add_rmsnorm/one_pass", "bfloat16", (HIDDEN,))
    yield Case("avx2", "fused_add_rmsnorm/two_pass", "float32", (HIDDEN,))
    yield Case("avx512", "rmsnorm/one_pass", "bfloat16", (ALIGNED_HIDDEN,), (("streaming", True), ("prefetch_rows", 1)))
    yield Case("avx2", "rmsnorm/two_pass", "float16", (ALIGNED_HIDDEN,), (("streaming", True), ("unroll", 8)))
    yield Case("avx512", "rmsnorm/two_pass", "float32", (3,))


CASES = tuple(_cases())
GEMMS = tuple(case for case in CASES if case.template.startswith("gemm/"))
NORMS = tuple(case for case in CASES if case not in GEMMS)

Built = Callable[[Case], Artifact]


@pytest.fixture(scope="module")
def built(run_directory: Path) -> Built:
    """Builds a case where this CPU can run it; the cache is shared by all workers of a run."""
    cache = Cache(run_directory / "kernels")
    artifacts: dict[Case, Artifact] = {}

    def get(case: Case) -> Artifact:
        if case.isa not in LEVELS:
            pytest.skip(f"this CPU has no {case.isa} (it has {', '.join(LEVELS) or 'no level'})")
        if case not in artifacts:
            artifacts[case] = _build(case, cache)
        return artifacts[case]

    return get


def _build(case: Case, cache: Cache) -> Artifact:
    backend = backend_for(case.isa, cache)
    definition = case.definition
    config = default_config(space_of(backend, definition, case.template, SIZE), **dict(case.changed))
    candidate = backend.candidate(definition, case.template, config)
    artifact = backend.build(definition, [candidate], timeout_s=60, jobs=1)[candidate.digest]
    assert not isinstance(artifact, BuildFailure), artifact.log
    return artifact


def _random(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def _guarded(shape: tuple[int, int], dtype: str) -> tuple[torch.Tensor, Callable[[], bool]]:
    """Return an output full of a sentinel between guard rows, and whether the guards are whole."""
    whole = torch.full((shape[0] + 2, shape[1]), 7.0, dtype=DTYPES[dtype])
    return whole[1:-1], lambda: bool((whole[0] == 7).all() and (whole[-1] == 7).all())


def _rows_of_a_wider_tensor(values: torch.Tensor) -> torch.Tensor:
    wide = torch.full((values.shape[0], values.shape[1] + 5), math.nan, dtype=values.dtype)
    wide[:, : values.shape[1]] = values
    return wide[:, : values.shape[1]]


def _run_gemm(case: Case, artifact: Artifact, a: torch.Tensor, b: torch.Tensor, num_threads: int) -> torch.Tensor:
    c, whole = _guarded((a.shape[0], case.shape[0]), case.dtype)
    assert call_kernel(artifact, case.definition, {"M": a.shape[0]}, [a, b], [c], num_threads) == 0
    assert whole()
    return c


@pytest.mark.parametrize("case", GEMMS, ids=str)
def test_a_gemm_is_within_its_bound_at_every_number_of_rows_and_threads(case: Case, built: Built) -> None:
    artifact = built(case)
    n, k = case.shape
    b = _random((n, k), case.dtype, 1)
    for rows, num_threads in ((1, 1), (2, 3), (3, 1), (5, 2), (8, 1), (16, 2), (17, 1), (33, 2), (64, 3), (70, 1)):
        a = _rows_of_a_wider_tensor(_random((rows, k), case.dtype, 2 + rows))
        c = _run_gemm(case, artifact, a, b, num_threads)
        exact = a.double() @ b.double().T
        terms = a.double().abs() @ b.double().abs().T
        bound = UNIT_ROUNDOFF[case.dtype] * exact.abs() + (k + 2) * (2.0**-24 * terms + 2.0**-126)
        bound += HALF_SUBNORMAL[case.dtype]
        assert bool(((c.double() - exact).abs() <= bound).all()), f"{rows} rows, {num_threads} threads"


@pytest.mark.parametrize("case", GEMMS, ids=str)
def test_a_gemm_has_nan_and_infinities_where_the_reference_has_them(case: Case, built: Built) -> None:
    n, k = case.shape
    a, b = _random((19, k), case.dtype, 3), _random((n, k), case.dtype, 4)
    a[2, 5], a[4, k - 1], a[18, 0] = math.nan, math.inf, -math.inf
    b[6, 7], b[n - 1, k - 1] = math.inf, math.nan
    c = _run_gemm(case, built(case), a, b, 2).double()
    expected = a.double() @ b.double().T
    assert torch.equal(c.isnan(), expected.isnan())
    assert torch.equal(c.isinf(), expected.isinf())
    assert torch.equal(c[c.isinf()], expected[expected.isinf()])


@pytest.mark.parametrize("case", GEMMS, ids=str)
def test_a_gemm_gives_the_same_bits_for_any_number_of_threads(case: Case, built: Built) -> None:
    n, k = case.shape
    a, b = _random((40, k), case.dtype, 5), _random((n, k), case.dtype, 6)
    first, *others = (_run_gemm(case, built(case), a, b, num_threads) for num_threads in (1, 2, 5))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("case", NORMS, ids=str)
def test_a_norm_is_within_its_bound_at_every_number_of_rows_and_threads(case: Case, built: Built) -> None:
    artifact = built(case)
    (hidden,) = case.shape
    weight = _random((hidden,), case.dtype, 1)
    fused = case.template.startswith("fused")
    for rows, num_threads in ((1, 1), (2, 2), (3, 1), (17, 2), (64, 3)):
        terms = [_random((rows, hidden), case.dtype, seed) for seed in ((2, 3) if fused else (2,))]
        y, whole = _guarded((rows, hidden), case.dtype)
        inputs = [*map(_rows_of_a_wider_tensor, terms), weight]
        assert call_kernel(artifact, case.definition, {"rows": rows}, inputs, [y], num_threads) == 0
        assert whole()
        x = torch.stack(terms).double().sum(0)
        exact = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
        # The sum of two inputs is rounded to float32 before the product; where they cancel that is all that is left.
        absolute = torch.stack(terms).double().abs().sum(0) / x.abs().clamp_min(1e-30) * exact.abs()
        bound = UNIT_ROUNDOFF[case.dtype] * exact.abs() + 2.0**-24 * ((hidden + 8) * exact.abs() + absolute)
        bound += HALF_SUBNORMAL[case.dtype]
        assert bool(((y.double() - exact).abs() <= bound).all()), f"{rows} rows, {num_threads} threads"


@pytest.mark.parametrize("case", NORMS, ids=str)
def test_a_norm_keeps_nan_and_infinities_in_their_rows(case: Case, built: Built) -> None:
    (hidden,) = case.shape
    count = 2 if case.template.startswith("fused") else 1
    terms = [_random((5, hidden), case.dtype, seed) for seed in range(count)]
    terms[0][1, hidden - 1], terms[-1][3, 0] = math.nan, math.inf
    weight = torch.ones(hidden, dtype=DTYPES[case.dtype])
    y, _ = _guarded((5, hidden), case.dtype)
    assert call_kernel(built(case), case.definition, {"rows": 5}, [*terms, weight], [y]) == 0
    assert y[1].isnan().all()
    assert y[3, 0].isnan()  # infinity times 1 / infinity
    assert not y[3, 1:].double().abs().any()
    assert torch.isfinite(y[[0, 2, 4]]).all()


@pytest.mark.parametrize("case", [c for c in CASES if c.shape in (ODD, (HIDDEN,)) and c.dtype == "bfloat16"], ids=str)
def test_no_rows_are_no_work(case: Case, built: Built) -> None:
    definition = case.definition
    rows = [torch.empty(0, case.shape[-1], dtype=DTYPES[case.dtype]) for _ in definition.inputs]
    weight = torch.ones(case.shape, dtype=DTYPES[case.dtype])
    y = torch.empty(0, case.shape[0], dtype=DTYPES[case.dtype])
    assert call_kernel(built(case), definition, {definition.var_axes[0]: 0}, [*rows[1:], weight], [y], 2) == 0


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_are_rounded_to_nearest_even_and_keep_subnormals(isa: str, dtype: str, built: Built) -> None:
    artifact = built(Case(isa, "gemm/matvec", dtype, ODD))
    n, k = ODD
    generator = torch.Generator().manual_seed(7)
    scales = torch.tensor(2.0).pow(torch.randint(-30, 6, (64, 1), generator=generator))
    a = torch.zeros(64, k)
    a[:, :1], a[:, 1:2] = torch.randn(64, 1, generator=generator) * scales, torch.randn(64, 1, generator=generator)
    b = torch.zeros(n, k)
    b[:, 0], b[:, 1] = 1.0, 2.0**-12 if dtype == "float16" else 2.0**-9
    a, b = a.to(DTYPES[dtype]), b.to(DTYPES[dtype])
    c = _run_gemm(Case(isa, "gemm/matvec", dtype, ODD), artifact, a, b, 1)
    once = (a.float() @ b.float().T).to(DTYPES[dtype])  # two terms: the float32 sum is one rounding
    assert torch.equal(c, once)

"""The bound grows with the reduction as the theory of rounding has it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import gemm, rmsnorm

from fibc.bound import growth, reduction_length
from fibc.errors import InputError


def test_the_reduction_is_what_inputs_have_and_outputs_have_not() -> None:
    assert reduction_length(gemm(32, 640, "float32"), {"M": 5}, multi_affine=True) == 640
    assert reduction_length(rmsnorm(512, "float32", fused=True), {"rows": 5}, multi_affine=True) == 1
    assert reduction_length(rmsnorm(512, "float32", fused=True), {"rows": 5}, multi_affine=False) == 512


def test_growth_is_highams_gamma_and_its_probabilistic_form() -> None:
    u = 2.0**-24
    assert growth(1000, u, independent=False) == pytest.approx(1000 * u / (1 - 1000 * u))
    assert growth(10**6, u, independent=True) == pytest.approx(10.0 * 1000 * u, rel=1e-3)
    with pytest.raises(InputError, match="needs length"):
        growth(2**24, u, independent=False)


@given(n=st.integers(1, 10**6))
def test_the_probabilistic_bound_never_exceeds_the_certain_one(n: int) -> None:
    assert 0 < growth(n, 2.0**-24, independent=True) <= growth(n, 2.0**-24, independent=False)

"""Calls by a contract run at full precision, on one device, and in the width that the oracle needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_calls import gemm

from fibc.calls import call_reference, device_of, full_precision
from fibc.upcast import upcast, wide_dtype, widest


def settings() -> tuple[Any, ...]:
    matmul = torch.backends.cuda.matmul
    return (
        torch.get_float32_matmul_precision(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )


@pytest.fixture
def careless() -> Any:
    """Settings of a user who prefers speed."""
    before = settings()
    torch.set_float32_matmul_precision("medium")
    yield settings()
    torch.set_float32_matmul_precision(before[0])


def test_the_reference_multiplies_without_tf32_whatever_the_user_has_set(careless: tuple[Any, ...]) -> None:
    seen = []

    def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(settings())
        return a @ b.T

    values = {"A": torch.randn(2, 8), "B": torch.randn(4, 8)}
    call_reference(gemm(4, 8, "float32"), reference, values)
    assert seen == [("highest", False, False)]
    assert settings() == careless


def test_settings_come_back_after_an_error(careless: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="no"), full_precision():
        raise ValueError("no")
    assert settings() == careless


def test_a_call_is_on_the_device_of_its_tensors() -> None:
    assert device_of([1.5, None, torch.empty(2, device="meta"), torch.empty(2)]) == torch.device("meta")
    assert device_of([3]) == torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "on_cpu", "on_gpu"),
    [
        (torch.bfloat16, torch.float32, torch.float64),
        (torch.float8_e4m3fn, torch.float32, torch.float64),
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float64, torch.float64),
    ],
)
def test_the_oracle_runs_in_a_wider_dtype_on_a_gpu_always_in_the_widest(
    dtype: torch.dtype, on_cpu: torch.dtype, on_gpu: torch.dtype
) -> None:
    assert (wide_dtype(dtype, "cpu"), wide_dtype(dtype, "cuda")) == (on_cpu, on_gpu)


@pytest.mark.parametrize("make", [upcast, widest])
def test_upcast_values_are_private_copies(make: Callable[[Any], Any]) -> None:
    for value in (torch.ones(3, dtype=torch.float64), torch.ones(3).bfloat16(), torch.ones(3, dtype=torch.int32)):
        copy = make(value)
        copy.zero_()
        assert value.sum() == 3
    assert make(2.5) == 2.5

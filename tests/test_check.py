"""The bound accepts what float32 accumulation may do, and refuses what only looks right."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fibc import check, inputs
from fibc.check import ErrorModel, Oracle, Weights
from fibc.errors import InputError
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Status
from fibc.worker import load_text

LOW = ("bfloat16", "float16")
ALL = (*LOW, "float32")

MATMUL = "import torch\n\n\ndef run(A, B):\n    return torch.matmul(A, B.T)\n"
NORM = """
import torch


def run(x, residual, weight):
    total = x.to(torch.float32) + residual.to(torch.float32)
    inverse = torch.rsqrt(total.pow(2).mean(dim=-1, keepdim=True) + 1e-6)
    return (total * inverse * weight.to(torch.float32)).to(x.dtype)
"""
SOFTMAX = "import torch\n\n\ndef run(x):\n    return torch.softmax(x, dim=-1)\n"


def gemm(n: int, k: int, dtype: str, reference: str = MATMUL) -> Definition:
    return Definition.model_validate(
        {
            "name": "gemm",
            "op_type": "gemm",
            "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": n}, "K": {"type": "const", "value": k}},
            "inputs": {"A": {"shape": ["M", "K"], "dtype": dtype}, "B": {"shape": ["N", "K"], "dtype": dtype}},
            "outputs": {"C": {"shape": ["M", "N"], "dtype": dtype}},
            "reference": reference,
        }
    )


def rowwise(names: tuple[str, ...], columns: int, dtype: str, reference: str) -> Definition:
    shapes = {name: ["columns"] if name == "weight" else ["rows", "columns"] for name in names}
    return Definition.model_validate(
        {
            "name": "rowwise",
            "op_type": "rowwise",
            "axes": {"rows": {"type": "var"}, "columns": {"type": "const", "value": columns}},
            "inputs": {name: {"shape": shape, "dtype": dtype} for name, shape in shapes.items()},
            "outputs": {"y": {"shape": ["rows", "columns"], "dtype": dtype}},
            "reference": reference,
        }
    )


def norm(columns: int, dtype: str) -> Definition:
    return rowwise(("x", "residual", "weight"), columns, dtype, NORM)


def reference_of(definition: Definition) -> check.Reference:
    reference: check.Reference = load_text("reference", definition.reference).run
    return reference


class Bench:
    """A definition at one size: makes inputs, and compares what a kernel returns with the oracle."""

    def __init__(self, definition: Definition, rows: int) -> None:
        self.definition = definition
        self.axes = {definition.var_axes[0]: rows}
        reference = reference_of(definition)
        self.dense: Mapping[str, Any] = inputs.make(definition, self.axes, 0)
        self.model = check.probe(definition, reference, self.dense)
        self.oracle = Oracle(definition, reference, self.model, Weights(definition))

    def judge(
        self, kernel: Callable[..., Tensor], values: Mapping[str, Any] | None = None, *, independent: bool | None = None
    ) -> check.Agreement:
        given_inputs = self.dense if values is None else values
        known = values is None if independent is None else independent
        expected = self.oracle.expect(given_inputs, self.axes, independent=known)
        return check.compare(self.definition, self.axes, [kernel(*given_inputs.values())], expected)


def matmul_in(accumulator: torch.dtype, step: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a GEMM that rounds its sum to ``accumulator`` after every ``step`` terms, exact in between."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(a.shape[0], b.shape[0], dtype=accumulator)
        for begin in range(0, a.shape[1], step):
            part = slice(begin, begin + step)
            total = (total.double() + a[:, part].double() @ b[:, part].double().T).to(accumulator)
        return total.to(a.dtype)

    return kernel


@pytest.mark.parametrize("dtype", ALL)
def test_a_gemm_is_found_to_be_multi_affine_and_a_norm_is_not(dtype: str) -> None:
    assert Bench(gemm(16, 64, dtype), 3).model == ErrorModel(multi_affine=True, accepts_upcast=True)
    assert Bench(norm(64, dtype), 3).model == ErrorModel(multi_affine=False, accepts_upcast=True)
    assert not Bench(rowwise(("x",), 64, dtype, SOFTMAX), 3).model.multi_affine


def test_a_bias_that_is_subtracted_is_not_taken_for_a_sum_of_positive_terms() -> None:
    reference = "def run(x, residual):\n    return x - residual\n"
    assert not Bench(rowwise(("x", "residual"), 64, "float32", reference), 3).model.multi_affine
    added = "def run(x, residual):\n    return x + residual\n"
    assert Bench(rowwise(("x", "residual"), 64, "float32", added), 3).model.multi_affine


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("step", [1, 32])
def test_float32_accumulation_passes_in_a_long_reduction(dtype: str, step: int) -> None:
    bench = Bench(gemm(48, 14336, dtype), 4)
    agreement = bench.judge(matmul_in(torch.float32, step))
    assert agreement.status is Status.PASSED, agreement.message
    assert 0.0 < agreement.max_bound_ratio < 1.0


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("step", [1, 32, 128])
def test_accumulation_in_the_inputs_precision_fails_in_a_long_reduction(dtype: str, step: int) -> None:
    bench = Bench(gemm(48, 14336, dtype), 4)
    agreement = bench.judge(matmul_in(getattr(torch, dtype), step))
    assert agreement.status is Status.INCORRECT_NUMERICAL
    assert agreement.max_bound_ratio > 1.0


def test_bfloat16_accumulation_fails_at_14336_on_any_inputs_by_the_worst_case_bound() -> None:
    bench = Bench(gemm(48, 14336, "bfloat16"), 4)
    assert bench.judge(matmul_in(torch.bfloat16, 1), bench.dense).status is Status.INCORRECT_NUMERICAL
    ones = {name: torch.ones_like(value) for name, value in bench.dense.items()}
    assert bench.judge(matmul_in(torch.bfloat16, 1), ones).status is Status.INCORRECT_NUMERICAL
    assert bench.judge(matmul_in(torch.float32, 1), ones).status is Status.PASSED


def test_a_float32_gemm_in_half_the_mantissa_fails() -> None:
    """What TF32 does: 10 bits of each factor."""

    def tf32(a: Tensor, b: Tensor) -> Tensor:
        return (a.half().double() @ b.half().double().T).float()

    bench = Bench(gemm(64, 4096, "float32"), 8)
    agreement = bench.judge(tf32)
    assert agreement.status is Status.INCORRECT_NUMERICAL
    assert "rms" in agreement.message
    assert bench.judge(lambda a, b: a @ b.T).status is Status.PASSED


@pytest.mark.parametrize("dtype", ALL)
def test_torchs_own_kernels_pass_on_dense_and_adversarial_inputs(dtype: str) -> None:
    def fused(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x + residual, (x.shape[-1],), weight, 1e-6)

    natives: list[tuple[Bench, Callable[..., Tensor]]] = [
        (Bench(gemm(96, 512, dtype), 5), lambda a, b: a @ b.T),
        (Bench(norm(512, dtype), 5), fused),
    ]
    for bench, native in natives:
        agreement = bench.judge(native)
        assert agreement.status is Status.PASSED, agreement.message
        for name, values in inputs.adversarial(bench.definition, bench.axes, 0):
            agreement = bench.judge(native, values)
            assert agreement.status is Status.PASSED, (name, agreement.message)


@pytest.mark.parametrize("dtype", ALL)
def test_zeros_copies_and_halves_fail_on_dense_and_adversarial_inputs(dtype: str) -> None:
    bench = Bench(norm(512, dtype), 6)

    def right(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x + residual, (x.shape[-1],), weight, 1e-6)

    def half(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([right(x, residual, weight)[:3], torch.full_like(x[3:], math.nan)])

    wrong: dict[str, Callable[..., Tensor]] = {
        "zeros": lambda x, residual, weight: torch.zeros_like(x),
        "copy": lambda x, residual, weight: x.clone(),
        "half": half,
        "without the sum": lambda x, residual, weight: right(x, torch.zeros_like(x), weight),
        "without the weight": lambda x, residual, weight: right(x, residual, torch.ones_like(weight)),
    }
    adversarial = dict(inputs.adversarial(bench.definition, bench.axes, 0))
    for what, kernel in wrong.items():
        assert bench.judge(kernel).status is Status.INCORRECT_NUMERICAL, what
        for name in ("huge", "cancelling", "one_hot_row", "nan"):
            assert bench.judge(kernel, adversarial[name]).status is Status.INCORRECT_NUMERICAL, (what, name)


@pytest.mark.parametrize("dtype", ALL)
def test_outputs_as_small_as_a_wide_softmax_are_still_compared(dtype: str) -> None:
    """max |y| is 4e-6 over 393216 columns: an absolute tolerance of 1e-2 would pass zeros."""
    bench = Bench(rowwise(("x",), 393216, dtype, SOFTMAX), 1)
    small = {"x": bench.dense["x"] * 0.25}
    wrong: list[Callable[[Tensor], Tensor]] = [
        torch.zeros_like,
        lambda x: x.clone(),
        lambda x: torch.full_like(x, 1 / x.shape[-1]),
        lambda x: torch.softmax(x, -1) * 1.07,
    ]
    for independent in (False, True):
        assert bench.judge(lambda x: torch.softmax(x, -1), small, independent=independent).status is Status.PASSED
        for kernel in wrong:
            assert bench.judge(kernel, small, independent=independent).status is Status.INCORRECT_NUMERICAL


def test_a_message_says_where_what_and_what_is_accepted() -> None:
    bench = Bench(gemm(32, 64, "float32"), 5)

    def off_by_one_element(a: Tensor, b: Tensor) -> Tensor:
        c = a @ b.T
        c[3, 17] = 4.5
        return c

    agreement = bench.judge(off_by_one_element)
    assert agreement.status is Status.INCORRECT_NUMERICAL
    wanted = float((bench.dense["A"] @ bench.dense["B"].T)[3, 17])
    assert agreement.message.startswith("output C[3, 17]: must be within ")
    assert f"of the reference {wanted:.4g}"[:-1] in agreement.message
    assert agreement.message.endswith("got 4.5")
    assert agreement.max_absolute_error == pytest.approx(abs(4.5 - wanted), rel=1e-4)


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        (math.nan, Status.PASSED),
        (0.0, Status.INCORRECT_NUMERICAL),
        (math.inf, Status.INCORRECT_NUMERICAL),
    ],
)
def test_nan_must_be_where_the_reference_has_it(seen: float, status: Status) -> None:
    bench = Bench(gemm(32, 64, "float32"), 5)
    values = {**bench.dense, "A": bench.dense["A"].clone()}
    values["A"][2, 5] = math.nan

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        c = a @ b.T
        c[2] = seen
        return c

    assert bench.judge(kernel, values).status is status
    assert bench.judge(lambda a, b: torch.full((5, 32), math.nan), values).status is Status.INCORRECT_NUMERICAL


@pytest.mark.parametrize("replaced", [1e30, math.nan, "other sign"])
def test_infinity_must_be_where_the_reference_has_it(replaced: float | str) -> None:
    bench = Bench(gemm(32, 64, "bfloat16"), 5)
    values = {**bench.dense, "A": bench.dense["A"].clone()}
    values["A"][2, 5] = math.inf

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        c = a.float() @ b.float().T
        row = c[2].clone()
        assert bool(row.isinf().all())
        c[2, 7] = -row[7] if isinstance(replaced, str) else replaced
        return c.to(a.dtype)

    assert bench.judge(lambda a, b: (a.float() @ b.float().T).to(a.dtype), values).status is Status.PASSED
    assert bench.judge(kernel, values).status is Status.INCORRECT_NUMERICAL


def test_an_infinity_where_the_reference_is_finite_fails() -> None:
    bench = Bench(gemm(32, 64, "float16"), 5)

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        c = a @ b.T
        c[0, 0] = math.inf
        return c

    assert bench.judge(kernel).status is Status.INCORRECT_NUMERICAL


def test_overflow_of_the_output_is_an_infinity_and_either_one_is_right_at_the_threshold() -> None:
    bench = Bench(gemm(2, 4, "float16"), 1)
    values = {"A": torch.full((1, 4), 128.0).half(), "B": torch.full((2, 4), 128.0).half()}
    values["B"][1] = 127.9375  # 4 * 128 * 128 = 65536 overflows; 65504 is the largest float16

    def kernel(first: float, second: float) -> Callable[..., Tensor]:
        return lambda a, b: torch.tensor([[first, second]], dtype=torch.float16)

    assert bench.judge(kernel(math.inf, 65504.0), values).status is Status.PASSED
    assert bench.judge(kernel(math.inf, math.inf), values).status is Status.PASSED
    assert bench.judge(kernel(math.inf, 60000.0), values).status is Status.INCORRECT_NUMERICAL
    assert bench.judge(kernel(math.inf, -math.inf), values).status is Status.INCORRECT_NUMERICAL
    values["B"][0] = 256.0
    assert bench.judge(kernel(65504.0, 65504.0), values).status is Status.INCORRECT_NUMERICAL


def test_nothing_is_asked_where_finite_terms_overflow_float32() -> None:
    bench = Bench(gemm(2, 4, "float32"), 1)
    values = {
        "A": torch.tensor([[3e38, 3e38, -3e38, -3e38]]),
        "B": torch.tensor([[1.0, 1.0, 1.0, 1.0], [1e-38, 0.0, 0.0, 0.0]]),
    }

    def kernel(first: float, second: float) -> Callable[..., Tensor]:
        return lambda a, b: torch.tensor([[first, second]])

    # In float64 the first sum is 0; in float32 it is 0, an infinity or NaN, as the order has it.
    assert bench.judge(kernel(0.0, 3.0), values).status is Status.PASSED
    assert bench.judge(kernel(math.nan, 0.0), values).status is Status.INCORRECT_NUMERICAL


def test_terms_that_are_subnormal_in_float32_may_be_flushed_and_others_may_not() -> None:
    bench = Bench(gemm(4, 64, "bfloat16"), 2)
    a = torch.full((2, 64), 1e-39).bfloat16()
    a[1] = 1e-30
    values = {"A": a, "B": torch.ones(4, 64).bfloat16()}

    def flushing(a: Tensor, b: Tensor) -> Tensor:
        return (torch.where(a.abs() < 2.0**-126, 0.0, a.float()) @ b.float().T).to(torch.bfloat16)

    assert bench.judge(flushing, values).status is Status.PASSED
    assert bench.judge(lambda a, b: (a.float() @ b.float().T).bfloat16(), values).status is Status.PASSED
    zeros = bench.judge(lambda a, b: torch.zeros(2, 4).bfloat16(), values)
    assert zeros.message.startswith("output C[1, 0]")


def test_shape_dtype_and_number_of_outputs_are_judged_first() -> None:
    bench = Bench(gemm(32, 64, "bfloat16"), 5)
    transposed = bench.judge(lambda a, b: b @ a.T)
    assert transposed.status is Status.INCORRECT_SHAPE
    assert transposed.message == "output C: shape must be [5, 32], got [32, 5]"
    wide = bench.judge(lambda a, b: a.float() @ b.float().T)
    assert wide.status is Status.INCORRECT_DTYPE
    assert wide.message == "output C: dtype must be bfloat16, got float32"
    expected = bench.oracle.expect(bench.dense, bench.axes, independent=True)
    assert check.compare(bench.definition, bench.axes, [], expected).status is Status.INCORRECT_SHAPE


@pytest.mark.parametrize("at", [0, 15, 16, 63, 64, 79])
def test_one_wrong_element_is_found_wherever_it_is_in_an_output_of_many_chunks(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "CHUNK_ELEMS", 16)  # the output has 80
    bench = Bench(gemm(16, 64, "float32"), 5)
    assert bench.judge(lambda a, b: a @ b.T).status is Status.PASSED

    def wrong(a: Tensor, b: Tensor) -> Tensor:
        product = a @ b.T
        product.view(-1)[at] += 1.0
        return product

    agreement = bench.judge(wrong)
    assert agreement.status is Status.INCORRECT_NUMERICAL
    assert agreement.message.startswith(f"output C[{at // 16}, {at % 16}]: must be within")
    assert agreement.max_absolute_error == pytest.approx(1.0, rel=1e-3)


def test_the_last_output_is_judged_as_the_first() -> None:
    text = "def run(x, residual):\n    return x + residual, x - residual\n"
    plain = rowwise(("x", "residual"), 32, "float32", text)
    document = plain.model_dump(mode="json", by_alias=True)
    document["outputs"] = {"sum": document["outputs"]["y"], "difference": document["outputs"]["y"]}
    definition = Definition.model_validate(document)
    bench = Bench(definition, 3)
    x, residual = bench.dense["x"], bench.dense["residual"]
    expected = bench.oracle.expect(bench.dense, bench.axes, independent=True)

    def judge(*outputs: Tensor) -> check.Agreement:
        return check.compare(definition, bench.axes, outputs, expected)

    assert judge(x + residual, x - residual).status is Status.PASSED
    assert judge(x + residual, x + residual).message.startswith("output difference[0, 0]: must be within")
    assert judge(x - residual, x - residual).message.startswith("output sum[0, 0]: must be within")


def test_an_output_on_another_device_is_no_output() -> None:
    bench = Bench(gemm(32, 64, "bfloat16"), 5)
    elsewhere = bench.judge(lambda a, b: (a @ b.T).to("meta"))
    assert elsewhere.status is Status.INCORRECT_DTYPE
    assert elsewhere.message == "output C: device must be cpu, got meta"


def test_integer_outputs_must_be_equal() -> None:
    definition = Definition.model_validate(
        {
            "name": "largest",
            "op_type": "sampling",
            "axes": {"rows": {"type": "var"}, "columns": {"type": "const", "value": 40}},
            "inputs": {"x": {"shape": ["rows", "columns"], "dtype": "float32"}},
            "outputs": {"at": {"shape": ["rows"], "dtype": "int64"}},
            "reference": "def run(x):\n    return x.argmax(-1)\n",
        }
    )
    bench = Bench(definition, 7)
    assert bench.judge(lambda x: x.argmax(-1)).status is Status.PASSED
    agreement = bench.judge(lambda x: x.argmax(-1) + (torch.arange(7) == 4))
    assert agreement.status is Status.INCORRECT_NUMERICAL
    assert agreement.message.startswith("output at[4]: must equal the reference")


def test_a_reference_that_refuses_upcast_inputs_runs_as_declared_and_gets_one_rounding_more() -> None:
    strict = "import torch\n\n\ndef run(A, B):\n    assert A.dtype == torch.bfloat16\n    return A @ B.T\n"
    bench = Bench(gemm(32, 256, "bfloat16", strict), 5)
    assert bench.model == ErrorModel(multi_affine=False, accepts_upcast=False)
    expected = bench.oracle.expect(bench.dense, bench.axes, independent=True)[0]
    assert expected.bound is not None
    assert bool((expected.bound >= 5 * 2.0**-8 * expected.values.abs()).all())
    assert bench.judge(lambda a, b: (a.float() @ b.float().T).bfloat16()).status is Status.PASSED
    assert bench.judge(lambda a, b: torch.zeros(5, 32).bfloat16()).status is Status.INCORRECT_NUMERICAL


def test_a_reference_that_rounds_at_its_end_is_allowed_one_rounding_more() -> None:
    rounding = "import torch\n\n\ndef run(A, B):\n    return torch.matmul(A.float(), B.float().T).to(torch.bfloat16)\n"
    plain = Bench(gemm(32, 256, "bfloat16"), 5)
    rounded = Bench(gemm(32, 256, "bfloat16", rounding), 5)
    wider = rounded.oracle.expect(rounded.dense, rounded.axes, independent=True)[0]
    exact = plain.oracle.expect(plain.dense, plain.axes, independent=True)[0]
    assert wider.bound is not None
    assert exact.bound is not None
    torch.testing.assert_close(wider.bound - exact.bound, 2.0**-8 * exact.values.abs(), rtol=0.05, atol=1e-5)


def test_a_reference_that_writes_into_its_arguments_does_not_change_later_oracles() -> None:
    careless = "import torch\n\n\ndef run(A, B):\n    C = torch.matmul(A, B.T)\n    B.zero_()\n    return C\n"
    bench = Bench(gemm(32, 256, "bfloat16", careless), 5)
    first = bench.oracle.expect(bench.dense, bench.axes, independent=True)[0]
    again = bench.oracle.expect(bench.dense, bench.axes, independent=True)[0]
    assert torch.equal(first.values, again.values)
    assert float(first.values.abs().max()) > 0.1


def test_a_reference_of_another_form_is_bad_input() -> None:
    transposed = "def run(A, B):\n    return B @ A.T\n"
    bench = Bench(gemm(32, 64, "float32", transposed), 5)
    with pytest.raises(InputError, match=r"gemm: reference: output C: shape must be \[5, 32\], got \[32, 5\]"):
        bench.oracle.expect(bench.dense, bench.axes, independent=True)
    with pytest.raises(InputError, match=r"outputs: must be 1, got 2"):
        check.as_outputs(bench.definition, (torch.zeros(1), torch.zeros(1)))
    with pytest.raises(InputError, match=r"outputs.C: must be a tensor, got str"):
        check.as_outputs(bench.definition, "C")


@settings(max_examples=25)
@given(
    rows=st.integers(1, 6),
    k=st.integers(1, 200),
    exponent=st.integers(-20, 20),
    dtype=st.sampled_from(ALL),
    seed=st.integers(0, 2**31),
)
def test_correctly_rounded_outputs_pass_at_every_scale(rows: int, k: int, exponent: int, dtype: str, seed: int) -> None:
    bench = Bench(gemm(8, k, dtype), rows)
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    scale = 2.0 ** (exponent if dtype != "float16" else exponent / 4)
    values = {
        "A": (torch.randn(rows, k, generator=generator) * scale).to(kind),
        "B": torch.randn(8, k, generator=generator).to(kind),
    }
    exact = values["A"].double() @ values["B"].double().T
    agreement = bench.judge(lambda a, b: exact.to(kind), values, independent=True)
    assert agreement.status is Status.PASSED, agreement.message
    assert agreement.max_absolute_error <= float(exact.abs().max()) * torch.finfo(kind).eps
    shifted = bench.judge(lambda a, b: (exact * 1.2).to(kind), values, independent=True)
    assert shifted.status is Status.INCORRECT_NUMERICAL

"""The error that an output may have: a bound of each element that follows from the operator's semantics.

The reference y* runs on upcast inputs (16 bits and fewer to float32, float32 to float64; on a GPU all to float64). An
output y is right where, for every element,

    |y - y*|  <=  r u_out |y*|  +  2 g(n, u_acc) T  +  floor

* u is a unit roundoff, half the distance from 1 to the next number: 2^-8 for bfloat16, 2^-11 float16, 2^-24 float32.
* r counts roundings to the output's dtype. 1 for a multi-affine operator (a GEMM rounds once). 4 for any other: such an
  operator may keep intermediates in that dtype, as torch's own kernels do. A fused add + norm that does so rounds the
  sum (its own error, and once more through the row's norm), the normalised value, and the product with the weight. One
  more where the reference itself returns a low precision, or runs only as declared.
* n is the length of the reduction: the product of the axes of inputs that no output has, and for operators that are not
  multi-affine (a norm reduces along an axis that it keeps) times the longest last axis of an input.
* u_acc = 2^-24: accumulation in float32 is what a contract in float32, bfloat16 or float16 is entitled to.
* g is gamma_n = n u / (1 - n u), which holds for every order of summation and every input: N. J. Higham, Accuracy and
  Stability of Numerical Algorithms, 2nd ed., SIAM 2002, section 3.1. For independent random inputs it is the much
  smaller exp((lambda sqrt(n) u + n u^2) / (1 - u)) - 1: N. J. Higham and T. Mary, A new approach to probabilistic
  rounding error analysis, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4; with lambda = 10 it is exceeded with a
  probability under 1e-10 for 10^11 operations. The factor 2: the candidate's own error, and the oracle's.
* T is the magnitude of the terms. Multi-affine operators (found by a probe, not by name): the reference on absolute
  values, |A| |B|^T for a GEMM. Others: the larger of |y*| and the rms of its row, because a norm, a softmax or an
  attention scales or averages a row by one accumulated number.
* floor = (n + 2) 2^-126 + half the smallest subnormal of the output: arithmetic that treats float32's subnormals as
  zero is accepted (vdpbf16ps and AMX tiles do, whatever MXCSR says), so terms with a subnormal factor count as error.

On independent random inputs the root mean square of the errors is bounded as well, by
1.5 sqrt(r u_out^2 / 3 + n u_acc^2) times that of y* (and as much of a subnormal step): rounding errors are uniform,
hence 1/3, and independent, and a sum of n terms, in the worst order, wanders by 0.41 sqrt(n) u (the partial sums'
squares add up to n / 2 of the last). This finds low-precision accumulators that hide inside the elementwise bound.

NaN must be where the reference has it and nowhere else; infinities alike, except within the bound of the overflow
threshold, and where the terms overflow float32 although inputs are finite: there the result depends on the order, so
nothing is asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fibc.calls import axis_values
from fibc.errors import InputError
from fibc.schema.definition import Definition

U_ACC = 2.0**-24
"""Unit roundoff of the accumulator, float32."""

LAMBDA = 10.0
"""Deviations, in the probabilistic bound, beyond which nothing is explained by rounding."""

ROUNDINGS_OTHER = 4
"""Roundings to the output's dtype allowed to an operator that is not multi-affine (see above)."""

RMS_SAFETY = 1.5
RMS_MIN_ELEMS = 64
"""Fewer errors say nothing about their mean square."""

FLOAT32_TINY = 2.0**-126
FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Expected:
    """One output of the oracle.

    Attributes:
        values: y*, float32 or float64; the output's own dtype where that is not floating-point.
        bound: Accepted |y - y*| per element, float32; None where equality is asked.
        rms_bound: Accepted rms of the errors; None where inputs are not independent.
        open: Elements of which nothing is asked (order-dependent overflow); None where there are none.
        all_finite: Every value is finite and far from the output's overflow.
    """

    name: str
    dtype: torch.dtype
    values: Tensor
    bound: Tensor | None
    rms_bound: float | None
    open: Tensor | None
    all_finite: bool

    @property
    def has_nan(self) -> bool:
        return bool(self.values.isnan().any()) if self.values.is_floating_point() else False


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to ``dtype``: half its epsilon."""
    return float(torch.finfo(dtype).eps) / 2


def growth(n: int, u: float, *, independent: bool) -> float:
    """Return the relative error that a reduction of ``n`` terms may accumulate: gamma_n, or its probabilistic form.

    Raises:
        InputError: If ``n u`` is 1 or more, where no bound exists.
    """
    if n * u >= 1:
        raise InputError(f"reduction: needs length * {u:g} < 1, got a length of {n} (accepted: up to {int(1 / u) - 1})")
    gamma = n * u / (1 - n * u)
    if not independent:
        return gamma
    return min(gamma, math.expm1((LAMBDA * math.sqrt(n) * u + n * u * u) / (1 - u)))


def reduction_length(definition: Definition, axes: Mapping[str, int], *, multi_affine: bool) -> int:
    """Return n of the bound, at least 1."""
    values = axis_values(definition, axes)
    shapes = [spec.shape for spec in definition.inputs.values() if spec.shape]
    kept = {axis for spec in definition.outputs.values() for axis in spec.shape or ()}
    reduced = {axis for shape in shapes for axis in shape if axis not in kept}
    n = math.prod(values[axis] for axis in reduced)
    if not multi_affine:
        n *= max((values[shape[-1]] for shape in shapes), default=1)
    return max(1, n)


@dataclass(frozen=True)
class Magnitude:
    """Sums of the absolute terms of one output.

    Attributes:
        terms: All of them.
        finite_terms: Those without NaN and infinity; None where ``terms`` is finite.
        flushed_terms: Those with a factor that is subnormal in float32; None where there are none.
    """

    terms: Tensor
    finite_terms: Tensor | None
    flushed_terms: Tensor | None


def expected_output(
    name: str, dtype: torch.dtype, value: Tensor, magnitude: Magnitude | None, *, n: int, independent: bool
) -> Expected:
    """Return one expected output with its bound.

    Args:
        value: y*.
        magnitude: None for operators that are not multi-affine.
        n: Length of the reduction.
        independent: Inputs are independent random numbers.
    """
    if not dtype.is_floating_point:
        return Expected(name, dtype, value.to(dtype).contiguous(), None, None, None, True)
    limits = torch.finfo(dtype)
    u_out = unit_roundoff(dtype)
    exact = value if value.dtype == torch.float64 else value.to(torch.float32)
    roundings = ROUNDINGS_OTHER if magnitude is None else 1
    if not value.is_floating_point() or torch.finfo(value.dtype).eps >= limits.eps:
        roundings += 1  # it rounds at its end, or runs only as declared
    if magnitude is None:
        row_rms = exact.square().mean(-1, keepdim=True).sqrt() if exact.dim() else exact.abs()
        terms = torch.maximum(exact.abs(), row_rms)
    else:
        terms = magnitude.terms.abs()
    bound = exact.abs() * (roundings * u_out)
    half_step = limits.smallest_normal * limits.eps / 2
    bound += (n + 2) * FLOAT32_TINY + half_step
    bound += terms * (2 * growth(n, U_ACC, independent=independent))
    open_ = None
    if magnitude is not None and magnitude.flushed_terms is not None:
        bound += magnitude.flushed_terms.abs()
    if magnitude is not None and magnitude.finite_terms is not None:
        overflow = ~(magnitude.finite_terms.abs() <= FLOAT32_MAX)
        open_ = overflow if bool(overflow.any()) else None
    bound = torch.where(torch.isfinite(exact), torch.nan_to_num(bound, 0.0), 0.0).to(torch.float32)
    all_finite = bool((exact.abs() + bound < limits.max).all())  # False where a value is NaN
    rms_bound = None
    if independent and all_finite and exact.numel() >= RMS_MIN_ELEMS:
        square = float(exact.square().mean(dtype=torch.float64))
        relative, absolute = roundings * u_out**2 / 3 + n * U_ACC**2, roundings * half_step**2 / 3
        rms_bound = RMS_SAFETY * math.sqrt(relative * square + absolute)
    return Expected(name, dtype, exact.contiguous(), bound.contiguous(), rms_bound, open_, all_finite)

"""Outputs against the reference, within a bound that follows from the operator's semantics.

The reference y* runs on upcast inputs (16 bits and fewer to float32, float32 to float64). An output y is right where,
for every element,

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fibc.errors import InputError
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Status

Value = Tensor | int | float | bool | None
"""An argument of a call."""

Reference = Callable[..., object]
"""A definition's reference function."""

Change = Callable[[Value], Value]
"""Makes other inputs from upcast ones: their absolute values, for example."""

Test = Callable[[Tensor], Tensor]
"""Asks a question of each element."""

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

_CHUNK_ELEMS = 1 << 18
"""Elements compared at once: a dozen passes over 1 MiB stay in the second-level cache."""


@dataclass(frozen=True)
class ErrorModel:
    """What rounding may do to one definition.

    Attributes:
        multi_affine: Affine in each floating-point input, and dominated by its value on absolute inputs.
        accepts_upcast: The reference takes upcast inputs; else it runs as declared.
    """

    multi_affine: bool
    accepts_upcast: bool


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


@dataclass(frozen=True)
class Agreement:
    """Outputs compared with the oracle.

    Attributes:
        status: PASSED or one of the three INCORRECT ones.
        message: Where, the law, what was seen and what is accepted; empty where it passed.
        max_absolute_error: Over elements where both are finite.
        max_relative_error: Over those with y* != 0.
        max_bound_ratio: Error over bound.
    """

    status: Status
    message: str
    max_absolute_error: float = 0.0
    max_relative_error: float = 0.0
    max_bound_ratio: float = 0.0


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


def axis_values(definition: Definition, axes: Mapping[str, int]) -> dict[str, int]:
    """Return every axis of the definition with its value, constants included."""
    return {**definition.const_axes, **axes}


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


def upcast(value: Value) -> Value:
    """Return a private copy of ``value``: floating-point tensors of up to 16 bits as float32, float32 as float64."""
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        return value.clone()
    if value.dtype == torch.float64:
        return value.clone()
    return value.to(torch.float64 if value.dtype == torch.float32 else torch.float32)


def as_outputs(definition: Definition, result: object) -> tuple[Tensor, ...]:
    """Return what a reference or a native returned as one tensor per output.

    Raises:
        InputError: If the number of outputs is another one or one of them is no tensor.
    """
    if isinstance(result, Mapping):
        missing = [name for name in definition.outputs if name not in result]
        if missing:
            raise InputError(
                f"{definition.name}: outputs: must hold {', '.join(definition.outputs)}, got {', '.join(result)}"
            )
        result = tuple(result[name] for name in definition.outputs)
    items = tuple(result) if isinstance(result, tuple | list) else (result,)
    if len(items) != len(definition.outputs):
        raise InputError(f"{definition.name}: outputs: must be {len(definition.outputs)}, got {len(items)}")
    tensors = []
    for name, item in zip(definition.outputs, items, strict=True):
        if isinstance(item, bool | int | float):
            tensors.append(torch.tensor(item))
        elif isinstance(item, Tensor):
            tensors.append(item)
        else:
            raise InputError(f"{definition.name}: outputs.{name}: must be a tensor, got {type(item).__name__}")
    return tuple(tensors)


def call_reference(definition: Definition, reference: Reference, inputs: Mapping[str, Value]) -> tuple[Tensor, ...]:
    """Return the reference's outputs; it may change its arguments, so hand it private copies."""
    with torch.no_grad():
        return as_outputs(definition, reference(*(inputs[name] for name in definition.inputs)))


def form_problem(
    definition: Definition, axes: Mapping[str, int], outputs: Sequence[Tensor], *, dtypes: bool = True
) -> tuple[Status, str] | None:
    """Return why the outputs' number, shapes or dtypes break the contract, or None."""
    values = axis_values(definition, axes)
    if len(outputs) != len(definition.outputs):
        return Status.INCORRECT_SHAPE, f"outputs: must be {len(definition.outputs)}, got {len(outputs)}"
    for (name, spec), output in zip(definition.outputs.items(), outputs, strict=True):
        shape = tuple(values[axis] for axis in spec.shape or ())
        if tuple(output.shape) != shape:
            return Status.INCORRECT_SHAPE, f"output {name}: shape must be {list(shape)}, got {list(output.shape)}"
        if dtypes and output.dtype != torch_dtype(spec.dtype):
            return Status.INCORRECT_DTYPE, f"output {name}: dtype must be {spec.dtype}, got {str(output.dtype)[6:]}"
    return None


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a definition's dtype name (``float8_e4m3fn``, ``bool``).

    Raises:
        InputError: If torch has none (``float4_e2m1``).
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"dtype: torch has no {name} (accepted: names of torch dtypes)")
    return dtype


def probe(definition: Definition, reference: Reference, inputs: Mapping[str, Value]) -> ErrorModel:
    """Find out how rounding may enter: run the reference on sums, on zeros and on absolute values of ``inputs``.

    Args:
        inputs: Dense inputs of one call, small: the reference runs about three times per floating-point input.
    """
    wide = {name: upcast(value) for name, value in inputs.items()}

    def run(changed: Mapping[str, Value]) -> tuple[Tensor, ...]:
        private = {name: value.clone() if isinstance(value, Tensor) else value for name, value in changed.items()}
        return call_reference(definition, reference, private)

    try:
        base = run(wide)
    except Exception:  # noqa: BLE001  whatever it raises on dtypes that it does not declare: it then runs as declared
        return ErrorModel(multi_affine=False, accepts_upcast=False)
    try:
        multi_affine = _is_multi_affine(run, wide, base)
    except Exception:  # noqa: BLE001  sums and zeros may be no lawful inputs, of probabilities for example
        multi_affine = False
    return ErrorModel(multi_affine, accepts_upcast=True)


def _is_multi_affine(
    run: Callable[[Mapping[str, Value]], tuple[Tensor, ...]], wide: Mapping[str, Value], base: Sequence[Tensor]
) -> bool:
    """Return whether each input enters affinely, and absolute inputs give the sum of absolute terms.

    An input is affine where f(x + x') - f(x) - f(x') + f(0) vanishes, x' being x in reverse order.
    """
    if not all(output.is_floating_point() for output in base):
        return False
    slack = 1e-3 + 8 * max(unit_roundoff(output.dtype) for output in base)
    for name, value in wide.items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() == 0:
            continue
        other = value.flip(tuple(range(value.dim()))) if value.dim() else 2 * value
        sums, others, zeros = (
            run({**wide, name: changed}) for changed in (value + other, other, torch.zeros_like(value))
        )
        for of_sum, of_value, of_other, of_zero in zip(sums, base, others, zeros, strict=True):
            rest = of_sum - of_value - of_other + of_zero
            if rest.numel() and not bool(rest.abs().amax() <= slack * of_sum.abs().amax()):
                return False
    magnitudes = run({name: _absolute(value) for name, value in wide.items()})
    return all(
        bool((output.abs() <= magnitude * (1 + slack) + FLOAT32_TINY).all())
        for output, magnitude in zip(base, magnitudes, strict=True)
    )


def _widest(value: Value) -> Value:
    return (
        value.to(torch.float64, copy=True) if isinstance(value, Tensor) and value.is_floating_point() else upcast(value)
    )


def _unchanged(value: Value) -> Value:
    return value


def _absolute(value: Value) -> Value:
    return value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value


def _without_specials(value: Value) -> Value:
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.nan_to_num(value, 0.0, 0.0, 0.0).abs_()
    return value


def _flushed(value: Value) -> Value:
    """Absolute values with float32's subnormals as zero."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.where(value.abs() < FLOAT32_TINY, 0.0, value).abs_()
    return value


def _is_special(tensor: Tensor) -> Tensor:
    return ~torch.isfinite(tensor)


def _is_subnormal(tensor: Tensor) -> Tensor:
    return (tensor != 0) & (tensor.abs() < FLOAT32_TINY)


@dataclass(frozen=True)
class _Upcast:
    """A weight and what was made of it; writes into either change its version."""

    weight: Tensor
    wide: Tensor
    versions: tuple[int, int]


class Weights:
    """Upcast copies of a definition's weights (inputs of constant axes), made once for many oracles."""

    def __init__(self, definition: Definition) -> None:
        self._names = {
            name
            for name, spec in definition.inputs.items()
            if spec.shape and not any(axis in definition.var_axes for axis in spec.shape)
        }
        self._known: dict[tuple[str, Change], _Upcast] = {}
        self._answers: dict[tuple[str, Test], tuple[Tensor, int, bool]] = {}

    def wide(self, name: str, value: Value, change: Change) -> Value:
        """Return ``change(upcast(value))``, the same tensor for the same weight."""
        if name not in self._names or not isinstance(value, Tensor):
            return change(upcast(value))
        known = self._known.get((name, change))
        if known is not None and known.weight is value and known.versions == (value._version, known.wide._version):
            return known.wide
        wide = change(upcast(value))
        assert isinstance(wide, Tensor)
        self._known[name, change] = _Upcast(value, wide, (value._version, wide._version))
        return wide

    def has(self, name: str, value: Value, test: Test) -> bool:
        """Return whether ``test`` holds for any element of a floating-point tensor, looked at once for a weight."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return False
        known = self._answers.get((name, test))
        if known is not None and known[0] is value and known[1] == value._version:
            return known[2]
        answer = bool(test(value).any())
        if name in self._names:
            self._answers[name, test] = value, value._version, answer
        return answer

    def hold(self, inputs: Mapping[str, Value]) -> None:
        """Make what oracles of ordinary inputs need."""
        for name in self._names:
            for change in (_unchanged, _absolute):
                self.wide(name, inputs[name], change)
            for test in (_is_special, _is_subnormal):
                self.has(name, inputs[name], test)


class Oracle:
    """The reference of one definition with its error model."""

    def __init__(self, definition: Definition, reference: Reference, model: ErrorModel, weights: Weights) -> None:
        self._definition = definition
        self._reference = reference
        self._model = model
        self._weights = weights

    def _run(self, inputs: Mapping[str, Value], change: Change) -> tuple[Tensor, ...]:
        """Return the reference's outputs on changed upcast inputs.

        Inputs that are subnormal in float32 run in float64, where they are normal: a float32 GEMM of 9 x 4096 x 4096
        with such inputs takes 1.3 s instead of 0.02 s (two cores of an Intel Xeon with AMX, torch 2.13.0).
        """
        if self._any(inputs, _is_subnormal):
            wide = {name: change(_widest(value)) for name, value in inputs.items()}
        else:
            wide = {name: self._weights.wide(name, value, change) for name, value in inputs.items()}
        return call_reference(self._definition, self._reference, wide)

    def _any(self, inputs: Mapping[str, Value], test: Test) -> bool:
        return any(self._weights.has(name, value, test) for name, value in inputs.items())

    def expect(
        self, inputs: Mapping[str, Value], axes: Mapping[str, int], *, independent: bool
    ) -> tuple[Expected, ...]:
        """Return the expected outputs of one call, with their bounds.

        Args:
            inputs: As declared; they are not changed.
            independent: They are independent random numbers, so that the probabilistic bounds hold.

        Raises:
            InputError: If the reference returns another number of outputs or other shapes.
            Exception: Whatever the reference raises.
        """
        definition, model = self._definition, self._model
        if model.accepts_upcast:
            values = self._run(inputs, _unchanged)
        else:
            copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
            values = call_reference(definition, self._reference, copies)
        problem = form_problem(definition, axes, values, dtypes=False)
        if problem is not None:
            raise InputError(f"{definition.name}: reference: {problem[1]}")
        magnitudes = self._magnitudes(inputs) if model.multi_affine else [None] * len(values)
        n = reduction_length(definition, axes, multi_affine=model.multi_affine)
        return tuple(
            _expected(name, torch_dtype(spec.dtype), value, magnitude, n=n, independent=independent)
            for (name, spec), value, magnitude in zip(definition.outputs.items(), values, magnitudes, strict=True)
        )

    def _magnitudes(self, inputs: Mapping[str, Value]) -> list[_Magnitude | None]:
        """Return the magnitude of the terms of a multi-affine operator, one per output."""
        terms = self._run(inputs, _absolute)
        finite: tuple[Tensor, ...] | None = None
        if self._any(inputs, _is_special):
            finite = self._run(inputs, _without_specials)
        elif not all(bool(torch.isfinite(term).all()) for term in terms):
            finite = terms
        flushed: tuple[Tensor, ...] | None = None
        if self._any(inputs, _is_subnormal):
            flushed = self._run(inputs, _flushed)
        return [
            _Magnitude(term, None if finite is None else finite[i], None if flushed is None else term - flushed[i])
            for i, term in enumerate(terms)
        ]


@dataclass(frozen=True)
class _Magnitude:
    """Sums of the absolute terms of one output.

    Attributes:
        terms: All of them.
        finite_terms: Those without NaN and infinity; None where ``terms`` is finite.
        flushed_terms: Those with a factor that is subnormal in float32; None where there are none.
    """

    terms: Tensor
    finite_terms: Tensor | None
    flushed_terms: Tensor | None


def _expected(
    name: str, dtype: torch.dtype, value: Tensor, magnitude: _Magnitude | None, *, n: int, independent: bool
) -> Expected:
    """Return one expected output with its bound; ``magnitude`` is None for operators that are not multi-affine."""
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


def compare(
    definition: Definition, axes: Mapping[str, int], outputs: Sequence[Tensor], expected: Sequence[Expected]
) -> Agreement:
    """Return how ``outputs`` agree with the oracle, form first; the first output that does not decides."""
    problem = form_problem(definition, axes, outputs)
    if problem is not None:
        return Agreement(*problem)
    worst = Agreement(Status.PASSED, "")
    for output, wanted in zip(outputs, expected, strict=True):
        agreement = _compare_output(output, wanted)
        worst = Agreement(
            agreement.status,
            agreement.message,
            max(worst.max_absolute_error, agreement.max_absolute_error),
            max(worst.max_relative_error, agreement.max_relative_error),
            max(worst.max_bound_ratio, agreement.max_bound_ratio),
        )
        if agreement.status is not Status.PASSED:
            break
    return worst


def _where(name: str, flat: int, shape: Sequence[int]) -> str:
    index = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return f"output {name}[{', '.join(map(str, reversed(index)))}]"


def _compare_output(output: Tensor, wanted: Expected) -> Agreement:
    flat = output.detach().reshape(-1)
    values = wanted.values.reshape(-1)
    if wanted.bound is None:
        unequal = (flat != values).nonzero()
        if unequal.numel() == 0:
            return Agreement(Status.PASSED, "")
        at = int(unequal[0])
        where = _where(wanted.name, at, output.shape)
        message = f"{where}: must equal the reference {values[at].item()}, got {flat[at].item()}"
        return Agreement(Status.INCORRECT_NUMERICAL, message, max_bound_ratio=math.inf)
    bounds = wanted.bound.reshape(-1)
    max_absolute = max_relative = max_ratio = square_error = 0.0
    limit = torch.finfo(wanted.dtype).max
    for begin in range(0, flat.numel(), _CHUNK_ELEMS):
        chunk = slice(begin, begin + _CHUNK_ELEMS)
        value, bound = values[chunk], bounds[chunk]
        seen = flat[chunk].to(value.dtype)
        error = (seen - value).abs_()
        good = error <= bound  # False for NaN
        if not wanted.all_finite:
            good |= value.isnan() & seen.isnan()
            good |= (value.abs() + bound > limit) & (seen == torch.copysign(torch.full_like(value, math.inf), value))
            if wanted.open is not None:
                good |= wanted.open.reshape(-1)[chunk]
            error = torch.where(torch.isfinite(error) & torch.isfinite(value), error, 0.0)
        if not bool(good.all()):
            at = begin + int((~good).nonzero()[0])
            failed = _disagreement(wanted, at, output.shape, float(flat[at]))
            ratio = torch.nan_to_num(error / bound, math.inf, math.inf)
            return Agreement(
                Status.INCORRECT_NUMERICAL,
                failed,
                float(torch.nan_to_num(error, math.inf, math.inf).max()),
                float(torch.nan_to_num(error / value.abs(), math.inf, math.inf).max()),
                float(torch.where(good, ratio, ratio.clamp_min(1.0)).max()),
            )
        max_absolute = max(max_absolute, float(error.max()))
        max_ratio = max(max_ratio, float((error / bound).nan_to_num(0.0, 0.0).max()))
        max_relative = max(max_relative, float((error / value.abs()).nan_to_num(0.0, 0.0).max()))
        if wanted.rms_bound is not None:
            square_error += float(error.square().sum(dtype=torch.float64))
    if wanted.rms_bound is not None:
        rms = math.sqrt(square_error / flat.numel())
        max_ratio = max(max_ratio, rms / wanted.rms_bound)
        if rms > wanted.rms_bound:
            message = (
                f"output {wanted.name}: errors must have an rms of at most {wanted.rms_bound:.3g}, got {rms:.3g}: "
                "it accumulates in too low a precision"
            )
            return Agreement(Status.INCORRECT_NUMERICAL, message, max_absolute, max_relative, max_ratio)
    return Agreement(Status.PASSED, "", max_absolute, max_relative, max_ratio)


def _disagreement(wanted: Expected, at: int, shape: Sequence[int], seen: float) -> str:
    assert wanted.bound is not None
    value, bound = float(wanted.values.reshape(-1)[at]), float(wanted.bound.reshape(-1)[at])
    where = _where(wanted.name, at, shape)
    if not math.isfinite(value):
        return f"{where}: must be {value} as in the reference, got {seen:.9g}"
    return f"{where}: must be within {bound:.3g} of the reference {value:.9g}, got {seen:.9g}"

"""Outputs compared with what the oracle expects (fibc.oracle), within the bound of fibc.bound.

The names of both are here too, for those who judge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fibc.bound import Expected, growth, reduction_length, unit_roundoff
from fibc.calls import Reference, Value, as_outputs, call_reference, form_problem, torch_dtype
from fibc.error_model import ErrorModel, probe
from fibc.oracle import Oracle
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Status
from fibc.upcast import Weights, upcast

__all__ = [
    "Agreement",
    "ErrorModel",
    "Expected",
    "Oracle",
    "Reference",
    "Value",
    "Weights",
    "as_outputs",
    "call_reference",
    "compare",
    "form_problem",
    "growth",
    "probe",
    "reduction_length",
    "torch_dtype",
    "unit_roundoff",
    "upcast",
]

CHUNK_ELEMS = 1 << 18
"""Elements compared at once: a dozen passes over 1 MiB stay in a CPU's second-level cache."""

DEVICE_CHUNK_ELEMS = 1 << 26
"""The same on a GPU: temporaries of half a gigabyte in float64, and few waits for it."""


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


def compare(
    definition: Definition, axes: Mapping[str, int], outputs: Sequence[Tensor], expected: Sequence[Expected]
) -> Agreement:
    """Return how ``outputs`` agree with the oracle, form first; the first output that does not decides."""
    problem = form_problem(definition, axes, outputs)
    if problem is not None:
        return Agreement(*problem)
    worst = Agreement(Status.PASSED, "")
    for output, wanted in zip(outputs, expected, strict=True):
        if output.device != wanted.values.device:
            law = f"device must be {wanted.values.device}, got {output.device}"
            return Agreement(Status.INCORRECT_DTYPE, f"output {wanted.name}: {law}")
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
    step = CHUNK_ELEMS if flat.device.type == "cpu" else DEVICE_CHUNK_ELEMS
    for begin in range(0, flat.numel(), step):
        chunk = slice(begin, begin + step)
        value, bound = values[chunk], bounds[chunk]
        error, good = _errors(flat[chunk].to(value.dtype), value, bound, wanted, chunk)
        all_good, absolute, ratio, relative, square = _summary(error, good, value, bound)
        if not all_good:
            at = begin + int((~good).nonzero()[0])
            failed = _disagreement(wanted, at, output.shape, float(flat[at]))
            return _failure(failed, error, good, value, bound)
        max_absolute = max(max_absolute, absolute)
        max_ratio = max(max_ratio, ratio)
        max_relative = max(max_relative, relative)
        square_error += square
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


def _errors(seen: Tensor, value: Tensor, bound: Tensor, wanted: Expected, chunk: slice) -> tuple[Tensor, Tensor]:
    """Return absolute errors, 0 where a right answer is not finite, and where the answer is right."""
    error = (seen - value).abs_()
    good = error <= bound  # False for NaN
    if wanted.all_finite:
        return error, good
    limit = torch.finfo(wanted.dtype).max
    good |= value.isnan() & seen.isnan()
    good |= (value.abs() + bound > limit) & (seen == torch.copysign(torch.full_like(value, math.inf), value))
    if wanted.open is not None:
        good |= wanted.open.reshape(-1)[chunk]
    return torch.where(torch.isfinite(error) & torch.isfinite(value), error, 0.0), good


def _summary(error: Tensor, good: Tensor, value: Tensor, bound: Tensor) -> tuple[bool, float, float, float, float]:
    """Return whether all is good, the largest error, error over bound and relative error, and the sum of squares.

    One transfer for all: a GPU is waited for once.
    """
    parts = (
        good.all(),
        error.amax(),
        (error / bound).nan_to_num(0.0, 0.0).amax(),
        (error / value.abs()).nan_to_num(0.0, 0.0).amax(),
        error.square().sum(dtype=torch.float64),
    )
    all_good, *numbers = torch.stack([part.double() for part in parts]).tolist()
    absolute, ratio, relative, square = numbers
    return bool(all_good), absolute, ratio, relative, square


def _failure(message: str, error: Tensor, good: Tensor, value: Tensor, bound: Tensor) -> Agreement:
    ratio = torch.nan_to_num(error / bound, math.inf, math.inf)
    return Agreement(
        Status.INCORRECT_NUMERICAL,
        message,
        float(torch.nan_to_num(error, math.inf, math.inf).max()),
        float(torch.nan_to_num(error / value.abs(), math.inf, math.inf).max()),
        float(torch.where(good, ratio, ratio.clamp_min(1.0)).max()),
    )


def _disagreement(wanted: Expected, at: int, shape: Sequence[int], seen: float) -> str:
    assert wanted.bound is not None
    value, bound = float(wanted.values.reshape(-1)[at]), float(wanted.bound.reshape(-1)[at])
    where = _where(wanted.name, at, shape)
    if not math.isfinite(value):
        return f"{where}: must be {value} as in the reference, got {seen:.9g}"
    return f"{where}: must be within {bound:.3g} of the reference {value:.9g}, got {seen:.9g}"

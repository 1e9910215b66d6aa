"""What a call must return: the reference on upcast inputs, with the bound of each element."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fibc.bound import Expected, Magnitude, expected_output, reduction_length
from fibc.calls import Reference, Value, call_reference, form_problem, torch_dtype
from fibc.error_model import ErrorModel
from fibc.errors import InputError
from fibc.schema.definition import Definition
from fibc.upcast import (
    Change,
    Test,
    Weights,
    absolute,
    flushed,
    is_special,
    is_subnormal,
    unchanged,
    widest,
    without_specials,
)


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
        if self._any(inputs, is_subnormal):
            wide = {name: change(widest(value)) for name, value in inputs.items()}
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
            values = self._run(inputs, unchanged)
        else:
            copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
            values = call_reference(definition, self._reference, copies)
        problem = form_problem(definition, axes, values, dtypes=False)
        if problem is not None:
            raise InputError(f"{definition.name}: reference: {problem[1]}")
        magnitudes = self._magnitudes(inputs) if model.multi_affine else [None] * len(values)
        n = reduction_length(definition, axes, multi_affine=model.multi_affine)
        return tuple(
            expected_output(name, torch_dtype(spec.dtype), value, magnitude, n=n, independent=independent)
            for (name, spec), value, magnitude in zip(definition.outputs.items(), values, magnitudes, strict=True)
        )

    def _magnitudes(self, inputs: Mapping[str, Value]) -> list[Magnitude | None]:
        """Return the magnitude of the terms of a multi-affine operator, one per output."""
        terms = self._run(inputs, absolute)
        finite: tuple[Tensor, ...] | None = None
        if self._any(inputs, is_special):
            finite = self._run(inputs, without_specials)
        elif not all(bool(torch.isfinite(term).all()) for term in terms):
            finite = terms
        normal: tuple[Tensor, ...] | None = None
        if self._any(inputs, is_subnormal):
            normal = self._run(inputs, flushed)
        return [
            Magnitude(term, None if finite is None else finite[i], None if normal is None else term - normal[i])
            for i, term in enumerate(terms)
        ]

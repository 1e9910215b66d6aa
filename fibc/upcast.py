"""Inputs in the precision that the reference runs in, and what oracles make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fibc.bound import FLOAT32_TINY
from fibc.calls import Value
from fibc.schema.definition import Definition

Change = Callable[[Value], Value]
"""Makes other inputs from upcast ones: their absolute values, for example."""

Test = Callable[[Tensor], Tensor]
"""Asks a question of each element."""


def upcast(value: Value) -> Value:
    """Return a private copy of ``value``, a floating-point tensor in the dtype ``wide_dtype``."""
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        return value.clone()
    return value.to(wide_dtype(value.dtype, value.device.type), copy=True)


def wide_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """Return what the reference computes in for inputs of ``dtype``.

    On a CPU float32 for up to 16 bits, float64 for float32. On a GPU float64 for all: a GPU that serves models computes
    it about as fast as float32 (an H200: 67 TFLOP/s each on its tensor cores, by the datasheet).
    """
    return torch.float32 if device_type == "cpu" and dtype.itemsize <= 2 else torch.float64


def widest(value: Value) -> Value:
    """Return a private copy of ``value``, a floating-point tensor as float64."""
    return (
        value.to(torch.float64, copy=True) if isinstance(value, Tensor) and value.is_floating_point() else upcast(value)
    )


def unchanged(value: Value) -> Value:
    """Return ``value``."""
    return value


def absolute(value: Value) -> Value:
    """Return absolute values."""
    return value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value


def without_specials(value: Value) -> Value:
    """Return absolute values, 0 for NaN and infinities."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.nan_to_num(value, 0.0, 0.0, 0.0).abs_()
    return value


def flushed(value: Value) -> Value:
    """Return absolute values, 0 for float32's subnormals."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.where(value.abs() < FLOAT32_TINY, 0.0, value).abs_()
    return value


def is_special(tensor: Tensor) -> Tensor:
    """Return where ``tensor`` is NaN or infinite."""
    return ~torch.isfinite(tensor)


def is_subnormal(tensor: Tensor) -> Tensor:
    """Return where ``tensor`` is a subnormal float32."""
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

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that was made, by name and change."""
        return {f"{name}, {change.__name__}": known.wide for (name, change), known in self._known.items()}

    def hold(self, inputs: Mapping[str, Value]) -> None:
        """Make what oracles of ordinary inputs need."""
        for name in self._names:
            for change in (unchanged, absolute):
                self.wide(name, inputs[name], change)
            for test in (is_special, is_subnormal):
                self.has(name, inputs[name], test)

"""How rounding may enter a definition's outputs, found out by running its reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fibc.bound import FLOAT32_TINY, unit_roundoff
from fibc.calls import Reference, Value, call_reference
from fibc.schema.definition import Definition
from fibc.upcast import absolute, upcast


@dataclass(frozen=True)
class ErrorModel:
    """What rounding may do to one definition.

    Attributes:
        multi_affine: Affine in each floating-point input, and dominated by its value on absolute inputs.
        accepts_upcast: The reference takes upcast inputs; else it runs as declared.
    """

    multi_affine: bool
    accepts_upcast: bool


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
    magnitudes = run({name: absolute(value) for name, value in wide.items()})
    return all(
        bool((output.abs() <= magnitude * (1 + slack) + FLOAT32_TINY).all())
        for output, magnitude in zip(base, magnitudes, strict=True)
    )

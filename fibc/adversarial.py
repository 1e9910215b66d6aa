"""Values that break kernels which ordinary values do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

HOT_FACTOR = 4096.0
"""How much larger one row is than the others: 12 bits, more than bfloat16 and float16 resolve."""

CANCEL_TO = 1 / 16
"""What is left of sums that cancel, relative to their terms."""

Cases = Iterator[tuple[str, dict[str, torch.Tensor]]]


def adversarial_cases(
    dense: Mapping[str, torch.Tensor],
    activations: Sequence[str],
    typical: Mapping[str, float],
    generator: torch.Generator,
    wanted: Collection[str] | None = None,
) -> Cases:
    """Yield the name of a case and the tensors that it changes.

    - ``all_equal``: one value everywhere (an accumulator of 8 bits stops at 256 terms);
    - ``huge`` and ``tiny``: outputs stay finite, and so do squares in float32;
    - ``cancelling``: sums of products, and sums of two activations, are a sixteenth of their terms;
    - ``one_hot_row``: the middle row is 4096 times as large as the others;
    - ``denormals``: below the smallest normal of the dtype;
    - ``nan``, ``inf``: in the last element of the first activation, and with the opposite sign in its first element
      where it has more than one row.

    Args:
        dense: Floating-point inputs in which any value is lawful, with a rank of at least 1 and not empty.
        activations: Those of ``dense`` whose magnitude may change.
        typical: Magnitude of each of ``dense``.
        generator: Of the device that ``dense`` is on.
        wanted: Cases to make; None is all.
    """
    if not activations:
        return
    first = activations[0]
    cases: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "all_equal": lambda: {name: torch.full_like(value, typical[name]) for name, value in dense.items()},
        "huge": lambda: {name: _scaled(dense[name], _huge(dense[name].dtype)) for name in activations},
        "tiny": lambda: {name: _scaled(dense[name], _tiny(dense[name].dtype)) for name in activations},
        "cancelling": lambda: _cancelling(dense, activations),
        "one_hot_row": lambda: {name: _one_hot_row(dense[name]) for name in activations},
        "denormals": lambda: {name: _denormals(dense[name], generator) for name in activations},
    }
    if _represents(dense[first].dtype, math.nan):
        cases["nan"] = lambda: {first: _planted(dense[first], math.nan)}
    if _represents(dense[first].dtype, math.inf):
        cases["inf"] = lambda: {first: _planted(dense[first], math.inf)}
    for label, make in cases.items():
        if wanted is None or label in wanted:
            yield label, make()


def _huge(dtype: torch.dtype) -> float:
    """A factor: squares of 1e15 sum to less than float32's 3.4e38; narrower floats keep room for sums."""
    return min(1e15, torch.finfo(dtype).max / 64)


def _tiny(dtype: torch.dtype) -> float:
    """A factor: squares of 1e-15 are normal in float32; in narrower floats the values still are."""
    return max(1e-15, torch.finfo(dtype).tiny * 64)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return (tensor.float() * factor).to(tensor.dtype)


def _cancelling(dense: Mapping[str, torch.Tensor], activations: Sequence[str]) -> dict[str, torch.Tensor]:
    """Neighbours along the last axis are opposite in the first activation and equal in the others.

    An activation of the first one's shape is its opposite instead, so that elementwise sums cancel.
    """
    first = activations[0]
    changed = {name: _paired(value) for name, value in dense.items()}
    opposite = changed[first].float()
    opposite[..., 1::2] *= -1
    alternating = opposite + dense[first].float() * CANCEL_TO
    changed[first] = alternating.to(dense[first].dtype)
    for name in activations[1:]:
        if dense[name].shape == dense[first].shape:
            changed[name] = (dense[name].float() * CANCEL_TO - alternating).to(dense[name].dtype)
    return changed


def _paired(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with every odd element of its last axis replaced by the one before it."""
    paired = tensor.clone()
    paired[..., 1::2] = tensor[..., : tensor.shape[-1] // 2 * 2 : 2]
    return paired


def _one_hot_row(tensor: torch.Tensor) -> torch.Tensor:
    scaled = _scaled(tensor, HOT_FACTOR**-0.5)
    middle = scaled.shape[0] // 2
    scaled[middle] = _scaled(scaled[middle], HOT_FACTOR)
    return scaled


def _denormals(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return values of both signs below the smallest normal of the dtype, zeros among them."""
    info = torch.finfo(tensor.dtype)
    fractions = torch.rand(tensor.shape, generator=generator, device=generator.device) * 2 - 1
    return _scaled(fractions, info.tiny * (1 - info.eps)).to(tensor.dtype)


def _represents(dtype: torch.dtype, value: float) -> bool:
    read_back = torch.tensor(value).to(dtype).float().item()
    return read_back == value or (math.isnan(value) and math.isnan(read_back))


def _planted(tensor: torch.Tensor, value: float) -> torch.Tensor:
    planted = tensor.clone()
    flat = planted.view(-1)
    flat[-1] = value
    if tensor.shape[0] > 1:
        flat[0] = -value
    return planted

"""What torch and libraries have for a kind of contract, as Python source: by its form, or by the function of a tag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fibc.schema.definition import Definition

RESERVED = frozenset({"torch", "rms_norm", "flashinfer", "call", "call_out", "normed", "added", "results", "reference"})
"""Names that sources use themselves, these and those of the reference."""


@dataclass(frozen=True)
class Form:
    """Shapes of a contract's tensors, all of one dtype.

    A shape is a string of letters, one per axis; equal letters are one axis, different letters different ones.

    Attributes:
        in_place: For each output the index of the input that it is written into; empty where all are new.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    in_place: tuple[int, ...] = ()

    def matches(self, definition: Definition) -> bool:
        """Return whether the contract is of this form."""
        names = tuple(definition.inputs)
        targets = tuple(spec.param for spec in definition.outputs.values())
        wanted = tuple(names[index] for index in self.in_place if index < len(names)) or (None,) * len(self.outputs)
        tensors = (*definition.inputs.values(), *definition.outputs.values())
        if targets != wanted or len(names) != len(self.inputs):
            return False
        if any(spec.optional or spec.dtype != tensors[0].dtype for spec in tensors):
            return False
        bound: dict[str, str] = {}
        for spec, letters in zip(tensors, (*self.inputs, *self.outputs), strict=True):
            if spec.shape is None or len(spec.shape) != len(letters):
                return False
            if any(bound.setdefault(letter, axis) != axis for letter, axis in zip(letters, spec.shape, strict=True)):
                return False
        return len(set(bound.values())) == len(bound)


# By the function that a contract's tag names --------------------------------------------------------------------------


@dataclass(frozen=True)
class Adapter:
    """How a function of a library is called for a contract.

    Attributes:
        form: Inputs and outputs that it serves.
        text: Makes the source from the argument names and the epsilon.
    """

    form: Form
    text: Callable[[Sequence[str], float], str]


def _flashinfer_rmsnorm(names: Sequence[str], eps: float) -> str:
    x, weight, output = names
    return f"""import flashinfer.norm


def call({x}, {weight}):
    return flashinfer.norm.rmsnorm({x}, {weight}, eps={eps!r})


def call_out({x}, {weight}, {output}):
    flashinfer.norm.rmsnorm({x}, {weight}, eps={eps!r}, out={output})
"""


def _flashinfer_fused_add_rmsnorm(names: Sequence[str], eps: float) -> str:
    x, residual, weight, output = names
    return f"""import flashinfer.norm


def call({x}, {residual}, {weight}):
    # The library writes both arguments and the contract neither: the copies are part of the work, and are timed.
    normed, added = {x}.clone(), {residual}.clone()
    flashinfer.norm.fused_add_rmsnorm(normed, added, {weight}, eps={eps!r})
    return normed


def call_out({x}, {residual}, {weight}, {output}):
    {output}.copy_({x})
    flashinfer.norm.fused_add_rmsnorm({output}, {residual}.clone(), {weight}, eps={eps!r})
"""


def _flashinfer_fused_add_rmsnorm_in_place(names: Sequence[str], eps: float) -> str:
    x, residual, weight, *_ = names
    return f"""import flashinfer.norm


def call({x}, {residual}, {weight}):
    flashinfer.norm.fused_add_rmsnorm({x}, {residual}, {weight}, eps={eps!r})
    return {x}, {residual}
"""


ADAPTERS: dict[str, tuple[Adapter, ...]] = {
    "flashinfer.norm.rmsnorm": (Adapter(Form(("RH", "H"), ("RH",)), _flashinfer_rmsnorm),),
    "flashinfer.norm.fused_add_rmsnorm": (
        Adapter(Form(("RH", "RH", "H"), ("RH",)), _flashinfer_fused_add_rmsnorm),
        Adapter(Form(("RH", "RH", "H"), ("RH", "RH"), in_place=(0, 1)), _flashinfer_fused_add_rmsnorm_in_place),
    ),
}
"""Library functions whose calling convention is known, by the path in a ``fi_api:`` tag."""


# By op_type and form --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Builtin:
    """torch's own kernel for a kind of contract.

    Attributes:
        op_type: As the contract has it.
        form: Inputs and outputs.
        name: With ``{0}``, ``{1}`` for the names of inputs.
        text: Makes the source from the argument names and the epsilon, which is NaN where it is not needed.
        needs_epsilon: The reference has to state one.
    """

    op_type: str
    form: Form
    name: str
    text: Callable[[Sequence[str], float], str]
    needs_epsilon: bool = False


def _gemm(names: Sequence[str], _: float) -> str:
    a, b, c = names
    return f"""import torch


def call({a}, {b}):
    return torch.matmul({a}, {b}.T)


def call_out({a}, {b}, {c}):
    torch.matmul({a}, {b}.T, out={c})
"""


def _rmsnorm(names: Sequence[str], eps: float) -> str:
    x, weight, _ = names
    return f"""from torch.nn.functional import rms_norm


def call({x}, {weight}):
    return rms_norm({x}, {weight}.shape, {weight}, {eps!r})
"""


def _fused_add_rmsnorm(names: Sequence[str], eps: float) -> str:
    x, residual, weight, _ = names
    return f"""from torch.nn.functional import rms_norm


def call({x}, {residual}, {weight}):
    return rms_norm({x} + {residual}, {weight}.shape, {weight}, {eps!r})
"""


def _fused_add_rmsnorm_in_place(names: Sequence[str], eps: float) -> str:
    x, residual, weight, *_ = names
    return f"""from torch.nn.functional import rms_norm


def call({x}, {residual}, {weight}):
    {residual}.add_({x})
    {x}.copy_(rms_norm({residual}, {weight}.shape, {weight}, {eps!r}))
    return {x}, {residual}
"""


BUILTINS: tuple[Builtin, ...] = (
    Builtin("gemm", Form(("MK", "NK"), ("MN",)), "torch.matmul({0}, {1}.T)", _gemm),
    Builtin("rmsnorm", Form(("RH", "H"), ("RH",)), "F.rms_norm({0}, weight={1})", _rmsnorm, needs_epsilon=True),
    Builtin(
        "rmsnorm",
        Form(("RH", "RH", "H"), ("RH",)),
        "F.rms_norm({0} + {1}, weight={2})",
        _fused_add_rmsnorm,
        needs_epsilon=True,
    ),
    Builtin(
        "rmsnorm",
        Form(("RH", "RH", "H"), ("RH", "RH"), in_place=(0, 1)),
        "F.rms_norm({1}.add_({0}), weight={2})",
        _fused_add_rmsnorm_in_place,
        needs_epsilon=True,
    ),
)
"""What torch has for a contract, by op_type and the shapes of its inputs and outputs, all of one dtype."""

"""A call by a definition's contract: what goes in, and the form of what must come out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fibc.errors import InputError
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Status

Value = Tensor | int | float | bool | None
"""An argument of a call."""

Reference = Callable[..., object]
"""A definition's reference function."""


def axis_values(definition: Definition, axes: Mapping[str, int]) -> dict[str, int]:
    """Return every axis of the definition with its value, constants included."""
    return {**definition.const_axes, **axes}


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a definition's dtype name (``float8_e4m3fn``, ``bool``).

    Raises:
        InputError: If torch has none (``float4_e2m1``).
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"dtype: torch has no {name} (accepted: names of torch dtypes)")
    return dtype


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
    """Return the reference's outputs, on the device of its inputs.

    It may change its arguments, so hand it private copies, and it may make an output on the CPU.
    """
    with torch.no_grad(), full_precision():
        outputs = as_outputs(definition, reference(*(inputs[name] for name in definition.inputs)))
    return tuple(output.to(device_of(inputs.values())) for output in outputs)


@contextmanager
def full_precision() -> Iterator[None]:
    """Have torch multiply as the dtype says: no TF32, and no sums in bfloat16 or float16 between parts of a GEMM."""
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision()
    reductions = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    try:
        torch.set_float32_matmul_precision("highest")
        matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
        with torch.backends.cudnn.flags(allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = reductions


def device_of(values: Iterable[Value]) -> torch.device:
    """Return the device that a call's tensors are on: that of the first one, the CPU where there is none."""
    return next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))


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

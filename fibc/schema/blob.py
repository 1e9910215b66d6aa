"""Stored tensors of a workload, checked by the header of their safetensors file; no tensor is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from fibc.schema.definition import Definition
from fibc.schema.json_text import is_file
from fibc.schema.problems import place, shown

if TYPE_CHECKING:
    from fibc.schema.workload import InputSpec

_NAMES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F4": "float4_e2m1",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""safetensors' names of the dtypes of the format."""


def blob_problems(
    definition: Definition, axes: Mapping[str, int], inputs: Mapping[str, InputSpec], root: Path
) -> list[str]:
    """Return where stored tensors contradict ``definition`` at ``axes``; a file that is not there does not."""
    problems: list[str] = []
    for name, spec in inputs.items():
        if spec.type != "safetensors" or not is_file(root / spec.path):
            continue
        where = place("inputs", name)
        tensor = definition.inputs[name]
        try:
            with safe_open(root / spec.path, framework="np") as file:
                keys = file.keys()
                if spec.tensor_key not in keys:
                    accepted = ", ".join(sorted(keys))
                    problems.append(
                        f"{where}.tensor_key: must be in the file, got {shown(spec.tensor_key)} (accepted: {accepted})"
                    )
                    continue
                stored = file.get_slice(spec.tensor_key)
                shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        except (SafetensorError, OSError) as error:
            problems.append(f"{where}.path: must be a readable safetensors file, got {shown(spec.path)}: {error}")
            continue
        expected = definition.shape_of(tensor, axes)
        if shape != expected:
            axes_text = ", ".join(tensor.shape or ())
            problems.append(
                f"{where}: must have shape [{axes_text}] = {list(expected or ())}, got a stored {list(shape)}"
            )
        if _NAMES.get(dtype, dtype) != tensor.dtype:
            problems.append(f"{where}: must be {tensor.dtype}, got a stored {_NAMES.get(dtype, dtype)}")
    return problems

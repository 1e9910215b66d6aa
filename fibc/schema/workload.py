"""Workload: the sizes and inputs of one call that was seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

from fibc.errors import SchemaError
from fibc.schema.blob import blob_problems
from fibc.schema.constraints import check_constraints
from fibc.schema.contract_laws import MAX_SIZE
from fibc.schema.definition import DTYPE_BITS, Definition, Label, TensorSpec
from fibc.schema.json_text import is_file, read_json_lines
from fibc.schema.problems import describe, place, shown


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class RandomInput(_Spec):
    """Values made from a seed."""

    type: Literal["random"] = "random"


class ScalarInput(_Spec):
    """One recorded number."""

    type: Literal["scalar"] = "scalar"
    value: StrictBool | StrictInt | Annotated[StrictFloat, Field(allow_inf_nan=False)]


class SafetensorsInput(_Spec):
    """A recorded tensor.

    Attributes:
        path: Of the safetensors file, relative to the root of the dataset.
        tensor_key: The tensor's name in that file.
    """

    type: Literal["safetensors"] = "safetensors"
    path: Annotated[StrictStr, Field(min_length=1)]
    tensor_key: Annotated[StrictStr, Field(min_length=1)]


InputSpec = RandomInput | ScalarInput | SafetensorsInput

_INPUT_SPEC: TypeAdapter[InputSpec] = TypeAdapter(Annotated[InputSpec, Field(discriminator="type")])
_UUID: TypeAdapter[str] = TypeAdapter(Label)
_TYPES = ("random", "scalar", "safetensors")


@dataclass(frozen=True)
class Workload:
    """One call.

    Attributes:
        uuid: Identity; seeds and sets follow from it.
        axes: Size of every var axis, in elements; 0 is an empty batch.
        inputs: Where each input's values come from; an optional input that is not here is None in the call.
        weight: Traffic: how many calls it stands for.
        synthesised: Made by fibc, in part or whole, and not recorded.
        root: Directory that the paths of safetensors inputs are relative to; no part of the identity.
        extra: Fields that nobody knows, kept for writing.
    """

    uuid: str
    axes: dict[str, int]
    inputs: dict[str, InputSpec]
    weight: float = 1.0
    synthesised: bool = False
    root: str = field(default="", compare=False)
    extra: dict[str, Any] = field(default_factory=dict)

    def stored_path(self, name: str) -> Path | None:
        """Return the file that holds input ``name``, or None where it is not stored or the file is not there."""
        spec = self.inputs.get(name)
        if not isinstance(spec, SafetensorsInput):
            return None
        path = Path(self.root) / spec.path
        return path if is_file(path) else None

    def to_json(self) -> dict[str, Any]:
        """Return the workload as the format's object."""
        inputs = {name: spec.model_dump(mode="json") for name, spec in self.inputs.items()}
        return {"uuid": self.uuid, "axes": dict(self.axes), "inputs": inputs, **self.extra}


def load_workloads(path: Path | str, definition: Definition) -> tuple[Workload, ...]:
    """Return the workloads in the file ``path``, in its order: JSON lines, each a trace's envelope or a bare workload.

    Stored tensors whose file is there are checked against the definition; files that are not there are accepted.

    Raises:
        SchemaError: With every problem of every line, each ``path:line: where: law, got X``; also if there is no line.
    """
    path = Path(path)
    root = dataset_root(path)
    workloads: list[Workload] = []
    problems: list[str] = []
    for where, document in read_json_lines(path):
        if isinstance(document, SchemaError):
            problems += document.problems
            continue
        try:
            workloads.append(read_workload(document, definition, root))
        except SchemaError as error:
            problems += [f"{where}: {problem}" for problem in error.problems]
    if not workloads and not problems:
        problems.append(f"{path}: must hold at least one workload, got an empty file")
    problems += [f"{path}: {problem}" for problem in _identity_problems(workloads)]
    if problems:
        raise SchemaError(problems)
    return tuple(workloads)


def read_workload(document: Any, definition: Definition, root: Path) -> Workload:
    """Return the workload in one line's ``document``.

    Args:
        root: Directory that the paths of stored tensors are relative to.

    Raises:
        SchemaError: With every problem, each ``where: law, got X``.
    """
    if not isinstance(document, Mapping):
        raise SchemaError(f"must be an object, got {shown(document)}")
    problems: list[str] = []
    inner = document
    if "workload" in document:
        inner = document["workload"]
        problems += _envelope_problems(document, definition)
        if not isinstance(inner, Mapping):
            raise SchemaError([*problems, f"workload: must be an object, got {shown(inner)}"])
    weight, count_problems = _weight(document, inner)
    uuid, uuid_problems = _uuid(inner)
    axes, axis_problems = _axes(inner, definition)
    inputs, input_problems = _inputs(inner, definition)
    problems += count_problems + uuid_problems + axis_problems + input_problems
    if not axis_problems:
        problems += _size_problems(definition, axes)
        problems += check_constraints(definition, axes)
        if not input_problems:
            problems += blob_problems(definition, axes, inputs, root)
    if problems:
        raise SchemaError(problems)
    extra = {name: value for name, value in inner.items() if name not in ("uuid", "axes", "inputs", "count")}
    synthesised = document.get("synthesised") is True
    return Workload(uuid, axes, inputs, weight, synthesised, root=str(root), extra=extra)


def dataset_root(path: Path) -> Path:
    """Return the root for the workload file ``path``: of its dataset where it lies in one, else its own directory."""
    path = path.absolute()
    if path.parent.parent.name == "workloads":
        return path.parent.parent.parent
    return path.parent


def merge_duplicates(workloads: Iterable[Workload]) -> tuple[Workload, ...]:
    """Return one workload for each kind of call (axes and inputs), with the weights of all.

    It is the one with the least uuid. Sorted by axes, then uuid; the order of the arguments does not matter.
    """
    groups: dict[tuple[object, ...], list[Workload]] = {}
    for workload in workloads:
        kind = (*sorted(workload.axes.items()), *sorted((name, repr(s)) for name, s in workload.inputs.items()))
        groups.setdefault(kind, []).append(workload)
    merged = []
    for group in groups.values():
        first = min(group, key=lambda workload: workload.uuid)
        merged.append(replace(first, weight=math.fsum(workload.weight for workload in group)))
    return tuple(sorted(merged, key=lambda workload: (sorted(workload.axes.items()), workload.uuid)))


def _envelope_problems(document: Mapping[str, Any], definition: Definition) -> list[str]:
    problems = []
    if "definition" not in document:
        problems.append("definition: must be present")
    elif document["definition"] != definition.name:
        problems.append(f"definition: must be {definition.name!r}, got {shown(document['definition'])}")
    problems += [
        f"{name}: must be null in a file of workloads, got {shown(document[name])}"
        for name in ("solution", "evaluation")
        if document.get(name) is not None
    ]
    return problems


def _weight(document: Mapping[str, Any], inner: Mapping[str, Any]) -> tuple[float, list[str]]:
    count = document.get("count", inner.get("count", 1))
    lawful = isinstance(count, int | float) and not isinstance(count, bool) and 0 < count < MAX_SIZE
    return (float(count), []) if lawful else (1.0, [f"count: must be a number > 0, got {shown(count)}"])


def _uuid(inner: Mapping[str, Any]) -> tuple[str, list[str]]:
    if "uuid" not in inner:
        return "", ["uuid: must be present"]
    try:
        return _UUID.validate_python(inner["uuid"]), []
    except ValidationError as error:
        return "", [f"uuid: {problem}" for problem in describe(error)]


def _axes(inner: Mapping[str, Any], definition: Definition) -> tuple[dict[str, int], list[str]]:
    sizes = inner.get("axes", {})
    if not isinstance(sizes, Mapping):
        return {}, [f"axes: must be an object, got {shown(sizes)}"]
    problems = [f"axes.{name}: must be present" for name in definition.var_axes if name not in sizes]
    for name, size in sizes.items():
        where = place("axes", name)
        if name in definition.const_axes:
            problems.append(f"{where}: must not be given, it is const {definition.const_axes[name]}, got {shown(size)}")
        elif name not in definition.axes:
            accepted = ", ".join(definition.var_axes) or "none"
            problems.append(
                f"{where}: must be a var axis of {definition.name}, got {shown(size)} (accepted: {accepted})"
            )
        elif isinstance(size, bool) or not isinstance(size, int):
            problems.append(f"{where}: must be an integer, got {shown(size)}")
        elif size < 0:
            problems.append(f"{where}: must be >= 0, got {size}")
        elif size > MAX_SIZE:
            problems.append(f"{where}: must be below 2^63, got {shown(size)}")
    return dict(sizes), problems


def _size_problems(definition: Definition, axes: Mapping[str, int]) -> Iterator[str]:
    for group, specs in (("inputs", definition.inputs), ("outputs", definition.outputs)):
        for name, spec in specs.items():
            num_bytes = math.prod(definition.shape_of(spec, axes) or ()) * DTYPE_BITS[spec.dtype] // 8
            if num_bytes > MAX_SIZE:
                yield f"axes: {place(group, name)} must be below 2^63 bytes, got {num_bytes}"


def _inputs(inner: Mapping[str, Any], definition: Definition) -> tuple[dict[str, InputSpec], list[str]]:
    documents = inner.get("inputs", {})
    if not isinstance(documents, Mapping):
        return {}, [f"inputs: must be an object, got {shown(documents)}"]
    inputs: dict[str, InputSpec] = {}
    problems = [
        f"inputs.{name}: must be present"
        for name, spec in definition.inputs.items()
        if name not in documents and not spec.optional
    ]
    for name, document in documents.items():
        where = place("inputs", name)
        if name not in definition.inputs:
            accepted = ", ".join(definition.inputs)
            problems.append(f"{where}: must be an input of {definition.name} (accepted: {accepted})")
            continue
        try:
            spec = _INPUT_SPEC.validate_python(document)
        except ValidationError as error:
            problems += [f"{where}: {problem}" for problem in describe(error, tags=_TYPES)]
            continue
        inputs[name] = spec
        problems += _spec_problems(where, spec, definition.inputs[name])
    ordered = {name: inputs[name] for name in definition.inputs if name in inputs}
    return ordered, problems


def _spec_problems(where: str, spec: InputSpec, tensor: TensorSpec) -> Iterator[str]:
    if isinstance(spec, ScalarInput):
        if tensor.shape:
            yield f"{where}: must be random or safetensors, as a tensor of shape {list(tensor.shape)}, got scalar"
        elif not _fits(spec.value, tensor.dtype):
            yield f"{where}.value: must be a {tensor.dtype}, got {shown(spec.value)}"
    if isinstance(spec, SafetensorsInput):
        path = PurePosixPath(spec.path)
        if path.is_absolute() or ".." in path.parts or "\0" in spec.path:
            yield f"{where}.path: must be a relative path without .., got {shown(spec.path)}"
        if tensor.shape is None:
            yield f"{where}: must be random or scalar, as a Python number, got safetensors"


def _fits(value: float, dtype: str) -> bool:
    if dtype == "bool":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if dtype.startswith("float") or dtype == "bfloat16":
        return True
    bits = DTYPE_BITS[dtype]
    low, high = (0, 2**bits - 1) if dtype.startswith("uint") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return isinstance(value, int) and low <= value <= high


def _identity_problems(workloads: Iterable[Workload]) -> Iterator[str]:
    seen: dict[str, Workload] = {}
    for workload in workloads:
        first = seen.setdefault(workload.uuid, workload)
        if (first.axes, first.inputs) != (workload.axes, workload.inputs):
            got = f"{dict(first.axes)} and {dict(workload.axes)}"
            yield f"uuid {shown(workload.uuid)}: must belong to one call, got two, {got}"

"""Where a definition's workloads come from: files by convention, else a synthetic sweep."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from fibc.errors import SchemaError
from fibc.paths import safe_name
from fibc.schema.axis_laws import AxisLaws
from fibc.schema.definition import DTYPE_BITS, Definition
from fibc.schema.json_text import is_file
from fibc.schema.workload import RandomInput, Workload, load_workloads

SUFFIX = ".workloads.jsonl"
"""``gemm.json`` has its workloads beside it in ``gemm.workloads.jsonl``."""

SWEEP_SIZES = (
    1,
    2,
    3,
    4,
    7,
    8,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    255,
    256,
    257,
    511,
    513,
    1000,
    2048,
    4097,
)
"""Powers of two, where kernels change their tiles, with the odd sizes on both sides of them."""

SWEEP_RATIOS = (1, 64)
"""Sizes of further free axes, as multiples of the first: short and long requests of a batch."""

MAX_SWEEP_BYTES = 2**31
"""Largest inputs and outputs with a var axis, together; weights are as large as the definition makes them."""


def find_workloads(
    path: Path | str, definition: Definition, explicit: Path | str | None = None
) -> tuple[tuple[Workload, ...], str] | None:
    """Return the recorded workloads of the definition in the file ``path``, and where they come from in words.

    In this order: ``explicit``, a file or a directory that holds the definition's file; beside the definition
    (``<stem>.workloads.jsonl``, ``<name>.jsonl``); the dataset that the definition lies in
    (``workloads/<op_type>/<name>.jsonl``). None where there is no such file; then there is ``synthetic_sweep``.

    Raises:
        SchemaError: If ``explicit`` does not exist or holds nothing for the definition; problems of the file found.
    """
    path = Path(path).absolute()
    if explicit is not None:
        file = _explicit_file(Path(explicit), path, definition)
        return load_workloads(file, definition), f"{file} (--workloads)"
    for file in _beside(path, definition):
        if is_file(file):
            return load_workloads(file, definition), f"{file} (beside the definition)"
    file = path.parent.parent.parent / "workloads" / _in_dataset(definition)
    if is_file(file):
        return load_workloads(file, definition), f"{file} (the definition's dataset)"
    return None


def synthetic_sweep(definition: Definition) -> tuple[Workload, ...]:
    """Return workloads that nobody recorded, at ``SWEEP_SIZES``, sorted by size; the same for the same definition.

    The first free var axis takes every size, further ones ``SWEEP_RATIOS`` times as much; axes that a constraint
    determines follow. Sizes that break a constraint or need more than ``MAX_SWEEP_BYTES`` are left out.

    Raises:
        SchemaError: If no size is left.
    """
    workloads = []
    for axes in _sweep_axes(definition):
        place = ", ".join(f"{name}={size}" for name, size in axes.items())
        identity = str(uuid.uuid5(uuid.NAMESPACE_OID, f"fibc sweep: {definition.name}: {place}"))
        inputs = {name: RandomInput() for name in definition.inputs}
        workloads.append(Workload(identity, axes, dict(inputs), synthesised=True))
    if not workloads:
        raise SchemaError(
            f"{definition.name}: needs workloads, got no size of the synthetic sweep that its constraints allow "
            f"(record some, and pass them with --workloads)"
        )
    return tuple(workloads)


def _explicit_file(explicit: Path, path: Path, definition: Definition) -> Path:
    try:
        if not explicit.is_dir():
            return explicit
    except OSError:
        return explicit  # reading it says what is wrong
    in_dataset = _in_dataset(definition)
    tried = [explicit / file.name for file in _beside(path, definition)] + [
        explicit / in_dataset,
        explicit / "workloads" / in_dataset,
    ]
    for file in tried:
        if is_file(file):
            return file
    names = ", ".join(str(file.relative_to(explicit)) for file in tried)
    raise SchemaError(f"{explicit}: must hold the workloads of {definition.name}, got none of {names}")


def _beside(path: Path, definition: Definition) -> tuple[Path, ...]:
    return path.with_suffix(SUFFIX), path.with_name(safe_name(definition.name, ".jsonl"))


def _in_dataset(definition: Definition) -> Path:
    return Path(safe_name(definition.op_type)) / safe_name(definition.name, ".jsonl")


def _sweep_axes(definition: Definition) -> Iterator[dict[str, int]]:
    laws = AxisLaws(definition)
    free = [name for name in definition.var_axes if name not in laws.determined]
    ratios = SWEEP_RATIOS if len(free) > 1 else (1,)
    seen = set()
    for size in SWEEP_SIZES if free else (1,):
        for ratio in ratios:
            wanted = {name: size if name == free[0] else size * ratio for name in free}
            completed = laws.complete(wanted, ())
            if completed is None:
                continue
            axes = {name: completed[name] for name in definition.var_axes}
            if tuple(axes.values()) not in seen and _num_bytes(definition, axes) <= MAX_SWEEP_BYTES:
                seen.add(tuple(axes.values()))
                yield axes


def _num_bytes(definition: Definition, axes: Mapping[str, int]) -> int:
    specs = (*definition.inputs.values(), *definition.outputs.values())
    varying = (spec for spec in specs if not set(spec.shape or ()) <= definition.const_axes.keys())
    return sum(math.prod(definition.shape_of(spec, axes) or ()) * DTYPE_BITS[spec.dtype] // 8 for spec in varying)

"""The Python oracle of the C++ dispatch (``fibc/dispatch.h``): the same reasons in the same order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fibc.schema.callspec import Argument, CallSpec
from fibc.schema.candidate import TensorGuard
from fibc.schema.definition import DTYPE_BITS
from fibc.schema.silicon import CudaValidity
from fibc.schema.table import CpuValidity, DispatchTable, Variant

HIT = "hit"

MEMORY_TOLERANCE = 32
"""GPUs whose memory differs by less than this part are alike: drivers keep different amounts for themselves."""

_EXACT = 2**53
"""Integers up to here are doubles, as which a kernel is given its scalars."""


@dataclass(frozen=True)
class TensorFacts:
    """What a view of a tensor shows, and what it does not.

    Attributes:
        strides: In elements.
        dtype: The definition's name, ``bfloat16``; empty for one that no definition has.
        device: ``cpu``, a GPU with its index (``cuda:0``), or any other.
        address: Of the first element; 0 where there is no memory.
        plain: Its type is exactly torch.Tensor or Parameter.
        viewable: It is strided memory on some device.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    address: int = 4096
    plain: bool = True
    requires_grad: bool = False
    viewable: bool = True
    negative: bool = False


Value = TensorFacts | bool | int | float | None


@dataclass(frozen=True)
class Surroundings:
    """What a call finds before its arguments are looked at.

    Attributes:
        standing: ``hit``, or what speaks against every call on this machine.
        isa: ISA levels of this machine.
        num_threads: What ``torch.get_num_threads()`` says; None stands for the table's own.
        watched: A dispatch mode of torch is active, or forward-mode differentiation.
        devices: Of each GPU ``hit`` where it is ready, or why no variant can serve on it; one that is missing is ready.
        declined: Of each GPU the symbols of variants that declined to load there while others did, as
            ``environment["devices"]`` of a module says: they call another version of a library than torch has loaded.
    """

    isa: tuple[str, ...]
    enabled: bool = True
    standing: str = HIT
    num_threads: int | None = None
    watched: bool = False
    grad_mode: bool = False
    devices: Mapping[str, str] = field(default_factory=dict)
    declined: Mapping[str, Collection[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """Where a call goes: ``hit`` and the region that serves it, or why native does.

    Attributes:
        region: Index of the region that holds the sizes, else None.
        axes: Every axis's size, None where the arguments contradict the definition.
    """

    reason: str
    region: int | None = None
    axes: Mapping[str, int] | None = None


def check_host(table: DispatchTable, host: Mapping[str, Any], *, accept_cpu: bool = False) -> str:
    """Return ``hit``, or what speaks against every call of a table for CPUs on a machine.

    Args:
        host: Its ``model``, ``isa``, ``l2_bytes`` and ``l3_bytes``.
        accept_cpu: Another model of the same ISA will do.
    """
    recorded = table.validity
    assert isinstance(recorded, CpuValidity)
    if not set(recorded.isa) <= set(host["isa"]):
        return "isa"
    if accept_cpu:
        return HIT
    if recorded.model != host["model"]:
        return "cpu_model"
    if (recorded.l2_bytes, recorded.l3_bytes) != (host["l2_bytes"], host["l3_bytes"]):
        return "caches"
    return HIT


def check_silicon(validity: CudaValidity, here: Mapping[str, int], *, accept_gpu: bool = False) -> str:
    """Return ``hit``, or what speaks against every call on a GPU.

    Args:
        here: Its ``compute_capability``, ``num_sms``, ``l2_bytes`` and ``memory_bytes``.
        accept_gpu: Other silicon of the same compute capability will do.
    """
    if here["compute_capability"] != validity.compute_capability:
        return "arch"
    if accept_gpu:
        return HIT
    apart = abs(here["memory_bytes"] - validity.memory_bytes)
    alike = (
        here["num_sms"] == validity.num_sms
        and here["l2_bytes"] == validity.l2_bytes
        and apart <= validity.memory_bytes // MEMORY_TOLERANCE
    )
    return HIT if alike else "silicon"


def choose(table: DispatchTable, inputs: Sequence[Value], around: Surroundings) -> Choice:
    """Return where a call by value goes, as far as that follows from its inputs."""
    spec = table.spec
    if not around.enabled:
        return Choice("disabled")
    if around.standing != HIT:
        return Choice(around.standing)
    validity = table.validity
    if isinstance(validity, CpuValidity) and around.num_threads not in (None, validity.num_threads):
        return Choice("num_threads")
    if around.watched:
        return Choice("mode")
    for argument, value in zip(spec.inputs, inputs, strict=True):
        if (reason := _read(argument, value, around)) != HIT:
            return Choice(reason)
    axes, place, reason = _bind(table, inputs)
    if reason != HIT:
        return Choice(reason)
    choice = choose_axes(table, axes, around, inputs)
    if choice.reason != HIT or isinstance(validity, CpuValidity):
        return choice
    reason = around.devices.get(place, HIT)
    assert choice.region is not None
    symbol = table.variants[table.regions[choice.region].variant].symbol
    if reason == HIT and symbol in around.declined.get(place, ()):
        reason = "load"
    return replace(choice, reason=reason)


def choose_axes(
    table: DispatchTable, axes: Mapping[str, int], around: Surroundings, inputs: Sequence[Value] | None = None
) -> Choice:
    """Return where a call of these sizes goes; without ``inputs`` they are taken to satisfy every variant's guards."""
    spec = table.spec
    if (reason := _check_empty(spec, axes)) != HIT:
        return Choice(reason, None, axes)
    region = find_region(table, axes)
    if region is None:
        return Choice("region", None, axes)
    variant = table.variants[table.regions[region].variant]
    if isinstance(table.validity, CpuValidity) and variant.isa not in around.isa:
        return Choice("variant_isa", region, axes)
    if inputs is not None and (reason := _check_guards(variant, inputs)) != HIT:
        return Choice(reason, region, axes)
    return Choice(HIT, region, axes)


def find_region(table: DispatchTable, axes: Mapping[str, int]) -> int | None:
    """Return the index of the region that holds ``axes``, or None."""
    if not table.features:
        return None
    values = tuple(feature.value(axes) for feature in table.features)
    return next((i for i, region in enumerate(table.regions) if region.cell.holds(values)), None)


def _read(argument: Argument, value: Value, around: Surroundings) -> str:
    if value is None:
        return "missing"
    if argument.kind == "scalar":
        return HIT if _is_scalar(argument.dtype, value) else "type"
    if not isinstance(value, TensorFacts) or not value.plain:
        return "type"
    if around.grad_mode and value.requires_grad:
        return "grad"
    if not value.viewable:
        return "view"
    return "negative" if value.negative else HIT


def _is_scalar(dtype: str, value: Value) -> bool:
    if dtype == "bool":
        return isinstance(value, bool)
    if type(value) is int:
        return abs(value) <= _EXACT
    return type(value) is float and dtype.startswith(("float", "bfloat"))


def _bind(table: DispatchTable, inputs: Sequence[Value]) -> tuple[dict[str, int], str, str]:
    """Return every axis's size and the device, or a reason."""
    spec = table.spec
    kind = "cpu" if isinstance(table.validity, CpuValidity) else "cuda"
    place = "cpu" if kind == "cpu" else ""
    axes = {axis.name: axis.value for axis in spec.axes}
    for argument, value in zip(spec.inputs, inputs, strict=True):
        if not isinstance(value, TensorFacts):
            continue
        if value.device.partition(":")[0] != kind:
            return {}, "", "device"
        place = place or value.device
        if value.device != place:
            return {}, "", "devices"
        if value.dtype != argument.dtype:
            return {}, "", "dtype"
        if len(value.shape) != len(argument.axes):
            return {}, "", "rank"
        for index, size in zip(argument.axes, value.shape, strict=True):
            name = spec.axes[index].name
            if axes[name] is None:
                axes[name] = size
            if axes[name] != size:
                return {}, "", "shape"
        if value.address == 0 and 0 not in value.shape:
            return {}, "", "no_data"
    bound = {name: size for name, size in axes.items() if size is not None}
    if len(bound) < len(axes):
        return {}, "", "shape"
    return (bound, place, HIT) if place else ({}, "", "device")


def _check_empty(spec: CallSpec, axes: Mapping[str, int]) -> str:
    def is_empty(argument: Argument) -> bool:
        return any(axes[spec.axes[index].name] == 0 for index in argument.axes)

    if all(is_empty(output) for output in spec.outputs):
        return "empty"
    return "empty_input" if any(is_empty(argument) for argument in (*spec.outputs, *spec.inputs)) else HIT


def _check_guards(variant: Variant, inputs: Sequence[Value]) -> str:
    for guard, value in zip(variant.guards.inputs, inputs, strict=True):
        if isinstance(value, TensorFacts) and (reason := _check(guard, value, variant.guards.max_offset_elems)) != HIT:
            return reason
    return HIT


def _check(guard: TensorGuard, tensor: TensorFacts, max_offset_elems: int) -> str:
    """Hold ``tensor``, which is not empty, to ``guard``; strides of axes of size 1 never matter."""
    expected = 1
    contiguous = True
    for size, stride in reversed(list(zip(tensor.shape, tensor.strides, strict=True))):
        if size != 1:
            contiguous = contiguous and stride == expected
            expected *= size
    *outer, last = list(zip(tensor.shape, tensor.strides, strict=True)) or [(1, 1)]
    rows = (last[0] == 1 or last[1] == 1) and all(size == 1 or stride >= 0 for size, stride in outer)
    if (guard.layout == "contiguous" and not contiguous) or (guard.layout == "rows" and not rows):
        return "layout"
    last_offset = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    if last_offset > max_offset_elems:
        return "offset"
    aligned = tensor.address % guard.alignment_bytes == 0
    if guard.layout == "rows" and not contiguous:
        elem_bytes = max(1, DTYPE_BITS[tensor.dtype] // 8)
        aligned &= all(size == 1 or stride * elem_bytes % guard.alignment_bytes == 0 for size, stride in outer)
    return HIT if aligned else "alignment"

"""Inputs of a definition from a seed: what a workload recorded, and what stands in for what it did not."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping

import torch
from safetensors import safe_open

from fibc.adversarial import adversarial_cases
from fibc.calls import Value, torch_dtype
from fibc.errors import InputError
from fibc.schema.constraints import check_constraints
from fibc.schema.definition import Definition, TensorSpec
from fibc.schema.digest import digest_text
from fibc.schema.workload import SafetensorsInput, ScalarInput, Workload
from fibc.structure import synthesise

COLD_FACTOR = 4
"""Copies of the weights total this many times the last-level cache, so that a rotation never finds one in it."""

MEMORY_FRACTION = 0.25
"""Copies take at most this part of the memory."""

MAX_COPIES = 1024
"""A sample goes through all copies. 1024 are enough for weights of 240 KB and more beside the 60 MB of an H200."""

BLOCK_ELEMS = 1_048_573
"""Distinct random values of a tensor on a CPU: a prime, so that a larger tensor, which repeats the block, has no two
equal rows at a distance that a wrong index could produce. Filling 8192 x 4096 takes 0.05 s so, 0.28 s without it (one
core of an Intel Xeon with AMX, torch 2.13.0, one thread). A GPU draws every value."""

NORM_WEIGHT_SPREAD = 0.1
"""Standard deviation of the weights of norms, around 1."""

SCALARS: Mapping[str, float] = {
    "eps": 1e-6,
    "epsilon": 1e-6,
    "local_expert_offset": 0,
    "routed_scaling_factor": 2.5,
}
"""Scalars by name where a workload recorded none; a softmax scale is 1 / sqrt(head dimension), any other scalar 1."""

_HEAD_DIMS = ("head_dim", "head_size", "qk_dim", "head_dim_ckv")
_SOFTMAX_SCALES = frozenset({"sm_scale", "scale", "softmax_scale"})


def make(
    definition: Definition,
    axes: Mapping[str, int],
    seed: int,
    workload: Workload | None = None,
    made: Mapping[str, Value] | None = None,
    *,
    device: torch.device | str = "cpu",
) -> dict[str, Value]:
    """Return one value per input of ``definition``, in call order; equal arguments give equal bits.

    Dense values come from the generator of their device, so that a GPU draws a large weight in milliseconds: equal bits
    on GPUs of one kind, other bits than on a CPU. Structured inputs (lengths, pages) are the same everywhere.

    Dense inputs are normal: activations with a deviation of 1, weights (constant axes, rank 2 and more) with 1 /
    sqrt(contracted size), so that a product stays O(1), weights of norms around 1. Scalars and stored tensors come from
    ``workload``. Structured inputs whose file is not there are made from its uuid, so that they are the same in every
    session, while dense values follow ``seed``.

    Runs no parallel region where ``torch.get_num_threads()`` is 1.

    Args:
        axes: Every var axis.
        workload: Where it was recorded; an optional input that it leaves out is None.
        made: Inputs of an earlier call with the same seed that do not depend on ``axes``, such as weights: taken as
            they are, as making a large weight takes longer than timing a small call.
        device: Of the tensors.

    Raises:
        InputError: If the definition's constraints do not hold, or torch has no such dtype.
    """
    sizes = {**definition.const_axes, **axes}
    structure_seed = _derived_seed(workload.uuid if workload is not None else repr(sorted(axes.items())))
    recorded = {} if workload is None else _recorded(definition, workload)
    integers = {
        name: value.long().numpy()
        for name, value in recorded.items()
        if isinstance(value, torch.Tensor) and not value.is_floating_point()
    }
    structured = synthesise(definition, sizes, structure_seed, integers)
    values: dict[str, Value] = {}
    for name, spec in definition.inputs.items():
        if made is not None and name in made:
            values[name] = made[name]
        elif name in recorded:
            values[name] = _moved(recorded[name], device)
        elif spec.shape is None:
            values[name] = _scalar(name, spec, sizes)
        elif name in structured:
            values[name] = torch.from_numpy(structured[name]).to(torch_dtype(spec.dtype)).to(device)
        else:
            generator = torch.Generator(device).manual_seed(_derived_seed(f"{seed}:{name}"))
            values[name] = _dense(definition, name, spec, sizes, generator)
    problems = check_constraints(definition, axes, values)
    if problems:
        raise InputError("\n".join(f"{definition.name}: {problem}" for problem in problems))
    return values


def residency(definition: Definition) -> dict[str, str]:
    """Return ``cold`` for weights (rank 2 and more, constant axes only: read once a call, long evicted) and ``hot`` for
    everything else (just written by the operator before)."""
    return {name: "cold" if _is_weight(definition, spec) else "hot" for name, spec in definition.inputs.items()}


def num_copies(definition: Definition, cache_bytes: int, memory_bytes: int, share_bytes: int | None = None) -> int:
    """Return how many copies of the cold inputs a rotation needs, at least 1 and at most ``MAX_COPIES``.

    Args:
        cache_bytes: Size of the last-level cache: a CPU's L3, a GPU's L2.
        memory_bytes: Memory of the machine or the GPU; copies take at most a quarter of it.
        share_bytes: What this machine can use of the cache, measured; copies are then four times that, and no less than
            the whole cache. None: all of it.
    """
    bytes_of_one = cold_bytes(definition)
    if bytes_of_one == 0:
        return 1
    wanted = COLD_FACTOR * cache_bytes
    if share_bytes is not None:
        wanted = min(wanted, max(cache_bytes, COLD_FACTOR * share_bytes))
    needed = -(-wanted // bytes_of_one)
    return max(1, min(needed, int(memory_bytes * MEMORY_FRACTION) // bytes_of_one, MAX_COPIES))


def cold_bytes(definition: Definition) -> int:
    """Return the size of one copy of the cold inputs."""
    return sum(
        math.prod(definition.const_axes[axis] for axis in spec.shape or ()) * torch_dtype(spec.dtype).itemsize
        for name, spec in definition.inputs.items()
        if _is_weight(definition, spec)
    )


def cold_copies(definition: Definition, inputs: Mapping[str, Value], count: int) -> list[dict[str, Value]]:
    """Return ``count`` times ``inputs``: the first itself, the others with copies of the cold inputs."""
    cold = residency(definition)
    return [
        {
            name: value.clone() if index > 0 and cold[name] == "cold" and isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }
        for index in range(count)
    ]


def adversarial(
    definition: Definition,
    axes: Mapping[str, int],
    seed: int,
    workload: Workload | None = None,
    *,
    device: torch.device | str = "cpu",
    wanted: Collection[str] | None = None,
) -> Iterator[tuple[str, dict[str, Value]]]:
    """Yield named inputs that break kernels which ordinary inputs do not.

    The cases are those of ``fibc.adversarial``; the definition's reference says what is right.

    Those ``wanted``, all where it is None. Only dense floating-point inputs change, most of them only where an axis
    varies: probabilities stay such, indexes stay valid. Tensors that a case leaves alone are shared between the cases.
    """
    plain = make(definition, axes, seed, workload, device=device)
    sizes = {**definition.const_axes, **axes}
    dense = {
        name: value
        for name, value in plain.items()
        if isinstance(value, torch.Tensor)
        and value.dim() > 0
        and value.numel() > 0
        and _is_plain(name, definition.inputs[name])
    }
    varying = [name for name in dense if _varies(definition, definition.inputs[name])]
    typical = {
        name: _deviation(definition, name, sizes) if len(definition.inputs[name].shape or ()) >= 2 else 1.0
        for name in dense
    }
    generator = torch.Generator(device).manual_seed(_derived_seed(f"{seed}:adversarial"))
    for label, changed in adversarial_cases(dense, varying or list(dense), typical, generator, wanted):
        yield label, {**plain, **changed}


# Dense values ---------------------------------------------------------------------------------------------------------


def _dense(
    definition: Definition, name: str, spec: TensorSpec, sizes: Mapping[str, int], generator: torch.Generator
) -> torch.Tensor:
    """Return a floating-point or bool input."""
    shape = tuple(sizes[axis] for axis in spec.shape or ())
    dtype = torch_dtype(spec.dtype)
    num_elems = math.prod(shape)
    drawn = min(num_elems, BLOCK_ELEMS) if generator.device.type == "cpu" else num_elems
    block = _standard_normal(drawn, generator)
    if dtype is torch.bool:
        block = block > 0
    elif name == "probs" and len(shape) == 2:
        logits = _tile(block.mul_(3), num_elems).view(shape)
        return torch.softmax(logits, dim=-1).to(dtype)
    elif name == "top_p":
        block = 0.9 + 0.1 * torch.erf(block.abs_())
    elif name == "A_log":
        block = torch.log(1 + 15 * torch.erf(block.abs_()))
    elif _is_scale(name):
        block = _scale_of_quantised(definition, name, sizes) * (1 + NORM_WEIGHT_SPREAD * block.clamp_(-3, 3))
    elif _is_norm_weight(definition, name, spec):
        block.mul_(NORM_WEIGHT_SPREAD).add_(1)
    else:
        block.mul_(_deviation(definition, name, sizes))
    return _tile(block.to(dtype), num_elems).view(shape)


def _standard_normal(num: int, generator: torch.Generator) -> torch.Tensor:
    """Return ``num`` values. On a CPU they begin a longer draw, which is kept: calls of other sizes begin alike."""
    if generator.device.type != "cpu":
        return torch.randn(num, generator=generator, device=generator.device)
    drawn = min(BLOCK_ELEMS, 4 ** math.ceil(math.log(max(num, 1), 4)))
    return _drawn(generator.initial_seed(), max(num, drawn))[:num].clone()


@functools.lru_cache(maxsize=8)
def _drawn(seed: int, num: int) -> torch.Tensor:
    """Return values that nobody writes to; 4 MB each at most."""
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def _tile(block: torch.Tensor, num_elems: int) -> torch.Tensor:
    """Return ``num_elems`` elements that repeat ``block``."""
    if num_elems <= block.numel():
        return block
    tiled = torch.empty(num_elems, dtype=block.dtype, device=block.device)
    num_whole = num_elems // block.numel()
    tiled[: num_whole * block.numel()].view(num_whole, block.numel()).copy_(block)
    tiled[num_whole * block.numel() :].copy_(block[: num_elems - num_whole * block.numel()])
    return tiled


def _is_float(spec: TensorSpec) -> bool:
    return spec.shape is not None and spec.dtype.startswith(("float", "bfloat"))


def _is_weight(definition: Definition, spec: TensorSpec) -> bool:
    return spec.shape is not None and len(spec.shape) >= 2 and not _varies(definition, spec)


def _varies(definition: Definition, spec: TensorSpec) -> bool:
    return any(axis not in definition.const_axes for axis in spec.shape or ())


def _is_norm_weight(definition: Definition, name: str, spec: TensorSpec) -> bool:
    one_constant_axis = len(spec.shape or ()) == 1 and not _varies(definition, spec)
    return one_constant_axis and "bias" not in name


def _is_scale(name: str) -> bool:
    return name.endswith(("_scale", "_scales", "_scale_inv", "_scalar"))


def _is_plain(name: str, spec: TensorSpec) -> bool:
    """Return whether any finite value may stand in ``name``."""
    return _is_float(spec) and name not in ("probs", "top_p", "A_log") and not _is_scale(name)


def _deviation(definition: Definition, name: str, sizes: Mapping[str, int]) -> float:
    """Return the standard deviation that keeps products O(1): 1, or 1 / sqrt(contracted size) for a weight and for the
    second factor where an operator has just two.

    Quantised weights whose scale is another input have 1 (they would underflow): the scale has the factor.
    """
    if any(f"{name}{suffix}" in definition.inputs for suffix in ("_scale", "_scales", "_scale_inv")):
        return 1.0
    return _shrink(definition, name, sizes)


def _scale_of_quantised(definition: Definition, name: str, sizes: Mapping[str, int]) -> float:
    quantised = name.rpartition("_scale")[0]
    return _shrink(definition, quantised, sizes) if quantised in definition.inputs else 1.0


def _shrink(definition: Definition, name: str, sizes: Mapping[str, int]) -> float:
    spec = definition.inputs[name]
    shape = spec.shape or ()
    if not _is_float(spec) or len(shape) < 2:
        return 1.0
    in_outputs = {axis for output in definition.outputs.values() for axis in output.shape or ()}
    if _is_weight(definition, spec):
        missing = [axis for axis in shape if axis not in in_outputs]
        contracted = missing[0] if len(shape) == 2 and len(missing) == 1 else shape[-1]
        return 1 / math.sqrt(max(sizes[contracted], 1))
    factors = [other for other, at in definition.inputs.items() if _is_float(at) and len(at.shape or ()) >= 2]
    if len(factors) != 2 or factors[1] != name:  # attention has more, and its softmax keeps outputs O(1)
        return 1.0
    first = definition.inputs[factors[0]].shape or ()
    shared = [axis for axis in shape if axis in first and axis not in in_outputs]
    return 1 / math.sqrt(max(sizes[shared[-1]], 1)) if shared else 1.0


# Scalars and stored tensors ------------------------------------------------------------------------------------------


def _scalar(name: str, spec: TensorSpec, sizes: Mapping[str, int]) -> Value:
    if name in _SOFTMAX_SCALES:
        head_dim = next((sizes[axis] for axis in _HEAD_DIMS if axis in sizes), 1)
        return 1 / math.sqrt(head_dim)
    value = SCALARS.get(name, 1)
    if spec.dtype == "bool":
        return bool(value)
    return int(value) if spec.dtype.startswith(("int", "uint")) else float(value)


def _recorded(definition: Definition, workload: Workload) -> dict[str, Value]:
    """Return the inputs that ``workload`` recorded, without those whose file is not there; left out is None."""
    found: dict[str, Value] = {}
    for name, spec in definition.inputs.items():
        recorded, path = workload.inputs.get(name), workload.stored_path(name)
        if isinstance(recorded, ScalarInput):
            value = recorded.value
            found[name] = value if spec.shape is None else torch.tensor(value, dtype=torch_dtype(spec.dtype))
        elif isinstance(recorded, SafetensorsInput) and path is not None:
            with safe_open(str(path), framework="pt") as file:
                found[name] = file.get_tensor(recorded.tensor_key)
        elif recorded is None and spec.optional:
            found[name] = None
    return found


def _moved(value: Value, device: torch.device | str) -> Value:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _derived_seed(text: str) -> int:
    return int(digest_text(text), 16) & (2**63 - 1)

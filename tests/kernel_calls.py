"""Small definitions, and calls of built kernels through their C interface, for tests of templates."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import kernel_abi as abi
import torch

from fibc.backends.base import BuildFailure
from fibc.backends.cpu import CpuBackend
from fibc.cache import Cache
from fibc.environment import Environment, detect
from fibc.schema.candidate import Artifact, Candidate, ConfigValue
from fibc.schema.definition import Definition
from fibc.schema.feature import Cell, FeatureKey, Point
from fibc.schema.space import Space
from fibc.search.space import ConfigSpace

GEMM_REFERENCE = "import torch\n\ndef run(A, B):\n    return torch.matmul(A, B.T)\n"

NORM_REFERENCE = """\
import torch

EPS = 1e-5

def run({arguments}):
    x = {sum}
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.float()).to(weight.dtype)
"""

IN_PLACE_REFERENCE = """\
import torch

EPS = 1e-5

def run(x, residual, weight):
    total = x.float() + residual.float()
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight.float()
    return normed.to(weight.dtype), total.to(weight.dtype)
"""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def gemm(n: int, k: int, dtype: str) -> Definition:
    return define(
        "gemm",
        {"M": None, "N": n, "K": k},
        {"A": (("M", "K"), dtype), "B": (("N", "K"), dtype)},
        {"C": (("M", "N"), dtype)},
        GEMM_REFERENCE,
    )


def rmsnorm(hidden: int, dtype: str, *, fused: bool) -> Definition:
    rows = (("rows", "hidden"), dtype)
    residual = {"residual": rows} if fused else {}
    names = ["x", *residual, "weight"]
    total = "x.float() + residual.float()" if fused else "x.float()"
    return define(
        "rmsnorm",
        {"rows": None, "hidden": hidden},
        {"x": rows, **residual, "weight": (("hidden",), dtype)},
        {"y": rows},
        NORM_REFERENCE.format(arguments=", ".join(names), sum=total),
    )


def fused_in_place(hidden: int, dtype: str) -> Definition:
    """Return FlashInfer's fused_add_rmsnorm: x becomes the norm of the sum, and residual the sum."""
    rows = (("rows", "hidden"), dtype)
    written = {"shape": ["rows", "hidden"], "dtype": dtype}
    definition = define(
        "rmsnorm",
        {"rows": None, "hidden": hidden},
        {"x": rows, "residual": rows, "weight": (("hidden",), dtype)},
        {"normed": rows, "total": rows},
        IN_PLACE_REFERENCE,
    )
    outputs = {"normed": {**written, "param": "x"}, "total": {**written, "param": "residual"}}
    return Definition.model_validate({**definition.to_json(), "outputs": outputs})


def define(
    op_type: str,
    axes: Mapping[str, int | None],
    inputs: Mapping[str, tuple[Sequence[str] | None, str]],
    outputs: Mapping[str, tuple[Sequence[str] | None, str]],
    reference: str,
    **fields: Any,
) -> Definition:
    """Return a definition; an axis without a size varies."""
    return Definition.model_validate(
        {
            "name": f"{op_type}_under_test",
            "op_type": op_type,
            "axes": {n: {"type": "var"} if v is None else {"type": "const", "value": v} for n, v in axes.items()},
            "inputs": {n: {"shape": s, "dtype": d} for n, (s, d) in inputs.items()},
            "outputs": {n: {"shape": s, "dtype": d} for n, (s, d) in outputs.items()},
            "reference": reference,
            **fields,
        }
    )


def machine(*isa: str, l2_bytes: int = 1 << 21) -> Environment:
    """Return an environment of two threads whose CPU has the levels ``isa``."""
    return Environment("a test's CPU", isa, l2_bytes, 1 << 25, 2, {"torch": "2.13.0"})


def key(size: int) -> FeatureKey:
    """Return the key of the cell that ends at ``size``."""
    return FeatureKey(Cell(((1, size),)), (Point((("M", size),), "end"),), 0, True)


def space_of(backend: CpuBackend, definition: Definition, template: str, size: int = 64) -> Space:
    spaces, _ = backend.spaces(definition, key(size))
    return next(space for space in spaces if space.template == template)


def default_config(space: Space, **changed: ConfigValue) -> dict[str, ConfigValue]:
    """Return the first valid config with some values replaced."""
    config = ConfigSpace(space).default()
    assert config is not None, f"{space.template} has no valid config"
    return dict(config) | changed


def default_candidate(backend: CpuBackend, definition: Definition, template: str, size: int = 64) -> Candidate:
    return backend.candidate(definition, template, default_config(space_of(backend, definition, template, size)))


def build_one(backend: CpuBackend, definition: Definition, candidate: Candidate) -> Artifact:
    built = backend.build(definition, [candidate], timeout_s=60, jobs=1)[candidate.digest]
    assert not isinstance(built, BuildFailure), built.log
    return built


def own_levels() -> tuple[str, ...]:
    """Return the ISA levels of this machine."""
    return detect(1).isa


def backend_for(isa: str, cache: Cache) -> CpuBackend:
    return CpuBackend(machine("avx2", "avx512", "avx512_bf16", "amx_bf16"), cache, isa=isa)


def _in_turn(task: Any, context: int, num_threads: int) -> None:
    """Run the shares one after another, last first, as the interface allows."""
    for thread in reversed(range(num_threads)):
        task(context, thread, num_threads)


_parallel = abi.Parallel(_in_turn)


def call_kernel(
    artifact: Artifact,
    definition: Definition,
    axes: Mapping[str, int],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    num_threads: int = 1,
) -> int:
    """Call the kernel on tensors and return its status."""
    if artifact.resources["isa"] == "amx_bf16":
        ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    entry = getattr(ctypes.CDLL(artifact.library_path), artifact.symbol)
    entry.restype = ctypes.c_int32
    sizes = [definition.const_axes.get(name, axes.get(name, 0)) for name in definition.axes]
    call = abi.Call(
        abi.views(inputs),
        abi.views(outputs),
        (ctypes.c_double * max(1, len(inputs)))(),
        abi.int64s(sizes),
        ctypes.cast(_parallel, ctypes.c_void_p),
        num_threads,
    )
    return int(entry(ctypes.byref(call)))

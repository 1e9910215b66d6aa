"""A template's ``[launch]`` table for one candidate: what Triton compiles, and the C++ that launches it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fibc.backends.cubin import word_lines
from fibc.backends.launch_code import cpp, fixed_int
from fibc.backends.match import Match
from fibc.backends.triton_compile import Compiled, KernelSource
from fibc.errors import BuildError, SchemaError
from fibc.render import Renderer
from fibc.schema.arch import WARP_SIZE
from fibc.schema.candidate import ConfigValue
from fibc.schema.definition import DTYPE_BITS, Definition
from fibc.schema.launch import TRITON_TYPES, KernelArgument, LaunchTable, Text
from fibc.schema.template import Role, Template

LAUNCHER = "launch/triton.cpp.j2"

DIVISOR = 16
"""What Triton assumes of a pointer that is told to be aligned: a vector of 16 bytes is loaded at once."""

_PROMOTIONS = {0: "kNone", 64: "k64Bytes", 128: "k128Bytes", 256: "k256Bytes"}

_MAP_TYPES = {"float16": "kFloat16", "bfloat16": "kBfloat16", "float32": "kFloat32"}


@dataclass(frozen=True)
class Bound:
    """A template bound to a definition and a config.

    Attributes:
        values: Tunables and all that is fixed, by the template's names.
    """

    template: Template
    definition: Definition
    found: Match
    values: Mapping[str, ConfigValue]

    @property
    def table(self) -> LaunchTable:
        assert self.template.launch is not None, "a Triton template has a launch table"
        return self.template.launch

    @property
    def axes(self) -> dict[str, int]:
        """Varying axes by the template's names, with their indexes into ``call->axes``."""
        positions = list(self.definition.axes)
        varying = (axis for axis in self.template.axes if axis not in self.template.const_axes)
        return {axis: positions.index(self.found.axes[axis]) for axis in varying}

    @property
    def arguments(self) -> tuple[KernelArgument, ...]:
        """The kernel's arguments for these values."""
        return tuple(argument for argument in self.table.arguments if self.fixed(argument.when))

    def role(self, name: str) -> Role:
        return self.template.inputs[name] if name in self.template.inputs else self.template.outputs[name]

    def dtype(self, role: Role) -> str:
        return self.found.dtypes.get(role.dtype, role.dtype)

    def tensor(self, name: str) -> str:
        """Return a role's tensor as C++ finds it in a call."""
        if name in self.found.inputs:
            return f"inputs[{self.found.inputs[name]}]"
        return f"outputs[{self.found.outputs[name]}]"

    def fixed(self, text: Text) -> int:
        with self._named():
            return fixed_int(text, self.values)

    def cpp(self, text: Text) -> str:
        with self._named():
            return cpp(text, self.values, self.axes)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Say of which template a problem is."""
        try:
            yield
        except SchemaError as error:
            raise SchemaError(f"{self.template.name}: launch: {problem}" for problem in error.problems) from error


def kernel_source(bound: Bound, text: str, capability: int) -> KernelSource:
    """Return what Triton shall compile of the rendered ``text``."""
    table = bound.table
    options: dict[str, int | bool] = {
        "num_warps": bound.fixed(table.num_warps),
        "num_stages": bound.fixed(table.num_stages),
        "enable_fp_fusion": True,  # its default changes between versions of Triton
    }
    if maxnreg := bound.fixed(table.maxnreg):
        options["maxnreg"] = maxnreg
    if bound.fixed(table.dependent):
        options["launch_pdl"] = True
    aligned = (
        argument.workspace is not None
        or (argument.tensor is not None and bound.role(argument.tensor).alignment_bytes % DIVISOR == 0)
        for argument in bound.arguments
    )
    return KernelSource(
        text=text,
        function=table.function,
        signature=tuple((argument.name, _triton_type(bound, argument)) for argument in bound.arguments),
        divisible=tuple(index for index, holds in enumerate(aligned) if holds),
        options=options,
        capability=capability,
    )


def _triton_type(bound: Bound, argument: KernelArgument) -> str:
    if argument.workspace is not None:
        return "*i32" if argument.workspace == "counters" else "*fp32"
    if argument.value is not None:
        return argument.type
    name = argument.tensor or argument.descriptor or ""
    element = TRITON_TYPES[bound.dtype(bound.role(name))]
    if argument.tensor is not None:
        return f"*{element}"
    return f"tensordesc<{element}[{','.join(str(bound.fixed(size)) for size in argument.block)}]>"


def launcher_source(bound: Bound, compiled: Compiled, banner: str, renderer: Renderer) -> str:
    """Return the C++ translation unit that holds ``compiled`` and launches it."""
    table, facts = bound.table, compiled.facts
    scratch = bound.cpp(table.scratch_bytes)
    values = {
        "banner": banner,
        "cubin": word_lines(compiled.cubin),
        "size": len(compiled.cubin),
        "function": facts["name"],
        "threads": facts["num_warps"] * WARP_SIZE,
        "shared_bytes": facts["shared"],
        "dependent": bool(bound.fixed(table.dependent)),
        "requires": [bound.cpp(law) for law in table.requires],
        "grid": [bound.cpp(blocks) for blocks in (*table.grid, 1, 1)[:3]],
        "scratch": scratch,
        "arguments": list(_arguments(bound, facts["tensordesc_meta"] or ())),
    }
    return renderer(LAUNCHER, values)


def _arguments(bound: Bound, maps: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the arguments as the launcher's template takes them."""
    descriptions = iter(maps)
    for argument in bound.arguments:
        name = f"{argument.name}_arg"  # apart from the names of C++ and of the launcher
        if argument.workspace is not None:
            yield {"kind": "workspace", "name": name, "workspace": argument.workspace}
        elif argument.value is not None:
            yield {"kind": "value", "name": name, "value": bound.cpp(argument.value), "bits": int(argument.type[1:])}
        elif argument.tensor is not None:
            yield {"kind": "tensor", "name": name, "tensor": bound.tensor(argument.tensor)}
        else:
            yield _descriptor(bound, argument, name, next(descriptions))


def _descriptor(bound: Bound, argument: KernelArgument, name: str, description: Mapping[str, Any]) -> dict[str, Any]:
    assert argument.descriptor is not None
    role = bound.role(argument.descriptor)
    promotion = bound.fixed(argument.promotion)
    if promotion not in _PROMOTIONS:
        accepted = ", ".join(map(str, _PROMOTIONS))
        raise SchemaError(
            f"{bound.template.name}: launch: promotion: must be known, got {promotion} (accepted: {accepted})"
        )
    dtype = bound.dtype(role)
    shape = [bound.cpp(axis) for axis in role.shape]
    strides = [" * ".join(shape[index + 1 :]) or "1" for index in range(len(shape))]
    return {
        "kind": "descriptor",
        "name": name,
        "tensor": bound.tensor(argument.descriptor),
        "type": _MAP_TYPES[dtype],
        "elem_bytes": DTYPE_BITS[dtype] // 8,
        "shape": shape,
        "strides": strides,
        "box": list(description["block_size"]),
        "swizzle": int(description["swizzle"]),
        "promotion": _PROMOTIONS[promotion],
    }


def check_parameters(bound: Bound, compiled: Compiled, seen: tuple[int, ...]) -> None:
    """Hold the kernel's parameters to those that the launcher passes.

    Args:
        seen: Sizes of the parameters in the cubin, in bytes.

    Raises:
        BuildError: If they are others: this version of Triton has another launch interface.
    """
    sizes: list[int] = []
    for argument in bound.arguments:
        if argument.value is not None:
            sizes.append(int(argument.type[1:]) // 8)
        elif argument.descriptor is not None:
            rank = len(argument.block)
            sizes += [128, *[4] * rank, *[8] * rank]
        else:
            sizes.append(8)
    expected = (*sizes, 8, 8)  # global scratch, profile scratch
    if seen != expected:
        raise BuildError(
            f"{bound.template.name}: the launcher passes parameters of {_spaced(expected)} bytes, "
            f"the kernel takes {_spaced(seen)} (this version of Triton is not known here)"
        )
    scratch = compiled.facts["global_scratch_size"] or compiled.facts["profile_scratch_size"]
    if scratch:
        raise BuildError(f"{bound.template.name}: must need no scratch of Triton's own, needs {scratch} bytes a block")


def _spaced(sizes: Sequence[int]) -> str:
    return " ".join(map(str, sizes))

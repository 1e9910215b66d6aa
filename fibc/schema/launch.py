"""How a template's kernel is launched, as the ``[launch]`` table of its TOML says it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, model_validator
from pydantic_core import PydanticCustomError

from fibc.errors import SchemaError
from fibc.schema.definition import DTYPE_BITS
from fibc.schema.expression import parse
from fibc.schema.problems import place, shown

Text = StrictInt | StrictStr
"""An integer, or an expression in the language of ``fibc.schema.expression``."""

_Identifier = Annotated[StrictStr, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=64)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KernelArgument(_Table):
    """An argument of the kernel. Exactly one of ``tensor``, ``descriptor``, ``workspace`` and ``value`` is given.

    Attributes:
        name: The kernel's parameter.
        when: A law over tunables and constants; where it does not hold, the kernel has no such argument.
        tensor: A role, whose data pointer is passed; what its alignment allows is told to the compiler.
        descriptor: A role, passed as a tensor map that copies blocks of ``block``; the tensor is contiguous.
        block: Elements of a block, one expression over configs and constants for each axis of the role.
        promotion: Bytes that a read of a block brings into the L2 cache at once: 0, 64, 128 or 256.
        workspace: ``counters``, a pointer to int32 that are zero when the kernel starts and that it leaves zero, or
            ``scratch``, a pointer to float32 of any value. Null where ``scratch_bytes`` is 0.
        value: An integer, as an expression over axes, configs and constants.
        type: Of ``value``.
    """

    name: _Identifier
    when: StrictStr = "True"
    tensor: StrictStr | None = None
    descriptor: StrictStr | None = None
    block: tuple[Text, ...] = ()
    promotion: Text = 128
    workspace: Literal["counters", "scratch"] | None = None
    value: Text | None = None
    type: Literal["i32", "i64"] = "i32"

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        if sum(kind is not None for kind in (self.tensor, self.descriptor, self.workspace, self.value)) != 1:
            raise PydanticCustomError("kind", "must have one of tensor, descriptor, workspace and value")
        if bool(self.block) != (self.descriptor is not None):
            raise PydanticCustomError("block", "must have a block where it has a descriptor, and only there")
        return self


class LaunchTable(_Table):
    """A launch: what is fixed when the kernel is compiled, then what each call computes.

    Attributes:
        function: Name of the kernel in the source.
        num_warps: Over tunables and constants. Alike ``num_stages`` and ``maxnreg`` (0 leaves it to the compiler).
        dependent: Whether it is launched before its predecessor in the stream has ended; the kernel then waits itself.
        grid: Blocks along one to three axes. Over axes, tunables and constants, like all that follows.
        arguments: In the kernel's order.
        scratch_bytes: 0 where neither scratch nor counters are needed.
        requires: Laws that a call must keep to be launched; any other is declined.
    """

    function: _Identifier
    num_warps: Text = 4
    num_stages: Text = 3
    maxnreg: Text = 0
    dependent: Text = 0
    grid: Annotated[tuple[Text, ...], Field(min_length=1, max_length=3)]
    arguments: Annotated[tuple[KernelArgument, ...], Field(min_length=1)]
    scratch_bytes: Text = 0
    requires: tuple[StrictStr, ...] = ()

    def problems(self, fixed: Collection[str], axes: Collection[str], roles: dict[str, int]) -> Iterator[str]:
        """Yield what does not fit to the rest of the template.

        Args:
            fixed: Names known when the kernel is compiled.
            axes: Names known in a call only.
            roles: The rank of every role.
        """
        for field in ("num_warps", "num_stages", "maxnreg", "dependent"):
            yield from _expression_problems(field, getattr(self, field), fixed)
        in_call = {*fixed, *axes}
        for index, text in enumerate(self.grid):
            yield from _expression_problems(place("grid", index), text, in_call)
        yield from _expression_problems("scratch_bytes", self.scratch_bytes, in_call)
        for index, law in enumerate(self.requires):
            yield from _expression_problems(place("requires", index), law, in_call)
        for index, argument in enumerate(self.arguments):
            where = place("arguments", index)
            role = argument.tensor or argument.descriptor
            if role is not None and role not in roles:
                yield f"{where}: must be a role, got {shown(role)} (accepted: {', '.join(roles)})"
            elif argument.descriptor is not None and roles[argument.descriptor] != len(argument.block):
                rank = roles[argument.descriptor]
                yield f"{where}.block: must have {rank} sizes like {role}, got {len(argument.block)}"
            yield from _expression_problems(f"{where}.when", argument.when, fixed)
            yield from _expression_problems(f"{where}.promotion", argument.promotion, fixed)
            for text in argument.block:
                yield from _expression_problems(f"{where}.block", text, fixed)
            if argument.value is not None:
                yield from _expression_problems(f"{where}.value", argument.value, in_call)
        names = [argument.name for argument in self.arguments if argument.when == "True"]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"arguments: must have different names, got {name} twice"


def _expression_problems(where: str, text: Text, names: Collection[str]) -> Iterator[str]:
    try:
        parse(str(text), names)
    except SchemaError as error:
        yield from (f"{where}: {problem}" for problem in error.problems)


TRITON_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8e4nv", "int32": "i32"}
"""Triton's names of dtypes, for those that kernels take pointers to."""

assert TRITON_TYPES.keys() <= DTYPE_BITS.keys()

"""Definition: an operator's contract, as FlashInfer-Trace JSON at the border."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fibc.errors import SchemaError
from fibc.paths import atomic_write
from fibc.schema import callspec
from fibc.schema.contract_laws import MAX_SIZE, law_problems
from fibc.schema.digest import digest_json
from fibc.schema.json_text import read_json, write_json
from fibc.schema.problems import describe
from fibc.schema.reference import ENTRY, entry_function, with_run

DTYPE_BITS: Mapping[str, int] = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float4_e2m1": 4,
    "int64": 64,
    "int32": 32,
    "int16": 16,
    "int8": 8,
    "uint8": 8,
    "bool": 8,
}
"""The dtypes of the format with the size of an element in bits. torch's ``bool`` takes a byte."""

MAX_NAME_CHARS = 128

NAME_LAW = f"an identifier of ASCII letters, digits and _, at most {MAX_NAME_CHARS} characters, no leading __"
"""What a name may be. Names reach C++, file names, shells and Python signatures."""

_NAME = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]*")


def is_safe_name(name: str) -> bool:
    """Return whether ``name`` obeys ``NAME_LAW``."""
    return len(name) <= MAX_NAME_CHARS and _NAME.fullmatch(name) is not None


def _safe_name(name: str) -> str:
    if not is_safe_name(name):
        raise PydanticCustomError("name", "must be {law}", {"law": NAME_LAW})
    return name


def _argument_name(name: str) -> str:
    if keyword.iskeyword(name):
        raise PydanticCustomError("name", "must not be a keyword of Python")
    return _safe_name(name)


def _dtype(name: str) -> str:
    if name not in DTYPE_BITS:
        raise PydanticCustomError("dtype", "must be one of {known}", {"known": ", ".join(DTYPE_BITS)})
    return name


def _printable(text: str) -> str:
    if not text or len(text) > MAX_NAME_CHARS or not text.isprintable():
        raise PydanticCustomError("text", "must be 1 to {most} printable characters", {"most": MAX_NAME_CHARS})
    return text


def _null_is_empty(value: object) -> object:
    return () if value is None else value


Name = Annotated[StrictStr, AfterValidator(_safe_name)]
ArgumentName = Annotated[StrictStr, AfterValidator(_argument_name)]
Label = Annotated[StrictStr, AfterValidator(_printable)]
Size = Annotated[StrictInt, Field(ge=0, le=MAX_SIZE)]
Texts = Annotated[tuple[StrictStr, ...], BeforeValidator(_null_is_empty)]


class _Frozen(BaseModel):
    """A value that never changes; fields that nobody knows are kept and written again."""

    model_config = ConfigDict(frozen=True, extra="allow")


class ConstAxis(_Frozen):
    """An axis whose size is part of the contract, in elements."""

    type: Literal["const"]
    value: Size
    description: StrictStr | None = None


class VarAxis(_Frozen):
    """An axis whose size comes with each call."""

    type: Literal["var"]
    description: StrictStr | None = None


class TensorSpec(_Frozen):
    """An input or an output.

    Attributes:
        shape: Names of axes; ``()`` is a 0-d tensor, None a Python number.
        dtype: One of ``DTYPE_BITS``.
        optional: The caller may pass None for this input.
        param: Of an output in FlashInfer's own dialect: the parameter it is written into. Where that is an input's
            name the output is in place; any other name (``out``) is a buffer that the caller brings.
    """

    shape: tuple[StrictStr, ...] | None
    dtype: Annotated[StrictStr, AfterValidator(_dtype)]
    optional: StrictBool = False
    param: StrictStr | None = None
    description: StrictStr | None = None


class Definition(_Frozen):
    """What an operator takes, returns and means.

    Building one from data that breaks a law raises ``SchemaError`` with every problem, each ``where: law, got X``.

    Attributes:
        name: Unique; ``NAME_LAW``.
        op_type: The operator's family, free text: ``gemm``.
        axes: By name, in the order of the file.
        inputs: By name, in call order.
        outputs: By name, in call order.
        reference: Python source of the semantics; see ``entry_point``.
        tags: ``model:x``, ``fi_api:dotted.path``, ...
        constraints: Laws between axes and inputs, in the language of ``fibc.schema.expression``.
    """

    name: Name
    op_type: Label
    axes: dict[Name, Annotated[ConstAxis | VarAxis, Field(discriminator="type")]]
    inputs: Annotated[dict[ArgumentName, TensorSpec], Field(min_length=1)]
    outputs: Annotated[dict[ArgumentName, TensorSpec], Field(min_length=1)]
    reference: StrictStr
    tags: Texts = ()
    constraints: Texts = ()
    description: StrictStr | None = None

    _nulls: tuple[str, ...] = PrivateAttr(default=())
    """Lists that were null in the file, so that they are null when it is written."""

    @model_validator(mode="wrap")
    @classmethod
    def _report_every_problem(cls, document: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(document, cls):
            return document
        problems: list[str] = []
        definition = None
        try:
            definition = build(document)
        except ValidationError as error:
            problems += describe(error, tags=("const", "var"))
        if isinstance(document, Mapping):
            problems += law_problems(document)
        if problems or definition is None:
            raise SchemaError(problems)
        definition._nulls = tuple(name for name in ("tags", "constraints") if document.get(name, ()) is None)
        return definition

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with the fields in ``update`` replaced; nothing is checked."""
        copy = super().model_copy(update=update, deep=deep)
        for name in copy.__dict__.keys() - Definition.model_fields.keys():  # what properties cached before the change
            del copy.__dict__[name]
        return copy

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def const_axes(self) -> dict[str, int]:
        """Sizes of the const axes, in elements."""
        return {name: axis.value for name, axis in self.axes.items() if isinstance(axis, ConstAxis)}

    @cached_property
    def var_axes(self) -> tuple[str, ...]:
        """Names of the var axes."""
        return tuple(name for name, axis in self.axes.items() if isinstance(axis, VarAxis))

    @cached_property
    def entry_point(self) -> str:
        """Name of the reference's function: ``run``, or any in FlashInfer's own dialect."""
        entry = entry_function(self.reference)
        assert entry is not None  # checked when the definition was built
        return entry.name

    @cached_property
    def digest(self) -> str:
        """Identity of the meaning: name, axes, inputs, outputs, reference, constraints; equal in both dialects."""
        first = self.first_dialect()
        sizes = {name: first.const_axes.get(name) for name in first.axes}

        def specs(group: Mapping[str, TensorSpec]) -> list[Any]:
            return [[name, spec.shape, spec.dtype, spec.optional, spec.param] for name, spec in group.items()]

        return digest_json(
            [first.name, sizes, specs(first.inputs), specs(first.outputs), first.reference, first.constraints]
        )

    def first_dialect(self) -> Definition:
        """Return the definition as FlashInfer-Bench reads it: a ``run``, and no output with an input's name."""
        if self.entry_point == ENTRY and not self.inputs.keys() & self.outputs.keys():
            return self
        outputs = {self._output_name(name): spec for name, spec in self.outputs.items()}
        rewritten = {"outputs": outputs, "reference": with_run(self.reference, tuple(self.inputs))}
        return self.model_copy(update=rewritten)

    def alias_of(self, output: str) -> str | None:
        """Return the input that ``output`` is written into, or None where it has memory of its own."""
        param = self.outputs[output].param
        return param if param in self.inputs else None

    def shape_of(self, spec: TensorSpec, axes: Mapping[str, int]) -> tuple[int, ...] | None:
        """Return the sizes of ``spec``, in elements, for the var axes ``axes``; None for a Python number."""
        if spec.shape is None:
            return None
        return tuple(self.const_axes[name] if name in self.const_axes else axes[name] for name in spec.shape)

    def call_spec(self) -> callspec.CallSpec:
        """Return the calling convention: every axis, input and output in the order of the definition."""
        axis_index = {name: index for index, name in enumerate(self.axes)}
        input_index = {name: index for index, name in enumerate(self.inputs)}

        def argument(name: str, spec: TensorSpec, alias: str | None = None) -> callspec.Argument:
            kind = "scalar" if spec.shape is None else "tensor" if spec.shape else "scalar_tensor"
            axes = tuple(axis_index[axis] for axis in spec.shape or ())
            return callspec.Argument(
                name, kind, spec.dtype, axes, spec.optional, None if alias is None else input_index[alias]
            )

        return callspec.CallSpec(
            definition=self.name,
            axes=tuple(callspec.Axis(name, self.const_axes.get(name)) for name in self.axes),
            inputs=tuple(argument(name, spec) for name, spec in self.inputs.items()),
            outputs=tuple(argument(name, spec, self.alias_of(name)) for name, spec in self.outputs.items()),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the definition as it was read: every field that was there, none that was not, nulls as nulls."""
        return {**self.model_dump(mode="json", exclude_unset=True), **dict.fromkeys(self._nulls)}

    def _output_name(self, name: str) -> str:
        while name in self.inputs:
            name += "_out"
        return name


def load_definition(path: Path | str) -> Definition:
    """Return the definition in the JSON file ``path``, in either dialect.

    Raises:
        SchemaError: With every problem of the file, each ``path: where: law, got X``.
    """
    document = read_json(Path(path))
    try:
        return Definition.model_validate(document)
    except SchemaError as error:
        raise SchemaError(f"{path}: {problem}" for problem in error.problems) from None


def save_definition(definition: Definition, path: Path | str) -> None:
    """Write ``definition`` to ``path`` in the first dialect, whole or not at all.

    Raises:
        RecordError: If it cannot be written.
    """
    atomic_write(Path(path), f"{write_json(definition.first_dialect().to_json())}\n".encode())

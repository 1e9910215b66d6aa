"""A kernel template's TOML: what it matches, its tunables and their constraints, what it needs and assumes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, StrictStr, ValidationError
from pydantic_core import PydanticCustomError

from fibc.errors import SchemaError
from fibc.schema.candidate import ConfigValue
from fibc.schema.definition import DTYPE_BITS
from fibc.schema.digest import digest_text
from fibc.schema.expression import parse
from fibc.schema.isa import ISA_NAMES
from fibc.schema.problems import describe, shown
from fibc.schema.space import Constraint

TARGET_NAMES = ("lanes", "vector_registers", "l2_bytes", "num_threads")
"""Names of the target that constraints may use: float32 elements of a vector, vector registers, bytes of a core's L2
cache, threads of a call."""

SIZE_NAME = "size"
"""Name of the upper end of a key's first feature."""

SOURCE_SUFFIX = ".cpp.j2"


def _choices(value: object) -> tuple[ConfigValue, ...]:
    if isinstance(value, list | tuple):
        for kind in (bool, int, str):
            if value and all(type(choice) is kind for choice in value) and len(set(value)) == len(value):
                return tuple(value)
    raise PydanticCustomError("choices", "must be a list of different integers, booleans or strings, at least one")


_Identifier = Annotated[StrictStr, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=64)]
_Choices = Annotated[tuple[ConfigValue, ...], PlainValidator(_choices)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Role(_Table):
    """A tensor by the part it plays.

    Attributes:
        shape: Names of the template's own axes, ``["M", "K"]``. Equal names are equal axes of the definition.
        dtype: A dtype, or the name of one of the template's dtype variables.
        layout: What the code assumes of strides, as in ``TensorGuard``.
        alignment_bytes: What it assumes of the data pointer.
    """

    shape: tuple[_Identifier, ...]
    dtype: str = "T"
    layout: Literal["contiguous", "rows"] = "contiguous"
    alignment_bytes: Annotated[int, Field(ge=1, le=4096)] = 1


class Law(_Table):
    """A constraint on configs, checked before a build."""

    expression: str
    message: str


class Template(_Table):
    """A kernel template, ``<family>/<name>.toml`` beside ``<family>/<name>.cpp.j2``.

    Attributes:
        name: ``gemm/matvec``: its path below the root that holds it; not a key of the file.
        digest: Of both files; not a key of the file either.
        summary: A sentence for people.
        source: Where the code comes from, with its license where it is not fibc's own.
        op_types: Op types that it may serve; matching shapes does the rest, and validation is the judge.
        needs: The least ISA level.
        inputs: Roles of the inputs. Alike ``outputs``.
        const_axes: Axes that must be constant in the definition; the others must vary.
        dtypes: Dtype variables, each with the dtypes that it stands for.
        constants: Numbers that the definition's reference must state: ``eps``.
        tunables: Choices; the first of each is the default.
        constraints: Laws between tunables, constant axes, dtype variables, their ``<variable>_bytes``, ``size`` and
            ``TARGET_NAMES``.
        max_offset_elems: Largest offset that the code computes.
    """

    name: str
    digest: str
    summary: str
    source: str
    op_types: Annotated[tuple[str, ...], Field(min_length=1)]
    needs: str = ISA_NAMES[0]
    inputs: Annotated[dict[_Identifier, Role], Field(min_length=1, max_length=8)]
    outputs: Annotated[dict[_Identifier, Role], Field(min_length=1, max_length=8)]
    const_axes: tuple[_Identifier, ...] = ()
    dtypes: dict[_Identifier, Annotated[tuple[StrictStr, ...], Field(min_length=1)]] = {}
    constants: tuple[Literal["eps"], ...] = ()
    tunables: dict[_Identifier, _Choices] = {}
    constraints: tuple[Law, ...] = ()
    max_offset_elems: Annotated[int, Field(ge=1, le=2**63 - 1)] = 2**63 - 1

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis, in the order in which roles name them."""
        roles = (*self.inputs.values(), *self.outputs.values())
        return tuple(dict.fromkeys(axis for role in roles for axis in role.shape))

    @property
    def names(self) -> frozenset[str]:
        """Names that a constraint may use."""
        sizes = (f"{variable}_bytes" for variable in self.dtypes)
        return frozenset({*self.tunables, *self.const_axes, *self.dtypes, *sizes, SIZE_NAME, *TARGET_NAMES})

    def laws(self) -> tuple[Constraint, ...]:
        """Return the constraints as a space holds them."""
        return tuple(Constraint(law.expression, law.message) for law in self.constraints)

    def problems(self) -> Iterator[str]:
        """Yield what no value shows alone: names that do not fit together, each as ``where: law, got``."""
        if self.needs not in ISA_NAMES:
            yield f"needs: must be an ISA level, got {shown(self.needs)} (accepted: {', '.join(ISA_NAMES)})"
        for variable, dtypes in self.dtypes.items():
            if unknown := [dtype for dtype in dtypes if dtype not in DTYPE_BITS]:
                yield f"dtypes.{variable}: must be dtypes, got {', '.join(unknown)} (accepted: {', '.join(DTYPE_BITS)})"
        known = (*self.dtypes, *DTYPE_BITS)
        for kind, roles in (("inputs", self.inputs), ("outputs", self.outputs)):
            for name, role in roles.items():
                if role.dtype not in known:
                    yield f"{kind}.{name}.dtype: must be known, got {shown(role.dtype)} (accepted: {', '.join(known)})"
        for name in sorted(set(self.inputs) & set(self.outputs)):
            yield f"outputs.{name}: must not be the name of an input as well"
        read = {axis for role in self.inputs.values() for axis in role.shape}
        for axis in self.axes:
            if axis not in read:
                yield f"outputs: axis {axis} must occur in an input too (accepted: {', '.join(sorted(read))})"
        for axis in self.const_axes:
            if axis not in self.axes:
                yield f"const_axes: must be axes of a shape, got {axis} (accepted: {', '.join(self.axes)})"
        taken = {*self.axes, *self.inputs, *self.outputs, *self.dtypes, *self.constants, SIZE_NAME, *TARGET_NAMES}
        for name in self.tunables:
            if name in taken or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                yield f"tunables.{name}: must be a lower-case name that nothing else in the template has"
        for index, law in enumerate(self.constraints):
            try:
                parse(law.expression, self.names)
            except SchemaError as error:
                yield from (f"constraints[{index}].expression: {problem}" for problem in error.problems)


def load_template(path: Path, root: Path) -> Template:
    """Return the template at ``path``, named by its place below ``root``.

    Raises:
        SchemaError: With every problem of the file, each ``path: where: law, got``.
    """
    try:
        text = path.read_bytes()
        data = tomllib.loads(text.decode())
    except OSError as error:
        raise SchemaError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SchemaError(f"{path}: must be TOML in UTF-8: {error}") from error
    problems = [f"{name}: must be absent, it follows from the file" for name in ("name", "digest") if name in data]
    source = path.with_name(path.stem + SOURCE_SUFFIX)
    try:
        digest = digest_text(text, source.read_bytes())
    except OSError as error:
        problems.append(f"{source.name}: must be beside it, got: {error.strerror or error}")
        digest = ""
    try:
        template = Template(**{**data, "name": path.relative_to(root).with_suffix("").as_posix(), "digest": digest})
    except ValidationError as error:
        problems += describe(error)
    else:
        problems += template.problems()
    if problems:
        raise SchemaError(f"{path}: {problem}" for problem in problems)
    return template


def load_templates(roots: tuple[Path, ...]) -> tuple[Template, ...]:
    """Return every template below ``roots``, sorted by name.

    Raises:
        SchemaError: With every problem of every file; two templates of one name, or a root without any, are problems.
    """
    templates: dict[str, Template] = {}
    problems: list[str] = []
    for root in roots:
        paths = sorted(root.rglob("*.toml"))
        if not paths:
            problems.append(
                f"{root}: must be a directory that holds templates (*.toml with *{SOURCE_SUFFIX} beside it)"
            )
        for path in paths:
            try:
                template = load_template(path, root)
            except SchemaError as error:
                problems += error.problems
                continue
            if template.name in templates:
                problems.append(f"{path}: template {template.name} exists already; give it another name")
            templates[template.name] = template
    if problems:
        raise SchemaError(problems)
    return tuple(templates[name] for name in sorted(templates))

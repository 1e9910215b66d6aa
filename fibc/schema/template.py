"""A kernel template's TOML: what it matches, its tunables and their constraints, what it needs and assumes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, StrictBool, StrictInt, StrictStr, ValidationError
from pydantic_core import PydanticCustomError

from fibc.errors import SchemaError
from fibc.schema.arch import ARCH_NAMES
from fibc.schema.candidate import ConfigValue
from fibc.schema.definition import DTYPE_BITS
from fibc.schema.digest import digest_text
from fibc.schema.expression import parse
from fibc.schema.isa import ISA_NAMES
from fibc.schema.launch import LaunchTable
from fibc.schema.problems import describe, shown
from fibc.schema.space import Config, Constraint, Start

BACKENDS = {"cpu": ".cpp.j2", "triton": ".py.j2", "cutlass": ".cu.j2", "cublaslt": ".lt.cpp.j2"}
"""The backends of templates, each with the suffix of its sources: a template's backend follows from its file."""

TARGET_NAMES = {
    "cpu": ("lanes", "vector_registers", "l2_bytes", "num_threads"),
    "cuda": ("shared_bytes_max", "registers_max", "num_sms", "l2_bytes"),
}
"""Names of the target that constraints may use, by its kind. ``cpu``: float32 elements of a vector, vector registers,
bytes of a core's L2 cache, threads of a call. ``cuda``: bytes of shared memory that a block can have, registers that it
can have, multiprocessors, bytes of the L2 cache."""

SIZE_NAME = "size"
"""Name of the upper end of a key's first feature."""

TF32_NAME = "allow_tf32"
"""Name of a constant on CUDA: whether the definition's tags allow products of float32 in tf32."""

TF32_TAG = "math:tf32"
"""Tag of a definition whose products of float32 may be made in tf32."""


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
        in_place_of: Of an output: the role of the input that it is written into.
    """

    shape: tuple[_Identifier, ...]
    dtype: str = "T"
    layout: Literal["contiguous", "rows"] = "contiguous"
    alignment_bytes: Annotated[int, Field(ge=1, le=4096)] = 1
    in_place_of: _Identifier | None = None


class Law(_Table):
    """A constraint on configs, checked before a build."""

    expression: str
    message: str


class Guess(_Table):
    """A config to try first, where ``when`` holds: values of some tunables, the others follow from the constraints."""

    when: str
    values: Annotated[dict[_Identifier, StrictBool | StrictInt | StrictStr], Field(min_length=1)]


class Template(_Table):
    """A kernel template, ``<family>/<name>.toml`` beside its source, whose suffix ``BACKENDS`` has.

    Attributes:
        name: ``gemm/matvec``: its path below the root that holds it; not a key of the file.
        digest: Of both files; not a key of the file either.
        backend: One of ``BACKENDS``, by the source's suffix; not a key of the file either.
        summary: A sentence for people.
        source: Where the code comes from, with its license where it is not fibc's own.
        op_types: Op types that it may serve; matching shapes does the rest, and validation is the judge.
        needs: The least ISA level, or the least architecture of a GPU; empty where any will do.
        inputs: Roles of the inputs. Alike ``outputs``.
        const_axes: Axes that must be constant in the definition; the others must vary.
        dtypes: Dtype variables, each with the dtypes that it stands for.
        constants: Numbers that the definition's reference must state: ``eps``.
        tunables: Choices; the first of each is the default.
        shortlist: Where a build takes long, the configs that are worth one, each as tunables by their names; one that
            is not named has its first choice. A search is held to those that keep the laws.
        constraints: Laws between tunables, constant axes, dtype variables, their ``<variable>_bytes``, ``size`` and
            ``TARGET_NAMES``.
        starts: Guesses at the best config, best first.
        max_offset_elems: Largest offset that the code computes.
        deterministic: Whether equal inputs give equal bits.
        launch: How a Triton kernel is launched.
    """

    name: str
    digest: str
    backend: Literal["cpu", "triton", "cutlass", "cublaslt"]
    summary: str
    source: str
    op_types: Annotated[tuple[str, ...], Field(min_length=1)]
    needs: str = ""
    inputs: Annotated[dict[_Identifier, Role], Field(min_length=1, max_length=8)]
    outputs: Annotated[dict[_Identifier, Role], Field(min_length=1, max_length=8)]
    const_axes: tuple[_Identifier, ...] = ()
    dtypes: dict[_Identifier, Annotated[tuple[StrictStr, ...], Field(min_length=1)]] = {}
    constants: tuple[Literal["eps"], ...] = ()
    tunables: dict[_Identifier, _Choices] = {}
    constraints: tuple[Law, ...] = ()
    shortlist: tuple[dict[str, ConfigValue], ...] = ()
    starts: tuple[Guess, ...] = ()
    max_offset_elems: Annotated[int, Field(ge=1, le=2**63 - 1)] = 2**63 - 1
    deterministic: bool = True
    launch: LaunchTable | None = None

    @property
    def kind(self) -> str:
        """The kind of target that it serves."""
        return "cpu" if self.backend == "cpu" else "cuda"

    @property
    def source_name(self) -> str:
        """The source's path below the root."""
        return self.name + BACKENDS[self.backend]

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis, in the order in which roles name them."""
        roles = (*self.inputs.values(), *self.outputs.values())
        return tuple(dict.fromkeys(axis for role in roles for axis in role.shape))

    @property
    def names(self) -> frozenset[str]:
        """Names that a constraint may use."""
        return frozenset({*self.tunables, *self.fixed_names, SIZE_NAME})

    @property
    def fixed_names(self) -> tuple[str, ...]:
        """Names of what the definition and the target fix."""
        sizes = (f"{variable}_bytes" for variable in self.dtypes)
        math = (TF32_NAME,) if self.kind == "cuda" else ()
        return (*self.const_axes, *self.dtypes, *sizes, *TARGET_NAMES[self.kind], *math)

    def laws(self) -> tuple[Constraint, ...]:
        """Return the constraints as a space holds them."""
        return tuple(Constraint(law.expression, law.message) for law in self.constraints)

    def listed(self) -> tuple[Config, ...]:
        """Return the shortlist as configs, once each."""
        defaults = {name: choices[0] for name, choices in self.tunables.items()}
        return tuple(dict.fromkeys(tuple({**defaults, **values}.items()) for values in self.shortlist))

    def guesses(self) -> tuple[Start, ...]:
        """Return the starts as a space holds them."""
        return tuple(Start(guess.when, tuple(guess.values.items())) for guess in self.starts)

    def problems(self) -> Iterator[str]:
        """Yield what no value shows alone: names that do not fit together, each as ``where: law, got``."""
        levels, what = (ISA_NAMES, "an ISA level") if self.kind == "cpu" else (ARCH_NAMES, "an architecture")
        if self.needs and self.needs not in levels:
            yield f"needs: must be {what}, got {shown(self.needs)} (accepted: {', '.join(levels)})"
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
        for name, role in self.outputs.items():
            if role.in_place_of is not None and role.in_place_of not in self.inputs:
                seen, accepted = shown(role.in_place_of), ", ".join(self.inputs)
                yield f"outputs.{name}.in_place_of: must be an input, got {seen} (accepted: {accepted})"
        for name, role in self.inputs.items():
            if role.in_place_of is not None:
                yield f"inputs.{name}.in_place_of: must be absent, only outputs are written"
        read = {axis for role in self.inputs.values() for axis in role.shape}
        for axis in self.axes:
            if axis not in read:
                yield f"outputs: axis {axis} must occur in an input too (accepted: {', '.join(sorted(read))})"
        for axis in self.const_axes:
            if axis not in self.axes:
                yield f"const_axes: must be axes of a shape, got {axis} (accepted: {', '.join(self.axes)})"
        taken = {*self.axes, *self.inputs, *self.outputs, *self.constants, *self.fixed_names, SIZE_NAME}
        for name in self.tunables:
            if name in taken or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                yield f"tunables.{name}: must be a lower-case name that nothing else in the template has"
        if self.shortlist and self.backend != "cutlass":
            yield f"shortlist: must be there only beside a {BACKENDS['cutlass']} source, whose builds take long"
        for index, values in enumerate(self.shortlist):
            for name, value in values.items():
                choices = self.tunables.get(name, ())
                if not any(value == choice and type(value) is type(choice) for choice in choices):
                    seen = f"{name} = {shown(value)}"
                    accepted = ", ".join(map(shown, choices)) or ", ".join(self.tunables)
                    yield f"shortlist[{index}]: must have tunables' choices, got {seen} (accepted: {accepted})"
        for index, law in enumerate(self.constraints):
            try:
                parse(law.expression, self.names)
            except SchemaError as error:
                yield from (f"constraints[{index}].expression: {problem}" for problem in error.problems)
        for index, guess in enumerate(self.starts):
            yield from self._start_problems(f"starts[{index}]", guess)
        if (self.launch is not None) != (self.backend == "triton"):
            yield f"launch: must be there in a template with a {BACKENDS['triton']} source, and only there"
        if self.backend == "cublaslt" and (set(self.axes) != {"M", "N", "K"} or "T" not in self.dtypes):
            yield "inputs: must be over the axes M, N and K with a dtype variable T, for which cuBLASLt is asked"
        if self.launch is not None:
            varying = [axis for axis in self.axes if axis not in self.const_axes]
            ranks = {name: len(role.shape) for name, role in (*self.inputs.items(), *self.outputs.items())}
            for problem in self.launch.problems({*self.tunables, *self.fixed_names}, varying, ranks):
                yield f"launch.{problem}"

    def _start_problems(self, where: str, guess: Guess) -> Iterator[str]:
        try:
            parse(guess.when, {*self.fixed_names, SIZE_NAME})
        except SchemaError as error:
            yield from (f"{where}.when: {problem}" for problem in error.problems)
        for name, value in guess.values.items():
            choices = self.tunables.get(name, ())
            if not any(value == choice and type(value) is type(choice) for choice in choices):
                accepted = ", ".join(map(shown, choices)) or f"tunables: {', '.join(self.tunables)}"
                yield f"{where}.values.{name}: must be a choice of a tunable, got {shown(value)} (accepted: {accepted})"


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
    follows = ("name", "digest", "backend")
    problems = [f"{name}: must be absent, it follows from the file" for name in follows if name in data]
    backend = source_backend(path)
    digest = ""
    if backend is None:
        names = " or ".join(path.stem + suffix for suffix in BACKENDS.values())
        problems.append(f"{names}: must be beside it, and one of them only")
    else:
        source = path.with_name(path.stem + BACKENDS[backend])
        try:
            digest = digest_text(text, source.read_bytes())
        except OSError as error:
            problems.append(f"{source.name}: cannot be read: {error.strerror or error}")
    own = {"name": path.relative_to(root).with_suffix("").as_posix(), "digest": digest, "backend": backend or "cpu"}
    try:
        template = Template(**{**data, **own})
    except ValidationError as error:
        problems += describe(error)
    else:
        problems += template.problems()
    if problems:
        raise SchemaError(f"{path}: {problem}" for problem in problems)
    return template


def source_backend(path: Path) -> str | None:
    """Return the backend of the template at ``path`` by the source beside it; None where there is none, or several."""
    found = [name for name, suffix in BACKENDS.items() if path.with_name(path.stem + suffix).is_file()]
    return found[0] if len(found) == 1 else None


def load_templates(roots: tuple[Path, ...], backend: str | None = None) -> tuple[Template, ...]:
    """Return every template below ``roots``, sorted by name.

    Args:
        backend: Pass over the templates of other backends; their problems are not looked for.

    Raises:
        SchemaError: With every problem of every file; two templates of one name, or a root without any, are problems.
    """
    templates: dict[str, Template] = {}
    problems: list[str] = []
    for root in roots:
        paths = sorted(root.rglob("*.toml"))
        if not paths:
            problems.append(
                f"{root}: must be a directory that holds templates (*.toml with "
                f"{' or '.join(f'*{suffix}' for suffix in BACKENDS.values())} beside it)"
            )
        for path in paths:
            if backend is not None and source_backend(path) not in (backend, None):
                continue
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

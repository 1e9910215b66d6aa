"""A dispatch table to the text of its module: pure, and the same bytes for the same table."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from fibc.errors import SchemaError
from fibc.paths import TEMPLATES
from fibc.render import Renderer
from fibc.schema.callspec import Argument, CallSpec
from fibc.schema.codec import to_plain
from fibc.schema.digest import digest_json
from fibc.schema.silicon import CudaValidity
from fibc.schema.table import DispatchTable

SURFACE = (
    "run",
    "run_out",
    "explain",
    "table",
    "stats",
    "enable",
    "disable",
    "set_native",
    "prepare",
    "environment",
)
"""Names that a package exports, in the order in which people meet them."""

MAX_INPUTS = 64
MAX_OUTPUTS = 16
MAX_AXES = 64
MAX_RANK = 16
MAX_FEATURES = 4
"""Bounds of one call, those of ``fibc/table.h``: a call's state lives on the stack."""

_KINDS = {"tensor": "Kind::kTensor", "scalar": "Kind::kScalar", "scalar_tensor": "Kind::kScalarTensor"}
_LAYOUTS = {"contiguous": "Layout::kContiguous", "rows": "Layout::kRows", "any": "Layout::kAny"}
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")


@dataclass(frozen=True)
class Sources:
    """The generated files of a package.

    Attributes:
        digest: Of the table; named in every file's banner.
        module_cpp: The translation unit of constants.
        package_py: ``__init__.py`` of the package.
        package_pyi: Its stub.
        generation_py: ``__init__.py`` of the generation.
    """

    digest: str
    module_cpp: str
    package_py: str
    package_pyi: str
    generation_py: str


def emit(table: DispatchTable) -> Sources:
    """Return the sources of ``table``'s module.

    Raises:
        SchemaError: If a name is no identifier, or the definition is beyond the bounds of one call.
    """
    _check(table)
    plain = to_plain(table)
    digest = digest_json(plain)
    values: dict[str, Any] = {
        "table": table,
        "identifier": _identifier,
        "comment": _comment,
        "docstring": _docstring,
        "raw_string": lambda text: _raw_string(text, digest),
        "digest": digest,
        "surface": SURFACE,
        "inputs": [_argument(table.spec, a, "input", i) for i, a in enumerate(table.spec.inputs)],
        "outputs": [_argument(table.spec, a, "output", i) for i, a in enumerate(table.spec.outputs)],
        "features": _features(table),
        "layouts": _LAYOUTS,
        "on_gpu": isinstance(table.validity, CudaValidity),
        "json_text": _json(plain),
        "run_parameters": ", ".join(_parameters(table.spec, with_outputs=False)),
        "run_out_parameters": ", ".join(_parameters(table.spec, with_outputs=True)),
        "run_result": _result(table.spec),
    }
    render = Renderer([TEMPLATES / "dispatch"])
    return Sources(
        digest=digest,
        module_cpp=render("module.cpp.j2", values),
        package_py=render("package.py.j2", values),
        package_pyi=render("package.pyi.j2", values),
        generation_py=render("generation.py.j2", values),
    )


def _identifier(text: str) -> str:
    """Return ``text``, which becomes a name in the generated code.

    Raises:
        ValueError: If it is none.
    """
    if not _IDENTIFIER.fullmatch(text):
        raise ValueError(f"must be an identifier, got {text!r} (accepted: letters, digits and _, at most 255)")
    return text


def _comment(value: object) -> str:
    """Return ``value`` on one line of printable ASCII that cannot continue a ``//`` comment."""
    line = "".join(c if " " <= c <= "~" else "?" for c in str(value))
    return line.rstrip("\\? ").replace("??", "?")


def _docstring(value: object) -> str:
    """Return ``value`` on one line that cannot end a docstring."""
    return _comment(value).replace("\\", "/").replace('"', "'")


def _raw_string(text: str, digest: str) -> str:
    """Return ``text`` as a C++ raw string literal whose end mark ``text`` does not contain.

    Raises:
        ValueError: If it does.
    """
    mark = digest[:16]  # the longest that C++ allows
    if f'){mark}"' in text:
        raise ValueError(f"contains the end mark of its own literal, {mark}")
    return f'R"{mark}({text}){mark}"'


def _json(plain: dict[str, Any]) -> str:
    """Return ``plain`` as readable JSON: a line for each entry, and for each element of a list of objects."""
    lines = []
    for key, value in sorted(plain.items()):
        if isinstance(value, list) and value and isinstance(value[0], dict):
            elements = ",\n  ".join(json.dumps(element, sort_keys=True) for element in value)
            lines.append(f"{json.dumps(key)}: [\n  {elements}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}")
    return "{\n " + ",\n ".join(lines) + "\n}"


def _argument(spec: CallSpec, argument: Argument, side: str, index: int) -> dict[str, Any]:
    shape = ", ".join(spec.axes[axis].name for axis in argument.axes)
    form = {"tensor": f"[{shape}]", "scalar": "number", "scalar_tensor": "0-d tensor"}[argument.kind]
    notes = ", optional" if argument.optional else ""
    if argument.alias is not None:
        notes += f", written into {spec.inputs[argument.alias].name}"
    return {
        "value": argument,
        "kind": _KINDS[argument.kind],
        "axes_symbol": f"k{side.capitalize()}{index}Axes",
        "description": f"{side} {argument.name}: {form} {argument.dtype}{notes}",
    }


def _features(table: DispatchTable) -> list[dict[str, Any]]:
    index = {axis.name: i for i, axis in enumerate(table.spec.axes)}
    return [
        {
            "name": feature.name,
            "numerator": index[feature.numerator],
            "denominator": -1 if feature.denominator is None else index[feature.denominator],
        }
        for feature in table.features
    ]


def _annotation(argument: Argument) -> str:
    if argument.kind != "scalar":
        base = "torch.Tensor"
    elif argument.dtype == "bool":
        base = "bool"
    else:
        base = "float" if "float" in argument.dtype else "int"
    return f"{base} | None = None" if argument.optional else base


def _parameters(spec: CallSpec, *, with_outputs: bool) -> list[str]:
    """Return parameters as Python declares them; from the first optional one on, every later one has a default."""
    taken = {argument.name for argument in spec.inputs}
    parameters = []
    defaulted = False
    for argument in spec.inputs:
        defaulted = defaulted or argument.optional
        annotation = _annotation(argument)
        parameters.append(
            f"{argument.name}: {annotation if '=' in annotation or not defaulted else annotation + ' = ...'}"
        )
    if with_outputs:
        for argument in spec.outputs:
            name = argument.name if argument.name not in taken else f"{argument.name}_out"
            parameters.append(f"{name}: torch.Tensor{' = ...' if defaulted else ''}")
    return parameters


def _result(spec: CallSpec) -> str:
    if len(spec.outputs) == 1:
        return "torch.Tensor"
    return f"tuple[{', '.join('torch.Tensor' for _ in spec.outputs) or '()'}]"


def _check(table: DispatchTable) -> None:
    spec = table.spec
    problems = []
    kind = table.target.partition(":")[0]
    if (kind == "cuda") != isinstance(table.validity, CudaValidity):
        problems.append(
            f"{table.definition}: validity: must be that of target {table.target}, got {type(table.validity).__name__}"
        )
    for where, seen, bound in (
        ("inputs", len(spec.inputs), MAX_INPUTS),
        ("outputs", len(spec.outputs), MAX_OUTPUTS),
        ("axes", len(spec.axes), MAX_AXES),
        ("features", len(table.features), MAX_FEATURES),
        ("rank", max((len(a.axes) for a in (*spec.inputs, *spec.outputs)), default=0), MAX_RANK),
    ):
        if seen > bound:
            problems.append(f"{table.definition}: {where}: too many for one call, got {seen} (accepted: up to {bound})")
    names = [table.definition, *(axis.name for axis in spec.axes), *(a.name for a in (*spec.inputs, *spec.outputs))]
    problems += [
        f"{table.definition}: name: must be an identifier, got {name!r} (accepted: letters, digits and _)"
        for name in names
        if not _IDENTIFIER.fullmatch(name)
    ]
    for variant in table.variants:
        guards = variant.guards
        if (len(guards.inputs), len(guards.outputs)) != (len(spec.inputs), len(spec.outputs)):
            problems.append(
                f"{table.definition}: guards of {variant.symbol}: must be one per argument, got {len(guards.inputs)} "
                f"for inputs and {len(guards.outputs)} for outputs"
            )
    if problems:
        raise SchemaError(problems)

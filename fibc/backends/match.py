"""Whether a template serves a definition: roles against tensors, the template's axes against the definition's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from fibc.schema import constants
from fibc.schema.candidate import Guards, TensorGuard
from fibc.schema.definition import Definition, TensorSpec
from fibc.schema.template import Role, Template

MAX_PERMUTED = 4
"""Inputs above this number are taken in the definition's order alone: the permutations of 5 are 120."""


@dataclass(frozen=True)
class Match:
    """How a template's names map to a definition's.

    Attributes:
        axes: The template's axis to the definition's.
        inputs: Role to index of the definition's input. Alike ``outputs``.
        dtypes: Dtype variable to dtype.
        constants: Numbers that the reference states.
    """

    axes: Mapping[str, str]
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    dtypes: Mapping[str, str]
    constants: Mapping[str, float]


def match(template: Template, definition: Definition) -> Match | str:
    """Return how ``template`` serves ``definition``, or why it does not.

    Roles are tried in the definition's order first, then in every other order. A match is a proposal: validation
    against the reference decides whether the kernel computes what the definition means.
    """
    if definition.op_type not in template.op_types:
        return f"serves op_type {' or '.join(template.op_types)}, the definition is {definition.op_type}"
    for kind, roles, specs in (
        ("input", template.inputs, definition.inputs),
        ("output", template.outputs, definition.outputs),
    ):
        if len(roles) != len(specs):
            return f"serves {len(roles)} {kind}s ({', '.join(roles)}), the definition has {len(specs)}"
    if reason := _alias_reason(template, definition):
        return reason
    found: dict[str, float] = {}
    if "eps" in template.constants:
        eps = constants.epsilon(definition)
        if eps is None:
            return "needs one epsilon, the reference states none or several"
        found["eps"] = eps

    first_reason = ""
    orders = permutations(definition.inputs) if len(definition.inputs) <= MAX_PERMUTED else [tuple(definition.inputs)]
    for order in orders:
        result = _bind(template, definition, order, found)
        if isinstance(result, Match):
            return result
        first_reason = first_reason or result
    return first_reason


def guards(template: Template, found: Match) -> Guards:
    """Return what the code of ``template`` assumes, in the definition's call order."""

    def in_order(roles: Mapping[str, Role], positions: Mapping[str, int]) -> tuple[TensorGuard, ...]:
        ordered = sorted(roles, key=positions.__getitem__)
        return tuple(TensorGuard(roles[name].layout, roles[name].alignment_bytes) for name in ordered)

    return Guards(
        inputs=in_order(template.inputs, found.inputs),
        outputs=in_order(template.outputs, found.outputs),
        max_offset_elems=template.max_offset_elems,
    )


def _alias_reason(template: Template, definition: Definition) -> str:
    """Return why the outputs that are written in place do not fit, by their order; empty where they do."""
    for (role_name, role), name in zip(template.outputs.items(), definition.outputs, strict=True):
        written = definition.alias_of(name)
        if role.in_place_of is None and written is not None:
            return f"writes fresh outputs, output {name} is written in place of {written}"
        if role.in_place_of is not None and written is None:
            return f"writes {role_name} in place of {role.in_place_of}, output {name} is a fresh one"
    return ""


def _bind(template: Template, definition: Definition, order: Sequence[str], found: Mapping[str, float]) -> Match | str:
    """Try the inputs in ``order`` as the template's roles in theirs."""
    axes: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    pairs = [
        *zip(template.inputs.items(), ((name, definition.inputs[name]) for name in order), strict=True),
        *zip(template.outputs.items(), definition.outputs.items(), strict=True),
    ]
    for (role_name, role), (name, spec) in pairs:
        reason = _bind_shape(role, spec, axes) or _bind_dtype(template, role, spec, dtypes)
        if reason:
            return f"{role_name} = {name}: {reason}"
    for role_axis, axis in axes.items():
        if (axis in definition.const_axes) != (role_axis in template.const_axes):
            needed = "constant" if role_axis in template.const_axes else "variable"
            return f"{role_axis} = {axis}: needs a {needed} axis"
    positions = list(definition.inputs)
    bound = dict(zip(template.inputs, order, strict=True))
    for (role_name, role), name in zip(template.outputs.items(), definition.outputs, strict=True):
        written = definition.alias_of(name)
        if role.in_place_of is not None and bound[role.in_place_of] != written:
            return (
                f"{role_name} = {name}: is written into {bound[role.in_place_of]}, needs to be written into {written}"
            )
    return Match(
        axes=axes,
        inputs={role: positions.index(name) for role, name in zip(template.inputs, order, strict=True)},
        outputs={role: index for index, role in enumerate(template.outputs)},
        dtypes=dtypes,
        constants=found,
    )


def _bind_shape(role: Role, spec: TensorSpec, axes: dict[str, str]) -> str:
    wanted = f"[{', '.join(role.shape)}]"
    if spec.shape is None:
        return f"needs a tensor {wanted}, is a Python scalar"
    if len(spec.shape) != len(role.shape):
        return f"needs shape {wanted}, has [{', '.join(spec.shape)}]"
    for role_axis, axis in zip(role.shape, spec.shape, strict=True):
        if axes.setdefault(role_axis, axis) != axis:
            return f"needs shape {wanted} with {role_axis} = {axes[role_axis]}, has [{', '.join(spec.shape)}]"
    return ""


def _bind_dtype(template: Template, role: Role, spec: TensorSpec, dtypes: dict[str, str]) -> str:
    accepted = template.dtypes.get(role.dtype, (role.dtype,))
    if spec.dtype not in accepted:
        return f"needs {' or '.join(accepted)}, is {spec.dtype}"
    if role.dtype in template.dtypes and dtypes.setdefault(role.dtype, spec.dtype) != spec.dtype:
        return f"needs {dtypes[role.dtype]} like the tensors before it, is {spec.dtype}"
    return ""

"""The calling convention that a Definition implies, shared by the C++ entry, the Python oracle and the stub file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """A dimension: ``value`` is None where it varies from call to call."""

    name: str
    value: int | None


@dataclass(frozen=True)
class Argument:
    """An input or an output.

    Attributes:
        name: As in the definition.
        kind: ``tensor``, ``scalar`` (a Python number) or ``scalar_tensor`` (a 0-d tensor).
        dtype: The definition's dtype name, ``bfloat16``.
        axes: Indexes into ``CallSpec.axes``, one per dimension; empty for scalars and 0-d tensors.
        optional: The caller may leave it out (None), which sends the call to native.
        alias: For an output that is written in place, the index of that input; else None.
    """

    name: str
    kind: str
    dtype: str
    axes: tuple[int, ...] = ()
    optional: bool = False
    alias: int | None = None


@dataclass(frozen=True)
class CallSpec:
    """Axes, inputs and outputs in the definition's order."""

    definition: str
    axes: tuple[Axis, ...]
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]

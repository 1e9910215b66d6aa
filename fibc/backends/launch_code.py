"""Expressions of a launch as C++: names become what a call holds, arithmetic stays arithmetic on int64."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from fibc.errors import SchemaError
from fibc.schema.candidate import ConfigValue
from fibc.schema.expression import parse
from fibc.schema.launch import Text

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "/",
    ast.Mod: "%",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.And: "&&",
    ast.Or: "||",
}
_FUNCTIONS = ("cdiv", "min", "max")


def fixed_int(text: Text, values: Mapping[str, ConfigValue]) -> int:
    """Return the integer that ``text`` is for ``values``.

    Raises:
        SchemaError: If it is none.
    """
    value = parse(str(text), values).evaluate(values)
    if not isinstance(value, int):
        raise SchemaError(f"{text!r}: must be an integer, got {value!r}")
    return int(value)


def cpp(text: Text, values: Mapping[str, ConfigValue], axes: Mapping[str, int]) -> str:
    """Return ``text`` as a C++ expression. A quotient is cut towards zero: both its sides must not be negative.

    Args:
        values: What is fixed.
        axes: The other axes, each with its index into ``call->axes``.

    Raises:
        SchemaError: If ``text`` uses more of the language than arithmetic, comparisons, cdiv, min and max of numbers.
    """
    parse(str(text), {*values, *axes})
    return _translate(ast.parse(str(text), mode="eval").body, values, axes)


def _translate(node: ast.expr, values: Mapping[str, ConfigValue], axes: Mapping[str, int]) -> str:
    def inner(part: ast.expr) -> str:
        return _translate(part, values, axes)

    match node:
        case ast.Constant(value=int() as number):
            return _number(number)
        case ast.Name(id=name) if name in axes:
            return f"call->axes[{axes[name]}]"
        case ast.Name(id=name) if isinstance(values[name], int):
            return _number(int(values[name]))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return f"({inner(left)} {_OPERATORS[type(op)]} {inner(right)})"
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            return f"({inner(left)} {_OPERATORS[type(op)]} {inner(right)})"
        case ast.BoolOp(op=op, values=parts):
            return f"({f' {_OPERATORS[type(op)]} '.join(map(inner, parts))})"
        case ast.Call(func=ast.Name(id=name), args=[first, second]) if name in _FUNCTIONS:
            return f"{name}({inner(first)}, {inner(second)})"
    raise SchemaError(f"{ast.unparse(node)}: must be arithmetic, a comparison, cdiv, min or max of two numbers")


def _number(value: int) -> str:
    return f"INT64_C({value})"

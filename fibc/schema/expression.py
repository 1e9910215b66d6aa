"""The tiny safe language of constraints.

::

    comparison chains, and / or / not          0 < block_m <= M and not packed
    in, not in, with a list in brackets        head_dim in (64, 128)
    + - * // % / and parentheses               gemm1_weights.shape[1] == 2 * intermediate_size
    integers, True, False, names               N % block_n == 0
    strings, only as a side of ==, != or in    layout == "rows"
    name.shape[i], name[i], value.item()       num_kv_indices == kv_indptr[-1].item()
    name[i:j]                                  max(indptr[1:] - indptr[:-1]) <= max_q_len
    min(...), max(...), also of one tensor     max(block_m, block_n) <= 64
    cdiv(a, b), a / b rounded up               cdiv(N, block_n) * split_k <= 16384

There is no power, no shift, no call but these four, no attribute but ``shape``. Text is read with ``ast`` and turned
into closures; nothing is ever handed to ``eval``. Values may be numbers or tensors of any library: what is used of a
tensor is ``shape``, indexing, ``item`` and its operators.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fibc.errors import SchemaError
from fibc.schema.problems import shown

MAX_CHARS = 1000
"""Longest text. The longest constraint of the public definitions has 53."""

MAX_NESTING = 32
"""Deepest tree; far from Python's stack, and several times what people write."""

MAX_MAGNITUDE = 2**127
"""Largest integer that may come up while evaluating: a product of two 63-bit sizes fits."""

ACCEPTED = (
    "comparisons, in (...), and/or/not, + - * // % /, integers, names, "
    "name.shape[i], name[i], name[i:j], .item(), min(...), max(...), cdiv(a, b)"
)

_Values = Mapping[str, Any]
_Code = Callable[[_Values], Any]

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, choices: value in choices,
    ast.NotIn: lambda value, choices: value not in choices,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max}


def _cdiv(dividend: Any, divisor: Any) -> Any:
    return _bounded(-(-_number_or_tensor(dividend) // _number_or_tensor(divisor)))


@dataclass(frozen=True)
class Expression:
    """A parsed expression.

    Attributes:
        text: As written.
        names_used: The names whose values it needs.
    """

    text: str
    names_used: frozenset[str]
    _code: _Code = field(repr=False, compare=False)

    def evaluate(self, values: Mapping[str, Any]) -> object:
        """Return the value of the expression.

        Args:
            values: At least ``names_used``.

        Raises:
            ZeroDivisionError: If a divisor is zero.
            OverflowError: If an integer grows beyond ``MAX_MAGNITUDE``.
            TypeError, IndexError, AttributeError: If a value is not what the expression makes of it, say a tensor
                whose ``shape`` is too short.
        """
        return self._code(values)

    def __reduce__(self) -> tuple[Callable[[str, frozenset[str]], Expression], tuple[str, frozenset[str]]]:
        return parse, (self.text, self.names_used)

    def __str__(self) -> str:
        return self.text


def parse(text: str, names: Collection[str]) -> Expression:
    """Return ``text`` as an Expression over ``names``.

    Raises:
        SchemaError: With every part of ``text`` that lies outside the language, and every unknown name.
    """
    if len(text) > MAX_CHARS:
        raise SchemaError(f"{shown(text)}: must be at most {MAX_CHARS} characters, got {len(text)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's advice on style, such as a missing space after a number
            tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        column = f" at column {error.offset}" if error.offset else ""
        raise SchemaError(
            f"{shown(text)}: must be an expression, got: {error.msg}{column} (accepted: {ACCEPTED})"
        ) from None
    except (RecursionError, MemoryError):  # the parser's ways to say so: its words differ between versions of Python
        raise SchemaError(f"{shown(text)}: must be an expression, got too many levels") from None
    except ValueError as error:
        raise SchemaError(f"{shown(text)}: must be an expression, got: {error}") from None
    translator = _Translator(text.strip(), names)
    code = translator.translate(tree.body)
    if translator.problems:
        raise SchemaError(translator.problems)
    return Expression(text, frozenset(translator.names_used), code)


class _Translator:
    """Turns a tree into closures and collects what it must refuse."""

    def __init__(self, text: str, names: Collection[str]) -> None:
        self.text = text
        self.names = names
        self.names_used: set[str] = set()
        self.problems: list[str] = []
        self._nesting = 0

    def translate(self, node: ast.expr) -> _Code:
        if self._nesting >= MAX_NESTING:
            return self._refuse(node, f"must be nested at most {MAX_NESTING} levels deep")
        self._nesting += 1
        try:
            return self._dispatch(node)
        finally:
            self._nesting -= 1

    def _dispatch(self, node: ast.expr) -> _Code:
        match node:
            case ast.Constant(value=bool() | int() as value):
                return self._number(node, value)
            case ast.Name(id=name):
                return self._name(node, name)
            case ast.BoolOp(op=op, values=parts):
                return self._logic(op, parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.translate(operand)
                return lambda values: not inner(values)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.translate(operand)
                return lambda values: -_number_or_tensor(inner(values))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self._arithmetic(left, _ARITHMETIC[type(op)], right)
            case ast.Compare(left=left, ops=ops, comparators=rest) if all(type(op) in _COMPARE for op in ops):
                return self._comparison(left, ops, rest)
            case ast.Subscript(value=ast.Attribute(value=base, attr="shape"), slice=index):
                return self._indexed(self.translate(base), index, lambda value: value.shape)
            case ast.Subscript(value=base, slice=index):
                return self._indexed(self.translate(base), index, lambda value: value)
            case ast.Call(func=ast.Attribute(value=base, attr="item"), args=[], keywords=[]):
                inner = self.translate(base)
                return lambda values: inner(values).item()
            case ast.Call(func=ast.Name(id=name), args=[single], keywords=[]) if name in _FUNCTIONS:
                inner = self.translate(single)
                return lambda values: getattr(inner(values), name)()
            case ast.Call(func=ast.Name(id=name), args=[_, _, *_] as args, keywords=[]) if name in _FUNCTIONS:
                return self._function(_FUNCTIONS[name], args)
            case ast.Call(func=ast.Name(id="cdiv"), args=[_, _] as args, keywords=[]):
                return self._function(_cdiv, args)
        return self._refuse(node, "must stay in the language of constraints")

    def _number(self, node: ast.expr, value: int) -> _Code:
        if abs(value) > MAX_MAGNITUDE:
            return self._refuse(node, "must be a number below 2^127")
        return lambda _: value

    def _name(self, node: ast.expr, name: str) -> _Code:
        if name not in self.names:
            known = ", ".join(sorted(self.names)) or "none"
            return self._refuse(node, "must be a known name", known)
        self.names_used.add(name)
        return lambda values: values[name]

    def _logic(self, op: ast.boolop, parts: list[ast.expr]) -> _Code:
        codes = [self.translate(part) for part in parts]
        if isinstance(op, ast.And):
            return lambda values: all(code(values) for code in codes)
        return lambda values: any(code(values) for code in codes)

    def _arithmetic(self, left: ast.expr, function: Callable[[Any, Any], Any], right: ast.expr) -> _Code:
        first, second = self.translate(left), self.translate(right)
        return lambda values: _bounded(function(_number_or_tensor(first(values)), _number_or_tensor(second(values))))

    def _comparison(self, left: ast.expr, ops: list[ast.cmpop], rest: list[ast.expr]) -> _Code:
        equality = all(isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for op in ops)
        codes = [self._side(left, equality)]
        for op, part in zip(ops, rest, strict=True):
            choices = isinstance(op, ast.In | ast.NotIn)
            codes.append(self._choices(part) if choices else self._side(part, equality))
        functions = [_COMPARE[type(op)] for op in ops]
        if len(functions) == 1:
            compare, first, second = functions[0], codes[0], codes[1]
            return lambda values: compare(first(values), second(values))

        def chain(values: _Values) -> bool:
            before = codes[0](values)
            for function, code in zip(functions, codes[1:], strict=True):
                after = code(values)
                if not function(before, after):
                    return False
                before = after
            return True

        return chain

    def _side(self, node: ast.expr, equality: bool) -> _Code:
        if equality and isinstance(node, ast.Constant) and isinstance(node.value, str):
            word = node.value
            return lambda _: word
        return self.translate(node)

    def _choices(self, node: ast.expr) -> _Code:
        if not isinstance(node, ast.Tuple | ast.List):
            return self._refuse(node, "must have a list in brackets after in")
        codes = [self._side(choice, equality=True) for choice in node.elts]
        return lambda values: tuple(code(values) for code in codes)

    def _indexed(self, base: _Code, index: ast.expr, part: Callable[[Any], Any]) -> _Code:
        position: int | slice | None
        if isinstance(index, ast.Slice) and index.step is None:
            ends = [None if end is None else _literal(end) for end in (index.lower, index.upper)]
            given = [end is not None for end in (index.lower, index.upper)]
            position = slice(*ends) if given == [end is not None for end in ends] else None
        else:
            position = _literal(index)
        if position is None:
            return self._refuse(index, "must have integer literals as indexes")
        return lambda values: part(base(values))[position]

    def _function(self, function: Callable[..., Any], args: list[ast.expr]) -> _Code:
        codes = [self.translate(arg) for arg in args]
        return lambda values: function(*(code(values) for code in codes))

    def _refuse(self, node: ast.expr, law: str, accepted: str = ACCEPTED) -> _Code:
        token = ast.get_source_segment(self.text, node) or self.text
        self.problems.append(f"{shown(self.text)}: {law}, got {shown(token)} (accepted: {accepted})")
        return lambda _: None


def _literal(node: ast.expr) -> int | None:
    match node:
        case ast.Constant(value=int(position)) if not isinstance(position, bool):
            return position
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(distance))):
            return -distance
    return None


def _number_or_tensor(value: Any) -> Any:
    """Return ``value``; text and sequences have operators too, and ``"a" * 2**60`` must not run."""
    if isinstance(value, str | bytes | list | tuple):
        raise TypeError(f"must be a number or a tensor, got {shown(value)}")
    return value


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > MAX_MAGNITUDE:
        raise OverflowError("an integer grew beyond 2^127")
    return value

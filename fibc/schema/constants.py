"""Numbers that a definition states only inside its reference."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fibc.schema.definition import Definition

_EPSILON_NAMES = frozenset({"eps", "epsilon", "variance_epsilon", "norm_eps", "rms_norm_eps", "layer_norm_eps"})

_LARGEST_EPSILON = 1e-2


def epsilon(definition: Definition) -> float | None:
    """Return the epsilon of a norm, or None where the reference states none or more than one.

    Found as a literal that is bound to a name such as ``EPS`` (an assignment, a keyword, a default), or else as a
    literal below 1e-2 that is added: ``torch.rsqrt(variance + 1e-6)``. An epsilon that is an input is no constant.
    """
    tree = ast.parse(definition.reference)
    named = {value for name, value in _named_literals(tree) if name.lower() in _EPSILON_NAMES}
    found = named or set(_added_literals(tree))
    return found.pop() if len(found) == 1 else None


def _named_literals(tree: ast.AST) -> Iterator[tuple[str, float]]:
    for node in ast.walk(tree):
        pairs: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target.id, node.value) for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            pairs = [(node.target.id, node.value)]
        elif isinstance(node, ast.Call):
            pairs = [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg is not None]
        elif isinstance(node, ast.arguments):
            positional = [*node.posonlyargs, *node.args]
            defaults = node.defaults
            pairs = [(a.arg, d) for a, d in zip(positional[len(positional) - len(defaults) :], defaults, strict=True)]
            pairs += [(a.arg, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True)]
        for name, value in pairs:
            literal = _literal(value)
            if literal is not None:
                yield name, literal


def _added_literals(tree: ast.AST) -> Iterator[float]:
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            for side in (node.left, node.right):
                literal = _literal(side)
                if literal is not None and literal < _LARGEST_EPSILON:
                    yield literal


def _literal(node: ast.expr | None) -> float | None:
    """Return the positive float that ``node`` writes out, or None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value > 0:
        return node.value
    return None

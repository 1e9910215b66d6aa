"""A definition's reference as text: its syntax, its entry and whether that takes the inputs. It is never run here."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Sequence

from fibc.schema.problems import shown

ENTRY = "run"
"""The entry's name in FlashInfer-Bench's dialect. FlashInfer's own dumper writes any name, and the entry last."""

MAX_CHARS = 1_000_000
"""Longest source. The longest public reference has a few thousand characters."""


def entry_function(source: str) -> ast.FunctionDef | None:
    """Return the entry: the last top-level ``run``, else the last top-level function; None where there is none.

    Raises:
        SyntaxError: If ``source`` is no Python.
    """
    functions = [node for node in _parse(source).body if isinstance(node, ast.FunctionDef)]
    named = [function for function in functions if function.name == ENTRY]
    entries = named or functions
    return entries[-1] if entries else None


def reference_problems(source: str, inputs: Sequence[str]) -> list[str]:
    """Return what is wrong with ``source`` as the reference of an operator with these inputs, in call order.

    Parameters may have names of their own, but not another input's: that is a swapped pair.
    """
    if len(source) > MAX_CHARS:
        return [f"reference: must be at most {MAX_CHARS} characters, got {len(source)}"]
    try:
        entry = entry_function(source)
        _check_syntax(source)
    except SyntaxError as error:
        if not error.lineno:
            return [f"reference: must be Python ({error.msg})"]
        line = source.splitlines()[error.lineno - 1 : error.lineno]
        return [f"reference:{error.lineno}:{error.offset}: must be Python, got {shown(''.join(line))} ({error.msg})"]
    except (RecursionError, MemoryError):  # the parser's ways to say so: its words differ between versions of Python
        return ["reference: must be Python, got too many levels"]
    except ValueError as error:
        return [f"reference: must be Python, got: {error}"]
    if entry is None:
        return [f"reference: must define a top-level function {ENTRY!r}, got none"]
    return _parameter_problems(entry, inputs)


def with_run(source: str, inputs: Sequence[str]) -> str:
    """Return ``source`` with a ``run`` that calls its entry, as FlashInfer-Bench asks; unchanged where it has one."""
    entry = entry_function(source)
    if entry is None or entry.name == ENTRY:
        return source
    names = ", ".join(inputs)
    return f"{source.rstrip()}\n\n\ndef {ENTRY}({names}):\n    return {entry.name}({names})\n"


def _parse(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an odd escape in somebody's docstring is not ours to report
        return ast.parse(source)


def _check_syntax(source: str) -> None:
    """Compile ``source`` and drop the code: that finds what a tree alone does not show, such as a stray ``return``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile(source, "<reference>", "exec", dont_inherit=True)


def _parameter_problems(entry: ast.FunctionDef, inputs: Sequence[str]) -> list[str]:
    arguments = entry.args
    parameters = [parameter.arg for parameter in (*arguments.posonlyargs, *arguments.args)]
    num_required = len(parameters) - len(arguments.defaults)
    enough = num_required <= len(inputs) and (len(inputs) <= len(parameters) or arguments.vararg is not None)
    asks_keyword = [
        parameter.arg
        for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    where = f"reference: {entry.name}"
    problems = []
    if entry.name in inputs:
        problems.append(f"{where}: must not have the name of an input")
    if not enough:
        problems.append(f"{where}: must take the inputs ({', '.join(inputs)}), got ({', '.join(parameters)})")
    if asks_keyword:
        problems.append(f"{where}: must take the inputs by position, got keyword-only {', '.join(asks_keyword)}")
    if any(name != parameter and parameter in inputs for name, parameter in zip(inputs, parameters, strict=False)):
        got = f"got ({', '.join(parameters)})"
        problems.append(f"{where}: parameters must be in the order of the inputs ({', '.join(inputs)}), {got}")
    return problems

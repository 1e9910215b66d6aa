"""The native kernel of a definition, as Python source that a generated module embeds."""

from __future__ import annotations

import ast
import importlib.util
import json
import keyword
import sys
from pathlib import Path

from fibc.backends.native_sources import ADAPTERS, BUILTINS, RESERVED
from fibc.errors import InputError
from fibc.isolation import run
from fibc.schema.constants import epsilon
from fibc.schema.definition import Definition
from fibc.schema.digest import digest_text
from fibc.schema.table import NativeSource

REMEDY = "pass --native MODULE.fn or FILE.py::fn"

PROBE_TIMEOUT_S = 300.0
"""Importing torch takes 1.3 s; a package that compiles kernels when it is imported takes minutes."""

CUDA_ONLY_PACKAGES = frozenset({"flashinfer"})
"""Packages whose functions import on a machine without a GPU and fail only when they are called."""

_TAG = "fi_api:"

_PROBE = """
import json, sys
request = json.load(sys.stdin)
sys.path[:] = request["path"]
namespace = {"__name__": "native"}
exec(compile(request["source"], "<native>", "exec"), namespace)
if not callable(namespace.get("call")):
    sys.exit("it is not callable")
"""


def resolve(definition: Definition, option: str | None = None, *, target_kind: str = "cpu") -> NativeSource:
    """Return what answers calls today: the baseline of every comparison and the fallback of every call.

    In this order: ``option``; the function that the contract's ``fi_api:`` tag names, where its package is installed
    and it serves the target; the table ``BUILTINS``; the reference. ``note`` says what was passed over.

    Args:
        option: ``MODULE.fn``, imported where the generated module is, or ``FILE.py::fn``, whose text is embedded.
        target_kind: ``cpu`` or ``cuda``.

    Raises:
        InputError: If ``option`` names nothing callable, or the tag names an installed function whose calling
            convention no adapter knows.
    """
    if option is not None:
        return _from_file(option) if "::" in option else _from_module(option)
    found, notes = _from_tag(definition, target_kind)
    if found is None:
        found, more = _from_builtins(definition)
        notes += more
    name, source, origin = found or _from_reference(definition)
    return NativeSource(name, source, origin, digest_text(source), "; ".join(notes))


_Found = tuple[str, str, str]
"""Name, source and origin of a NativeSource."""


# --native -------------------------------------------------------------------------------------------------------------


def _from_module(option: str) -> NativeSource:
    parts = option.split(".")
    if len(parts) < 2 or not all(_is_plain_name(part) for part in parts):
        raise InputError(
            f"--native {option}: must name a function, got no dotted path (accepted: MODULE.fn or FILE.py::fn)"
        )
    module, function = option.rsplit(".", 1)
    source = f"from {module} import {function} as call\n"
    _probe(option, source)
    return NativeSource(option, source, "option", digest_text(source))


def _from_file(option: str) -> NativeSource:
    file_name, function = option.rsplit("::", 1)
    try:
        text = Path(file_name).read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError) as error:
        raise InputError(f"--native {option}: must be a readable Python file, got {error}") from error
    defined = _top_level_functions(tree)
    if function not in defined:
        names = ", ".join(sorted(defined)) or "none"
        raise InputError(f"--native {option}: must name a function of the file, got {function} (accepted: {names})")
    if function != "call" and "call" in defined:
        raise InputError(
            f"--native {option}: `call` is the name that a module calls (rename it, or pass {file_name}::call)"
        )
    source = _with_entry(text, function)
    _probe(option, source)
    return NativeSource(f"{Path(file_name).name}::{function}", source, "option", digest_text(source))


def _probe(option: str, source: str) -> None:
    problem = _import_problem(source)
    if problem is not None:
        raise InputError(f"--native {option}: must import and be callable, {problem} (the module has to stand alone)")


def _import_problem(source: str) -> str | None:
    """Import ``source`` in a child: what a user names may compile, print, hang or crash when it is imported."""
    request = json.dumps({"source": source, "path": [entry or str(Path.cwd()) for entry in sys.path]})
    done = run([sys.executable, "-c", _PROBE], timeout_s=PROBE_TIMEOUT_S, stdin=request.encode())
    if done.timed_out:
        return f"took longer than {PROBE_TIMEOUT_S:.0f} s"
    if done.returncode != 0:
        tail = (done.stderr_tail.strip().splitlines() or [f"the process ended with status {done.returncode}"])[-1]
        return f"got {tail}"
    return None


def _top_level_functions(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


# The contract's tag ---------------------------------------------------------------------------------------------------


def _from_tag(definition: Definition, target_kind: str) -> tuple[_Found | None, list[str]]:
    paths = [tag.removeprefix(_TAG) for tag in definition.tags if tag.startswith(_TAG)]
    notes: list[str] = []
    for path in paths:
        package = path.split(".")[0]
        if not _is_installed(package):
            notes.append(f"{path} is not installed")
        elif target_kind == "cpu" and package in CUDA_ONLY_PACKAGES:
            notes.append(f"{path} needs a GPU")
        else:
            adapter = next((item for item in ADAPTERS.get(path, ()) if item.form.matches(definition)), None)
            eps = epsilon(definition)
            if adapter is None or eps is None:
                raise InputError(
                    f"{definition.name}: tags: {_TAG}{path}: must be called in a known way, got a contract or function "
                    f"that no adapter knows (accepted: {', '.join(ADAPTERS)}; or {REMEDY})"
                )
            source = adapter.text(_argument_names(definition), eps)
            problem = _import_problem(source)
            if problem is None:
                return (path, source, "fi_api"), notes
            notes.append(f"{path} does not import here: {problem}")
    return None, notes


def _is_installed(package: str) -> bool:
    try:
        return _is_plain_name(package) and importlib.util.find_spec(package) is not None
    except ValueError:  # a module that was made in this process, __main__ for one
        return False


# The table of builtins ------------------------------------------------------------------------------------------------


def _from_builtins(definition: Definition) -> tuple[_Found | None, list[str]]:
    notes: list[str] = []
    for builtin in BUILTINS:
        if builtin.op_type != definition.op_type or not builtin.form.matches(definition):
            continue
        eps = epsilon(definition)
        name = builtin.name.format(*definition.inputs)
        if builtin.needs_epsilon and eps is None:
            notes.append(f"{name} needs the one epsilon that the reference states, and none was found")
            continue
        source = builtin.text(_argument_names(definition), float("nan") if eps is None else eps)
        return (name, source, "builtin"), notes
    return None, notes


# The reference --------------------------------------------------------------------------------------------------------


def _from_reference(definition: Definition) -> _Found:
    """A reference returns new outputs; where the contract writes into inputs, that is done after it."""
    targets = [spec.param for spec in definition.outputs.values()]
    if not any(target in definition.inputs for target in targets):
        return "reference", _with_entry(definition.reference, definition.entry_point), "reference"
    names = _argument_names(definition)
    inputs = dict(zip(definition.inputs, names, strict=False))
    results = [inputs.get(target or "", f"results[{index}]") for index, target in enumerate(targets)]
    written = [
        f"    {inputs[target]}.copy_(results[{index}])" for index, target in enumerate(targets) if target in inputs
    ]
    lines = [
        definition.reference.rstrip("\n"),
        "",
        "",
        f"reference = {definition.entry_point}",
        "",
        "",
        f"def call({', '.join(inputs.values())}):",
        f"    results = reference({', '.join(inputs.values())})",
        "    results = results if isinstance(results, (tuple, list)) else (results,)",
        *written,
        f"    return {', '.join(results)}",
        "",
    ]
    return "reference", "\n".join(lines), "reference"


def _with_entry(text: str, function: str) -> str:
    """Return ``text`` with its ``function`` named ``call``."""
    body = text if text.endswith("\n") else text + "\n"
    return body if function == "call" else f"{body}\n\ncall = {function}\n"


# Names ----------------------------------------------------------------------------------------------------------------


def _argument_names(definition: Definition) -> list[str]:
    """Return the contract's names of inputs and outputs, or neutral ones where one could not stand in the source."""
    names = [*definition.inputs, *definition.outputs]
    if len(set(names)) == len(names) and all(_is_plain_name(name) and name not in RESERVED for name in names):
        return names
    return [f"argument_{index}" for index in range(len(names))]


def _is_plain_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)

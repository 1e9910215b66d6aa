"""The native kernel of a definition, as Python source that a generated module embeds."""

from __future__ import annotations

import ast
import importlib.util
import json
import keyword
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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


# Forms ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """Shapes of a contract's tensors, all of one dtype.

    A shape is a string of letters, one per axis; equal letters are one axis, different letters different ones.

    Attributes:
        in_place: For each output the index of the input that it is written into; empty where all are new.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    in_place: tuple[int, ...] = ()

    def matches(self, definition: Definition) -> bool:
        """Return whether the contract is of this form."""
        names = tuple(definition.inputs)
        targets = tuple(spec.param for spec in definition.outputs.values())
        wanted = tuple(names[index] for index in self.in_place if index < len(names)) or (None,) * len(self.outputs)
        tensors = (*definition.inputs.values(), *definition.outputs.values())
        if targets != wanted or len(names) != len(self.inputs):
            return False
        if any(spec.optional or spec.dtype != tensors[0].dtype for spec in tensors):
            return False
        bound: dict[str, str] = {}
        for spec, letters in zip(tensors, (*self.inputs, *self.outputs), strict=True):
            if spec.shape is None or len(spec.shape) != len(letters):
                return False
            if any(bound.setdefault(letter, axis) != axis for letter, axis in zip(letters, spec.shape, strict=True)):
                return False
        return len(set(bound.values())) == len(bound)


# The contract's tag ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adapter:
    """How a function of a library is called for a contract.

    Attributes:
        form: Inputs and outputs that it serves.
        text: Makes the source from the argument names and the epsilon.
    """

    form: Form
    text: Callable[[Sequence[str], float], str]


def _flashinfer_rmsnorm(names: Sequence[str], eps: float) -> str:
    x, weight, output = names
    return f"""import flashinfer.norm


def call({x}, {weight}):
    return flashinfer.norm.rmsnorm({x}, {weight}, eps={eps!r})


def call_out({x}, {weight}, {output}):
    flashinfer.norm.rmsnorm({x}, {weight}, eps={eps!r}, out={output})
"""


def _flashinfer_fused_add_rmsnorm(names: Sequence[str], eps: float) -> str:
    x, residual, weight, output = names
    return f"""import flashinfer.norm


def call({x}, {residual}, {weight}):
    # The library writes both arguments and the contract neither: the copies are part of the work, and are timed.
    normed, added = {x}.clone(), {residual}.clone()
    flashinfer.norm.fused_add_rmsnorm(normed, added, {weight}, eps={eps!r})
    return normed


def call_out({x}, {residual}, {weight}, {output}):
    {output}.copy_({x})
    flashinfer.norm.fused_add_rmsnorm({output}, {residual}.clone(), {weight}, eps={eps!r})
"""


def _flashinfer_fused_add_rmsnorm_in_place(names: Sequence[str], eps: float) -> str:
    x, residual, weight, *_ = names
    return f"""import flashinfer.norm


def call({x}, {residual}, {weight}):
    flashinfer.norm.fused_add_rmsnorm({x}, {residual}, {weight}, eps={eps!r})
    return {x}, {residual}
"""


ADAPTERS: dict[str, tuple[Adapter, ...]] = {
    "flashinfer.norm.rmsnorm": (Adapter(Form(("RH", "H"), ("RH",)), _flashinfer_rmsnorm),),
    "flashinfer.norm.fused_add_rmsnorm": (
        Adapter(Form(("RH", "RH", "H"), ("RH",)), _flashinfer_fused_add_rmsnorm),
        Adapter(Form(("RH", "RH", "H"), ("RH", "RH"), in_place=(0, 1)), _flashinfer_fused_add_rmsnorm_in_place),
    ),
}
"""Library functions whose calling convention is known, by the path in a ``fi_api:`` tag."""


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


@dataclass(frozen=True)
class Builtin:
    """torch's own kernel for a kind of contract.

    Attributes:
        op_type: As the contract has it.
        form: Inputs and outputs.
        name: With ``{0}``, ``{1}`` for the names of inputs.
        text: Makes the source from the argument names and the epsilon, which is NaN where it is not needed.
        needs_epsilon: The reference has to state one.
    """

    op_type: str
    form: Form
    name: str
    text: Callable[[Sequence[str], float], str]
    needs_epsilon: bool = False


def _gemm(names: Sequence[str], _: float) -> str:
    a, b, c = names
    return f"""import torch


def call({a}, {b}):
    return torch.matmul({a}, {b}.T)


def call_out({a}, {b}, {c}):
    torch.matmul({a}, {b}.T, out={c})
"""


def _rmsnorm(names: Sequence[str], eps: float) -> str:
    x, weight, _ = names
    return f"""from torch.nn.functional import rms_norm


def call({x}, {weight}):
    return rms_norm({x}, {weight}.shape, {weight}, {eps!r})
"""


def _fused_add_rmsnorm(names: Sequence[str], eps: float) -> str:
    x, residual, weight, _ = names
    return f"""from torch.nn.functional import rms_norm


def call({x}, {residual}, {weight}):
    return rms_norm({x} + {residual}, {weight}.shape, {weight}, {eps!r})
"""


def _fused_add_rmsnorm_in_place(names: Sequence[str], eps: float) -> str:
    x, residual, weight, *_ = names
    return f"""from torch.nn.functional import rms_norm


def call({x}, {residual}, {weight}):
    {residual}.add_({x})
    {x}.copy_(rms_norm({residual}, {weight}.shape, {weight}, {eps!r}))
    return {x}, {residual}
"""


BUILTINS: tuple[Builtin, ...] = (
    Builtin("gemm", Form(("MK", "NK"), ("MN",)), "torch.matmul({0}, {1}.T)", _gemm),
    Builtin("rmsnorm", Form(("RH", "H"), ("RH",)), "F.rms_norm({0}, weight={1})", _rmsnorm, needs_epsilon=True),
    Builtin(
        "rmsnorm",
        Form(("RH", "RH", "H"), ("RH",)),
        "F.rms_norm({0} + {1}, weight={2})",
        _fused_add_rmsnorm,
        needs_epsilon=True,
    ),
    Builtin(
        "rmsnorm",
        Form(("RH", "RH", "H"), ("RH", "RH"), in_place=(0, 1)),
        "F.rms_norm({1}.add_({0}), weight={2})",
        _fused_add_rmsnorm_in_place,
        needs_epsilon=True,
    ),
)
"""What torch has for a contract, by op_type and the shapes of its inputs and outputs, all of one dtype."""


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


_RESERVED = frozenset(
    {"torch", "rms_norm", "flashinfer", "call", "call_out", "normed", "added", "results", "reference"}
)
"""Names that the sources above use themselves."""


def _argument_names(definition: Definition) -> list[str]:
    """Return the contract's names of inputs and outputs, or neutral ones where one could not stand in the source."""
    names = [*definition.inputs, *definition.outputs]
    if len(set(names)) == len(names) and all(_is_plain_name(name) and name not in _RESERVED for name in names):
        return names
    return [f"argument_{index}" for index in range(len(names))]


def _is_plain_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)

"""``torch.ops.fibc.<definition>``, the operator of a package. A copy lies in every package: it imports no fibc."""

from __future__ import annotations

import keyword
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


def register(spec: dict[str, Any], run: Callable[..., Any], native: Callable[..., Any]) -> None:
    """Register the operator of ``spec`` (a CallSpec as plain data).

    It returns the outputs that are not written in place; those are mutated inputs. It serves compiled graphs through
    its fake kernel. Its derivative is native's: backward runs ``native`` again with grad mode on. An operator that
    writes into an input has none. The package of a definition that was imported last serves it: torch lets nobody
    redefine an operator, so a later package takes the place of an earlier one behind it.
    """
    declared = schema(spec)
    packet = getattr(torch.ops.fibc, spec["definition"], None)
    if packet is None:
        _define(spec, declared, Served(run, native, declared))
    elif packet.fibc_served.declared == declared:
        packet.fibc_served.run, packet.fibc_served.native = run, native
    else:
        warnings.warn(
            f"torch.ops.fibc.{spec['definition']}: another definition of this name was imported before, with schema "
            f"{packet.fibc_served.declared}; the operator stays that one's (call run() of this package)",
            RuntimeWarning,
            stacklevel=2,
        )


@dataclass
class Served:
    """What stands behind an operator: functions of the package that was imported last.

    Attributes:
        declared: The operator's schema, which never changes.
        library: Keeps the operator registered.
    """

    run: Callable[..., Any]
    native: Callable[..., Any]
    declared: str
    library: Any = None


def _define(spec: dict[str, Any], declared: str, served: Served) -> None:
    fresh = [index for index, output in enumerate(spec["outputs"]) if output["alias"] is None]
    in_place = len(fresh) < len(spec["outputs"])

    def kernel(*inputs: Any) -> Any:
        results = served.run(*inputs)
        if not in_place:
            return results
        listed = results if len(spec["outputs"]) != 1 else (results,)
        return _packed([listed[index] for index in fresh])

    def fake(*inputs: Any) -> Any:
        return _packed([_fake_output(spec, spec["outputs"][index], inputs) for index in fresh])

    served.library = torch.library.Library("fibc", "FRAGMENT")  # type: ignore[no-untyped-call]
    served.library.define(declared, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):  # whatever the table is for: native serves the other one
        served.library.impl(spec["definition"], kernel, device)
    name = f"fibc::{spec['definition']}"
    torch.library.register_fake(name, fake, lib=served.library)
    if not in_place:
        torch.library.register_autograd(name, _backward_through(served), setup_context=_save, lib=served.library)
    getattr(torch.ops.fibc, spec["definition"]).fibc_served = served


def schema(spec: dict[str, Any]) -> str:
    """Return the operator's schema, ``name(Tensor A, Tensor(a1!) B, float scale) -> Tensor``."""
    written = {output["alias"] for output in spec["outputs"]} - {None}
    parameters = []
    for index, argument in enumerate(spec["inputs"]):
        kind = f"Tensor(a{index}!)" if index in written else _kind(argument)
        name = f"{argument['name']}_" if keyword.iskeyword(argument["name"]) else argument["name"]
        if argument["optional"]:
            last = all(later["optional"] for later in spec["inputs"][index:])  # only then a default is allowed
            parameters.append(f"{kind}? {name}{'=None' if last else ''}")
        else:
            parameters.append(f"{kind} {name}")
    num_fresh = sum(output["alias"] is None for output in spec["outputs"])
    returns = "Tensor" if num_fresh == 1 else f"({', '.join(['Tensor'] * num_fresh)})"
    return f"{spec['definition']}({', '.join(parameters)}) -> {returns}"


def _kind(argument: dict[str, Any]) -> str:
    if argument["kind"] != "scalar":
        return "Tensor"
    if argument["dtype"] == "bool":
        return "bool"
    return "float" if "float" in argument["dtype"] else "int"


def _packed(results: list[Any]) -> Any:
    """Return results as an operator returns them: one alone, several as a tuple, none as None."""
    return results[0] if len(results) == 1 else tuple(results) or None


def _fake_output(spec: dict[str, Any], output: dict[str, Any], inputs: tuple[Any, ...]) -> torch.Tensor:
    """Return an output of the right form without values; sizes may be symbols."""
    sizes: dict[int, Any] = {}
    for argument, value in zip(spec["inputs"], inputs, strict=True):
        if argument["kind"] == "tensor" and value is not None:
            sizes.update(zip(argument["axes"], value.shape, strict=True))
    sizes.update({index: axis["value"] for index, axis in enumerate(spec["axes"]) if axis["value"] is not None})
    device = next(value.device for value in inputs if isinstance(value, torch.Tensor))
    shape = [sizes[axis] for axis in output["axes"]]
    return torch.empty(shape, dtype=_DTYPES[output["dtype"]], device=device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the inputs of a call for its backward."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.others = [None if isinstance(value, torch.Tensor) else (value,) for value in inputs]


def _backward_through(served: Served) -> Callable[..., Any]:
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if other is None else other[0] for other in ctx.others]
        wanted = [index for index, needed in enumerate(ctx.needs_input_grad) if needed]
        with torch.enable_grad():
            for index in wanted:
                inputs[index] = inputs[index].detach().requires_grad_()
            results = served.native(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        pairs = [
            (result, gradient)
            for result, gradient in zip(results, gradients, strict=True)
            if gradient is not None and result.requires_grad
        ]
        found = torch.autograd.grad(
            [result for result, _ in pairs],
            [inputs[index] for index in wanted],
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )
        by_index = dict(zip(wanted, found, strict=True))
        return tuple(by_index.get(index) for index in range(len(inputs)))

    return backward

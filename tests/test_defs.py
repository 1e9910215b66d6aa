"""The definitions that fibc ships: their files are lawful and their references compute what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fibc.schema.definition import Definition, load_definition
from fibc.schema.validate import validate_paths
from fibc.schema.workload_source import find_workloads

DEFS = Path(__file__).parent.parent / "defs"

EXPECTED = {
    "gemm": ("gemm_bf16_n4096_k4096", "bfloat16", 32),
    "gemm_f16": ("gemm_n4096_k4096", "float16", 32),
    "fused_add_rmsnorm": ("fused_add_rmsnorm_h4096", "bfloat16", 8),
    "fused_add_rmsnorm_inplace": ("fused_add_rmsnorm_inplace_h4096", "bfloat16", 8),
    "rmsnorm": ("rmsnorm_h4096", "bfloat16", 10),
}
"""Stem: name, dtype, number of recorded workloads."""


def load(stem: str) -> Definition:
    return load_definition(DEFS / f"{stem}.json")


def reference(definition: Definition) -> Callable[..., torch.Tensor]:
    namespace: dict[str, Any] = {}
    exec(definition.reference, namespace)  # noqa: S102 - our own definition
    run: Callable[..., torch.Tensor] = namespace[definition.entry_point]
    return run


def draw(definition: Definition, size: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    tensors = {}
    for name, spec in definition.inputs.items():
        shape = definition.shape_of(spec, dict.fromkeys(definition.var_axes, size)) or ()
        tensors[name] = torch.randn(shape, generator=generator).mul_(scale).to(getattr(torch, spec.dtype))
    return tensors


def test_every_file_is_lawful() -> None:
    checked = validate_paths([DEFS])
    assert checked.problems == ()
    assert checked.num_files == 2 * len(EXPECTED)


@pytest.mark.parametrize("stem", EXPECTED)
def test_each_definition_has_its_recorded_workloads_beside_it(stem: str) -> None:
    name, dtype, num_workloads = EXPECTED[stem]
    definition = load(stem)
    assert definition.name == name
    assert {spec.dtype for spec in (*definition.inputs.values(), *definition.outputs.values())} == {dtype}
    found = find_workloads(DEFS / f"{stem}.json", definition)
    assert found is not None
    workloads, _ = found
    assert len(workloads) == num_workloads
    assert not any(workload.synthesised for workload in workloads)


def test_both_gemms_have_the_same_recorded_sizes() -> None:
    sizes = []
    for stem in ("gemm", "gemm_f16"):
        found = find_workloads(DEFS / f"{stem}.json", load(stem))
        assert found is not None
        sizes.append([(workload.uuid, workload.axes) for workload in found[0]])
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("stem", ["gemm", "gemm_f16"])
def test_a_gemm_is_a_product_rounded_once(stem: str) -> None:
    definition = load(stem)
    tensors = draw(definition, 3, scale=0.125)
    exact = tensors["A"].double() @ tensors["B"].double().T
    output = reference(definition)(*tensors.values())
    assert output.dtype == tensors["A"].dtype
    rounding = torch.finfo(output.dtype).eps * exact.abs() + 1e-4
    assert bool(((output.double() - exact).abs() <= rounding).all())


@pytest.mark.parametrize("stem", ["rmsnorm", "fused_add_rmsnorm"])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_a_norm_has_epsilon_1e_5_and_is_rounded_once(stem: str, scale: float) -> None:
    definition = load(stem)
    tensors = draw(definition, 3, scale)
    total = sum(value.double() for name, value in tensors.items() if name != "weight")
    assert isinstance(total, torch.Tensor)
    exact = total / (total.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * tensors["weight"].double()
    output = reference(definition)(*tensors.values())
    assert output.dtype == torch.bfloat16
    rounding = torch.finfo(torch.bfloat16).eps * exact.abs() + 1e-12
    assert bool(((output.double() - exact).abs() <= rounding).all())


@pytest.mark.parametrize("stem", EXPECTED)
def test_a_reference_takes_an_empty_batch(stem: str) -> None:
    definition = load(stem)
    tensors = draw(definition, 0)
    result = reference(definition)(*tensors.values())
    outputs = result if isinstance(result, tuple) else (result,)
    for spec, output in zip(definition.outputs.values(), outputs, strict=True):
        assert tuple(output.shape) == definition.shape_of(spec, dict.fromkeys(definition.var_axes, 0))


def test_the_norm_in_place_writes_what_the_fused_norm_returns_and_the_sum() -> None:
    definition, fresh = load("fused_add_rmsnorm_inplace"), load("fused_add_rmsnorm")
    assert {name: definition.alias_of(name) for name in definition.outputs} == {
        "normed": "hidden_states",
        "total": "residual",
    }
    tensors = draw(definition, 5)
    normed, total = reference(definition)(*tensors.values())
    assert torch.equal(normed, reference(fresh)(*tensors.values()))
    exact = tensors["hidden_states"].double() + tensors["residual"].double()
    assert torch.equal(total, exact.float().to(torch.bfloat16))

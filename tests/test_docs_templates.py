"""Following docs/templates.md to the letter gives a kernel that computes what its definition means."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import interpreted
import pytest
import torch
from kernel_calls import build_one, call_kernel, default_config, key, machine, own_levels

from fibc.backends.cpu import CpuBackend
from fibc.backends.triton import TritonBackend
from fibc.cache import Cache
from fibc.schema.arch import ARCH_NAMES
from fibc.schema.candidate import Artifact
from fibc.schema.definition import Definition, load_definition
from fibc.schema.isa import ISA_NAMES
from fibc.schema.launch import KernelArgument, LaunchTable
from fibc.schema.template import TARGET_NAMES, Template

PAGE = Path(__file__).parent.parent / "docs" / "templates.md"

_FILE = re.compile(r"`(?P<name>[\w.]+)`[^`]*?:\n\n```\w+\n(?P<text>.*?)```", re.DOTALL)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A directory with every file of the page."""
    files = {match["name"]: match["text"] for match in _FILE.finditer(PAGE.read_text())}
    assert set(files) == {
        "squared_relu.toml",
        "squared_relu.cpp.j2",
        "squared_relu_h100.json",
        "squared_relu_gpu.toml",
        "squared_relu_gpu.py.j2",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def _reference(definition: Definition) -> torch.Tensor:
    namespace: dict[str, object] = {}
    exec(definition.reference, namespace)  # noqa: S102  the page's own code
    run = namespace["run"]
    assert callable(run)
    result = run(INPUT)
    assert isinstance(result, torch.Tensor)
    return result


INPUT = torch.randn(37, 100, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_the_twenty_lines_serve_the_definition(written: Path) -> None:
    lines = (written / "squared_relu.cpp.j2").read_text().splitlines()
    assert len(lines) <= 20
    levels = own_levels()
    if not levels:
        pytest.skip("this CPU has no AVX2")
    definition = load_definition(written / "squared_relu_h100.json")
    expected = _reference(definition)
    backend = CpuBackend(machine(*levels), Cache(written / "cache"), [written])
    (space,), _ = backend.spaces(definition, key(64))
    artifact = build_one(backend, definition, backend.candidate(definition, space.template, default_config(space)))
    for num_threads in (1, 3):
        out = torch.full_like(INPUT, torch.nan)
        assert call_kernel(artifact, definition, {"tokens": 37}, [INPUT], [out], num_threads) == 0
        assert torch.equal(out, expected)


def test_the_triton_kernel_serves_the_definition(written: Path) -> None:
    pytest.importorskip("triton", reason='needs Triton: pip install "fibc[cuda]"')
    definition = load_definition(written / "squared_relu_h100.json")
    backend = TritonBackend(Cache(written / "cache"), [written])
    (space,), _ = backend.spaces(definition, key(64))
    out = torch.full_like(INPUT, torch.nan).half()
    half = Definition.model_validate(
        {**definition.to_json(), **{group: _in_half(definition, group) for group in ("inputs", "outputs")}}
    )
    candidate = backend.candidate(half, space.template, default_config(space))
    run = interpreted.Run(backend, half, candidate, {"tokens": 37}, [INPUT.half()], [out])
    (result,) = interpreted.run([run], written)
    assert torch.equal(result["Y"], INPUT.half().float().relu().square().half())
    artifact = backend.build(half, [candidate], timeout_s=60, jobs=1)[candidate.digest]
    assert isinstance(artifact, Artifact), artifact.log
    assert artifact.resources["spill_bytes"] == 0


def _in_half(definition: Definition, group: str) -> dict[str, Any]:
    specs: dict[str, Any] = definition.to_json()[group]
    return {name: {**spec, "dtype": "float16"} for name, spec in specs.items()}


def test_the_page_names_every_key_level_and_name() -> None:
    text = PAGE.read_text()
    keys = set(Template.model_fields) - {"name", "digest", "backend"}
    launch = set(LaunchTable.model_fields) | set(KernelArgument.model_fields)
    of_targets = [name for names in TARGET_NAMES.values() for name in names]
    names = (*keys, *launch, *ISA_NAMES, *ARCH_NAMES, *of_targets)
    missing = [name for name in names if not any(form in text for form in (f"`{name}`", f"[{name}]", f"`{name} "))]
    assert not missing

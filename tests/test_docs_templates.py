"""Following docs/templates.md to the letter gives a kernel that computes what its definition means."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from kernel_calls import build_one, call_kernel, default_config, key, machine, own_levels

from fibc.backends.cpu import CpuBackend
from fibc.cache import Cache
from fibc.schema.definition import Definition, load_definition
from fibc.schema.isa import ISA_NAMES
from fibc.schema.template import TARGET_NAMES, Template

PAGE = Path(__file__).parent.parent / "docs" / "templates.md"

_FILE = re.compile(r"`(?P<name>[\w.]+)`[^`]*?:\n\n```\w+\n(?P<text>.*?)```", re.DOTALL)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A directory with every file of the page."""
    files = {match["name"]: match["text"] for match in _FILE.finditer(PAGE.read_text())}
    assert set(files) == {"squared_relu.toml", "squared_relu.cpp.j2", "squared_relu_h100.json"}
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


def test_the_page_names_every_key_level_and_name() -> None:
    text = PAGE.read_text()
    keys = set(Template.model_fields) - {"name", "digest"}
    missing = [
        name for name in (*keys, *ISA_NAMES, *TARGET_NAMES) if f"`{name}`" not in text and f"[{name}]" not in text
    ]
    assert not missing

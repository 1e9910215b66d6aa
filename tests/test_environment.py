"""The environment reads what Linux says, and its digest follows what timings depend on."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from fibc.environment import Environment, detect

CPUINFO = """\
processor\t: 0
model name\t: Some CPU @ 3.00GHz
flags\t\t: fpu avx2 fma f16c {more}

processor\t: 1
model name\t: Another CPU
flags\t\t: fpu
"""
AVX512 = "avx512f avx512bw avx512dq avx512vl"


def _machine(directory: Path, more: str = AVX512) -> Environment:
    cpuinfo = directory / "cpuinfo"
    cpuinfo.write_text(CPUINFO.format(more=more))
    for index, (level, kind, size) in enumerate(
        (("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K"), ("3", "Unified", "1G"))
    ):
        cache = directory / "cache" / f"index{index}"
        cache.mkdir(parents=True, exist_ok=True)
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (cache / name).write_text(f"{text}\n")
    return detect(3, cpuinfo=cpuinfo, caches=directory / "cache")


def test_the_first_cpu_and_its_caches_are_read(tmp_path: Path) -> None:
    found = _machine(tmp_path)
    assert found.model == "Some CPU @ 3.00GHz"
    assert found.isa == ("avx2", "avx512")
    assert (found.l2_bytes, found.l3_bytes, found.num_threads) == (2 << 20, 1 << 30, 3)
    assert found.facts()["l2"] == "2048 KiB"
    validity = found.cpu_validity()
    assert (validity.model, validity.isa, validity.num_threads) == (found.model, found.isa, 3)


@pytest.mark.parametrize(
    ("more", "levels"),
    [
        ("", ("avx2",)),
        ("avx512f avx512bw avx512dq", ("avx2",)),
        (f"{AVX512} avx512_bf16", ("avx2", "avx512", "avx512_bf16")),
        (f"{AVX512} amx_tile amx_bf16", ("avx2", "avx512")),
        (f"{AVX512} avx512_bf16 amx_tile amx_bf16", ("avx2", "avx512", "avx512_bf16", "amx_bf16")),
    ],
)
def test_a_level_needs_all_its_flags(more: str, levels: tuple[str, ...], tmp_path: Path) -> None:
    assert _machine(tmp_path, more).isa == levels


def test_files_that_cannot_be_read_are_a_cpu_of_no_known_kind(tmp_path: Path) -> None:
    found = detect(1, cpuinfo=tmp_path / "absent", caches=tmp_path / "absent")
    assert (found.model, found.isa, found.l2_bytes, found.l3_bytes) == ("unknown", (), 0, 0)
    assert found.facts()["isa"] == "below avx2"


def test_a_cache_size_that_is_no_number_counts_as_unknown(tmp_path: Path) -> None:
    _machine(tmp_path)
    (tmp_path / "cache" / "index2" / "size").write_text("lots\n")
    assert detect(1, cpuinfo=tmp_path / "cpuinfo", caches=tmp_path / "cache").l2_bytes == 0


def test_this_machine_computes_with_torchs_threads() -> None:
    found = detect()
    assert found.num_threads == torch.get_num_threads()
    assert found.versions["torch"] == metadata.version("torch")  # torch's own says +cu130 as well


def test_the_digest_follows_the_silicon_the_threads_and_torch_and_nothing_else(tmp_path: Path) -> None:
    found = _machine(tmp_path)
    changed = [
        replace(found, model="x"),
        replace(found, isa=("avx2",)),
        replace(found, l2_bytes=1),
        replace(found, l3_bytes=1),
        replace(found, num_threads=4),
        replace(found, versions={**found.versions, "torch": "9.9"}),
    ]
    assert len({found.digest, *(other.digest for other in changed)}) == 7
    assert replace(found, versions={**found.versions, "kernel": "Linux 9"}).digest == found.digest

"""Objects hold no instruction above their ISA level, export their entry alone, and call next to nothing."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from kernel_calls import backend_for, build_one, default_candidate, gemm, key, rmsnorm

from fibc import toolchain
from fibc.backends.build import COMPILE_FLAGS
from fibc.cache import Cache
from fibc.paths import INCLUDE
from fibc.schema.candidate import Artifact
from fibc.schema.isa import ISA_LEVELS, ISA_NAMES, available_levels, compiler_flags, isa_level

ABOVE = {
    "avx2": re.compile(r"%zmm|%k[0-7]\b|%[xy]mm(?:1[6-9]|2\d|3[01])\b"),
    "avx512": re.compile(r"\b(?:vdpbf16ps|vcvtne2?ps2?pbh|vcvtneps2bf16|tdp\w+|tileload\w*)\b"),
    "avx512_bf16": re.compile(r"\b(?:tdp\w+|tileload\w*)\b"),
}
"""Instructions that a level does not have."""

HOLDS = {"avx2": r"%ymm", "avx512": r"%zmm", "avx512_bf16": r"vdpbf16ps", "amx_bf16": r"tdpbf16ps"}

LIBRARY_CALLS = {"aligned_alloc", "free", "memcpy", "memset"}

DRIVER = """\
#include <cstdio>
#include "fibc/kernel_abi.h"
extern "C" std::int32_t {symbol}(const fibc_call* call);
int main() {{
  float a[8], b[4 * 8], c[4] = {{}};
  for (int i = 0; i < 8; ++i) a[i] = static_cast<float>(i);
  for (int i = 0; i < 32; ++i) b[i] = static_cast<float>(i / 8 + 1);
  const std::int64_t a_shape[] = {{1, 8}}, a_strides[] = {{8, 1}}, axes[] = {{1, 4, 8}};
  const fibc_tensor inputs[] = {{{{a, a_shape, a_strides}}, {{b, a_shape, a_strides}}}};
  const fibc_tensor outputs[] = {{{{c, a_shape, a_strides}}}};
  const double scalars[2] = {{}};
  const fibc_call call{{inputs, outputs, scalars, axes, nullptr, 1}};
  const int status = {symbol}(&call);
  std::printf("%d %g %g %g %g\\n", status, c[0], c[1], c[2], c[3]);
}}
"""
"""Rows of B are 1, 2, 3 and 4 everywhere, and A adds up to 28."""


@pytest.fixture(scope="module")
def cache(run_directory: Path) -> Cache:
    return Cache(run_directory / "kernels")


def _build(isa: str, template: str, cache: Cache) -> Artifact:
    fused = template.startswith("fused")
    definition = gemm(64, 128, "bfloat16") if template.startswith("gemm/") else rmsnorm(64, "bfloat16", fused=fused)
    backend = backend_for(isa, cache)
    return build_one(backend, definition, default_candidate(backend, definition, template))


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


LEVELS_OF_TEMPLATES = [
    *((isa, template) for template in ("gemm/matvec", "gemm/packed") for isa in ("avx2", "avx512")),
    ("avx512_bf16", "gemm/tile"),
    ("amx_bf16", "gemm/amx"),
    ("avx2", "fused_add_rmsnorm/one_pass"),
    ("avx512", "rmsnorm/two_pass"),
]


@pytest.mark.parametrize(("isa", "template"), LEVELS_OF_TEMPLATES)
def test_an_object_holds_its_level_and_exports_its_entry_alone(isa: str, template: str, cache: Cache) -> None:
    artifact = _build(isa, template, cache)
    code = _output("objdump", "-d", "--no-show-raw-insn", artifact.object_path)
    assert re.search(HOLDS[isa], code)
    if isa in ABOVE:
        assert not ABOVE[isa].search(code), ABOVE[isa].search(code)

    defined: set[str] = set()
    undefined: set[str] = set()
    for line in _output("nm", "--extern-only", artifact.object_path).splitlines():
        *_, kind, name = line.split()
        (undefined if kind == "U" else defined).add(name)
    assert defined == {artifact.symbol}
    assert undefined <= LIBRARY_CALLS | {"_GLOBAL_OFFSET_TABLE_"}
    exported = _output("nm", "--dynamic", "--defined-only", artifact.library_path).split()
    assert exported[2::3] == [artifact.symbol]


@pytest.mark.parametrize("isa", ISA_NAMES)
def test_a_template_above_the_target_is_a_mismatch(isa: str, cache: Cache) -> None:
    backend = backend_for(isa, cache)
    spaces, mismatches = backend.spaces(gemm(64, 64, "bfloat16"), key(64))
    reasons = {mismatch.template: mismatch.reason for mismatch in mismatches}
    assert ("gemm/amx" in {space.template for space in spaces}) == (isa == "amx_bf16")
    if isa != "amx_bf16":
        assert reasons["gemm/amx"] == f"needs ISA level amx_bf16, the target is cpu:{isa}"


def _driver(isa: str, cache: Cache, directory: Path) -> Path:
    definition = gemm(4, 8, "float32")
    backend = backend_for(isa, cache)
    artifact = build_one(backend, definition, default_candidate(backend, definition, "gemm/packed"))
    source = directory / f"{isa}.cpp"
    source.write_text(DRIVER.format(symbol=artifact.symbol))
    program = source.with_suffix("")
    options: list[str | Path] = ["-include", "cstdint", "-I", INCLUDE, source, artifact.object_path, "-o", program]
    subprocess.run([toolchain.find().cxx, *options], check=True)
    return program


def test_an_avx2_kernel_runs_on_a_cpu_that_dies_of_avx512(cache: Cache, tmp_path: Path) -> None:
    emulator = shutil.which("qemu-x86_64-static")
    if emulator is None:
        pytest.skip("qemu-x86_64-static is not installed (apt-get install qemu-user-static)")
    haswell: list[str | Path] = [emulator, "-cpu", "Haswell"]
    old = subprocess.run([*haswell, _driver("avx2", cache, tmp_path)], capture_output=True, text=True, check=True)
    assert old.stdout == "0 28 56 84 112\n"
    new = subprocess.run([*haswell, _driver("avx512", cache, tmp_path)], capture_output=True, text=True, check=False)
    assert new.returncode != 0
    assert "28 56 84 112" not in new.stdout


@pytest.mark.parametrize(("isa", "template"), LEVELS_OF_TEMPLATES)
def test_templates_compile_without_a_warning_of_ours(isa: str, template: str, cache: Cache, tmp_path: Path) -> None:
    found = toolchain.find()
    if "clang" in found.version:
        pytest.skip("warnings are kept clean for GCC")
    source = tmp_path / "kernel.cpp"
    source.write_text(_build(isa, template, cache).source)
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror", "-fsyntax-only"]
    command: list[str | Path] = [found.cxx, *COMPILE_FLAGS, *compiler_flags(isa), *warnings, "-I", INCLUDE, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_levels_are_available_in_order_and_only_where_all_before_them_are() -> None:
    every = [flag for level in ISA_LEVELS for flag in level.cpu_flags]
    assert available_levels(every) == ISA_NAMES
    assert available_levels([flag for flag in every if flag != "avx512vl"]) == ("avx2",)
    assert available_levels([flag for flag in every if flag != "f16c"]) == ()


def test_a_level_compiles_with_the_flags_of_those_before_it() -> None:
    for lower, upper in itertools.pairwise(ISA_NAMES):
        assert compiler_flags(upper)[: len(compiler_flags(lower))] == compiler_flags(lower)
    assert isa_level("avx2").lanes == 8
    assert isa_level("avx512").lanes == 16
    with pytest.raises(ValueError, match="not in tuple"):
        compiler_flags("sse9")

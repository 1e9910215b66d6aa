"""The CPU backend: pure spaces and candidates, builds that are cached, and failures that stay with their candidate."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_calls import (
    backend_for,
    build_one,
    call_kernel,
    default_candidate,
    default_config,
    define,
    gemm,
    key,
    machine,
    rmsnorm,
    space_of,
)

from fibc import isolation, toolchain
from fibc.backends import build, cpu
from fibc.backends.base import Backend, BuildFailure
from fibc.backends.cpu import PRELUDE, CpuBackend
from fibc.cache import Cache
from fibc.errors import BuildError, InputError, SchemaError, ToolchainError
from fibc.paths import INCLUDE
from fibc.schema.candidate import Candidate, Target, TensorGuard
from fibc.schema.isa import compiler_flags
from fibc.search.space import ConfigSpace

COPY_TOML = """\
summary = "copies"
source = "a test"
op_types = ["copy"]

[inputs]
X = { shape = ["R"], dtype = "float32" }

[outputs]
Y = { shape = ["R"], dtype = "float32", alignment_bytes = 4 }

[tunables]
way = ["good", "unused", "broken", "endless", "undefined"]
"""

COPY_SOURCE = """\
#include "fibc/kernel_abi.h"
{% if way == "broken" %}
this is no C++
{% elif way == "endless" %}
#include "/dev/zero"
{% elif way == "undefined" %}
extern "C" void nobody_has_this();
{% endif %}
extern "C" __attribute__((visibility("default"))) int32_t fibc_entry(const fibc_call* call) {
{% if way == "undefined" %}
  nobody_has_this();
{% endif %}
  const float* x = static_cast<const float*>(call->inputs[{{ inputs.X | c_int }}].data);
  float* y = static_cast<float*>(call->outputs[{{ outputs.Y | c_int }}].data);
  for (int64_t i = 0; i < call->axes[{{ R | c_int }}]; ++i) y[i] = x[i];
  return 0;
}
"""

DEFS = Path(__file__).parent.parent / "defs"

COPY = define(
    "copy", {"n": None}, {"a": (("n",), "float32")}, {"b": (("n",), "float32")}, "def run(a):\n    return a\n"
)


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    root = tmp_path / "my templates"
    root.mkdir()
    (root / "copy.toml").write_text(COPY_TOML)
    (root / "copy.cpp.j2").write_text(COPY_SOURCE)
    return root


@pytest.fixture
def backend(tmp_path: Path, templates: Path) -> CpuBackend:
    return CpuBackend(machine("avx2"), Cache(tmp_path / "the cache, mit Ümlaut & $HOME"), [templates])


def test_the_backend_keeps_the_protocol(backend: CpuBackend) -> None:
    seam: Backend = backend
    assert (seam.name, seam.target) == ("cpu", Target("cpu", "avx2"))


def test_the_target_is_the_best_level_of_the_environment(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert CpuBackend(machine("avx2", "avx512"), cache).target == Target("cpu", "avx512")
    assert CpuBackend(machine("avx2", "avx512"), cache, isa="avx2").target == Target("cpu", "avx2")
    with pytest.raises(InputError, match=r"isa: must be a level, got 'mmx' \(accepted: avx2"):
        CpuBackend(machine("avx2"), cache, isa="mmx")


def test_a_cpu_below_all_levels_gets_no_space_and_a_reason_for_each_template(tmp_path: Path) -> None:
    spaces, mismatches = CpuBackend(machine(), Cache(tmp_path)).spaces(gemm(8, 8, "float32"), key(4))
    assert spaces == ()
    assert all("needs ISA level" in mismatch.reason for mismatch in mismatches)


def test_spaces_are_small_start_with_a_valid_config_and_name_their_constants(tmp_path: Path) -> None:
    for isa in ("avx2", "avx512", "amx_bf16"):
        backend = backend_for(isa, Cache(tmp_path))
        for definition in (
            gemm(4096, 4096, "bfloat16"),
            gemm(28672, 4096, "float16"),
            rmsnorm(4096, "bfloat16", fused=True),
        ):
            for size in (1, 4, 16, 33, 64, 256, 16384):
                spaces, _ = backend.spaces(definition, key(size))
                counts = [sum(1 for _ in ConfigSpace(space).configs()) for space in spaces]
                assert max(counts) <= 120, (isa, size, counts)
                assert sum(counts) >= 2, (isa, size, counts)
                assert {space.constants["size"] for space in spaces} == {size}
    space = space_of(backend_for("avx2", Cache(tmp_path)), gemm(40, 50, "float16"), "gemm/tile")
    assert space.constants == {
        "N": 40,
        "K": 50,
        "T": "float16",
        "T_bytes": 2,
        "lanes": 8,
        "vector_registers": 16,
        "l2_bytes": 1 << 21,
        "num_threads": 2,
        "size": 64,
    }


def test_a_candidate_is_the_same_in_every_process(tmp_path: Path) -> None:
    program = f"""\
from pathlib import Path
from fibc.backends.cpu import CpuBackend
from fibc.cache import Cache
from fibc.environment import Environment
from fibc.schema.definition import load_definition
from fibc.schema.feature import Cell, FeatureKey
from fibc.search.space import ConfigSpace

backend = CpuBackend(Environment("x", ("avx2", "avx512"), 1 << 21, 1 << 25, 2), Cache(Path({str(tmp_path)!r})))
for name in ("gemm", "fused_add_rmsnorm"):
    definition = load_definition(Path({str(DEFS)!r}) / f"{{name}}.json")
    for space in backend.spaces(definition, FeatureKey(Cell(((1, 64),)), (), 0, True))[0]:
        print(backend.candidate(definition, space.template, dict(ConfigSpace(space).default())).digest)
"""
    outputs = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 5


def test_config_definition_target_and_compiler_are_part_of_a_candidates_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "cache")
    backend = backend_for("avx2", cache)
    definition, name = gemm(64, 96, "float32"), "gemm/matvec"
    first = default_candidate(backend, definition, name)
    assert default_candidate(backend, definition, name) == first
    changed = backend.candidate(definition, name, dict(first.config) | {"prefetch_bytes": 512})
    others = [
        changed,
        default_candidate(backend, gemm(64, 97, "float32"), name),
        default_candidate(backend_for("avx512", cache), definition, name),
    ]
    wrapper = tmp_path / "cxx"
    wrapper.write_text(f'#!/bin/sh\nexec {toolchain.find().cxx} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    others.append(default_candidate(backend_for("avx2", cache), definition, name))
    assert len({first.digest, *(other.digest for other in others)}) == 5


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("header_texts", lambda names: dict.fromkeys(names, "another text")),
        ("COMPILE_FLAGS", ("-O1",)),
        ("compiler_flags", lambda isa: ("-march=native",)),
        ("PRELUDE", "#include <string.h>\n"),
    ],
)
def test_all_that_a_binary_is_compiled_from_is_part_of_a_candidates_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, other: object
) -> None:
    definition, cache = gemm(64, 96, "float32"), Cache(tmp_path / "cache")

    def identities() -> tuple[Candidate, str]:
        backend = backend_for("avx2", cache)
        return default_candidate(backend, definition, "gemm/matvec"), backend.fingerprint(definition)

    first, fingerprint = identities()
    assert identities() == (first, fingerprint)
    monkeypatch.setattr(cpu, part, other)
    second, changed = identities()
    assert first.config == second.config
    assert first.digest != second.digest
    assert fingerprint != changed, "a table of the old binaries is out of date"


def test_a_template_of_ones_own_is_built_and_answers(backend: CpuBackend) -> None:
    spaces, _ = backend.spaces(COPY, key(8))
    assert [space.template for space in spaces] == ["copy"]
    candidate = backend.candidate(COPY, "copy", default_config(spaces[0]))
    artifact = build_one(backend, COPY, candidate)
    x, y = torch.arange(5.0), torch.zeros(5)
    assert call_kernel(artifact, COPY, {"n": 5}, [x], [y]) == 0
    assert torch.equal(x, y)
    assert artifact.guards.inputs == (TensorGuard("contiguous", 1),)
    assert artifact.guards.outputs == (TensorGuard("contiguous", 4),)
    assert artifact.source.startswith("// Generated by fibc from copy for cpu:avx2")
    assert artifact.symbol == f"fibc_{candidate.digest}"


def test_equal_binaries_have_equal_digests_and_symbols_of_their_own(backend: CpuBackend) -> None:
    good, unused = (
        build_one(backend, COPY, backend.candidate(COPY, "copy", {"way": way})) for way in ("good", "unused")
    )
    assert good.digest == unused.digest
    assert good.symbol != unused.symbol
    assert Path(good.object_path).read_bytes() != Path(unused.object_path).read_bytes()


def test_a_build_is_answered_from_the_cache(tmp_path: Path, templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_run(*_: object, **__: object) -> isolation.Completed:
        raise AssertionError("a command ran")

    first = CpuBackend(machine("avx2"), Cache(tmp_path / "cache"), [templates])
    candidate = first.candidate(COPY, "copy", {"way": "good"})
    artifact = build_one(first, COPY, candidate)
    again = CpuBackend(machine("avx2"), Cache(tmp_path / "cache"), [templates])
    monkeypatch.setattr(isolation, "run", no_run)
    assert build_one(again, COPY, candidate) == artifact


VECTOR_SOURCE = """\
#include "fibc/kernel_abi.h"
#include "fibc/simd/vec.h"
extern "C" __attribute__((visibility("default"))) int32_t fibc_entry(const fibc_call* call) {
  using namespace fibc;
  store(static_cast<float*>(call->outputs[0].data), load(static_cast<const float*>(call->inputs[0].data)));
  return 0;
}
"""


def build_vector(cache: Cache, name: str, prelude: str, tools: toolchain.Toolchain) -> build.Built:
    built = build.build_units(
        [build.Unit(name, VECTOR_SOURCE)],
        tools,
        flags=compiler_flags("avx2"),
        include=INCLUDE,
        cache=cache,
        timeout_s=60,
        jobs=1,
        prelude=prelude,
    )[name]
    assert isinstance(built, build.Built), built
    return built


def test_headers_that_were_precompiled_change_no_byte_of_an_object(tmp_path: Path) -> None:
    cache, tools = Cache(tmp_path), toolchain.find()
    plain = build_vector(cache, "plain", "", tools)
    assert not (tmp_path / "prelude").exists()
    quick = build_vector(cache, "quick", PRELUDE, tools)
    assert quick.digest == plain.digest
    (precompiled,) = (tmp_path / "prelude").glob("*.h.gch")
    assert precompiled.stat().st_size > 1_000_000
    precompiled.write_bytes(b"torn")
    assert build_vector(cache, "torn", PRELUDE, tools).digest == plain.digest


def test_a_compiler_that_precompiles_nothing_builds_all_the_same_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tools = toolchain.find()
    refusing = tmp_path / "refusing c++"
    refusing.write_text(
        f'#!/bin/sh\ncase "$*" in *c++-header*) echo "no headers here" >&2; exit 1;; esac\nexec "{tools.cxx}" "$@"\n'
    )
    refusing.chmod(0o755)
    cache = Cache(tmp_path / "cache")
    expected = build_vector(cache, "expected", "", tools).digest
    other = replace(tools, cxx=refusing, digest="other")
    for name in ("first", "second"):
        assert build_vector(cache, name, PRELUDE, other).digest == expected
    assert [record.message for record in caplog.records if "no headers here" in record.message] == [
        f"{refusing}: does not precompile headers, so builds take about twice as long: no headers here"
    ]


def test_a_failure_carries_its_own_log_and_harms_no_other_candidate(backend: CpuBackend) -> None:
    ways = ("broken", "good", "undefined", "unused")
    candidates = {way: backend.candidate(COPY, "copy", {"way": way}) for way in ways}
    built = backend.build(COPY, list(candidates.values()), timeout_s=60, jobs=2)
    broken, undefined = built[candidates["broken"].digest], built[candidates["undefined"].digest]
    assert isinstance(broken, BuildFailure)
    assert not broken.timed_out
    assert "this is no C++" in broken.log
    assert "nobody_has_this" not in broken.log
    assert isinstance(undefined, BuildFailure)
    assert "nobody_has_this" in undefined.log
    for way in ("good", "unused"):
        assert not isinstance(built[candidates[way].digest], BuildFailure)


def test_a_compiler_that_never_ends_is_stopped_at_its_deadline(backend: CpuBackend) -> None:
    endless, good = (backend.candidate(COPY, "copy", {"way": way}) for way in ("endless", "good"))
    built = backend.build(COPY, [endless], timeout_s=0.5, jobs=1)[endless.digest]
    assert isinstance(built, BuildFailure)
    assert built.timed_out
    assert "deadline of 0.5 s" in built.log
    build_one(backend, COPY, good)


def test_a_template_that_uses_an_unknown_name_is_an_error_with_its_file(tmp_path: Path, templates: Path) -> None:
    (templates / "copy.cpp.j2").write_text("int x = {{ unheard_of | c_int }};\n")
    backend = CpuBackend(machine("avx2"), Cache(tmp_path / "cache"), [templates])
    with pytest.raises(SchemaError, match=r"copy\.cpp\.j2: cannot be rendered: 'unheard_of' is undefined"):
        backend.candidate(COPY, "copy", {"way": "good"})
    (templates / "copy.cpp.j2").write_text("\n{% if %}\n")
    backend = CpuBackend(machine("avx2"), Cache(tmp_path / "cache"), [templates])
    with pytest.raises(SchemaError, match=r"copy\.cpp\.j2:2: "):
        backend.candidate(COPY, "copy", {"way": "good"})


def test_a_ninja_that_cannot_work_is_an_error_and_no_candidates_fault(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_RULES", "this is no build file\n")
    with pytest.raises(BuildError, match="ninja: failed before it ran a compiler"):
        backend.build(COPY, [backend.candidate(COPY, "copy", {"way": "good"})], timeout_s=60, jobs=1)


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    toolchain._find.cache_clear()
    yield
    toolchain._find.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_spaces_are_told_and_candidates_are_an_error_with_a_remedy(backend: CpuBackend) -> None:
    spaces, _ = backend.spaces(COPY, key(8))
    assert spaces
    with pytest.raises(ToolchainError, match="apt-get install"):
        backend.candidate(COPY, "copy", {"way": "good"})

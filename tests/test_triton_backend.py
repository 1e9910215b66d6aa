"""The Triton backend without a GPU: pure spaces, candidates, builds that are cached, and failures that are data."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import kernel_abi as abi
import pytest
from kernel_calls import default_config, define, fused_in_place, gemm, key, rmsnorm

from fibc import isolation, toolchain
from fibc.backends import triton_compile
from fibc.backends.base import Backend, BuildFailure
from fibc.backends.build import ENTRY_SUFFIXES
from fibc.backends.triton import TritonBackend
from fibc.backends.triton_compile import Compiled, TritonToolchain, child_environment, compile_kernels
from fibc.backends.triton_launch import check_parameters, launcher_source
from fibc.cache import Cache
from fibc.errors import BuildError, InputError, ToolchainError
from fibc.paths import INCLUDE, TEMPLATES
from fibc.render import Renderer
from fibc.schema.candidate import Artifact, ConfigValue, Target, TensorGuard
from fibc.schema.definition import Definition
from fibc.search.pruning import census
from fibc.search.space import ConfigSpace

pytest.importorskip("triton", reason='needs Triton: pip install "fibc[cuda]"')

DEFS = Path(__file__).parent.parent / "defs"

COPY_TOML = """\
summary = "copies"
source = "a test"
op_types = ["copy"]

[inputs]
X = { shape = ["R"], dtype = "float32", alignment_bytes = 16 }

[outputs]
Y = { shape = ["R"], dtype = "float32" }

[tunables]
way = ["good", "unused", "syntax", "type", "endless", "abort", "grandchild", "shared", "arguments"]
block = [128, 256, 65536]
num_warps = [4, 8, 32]
maxnreg = [0, 64]

[[constraints]]
expression = "block < 65536"
message = "a block is small"

[launch]
function = "copy"
num_warps = "num_warps"
maxnreg = "maxnreg"
grid = ["cdiv(R, block)"]
scratch_bytes = "4 * R"
requires = ["R < 1000"]
arguments = [
  { name = "x", tensor = "X" },
  { name = "y", tensor = "Y" },
  { name = "n", value = "R", when = "way != 'arguments'" },
  { name = "counters", workspace = "counters" },
]
"""

COPY_SOURCE = """\
import triton
import triton.language as tl

{% if way == "syntax" %}
this is no Python
{% elif way == "endless" %}
while True:
    pass
{% elif way == "abort" %}
import os
os.abort()
{% elif way == "grandchild" %}
import subprocess
subprocess.run(["sleep", "1000"])
{% endif %}
BLOCK = tl.constexpr({{ block | py }})


@triton.jit
def copy(x, y, n, counters):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n)
{% if way == "type" %}
    values = tl.dot(values, nobody)
{% elif way == "shared" %}
    values = tl.ravel(tl.trans(tl.reshape(values, (256, BLOCK // 256))))
{% endif %}
    tl.store(y + at, values, mask=at < n)
"""

COPY = define(
    "copy", {"n": None}, {"a": (("n",), "float32")}, {"b": (("n",), "float32")}, "def run(a):\n    return a\n"
)

SHIPPED = (
    gemm(4096, 4096, "bfloat16"),
    gemm(256, 7168, "float16"),
    gemm(128, 2048, "bfloat16"),
    gemm(28672, 4096, "float32"),
    rmsnorm(4096, "bfloat16", fused=False),
    rmsnorm(5120, "float16", fused=True),
    fused_in_place(4096, "bfloat16"),
)


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    root = tmp_path / "my templates"
    root.mkdir()
    (root / "copy.toml").write_text(COPY_TOML)
    (root / "copy.py.j2").write_text(COPY_SOURCE)
    return root


@pytest.fixture
def backend(tmp_path: Path, templates: Path) -> TritonBackend:
    return TritonBackend(Cache(tmp_path / "the cache, mit Ümlaut & $HOME"), [templates])


def copy_config(**changed: ConfigValue) -> dict[str, ConfigValue]:
    config: dict[str, ConfigValue] = {"way": "good", "block": 128, "num_warps": 4, "maxnreg": 0}
    return config | changed


def build(
    backend: TritonBackend, *ways: str, timeout_s: float = 60, jobs: int = 2, **changed: ConfigValue
) -> dict[str, Artifact | BuildFailure]:
    candidates = {way: backend.candidate(COPY, "copy", copy_config(way=way, **changed)) for way in ways}
    built = backend.build(COPY, list(candidates.values()), timeout_s=timeout_s, jobs=jobs)
    return {way: built[candidate.digest] for way, candidate in candidates.items()}


def artifact_of(outcome: Artifact | BuildFailure) -> Artifact:
    assert not isinstance(outcome, BuildFailure), outcome.log
    return outcome


def failure_of(outcome: Artifact | BuildFailure) -> BuildFailure:
    assert isinstance(outcome, BuildFailure)
    return outcome


# Spaces and candidates ------------------------------------------------------------------------------------------------


def test_the_backend_keeps_the_protocol(backend: TritonBackend) -> None:
    seam: Backend = backend
    assert (seam.name, seam.target) == ("triton", Target("cuda", "sm_90a"))
    with pytest.raises(InputError, match=r"arch: must be known, got 'sm_13' \(accepted: sm_80"):
        TritonBackend(Cache(), arch_name="sm_13")


def test_spaces_are_bounded_start_with_a_valid_config_and_count_what_they_prune(tmp_path: Path) -> None:
    backend = TritonBackend(Cache(tmp_path))
    for definition in SHIPPED:
        for size in (1, 4, 16, 64, 128, 1024, 16384):
            spaces, mismatches = backend.spaces(definition, key(size))
            counted = [census(space) for space in spaces]
            where = (definition.inputs, size, [str(item) for item in counted])
            assert {item.reason for item in mismatches}, where
            assert max(item.valid for item in counted) <= 2000, where
            assert sum(item.valid for item in counted) >= 8, where
            for item in counted:
                assert item.valid + sum(count for _, count in item.rejected) == item.total, where


def test_the_first_config_fits_the_size(tmp_path: Path) -> None:
    backend = TritonBackend(Cache(tmp_path))

    def default(template: str, size: int, definition: Definition) -> dict[str, ConfigValue]:
        spaces, _ = backend.spaces(definition, key(size))
        return default_config(next(space for space in spaces if space.template == template))

    large = gemm(4096, 4096, "bfloat16")
    assert default("gemm/triton_matvec", 1, large)["rows"] == 1
    assert default("gemm/triton_swap", 16, large) | {"block_n": 64, "block_m": 16, "split_k": 2} == default(
        "gemm/triton_swap", 16, large
    )
    assert default("gemm/triton_swap", 64, large)["block_m"] == 64
    assert default("gemm/triton_tma", 4096, large)["block_m"] == 128


def test_an_architecture_without_tensor_maps_gets_no_space_that_needs_them(tmp_path: Path) -> None:
    spaces, mismatches = TritonBackend(Cache(tmp_path), arch_name="sm_80").spaces(SHIPPED[0], key(64))
    assert "gemm/triton_tma" not in {space.template for space in spaces}
    assert "needs sm_90a, the target is cuda:sm_80" in {item.reason for item in mismatches}
    assert {space.constants["shared_bytes_max"] for space in spaces} == {166_912}


def test_every_template_renders_to_the_same_bytes_in_every_process() -> None:
    program = f"""\
from pathlib import Path
from kernel_calls import gemm
from fibc.backends.triton import TritonBackend
from fibc.cache import Cache
from fibc.schema.definition import load_definition
from fibc.schema.feature import Cell, FeatureKey
from fibc.search.space import ConfigSpace

backend = TritonBackend(Cache())
names = ("gemm", "rmsnorm", "fused_add_rmsnorm", "fused_add_rmsnorm_inplace")
shipped = [load_definition(Path({str(DEFS)!r}) / f"{{name}}.json") for name in names]
for definition in (*shipped, gemm(28672, 4096, "float16"), gemm(128, 2048, "float32")):
    for size in (1, 4, 128, 4096):
        for space in backend.spaces(definition, FeatureKey(Cell(((1, size),)), (), 0, True))[0]:
            if (config := ConfigSpace(space).default()) is not None:
                candidate = backend.candidate(definition, space.template, dict(config))
                rendered = backend.render(definition, candidate)
                print(definition.name, size, space.template, candidate.digest, rendered.kernel.digest(backend._triton))
"""
    outputs = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    rendered = {line.split()[2] for line in outputs.pop().splitlines()}
    assert rendered == set(TritonBackend(Cache())._templates)


def test_config_definition_and_compiler_are_part_of_a_candidates_identity(
    backend: TritonBackend, tmp_path: Path, templates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = backend.candidate(COPY, "copy", copy_config())
    assert backend.candidate(COPY, "copy", copy_config()) == first
    others = [
        backend.candidate(COPY, "copy", copy_config(**{name: value}))
        for name, value in (("way", "unused"), ("block", 256), ("num_warps", 8), ("maxnreg", 64))
    ]
    found = triton_compile.find()
    for other in (TritonToolchain("3.99.0", found.ptxas), TritonToolchain(found.version, "another ptxas")):
        monkeypatch.setattr(triton_compile, "find", lambda other=other: other)
        others.append(TritonBackend(Cache(tmp_path / "x"), [templates]).candidate(COPY, "copy", copy_config()))
    monkeypatch.undo()
    (templates / "copy.toml").write_text(COPY_TOML.replace("alignment_bytes = 16", "alignment_bytes = 8"))
    others.append(TritonBackend(Cache(tmp_path / "x"), [templates]).candidate(COPY, "copy", copy_config()))
    (templates / "copy.toml").write_text(COPY_TOML.replace("cdiv(R, block)", "1 + cdiv(R, block)"))
    others.append(TritonBackend(Cache(tmp_path / "x"), [templates]).candidate(COPY, "copy", copy_config()))
    assert len({first.digest, *(other.digest for other in others)}) == 9


def test_a_hosts_compiler_is_no_part_of_a_candidates_identity(
    backend: TritonBackend, tmp_path: Path, templates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = backend.candidate(COPY, "copy", copy_config())
    monkeypatch.setattr(TritonBackend, "_host_digest", "another compiler")
    assert TritonBackend(Cache(tmp_path / "x"), [templates]).candidate(COPY, "copy", copy_config()) == first


def test_a_definition_allows_tf32_by_a_tag(tmp_path: Path) -> None:
    backend = TritonBackend(Cache(tmp_path))
    plain = gemm(4096, 4096, "float32")
    allowed = plain.model_copy(update={"tags": ("math:tf32",)})
    precisions = [
        {
            dict(config)["precision"]
            for space in backend.spaces(definition, key(64))[0]
            if space.template == "gemm/triton_swap"
            for config in ConfigSpace(space).configs()
        }
        for definition in (plain, allowed)
    ]
    assert precisions == [{"ieee"}, {"ieee", "tf32x3", "tf32"}]


# Builds ---------------------------------------------------------------------------------------------------------------


def test_a_template_of_ones_own_becomes_an_object_with_three_entries(backend: TritonBackend) -> None:
    artifact = artifact_of(build(backend, "good")["good"])
    listed = subprocess.run(["nm", artifact.object_path], capture_output=True, text=True, check=True).stdout
    for suffix in ENTRY_SUFFIXES:
        assert f" T {artifact.symbol}{suffix}\n" in listed
    assert "fibc_entry" not in listed
    assert " r fibc_cubin\n" in listed  # local: any number of variants are linked together
    assert artifact.guards.inputs == (TensorGuard("contiguous", 16),)
    assert artifact.guards.outputs == (TensorGuard("contiguous", 1),)
    assert artifact.source.startswith("# Generated by fibc from copy for cuda:sm_90a")
    assert artifact.resources["num_warps"] == 4
    assert artifact.resources["spill_bytes"] == 0
    assert artifact.resources["shared_bytes"] == 0
    assert 8 <= int(artifact.resources["registers"]) <= 64
    assert artifact.resources["blocks_per_sm"] == 16
    assert artifact.resources["deterministic"] is True


def test_a_built_library_answers_without_a_gpu(backend: TritonBackend) -> None:
    artifact = artifact_of(build(backend, "good")["good"])
    kernel = abi.entries(artifact.library_path, artifact.symbol)
    tensors = abi.array([abi.Tensor()])
    answers = []
    for size in (0, 7, 5000):
        call = ctypes.byref(abi.Call(tensors, tensors, None, abi.int64s((size,))))
        answers.append((kernel.call(call), kernel.workspace(call)))
    assert answers == [(0, 0), (1, 28), (1, 20000)]  # nothing to do; then declined: no GPU's call, or too large
    assert kernel.prepare(0) == 1 or Path("/dev/nvidia0").exists()


def test_failures_are_data_and_harm_no_other_candidate(backend: TritonBackend) -> None:
    ways = ("syntax", "good", "type", "abort", "arguments", "unused")
    built = build(backend, *ways)
    artifact_of(built["good"])
    artifact_of(built["unused"])
    logs = {way: failure_of(built[way]).log for way in ("syntax", "type", "abort", "arguments")}
    assert "SyntaxError" in logs["syntax"]
    assert "nobody" in logs["type"]
    assert "nobody" not in logs["syntax"]
    assert "ended with signal 6" in logs["abort"]
    assert "must take x, y, counters, got x, y, n, counters" in logs["arguments"]
    assert not any(failure_of(built[way]).timed_out or failure_of(built[way]).resource for way in logs)


def command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def test_what_never_ends_is_stopped_at_its_deadline_with_all_it_started(backend: TritonBackend) -> None:
    for timeout_s in (2, 8, 32):  # the good one is done in a fifth of that, but on a loaded machine
        built = build(backend, "endless", "grandchild", "good", timeout_s=timeout_s, jobs=3)
        if not isinstance(built["good"], BuildFailure):
            break
    for way in ("endless", "grandchild"):
        failure = failure_of(built[way])
        assert failure.timed_out
        assert "stopped after its deadline" in failure.log
    artifact_of(built["good"])
    assert b"sleep\x001000\x00" not in [command_line(process) for process in Path("/proc").glob("[0-9]*")]


def test_what_needs_more_than_the_architecture_has_is_a_failure_of_resources(backend: TritonBackend) -> None:
    shared = failure_of(build(backend, "shared", block=65536, num_warps=32)["shared"])
    assert shared.resource
    assert shared.log.startswith("shared memory: needs 262144 bytes, sm_90a has 232448")


def test_a_build_is_answered_from_the_cache(tmp_path: Path, templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_run(*_: object, **__: object) -> isolation.Completed:
        raise AssertionError("a command ran")

    first = build(TritonBackend(Cache(tmp_path / "cache"), [templates]), "good")["good"]
    again = TritonBackend(Cache(tmp_path / "cache"), [templates])
    monkeypatch.setattr(isolation, "run", no_run)
    assert build(again, "good")["good"] == artifact_of(first)


def test_equal_binaries_have_equal_digests(backend: TritonBackend) -> None:
    built = build(backend, "good", "unused")
    good, unused = artifact_of(built["good"]), artifact_of(built["unused"])
    assert good.digest == unused.digest
    assert good.symbol != unused.symbol


def test_a_users_environment_changes_no_code() -> None:
    ours = child_environment(
        {"PATH": "/bin", "TRITON_F32_DEFAULT": "tf32", "PTXAS_OPTIONS": "-O0", "DISABLE_PTXAS_OPT": "1"}
    )
    assert ours == {
        "PATH": "/bin",
        "TRITON_DISABLE_LINE_INFO": "1",
        "TRITON_ALWAYS_COMPILE": "1",
        "TRITON_STORE_BINARY_ONLY": "1",
    }


def test_a_child_that_cannot_work_is_an_error_and_no_candidates_fault(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_compile, "CHILD", "fibc.backends.nothing_of_this_name")
    with pytest.raises(
        BuildError, match=r"triton: the process that compiles ended with status 1: .*nothing_of_this_name"
    ):
        build(backend, "good")


def test_another_launch_interface_is_an_error(backend: TritonBackend) -> None:
    candidate = backend.candidate(COPY, "copy", copy_config())
    bound = backend.render(COPY, candidate).bound
    facts = {"global_scratch_size": 0, "profile_scratch_size": 0}
    check_parameters(bound, Compiled(b"", facts), (8, 8, 4, 8, 8, 8))
    with pytest.raises(BuildError, match="passes parameters of 8 8 4 8 8 8 bytes, the kernel takes 8 8 4 8 8 "):
        check_parameters(bound, Compiled(b"", facts), (8, 8, 4, 8, 8))
    with pytest.raises(BuildError, match="must need no scratch of Triton's own, needs 384 bytes a block"):
        check_parameters(bound, Compiled(b"", facts | {"global_scratch_size": 384}), (8, 8, 4, 8, 8, 8))


WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror")


@pytest.mark.parametrize(
    ("definition", "template", "changed"),
    [
        (gemm(64, 128, "float16"), "gemm/triton_tma", {"block_m": 64, "block_n": 64, "store_parts": 1, "num_warps": 4}),
        (gemm(64, 128, "float16"), "gemm/triton_swap", {"split_k": 2, "pdl": True, "num_stages": 3}),
        (
            fused_in_place(128, "float16"),
            "fused_add_rmsnorm/triton_rows_inplace",
            {"block_h": 128, "programs_per_sm": 1},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_launcher_compiles_without_a_warning(
    definition: Definition, template: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    backend = TritonBackend(Cache(tmp_path / "cache"))
    config = {name: choices[0] for name, choices in backend._templates[template].tunables.items()} | changed
    rendered = backend.render(definition, backend.candidate(definition, template, config))
    compiled = compile_kernels(
        {"": rendered.kernel}, triton_compile.find(), cache=Cache(tmp_path / "cache"), timeout_s=60, jobs=1
    )[""]
    assert isinstance(compiled, Compiled), compiled.log
    source = tmp_path / "launcher.cpp"
    source.write_text(launcher_source(rendered.bound, compiled, rendered.banner, Renderer((TEMPLATES,))))
    command = [
        toolchain.find().cxx,
        "-std=c++17",
        *WARNINGS,
        "-I",
        INCLUDE,
        "-c",
        source,
        "-o",
        tmp_path / "launcher.o",
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Triton itself --------------------------------------------------------------------------------------------------------


def test_without_triton_spaces_are_told_and_candidates_are_an_error_with_a_remedy(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    spaces, _ = backend.spaces(COPY, key(8))
    assert [space.template for space in spaces] == ["copy"]
    for use in (lambda: backend.candidate(COPY, "copy", copy_config()), lambda: backend.fingerprint(COPY)):
        with pytest.raises(ToolchainError, match=r'^triton: not installed \(install it: pip install "fibc\[cuda\]"\)$'):
            use()


def test_an_old_triton_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "3.5.1")
    triton_compile._find.cache_clear()
    try:
        with pytest.raises(ToolchainError, match=r"triton: needs 3\.6 or newer, found 3\.5\.1 \(install it: pip"):
            triton_compile.find()
    finally:
        triton_compile._find.cache_clear()


def test_the_fingerprint_follows_included_templates(tmp_path: Path, templates: Path) -> None:
    (templates / "copy.py.j2").write_text(COPY_SOURCE + '{% include "part.py.j2" %}\n')
    seen = []
    for text in ("# part\n", "# part\n", "# another part\n"):
        (templates / "part.py.j2").write_text(text)
        backend = TritonBackend(Cache(tmp_path / "x"), [templates])
        seen.append((backend.fingerprint(COPY), backend.spaces(COPY, key(8))[0][0].source_digest))
    assert seen[0] == seen[1]
    assert seen[1][0] != seen[2][0]
    assert seen[1][1] != seen[2][1]


# Every template, compiled ---------------------------------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_template_compiles_by_default_and_small(dtype: str, tmp_path: Path) -> None:
    backend = TritonBackend(Cache(tmp_path))
    seen: set[str] = set()
    for definition, sizes in (
        (gemm(4096, 4096, dtype), (1, 16, 64, 256, 4096)),
        (gemm(28672, 4096, dtype), (4,)),
        (gemm(128, 2048, dtype), (16, 1024)),
        (gemm(72, 511, dtype), (3,)),
        (rmsnorm(4096, dtype, fused=False), (64,)),
        (rmsnorm(5120, dtype, fused=True), (8192,)),
        (fused_in_place(4096, dtype), (8192,)),
        (fused_in_place(83, dtype), (64,)),
    ):
        candidates = []
        for size in sizes:
            for space in backend.spaces(definition, key(size))[0]:
                if (config := ConfigSpace(space).default()) is not None:
                    candidates.append(backend.candidate(definition, space.template, dict(config)))
        built = backend.build(definition, candidates, timeout_s=120, jobs=2)
        for candidate in candidates:
            artifact = artifact_of(built[candidate.digest])
            assert int(artifact.resources["spill_bytes"]) <= 64, (str(candidate), artifact.resources)
            assert int(artifact.resources["blocks_per_sm"]) >= 1, str(candidate)
            seen.add(candidate.template)
    missing = {"float32": {"gemm/triton_tma"}}.get(dtype, set())  # it is for tensor cores
    assert seen | missing == set(backend._templates)

"""The CUTLASS backend without nvcc: spaces and their laws, rendering, identity, and builds by a test's own compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kernel_calls import define, gemm, key

from fibc import cuda_toolchain, isolation, toolchain
from fibc.backends import cutlass, cutlass_compile, memory
from fibc.backends.base import Backend, BuildFailure
from fibc.backends.cutlass import CutlassBackend
from fibc.backends.cutlass_compile import (
    KernelCompiler,
    compile_environment,
    compile_kernels,
    ninja_text,
    without_paths,
)
from fibc.cache import Cache
from fibc.cuda_toolchain import CudaToolchain
from fibc.errors import InputError, ToolchainError
from fibc.paths import INCLUDE
from fibc.schema.candidate import ConfigValue, Target, TensorGuard
from fibc.schema.space import Space
from fibc.search.space import Config, ConfigSpace

PLAIN, SWAPPED, AMPERE = "gemm/cutlass_sm90", "gemm/cutlass_sm90_swapped", "gemm/cutlass_sm80"

SHAPES = ((4096, 4096), (28672, 4096), (128, 2048))
SIZES = (1, 16, 48, 256, 1000)

CUDA = CudaToolchain(Path("/nowhere/nvcc"), "PATH", "13.0", (), Path("/nowhere/cutlass"), "4.2.0", "0" * 16)


@pytest.fixture
def backend(tmp_path: Path) -> CutlassBackend:
    return CutlassBackend(Cache(tmp_path / "cache"), whole=True)


@pytest.fixture
def shortlisted(tmp_path: Path) -> CutlassBackend:
    """What a search uses."""
    return CutlassBackend(Cache(tmp_path / "cache"))


@pytest.fixture
def some_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toolchain that nobody runs."""
    monkeypatch.setattr(cuda_toolchain, "find", lambda: CUDA)


def spaces_of(backend: CutlassBackend, n: int, k: int, size: int) -> dict[str, Space]:
    found, _ = backend.spaces(gemm(n, k, "bfloat16"), key(size))
    return {space.template: space for space in found}


def config_of(space: Space, **changed: ConfigValue) -> Config:
    """Return the first choices with some of them replaced, whether or not they keep the laws."""
    chosen = {tunable.name: tunable.choices[0] for tunable in space.tunables} | changed
    return tuple((tunable.name, chosen[tunable.name]) for tunable in space.tunables)


def test_the_backend_keeps_the_protocol(backend: CutlassBackend) -> None:
    seam: Backend = backend
    assert (seam.name, seam.target) == ("cutlass", Target("cuda", "sm_90a"))


def test_an_unknown_architecture_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"arch: must be known, got 'sm_42' \(accepted: sm_80"):
        CutlassBackend(Cache(tmp_path), arch_name="sm_42")


def test_the_architecture_decides_which_generation_of_cutlass_serves(tmp_path: Path) -> None:
    definition = gemm(4096, 4096, "float16")
    for arch, served in (("sm_80", {AMPERE}), ("sm_89", {AMPERE}), ("sm_90a", {PLAIN, SWAPPED})):
        spaces, mismatches = CutlassBackend(Cache(tmp_path), arch_name=arch).spaces(definition, key(256))
        assert {space.template for space in spaces} == served
        assert {mismatch.template for mismatch in mismatches} == {PLAIN, SWAPPED, AMPERE} - served
        assert all(f"the target is cuda:{arch}" in mismatch.reason for mismatch in mismatches)


def test_float32_is_a_mismatch_because_tensor_cores_round_it(backend: CutlassBackend) -> None:
    spaces, mismatches = backend.spaces(gemm(4096, 4096, "float32"), key(16))
    assert spaces == ()
    reasons = {mismatch.template: mismatch.reason for mismatch in mismatches}
    assert reasons[PLAIN] == "A = A: needs bfloat16 or float16, is float32"


def test_another_operation_is_a_mismatch(backend: CutlassBackend) -> None:
    copy = define("copy", {"n": None}, {"a": (("n",), "bfloat16")}, {"b": (("n",), "bfloat16")}, "def run(a): return a")
    spaces, mismatches = backend.spaces(copy, key(16))
    assert spaces == ()
    assert len(mismatches) == 3


def test_every_key_of_the_suite_has_valid_configs_and_few_enough_to_draw_from(backend: CutlassBackend) -> None:
    for n, k in SHAPES:
        for size in SIZES:
            counts = {
                name: sum(1 for _ in ConfigSpace(space).configs())
                for name, space in spaces_of(backend, n, k, size).items()
            }
            assert (counts[SWAPPED] > 0) == (size <= 512), (n, k, size)
            assert counts[PLAIN] > 0 or size <= 32, (n, k, size)
            assert max(counts.values()) < 5000, (n, k, size, counts)


@pytest.mark.parametrize(
    ("size", "template", "tile", "schedule"),
    [
        (16, SWAPPED, (64, 16, 128), "warp_specialized"),
        (16, SWAPPED, (64, 16, 256), "warp_specialized"),
        (16, SWAPPED, (64, 16, 128), "pingpong"),
        (32, SWAPPED, (64, 32, 128), "pingpong"),
        (64, SWAPPED, (64, 64, 128), "warp_specialized"),
        (64, SWAPPED, (64, 64, 128), "pingpong"),
        (256, PLAIN, (64, 128, 64), "pingpong"),
        (4096, PLAIN, (128, 256, 64), "cooperative"),
    ],
)
def test_what_won_in_prototypes_is_valid_and_among_the_first_kinds(
    backend: CutlassBackend, size: int, template: str, tile: tuple[int, int, int], schedule: str
) -> None:
    spaces = spaces_of(backend, 4096, 4096, size)
    configs = [(name, config) for name, space in spaces.items() for config in ConfigSpace(space).configs()]
    ranked = backend.rank(gemm(4096, 4096, "bfloat16"), key(size), configs)
    assert sorted(ranked) == sorted(configs)
    tilings = [
        (name, tuple(dict(config)[f"tile_{axis}"] for axis in "mnk"), dict(config)["schedule"])
        for name, config in ranked
    ]
    # Depths of one tile come one after another; the first of them stands for all.
    kinds = list(dict.fromkeys((name, own[:2], how) for name, own, how in tilings))
    assert (template, tile, schedule) in tilings
    assert kinds.index((template, tile[:2], schedule)) < 24  # of 40 and more


def test_a_search_is_held_to_the_shortlist_and_has_something_of_it_at_every_key(
    shortlisted: CutlassBackend, backend: CutlassBackend
) -> None:
    for n, k in SHAPES:
        for size in SIZES:
            whole = {name: set(ConfigSpace(space).configs()) for name, space in spaces_of(backend, n, k, size).items()}
            valid = {
                name: list(ConfigSpace(space).configs()) for name, space in spaces_of(shortlisted, n, k, size).items()
            }
            assert sum(map(len, valid.values())) >= 6, (n, k, size)
            assert all(set(configs) <= whole[name] for name, configs in valid.items())
            firsts = shortlisted.rank(gemm(n, k, "bfloat16"), key(size), [(t, c) for t in valid for c in valid[t]])
            assert all(configs == [c for t, c in firsts if t == name] for name, configs in valid.items())


def test_every_config_of_the_shortlist_is_valid_somewhere(backend: CutlassBackend) -> None:
    shapes = (*SHAPES, (6144, 4096), (4096, 14336), (256, 7168))
    spaces = [spaces_of(backend, n, k, size) for n, k in shapes for size in (8, *SIZES, 33, 64, 128, 4096)]
    for template in (PLAIN, SWAPPED):
        laws = [ConfigSpace(space[template]) for space in spaces]
        for config in backend._templates[template].listed():
            assert any(law.holds(config) for law in laws), config


def test_a_wave_that_is_not_full_is_no_reason_for_a_tile_of_another_width(backend: CutlassBackend) -> None:
    one: dict[str, ConfigValue] = {
        "tile_m": 64,
        "tile_n": 48,
        "tile_k": 128,
        "schedule": "warp_specialized",
        "cluster_m": 1,
    }
    full, half = (spaces_of(backend, n, 4096, 64)[PLAIN] for n in (6144, 4096))  # 128 tiles, 86 tiles
    assert ConfigSpace(full).holds(config_of(full, **one))
    broken = ConfigSpace(half).broken(config_of(half, **one))
    assert broken is not None
    assert broken.constraint.message == "tiles of other widths are for waves that they fill"


def test_no_more_tiles_are_divided_than_there_are_counters_for(backend: CutlassBackend) -> None:
    header = (INCLUDE / "fibc" / "kernel_abi.h").read_text()
    found = re.search(r"#define FIBC_COUNTER_BYTES (\d+)", header)
    assert found is not None
    assert int(found[1]) == 8192 * 2 * 4  # two warp groups' counters of four bytes
    one = {"tile_m": 128, "tile_n": 64, "tile_k": 128, "cluster_m": 1, "splits": 0}
    most, more = (spaces_of(backend, n, 4096, 4096)[PLAIN] for n in (64 * 255, 64 * 257))  # times 32 tiles of rows
    assert ConfigSpace(most).holds(config_of(most, **one))
    broken = ConfigSpace(more).broken(config_of(more, **one))
    assert broken is not None
    assert "two counters for each tile" in broken.constraint.message


ILLEGAL: list[tuple[str, int, Mapping[str, ConfigValue], str]] = [
    (PLAIN, 4096, {"tile_m": 64, "schedule": "cooperative"}, "two warp groups share a tile's rows"),
    (PLAIN, 4096, {"tile_m": 128, "tile_n": 256, "schedule": "pingpong"}, "at most 128 sums in registers"),
    (PLAIN, 4096, {"tile_m": 256, "tile_n": 256, "schedule": "cooperative"}, "at most 128 sums in registers"),
    (PLAIN, 4096, {"schedule": "pingpong", "tile_m": 64, "tile_n": 128, "splits": 0}, "among cooperative kernels only"),
    (PLAIN, 4096, {"schedule": "pingpong", "tile_m": 64, "tile_n": 128, "splits": 2}, "among cooperative kernels only"),
    (PLAIN, 4096, {"tile_m": 128, "tile_n": 256, "tile_k": 128}, "the stages, three at least, fit"),
    (PLAIN, 4096, {"stages": 4}, "where blocks are not persistent"),
    (
        PLAIN,
        4096,
        {"schedule": "warp_specialized", "tile_m": 64, "tile_n": 128, "raster": "along_m"},
        "in the order of the grid",
    ),
    (SWAPPED, 64, {"tile_n": 16, "cluster_m": 4}, "equal parts of a tile, 8 rows each at least"),
    (SWAPPED, 64, {"schedule": "cooperative", "tile_m": 64, "tile_n": 64}, "two warp groups share a tile's rows"),
    (SWAPPED, 16, {"tile_n": 128}, "no tile far wider than the rows of a call"),
    (SWAPPED, 16, {"schedule": "cooperative", "tile_m": 128, "tile_n": 16, "splits": 8}, "all blocks of a tile run at"),
]


@pytest.mark.parametrize(("template", "size", "changed", "message"), ILLEGAL)
def test_illegal_combinations_are_refused_with_a_reason_before_a_build(
    backend: CutlassBackend, template: str, size: int, changed: Mapping[str, ConfigValue], message: str
) -> None:
    space = spaces_of(backend, 4096, 4096, size)[template]
    broken = ConfigSpace(space).broken(config_of(space, **changed))
    assert broken is not None
    assert message in broken.constraint.message


@pytest.mark.parametrize(("n", "k"), [(4100, 4096), (4096, 511), (4096, 4092)])
def test_rows_that_tensor_maps_cannot_take_leave_no_valid_config(backend: CutlassBackend, n: int, k: int) -> None:
    for space in spaces_of(backend, n, k, 64).values():
        assert ConfigSpace(space).default() is None


def test_guards_ask_for_contiguous_rows_aligned_to_16_bytes(backend: CutlassBackend) -> None:
    for template in backend._templates.values():
        for role in (*template.inputs.values(), *template.outputs.values()):
            assert TensorGuard(role.layout, role.alignment_bytes) == TensorGuard("contiguous", 16)


def rendered(backend: CutlassBackend, n: int, k: int, template: str, **changed: ConfigValue) -> str:
    """Return what nvcc would compile."""
    definition = gemm(n, k, "bfloat16")
    space = spaces_of(backend, n, k, 16)[template]
    return backend._render(backend._templates[template], definition, config_of(space, **changed)).kernel


def test_one_kernel_serves_every_shape_every_split_count_and_every_order_of_tiles(backend: CutlassBackend) -> None:
    first = rendered(backend, 4096, 4096, SWAPPED, splits=2)
    assert rendered(backend, 256, 7168, SWAPPED, splits=2) == first
    assert rendered(backend, 4096, 4096, SWAPPED, splits=8, raster="along_m") == first
    assert rendered(backend, 4096, 4096, SWAPPED, splits=0) == first
    others = [
        rendered(backend, 4096, 4096, SWAPPED, splits=1),
        rendered(backend, 4096, 4096, SWAPPED, splits=2, tile_n=16),
        rendered(backend, 4096, 4096, SWAPPED, splits=2, dependent=True),
        rendered(backend, 4096, 4096, SWAPPED, splits=2, epilogue="direct"),
        rendered(backend, 4096, 4096, PLAIN, splits=2),
    ]
    assert len({first, *others}) == 6


@pytest.mark.usefixtures("some_nvcc")
def test_config_definition_and_compiler_are_part_of_a_candidates_identity(
    backend: CutlassBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(dtype: str = "bfloat16", **changed: ConfigValue) -> str:
        space = spaces_of(backend, 4096, 4096, 16)[SWAPPED]
        own = CutlassBackend(backend._cache)
        return own.candidate(gemm(4096, 4096, dtype), SWAPPED, dict(config_of(space, **changed))).digest

    first = digest()
    assert digest() == first
    others = [digest("float16"), digest(tile_n=16), digest(raster="along_m")]
    other_nvcc = CudaToolchain(CUDA.nvcc, "PATH", "13.1", (), CUDA.cutlass, "4.2.0", "1" * 16)
    monkeypatch.setattr(cuda_toolchain, "find", lambda: other_nvcc)
    others.append(digest())
    monkeypatch.setattr(cutlass, "header_texts", lambda names: {"fibc/cutlass/launch/sm90.h": "another"})
    others.append(digest())
    assert len({first, *others}) == 6


@pytest.mark.usefixtures("some_nvcc")
def test_a_launcher_that_makes_other_parameters_is_another_candidate(
    backend: CutlassBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition, space = gemm(4096, 4096, "bfloat16"), spaces_of(backend, 4096, 4096, 16)[SWAPPED]
    first = backend.candidate(definition, SWAPPED, dict(config_of(space)))
    launcher = CutlassBackend._launcher
    monkeypatch.setattr(CutlassBackend, "_launcher", lambda *given: launcher(*given) + "// other\n")
    assert backend.candidate(definition, SWAPPED, dict(config_of(space))).digest != first.digest


def test_sources_are_the_same_in_every_process(tmp_path: Path) -> None:
    program = f"""\
from pathlib import Path
from kernel_calls import gemm, key
from fibc.backends.cutlass import CutlassBackend
from fibc.cache import Cache
from fibc.search.space import ConfigSpace

for arch in ("sm_80", "sm_90a"):
    backend = CutlassBackend(Cache(Path({str(tmp_path)!r})), arch_name=arch)
    definition = gemm(4096, 4096, "bfloat16")
    for space in backend.spaces(definition, key(256))[0]:
        config = ConfigSpace(space).default()
        print(backend._render(backend._templates[space.template], definition, config))
"""
    outputs = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    text = outputs.pop()
    assert text.count("Generated by fibc from gemm/cutlass_sm") == 3
    assert "{{" not in text


def test_without_nvcc_spaces_are_told_and_candidates_are_an_error_with_a_remedy(
    backend: CutlassBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> CudaToolchain:
        raise ToolchainError("nvcc: needs CUDA's compiler, found none (install it: pip ...)")

    monkeypatch.setattr(cuda_toolchain, "find", missing)
    space = spaces_of(backend, 4096, 4096, 16)[SWAPPED]
    with pytest.raises(ToolchainError, match="found none"):
        backend.candidate(gemm(4096, 4096, "bfloat16"), SWAPPED, dict(config_of(space)))
    with pytest.raises(ToolchainError, match="found none"):
        backend.fingerprint(gemm(4096, 4096, "bfloat16"))


@pytest.fixture
def compiler(tmp_path: Path) -> Callable[[str], KernelCompiler]:
    """Make a compiler of a shell script, which finds the output in $out and the source in $in, and logs its calls."""

    def make(script: str) -> KernelCompiler:
        program = tmp_path / "nvcc of a test"
        program.write_text(
            f"#!/bin/sh\necho call >> {tmp_path}/calls\nwhile [ $# -gt 0 ]; do\n"
            f'  [ "$1" = -o ] && out=$2\n  in=$1\n  shift\ndone\n{script}\n'
        )
        program.chmod(0o755)
        cuda = CudaToolchain(program, "PATH", "13.0", (), tmp_path, "4.2.0", "0" * 16)
        return KernelCompiler(cuda, toolchain.find(), "sm_90a")

    return make


def test_equal_kernels_are_compiled_once_and_answered_from_the_cache(
    tmp_path: Path, compiler: Callable[[str], KernelCompiler]
) -> None:
    nvcc, cache = compiler('cp "$in" "$out"'), Cache(tmp_path / "cache")
    for _ in range(2):
        built = compile_kernels(["one", "two", "one"], nvcc, cache=cache, timeout_s=60, jobs=2)
        assert built == {"one": b"one", "two": b"two"}
    assert (tmp_path / "calls").read_text() == "call\n" * 2


def test_threads_that_want_the_same_kernels_at_once_compile_each_once(
    tmp_path: Path, compiler: Callable[[str], KernelCompiler]
) -> None:
    nvcc, cache = compiler('sleep 0.3; cp "$in" "$out"'), Cache(tmp_path / "cache")

    def build(texts: Sequence[str]) -> dict[str, bytes | BuildFailure]:
        return compile_kernels(texts, nvcc, cache=cache, timeout_s=60, jobs=2)

    with ThreadPoolExecutor(3) as threads:
        one, other, third = threads.map(build, (["a", "b"], ["b", "c"], ["c", "a"]))
    assert (one, other, third) == ({"a": b"a", "b": b"b"}, {"b": b"b", "c": b"c"}, {"a": b"a", "c": b"c"})
    assert (tmp_path / "calls").read_text() == "call\n" * 3


def test_names_made_of_a_path_are_made_alike() -> None:
    name = b"_ZN39_INTERNAL_8d9e3533_9_kernel_cu_2563e14c4cuda3std3__45__cpo5beginE\0x\0"
    assert without_paths(name) == name.replace(b"8d9e3533", b"00000000")
    assert (
        without_paths(b"_ZN_INTERNAL_8d9e_9 _GLOBAL__N__0123abcd_8_gemm")
        == b"_ZN_INTERNAL_8d9e_9 _GLOBAL__N__00000000_8_gemm"
    )


def test_a_failure_carries_its_log_and_harms_no_other_kernel(
    tmp_path: Path, compiler: Callable[[str], KernelCompiler]
) -> None:
    nvcc = compiler('grep -q good "$in" || { echo "static assertion failed: 8 rows" >&2; exit 2; }; cp "$in" "$out"')
    built = compile_kernels(["good", "bad"], nvcc, cache=Cache(tmp_path / "cache"), timeout_s=60, jobs=1)
    assert built["good"] == b"good"
    failure = built["bad"]
    assert isinstance(failure, BuildFailure)
    assert "static assertion failed: 8 rows" in failure.log
    assert not failure.timed_out


def test_a_compiler_that_never_ends_is_stopped_at_its_deadline(
    tmp_path: Path, compiler: Callable[[str], KernelCompiler]
) -> None:
    nvcc = compiler("sleep 60")
    failure = compile_kernels(["endless"], nvcc, cache=Cache(tmp_path / "cache"), timeout_s=0.5, jobs=1)["endless"]
    assert isinstance(failure, BuildFailure)
    assert failure.timed_out
    assert "deadline of 0.5 s" in failure.log


@pytest.mark.parametrize(
    ("free_gb", "jobs", "expected"), [(64, 16, 16), (23, 16, 6), (8, 2, 2), (5, 16, 1), (1, 16, 1)]
)
def test_compilers_run_side_by_side_as_memory_allows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiler: Callable[[str], KernelCompiler],
    free_gb: int,
    jobs: int,
    expected: int,
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 99 kB\nMemAvailable:   {free_gb << 20} kB\n")
    asked: list[str] = []
    run = isolation.run

    def recording_run(command: list[str | Path], **options: object) -> isolation.Completed:
        asked.append(str(command[command.index("-j") + 1]))
        return run(command, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(
        cutlass_compile,
        "room",
        lambda count, each: memory.room(count, each, meminfo=meminfo, cgroup=tmp_path / "none"),
    )
    monkeypatch.setattr(isolation, "run", recording_run)
    compile_kernels(["x"], compiler('cp "$in" "$out"'), cache=Cache(tmp_path / "cache"), timeout_s=60, jobs=jobs)
    assert asked == [str(expected)]


def test_the_build_file_names_the_architecture_the_host_compiler_and_every_kernel(
    compiler: Callable[[str], KernelCompiler],
) -> None:
    nvcc = compiler("")
    text = ninja_text(["aa", "bb"], nvcc, timeout_s=7)
    assert "-gencode=arch=compute_90a,code=sm_90a" in text
    assert f"-ccbin {nvcc.host.cxx}" in text
    assert "--timeout-s 7 " in text
    assert text.count("build ") == 2


def test_a_users_flags_do_not_reach_the_compiler() -> None:
    given = {"NVCC_APPEND_FLAGS": "-G", "CPATH": "/x", "PATH": "/bin", "TMPDIR": "/elsewhere"}
    assert compile_environment(given, Path("/work")) == {"PATH": "/bin", "TMPDIR": "/work"}


def test_the_digest_of_a_kernel_sees_the_headers_that_it_includes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: Callable[[str], KernelCompiler]
) -> None:
    headers = tmp_path / "include" / "fibc" / "cutlass"
    headers.mkdir(parents=True)
    for name in ("one.h", "two.h"):
        (headers / name).write_text("first\n")
    monkeypatch.setattr(cutlass_compile, "INCLUDE", tmp_path / "include")
    nvcc, text = compiler(""), '#include "fibc/cutlass/one.h"\n'
    before = nvcc.digest(text)
    (headers / "two.h").write_text("second\n")
    assert nvcc.digest(text) == before
    (headers / "one.h").write_text("second\n")
    assert nvcc.digest(text) != before

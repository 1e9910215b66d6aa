"""CUTLASS kernels built by nvcc: objects that are complete in themselves, launched over a driver that prints, and laws
that agree with the compiler."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import cutlass_calls
import filelock
import pytest
from kernel_calls import default_config, gemm, key

from fibc import cuda_toolchain, toolchain
from fibc.backends.base import BuildFailure
from fibc.backends.cutlass import CutlassBackend
from fibc.backends.cutlass_compile import KernelCompiler, compile_kernels
from fibc.cache import Cache
from fibc.errors import ToolchainError
from fibc.paths import INCLUDE
from fibc.schema.candidate import Artifact, ConfigValue
from fibc.search.space import ConfigSpace

pytestmark = pytest.mark.e2e

DEFINITION = gemm(4096, 4096, "bfloat16")
SWAPPED, PLAIN, AMPERE = "gemm/cutlass_sm90_swapped", "gemm/cutlass_sm90", "gemm/cutlass_sm80"
H200 = "90,132,62914560,150000000000"
DECLINED, DEVICE_ERROR = 1, 2
TIMEOUT_S = 600.0


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Cache:
    try:
        cuda_toolchain.find()
    except ToolchainError as error:
        pytest.skip(str(error))
    own = tmp_path_factory.getbasetemp()
    return Cache((own if worker_id == "master" else own.parent) / "cutlass cache")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a libcuda.so.1 that prints what it is asked."""
    directory = tmp_path_factory.mktemp("driver")
    source = Path(__file__).parent / "cpp" / "recording_cuda.cpp"
    library = directory / "libcuda.so.1"
    flags = ["-std=c++17", "-shared", "-fPIC", "-I", str(INCLUDE)]
    subprocess.run([toolchain.find().cxx, *flags, source, "-o", library], check=True)
    return directory


def build(cache: Cache, template: str, arch: str, size: int, **changed: ConfigValue) -> Artifact:
    backend = CutlassBackend(cache, arch_name=arch)
    space = next(space for space in backend.spaces(DEFINITION, key(size))[0] if space.template == template)
    config = default_config(space, **changed)
    assert ConfigSpace(space).broken(tuple(config.items())) is None
    candidate = backend.candidate(DEFINITION, template, config)
    with filelock.FileLock(f"{cache.root}.lock"):
        built = backend.build(DEFINITION, [candidate], timeout_s=TIMEOUT_S, jobs=1)[candidate.digest]
    assert not isinstance(built, BuildFailure), built.log
    return built


@pytest.fixture(scope="module")
def divided(cache: Cache) -> Artifact:
    """64 by 16 rows would do; this one needs a workspace too."""
    return build(cache, SWAPPED, "sm_90a", 16, schedule="cooperative", tile_m=128, splits=4, cluster_m=2)


@pytest.fixture(scope="module")
def ampere(cache: Cache) -> Artifact:
    return build(cache, AMPERE, "sm_80", 256)


def symbols(file: str | Path, *options: str) -> set[str]:
    """Return what nm prints as names, without versions and without weak ones: those are inline functions, hidden."""
    done = subprocess.run(["nm", *options, file], capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name.partition("@")[0] for *_, kind, name in lines if kind not in "WV"}


def test_an_object_exports_its_three_entries_and_needs_no_cuda_library(divided: Artifact, ampere: Artifact) -> None:
    for artifact in (divided, ampere):
        entries = {artifact.symbol, f"{artifact.symbol}_workspace", f"{artifact.symbol}_prepare"}
        assert symbols(artifact.library_path, "-D", "--defined-only") == entries
        assert symbols(artifact.object_path, "--defined-only", "--extern-only") == entries
        needed = symbols(artifact.object_path, "--undefined-only")
        assert not {name for name in needed if name.startswith(("cu", "__cuda", "_ZNSt", "_ZSt"))}, needed
        done = subprocess.run(["readelf", "-d", artifact.library_path], capture_output=True, text=True, check=True)
        assert "libcu" not in done.stdout


def test_what_a_kernel_takes_is_read_from_its_cubin(divided: Artifact, ampere: Artifact) -> None:
    assert divided.resources["num_warps"] == 12
    assert 200_000 < int(divided.resources["shared_bytes"]) <= 232_448
    assert divided.resources["registers"] == 65536 // 384 // 8 * 8
    assert ampere.resources["shared_bytes"] == 4 * (128 + 128) * 32 * 2
    assert (divided.resources["unmeasured"], ampere.resources["unmeasured"]) == (False, True)
    for artifact in (divided, ampere):
        assert artifact.resources["spill_bytes"] == 0
        assert int(artifact.resources["blocks_per_sm"]) >= 1


def test_without_a_driver_a_call_is_declined_and_the_workspace_is_known(divided: Artifact, tmp_path: Path) -> None:
    said = cutlass_calls.call(divided.library_path, divided.symbol, 16, 4096, 4096, driver=None)
    places = 3 * (4096 // 128)  # all parts but the last store sums of a tile of 128 x 16
    assert said == cutlass_calls.Said(places * 128 * 16 * 4 + 1, DECLINED, DECLINED, ())


def test_a_launch_brings_tensor_maps_clusters_and_sizes(divided: Artifact, driver: Path) -> None:
    said = cutlass_calls.call(divided.library_path, divided.symbol, 5, 4096, 4096, driver=driver, FAKE_GPUS=H200)
    assert (said.prepared, said.status) == (0, 0)
    shared_bytes = divided.resources["shared_bytes"]
    weights = "map type 1 data 20000000 shape 4096 4096 1 strides 8192 0 box 64 128 1 swizzle 3"  # the left operand
    rows = "map type 1 data 10000000 shape 4096 5 1 strides 8192 0 box 64 8 1 swizzle 3"  # half a tile for each block
    output = "map type 9 data 30000000 shape 4096 5 1 strides 8192 0 box 64 16 1 swizzle 3"
    cluster, sizes = "attribute 4 2 1 1", "parameters 0 4096 5 4096 1"
    assert said.asked[-5:] == (
        f"attribute 8 {shared_bytes}",
        weights,
        rows,
        output,
        f"launch grid 2 66 1 threads 384 shared {shared_bytes} stream 77 {cluster} {sizes}",
    )


def test_ampere_launches_a_plain_grid(ampere: Artifact, driver: Path) -> None:
    a100 = "80,108,41943040,80000000000"
    said = cutlass_calls.call(ampere.library_path, ampere.symbol, 300, 4096, 4096, driver=driver, FAKE_GPUS=a100)
    assert (said.workspace, said.prepared, said.status) == (0, 0, 0)
    assert said.asked[-1].startswith(
        "launch grid 3 32 1 threads 128 shared 65536 stream 77 parameters 300 4096 4096 3 32"
    )


def test_what_the_driver_refuses_is_declined_and_what_it_reports_is_an_error(divided: Artifact, driver: Path) -> None:
    def status(rows: int = 5, columns: int = 4096, **variables: str) -> int:
        return cutlass_calls.call(
            divided.library_path, divided.symbol, rows, columns, 4096, driver=driver, FAKE_GPUS=H200, **variables
        ).status

    assert status(FAKE_ENCODE="1") == DECLINED
    assert status(FAKE_LAUNCH="701") == DECLINED
    assert status(FAKE_LAUNCH="700") == DEVICE_ERROR
    assert status(columns=4100) == DECLINED  # rows of C do not begin at multiples of 16 bytes
    assert status(rows=128 * 16384) == DECLINED  # more tiles than there are counters
    assert status(rows=0) == 0


def test_two_objects_link_into_one_library_that_loads_without_a_gpu(
    divided: Artifact, ampere: Artifact, tmp_path: Path
) -> None:
    library = tmp_path / "both.so"
    subprocess.run(
        [toolchain.find().cxx, "-shared", "-Wl,-z,defs", "-o", library, divided.object_path, ampere.object_path],
        check=True,
    )
    for artifact, workspace in ((divided, 3 * 32 * 128 * 16 * 4 + 1), (ampere, 0)):
        said = cutlass_calls.call(library, artifact.symbol, 16, 4096, 4096, driver=None)
        assert said == cutlass_calls.Said(workspace, DECLINED, DECLINED, ())


def test_the_cubin_is_the_same_wherever_it_is_made(cache: Cache, ampere: Artifact, tmp_path: Path) -> None:
    compiler = KernelCompiler(cuda_toolchain.find(), toolchain.find(), "sm_80")
    text = ampere.source.partition("\n")[2]
    first = compile_kernels([text], compiler, cache=cache, timeout_s=TIMEOUT_S, jobs=1)[text]
    again = compile_kernels([text], compiler, cache=Cache(tmp_path / "other"), timeout_s=TIMEOUT_S, jobs=1)[text]
    assert isinstance(first, bytes)
    assert first == again


REFUSED: list[tuple[str, Mapping[str, ConfigValue], str]] = [
    (PLAIN, {"tile_m": 64, "tile_n": 128, "schedule": "cooperative"}, "128 along the M-dimension"),
    (PLAIN, {"tile_m": 64, "tile_n": 128, "schedule": "pingpong", "splits": 2}, "others never add the parts up"),
]


@pytest.mark.parametrize(("template", "changed", "message"), REFUSED)
def test_what_the_laws_refuse_the_compiler_refuses(
    cache: Cache, template: str, changed: Mapping[str, ConfigValue], message: str
) -> None:
    backend = CutlassBackend(cache)
    space = next(space for space in backend.spaces(DEFINITION, key(4096))[0] if space.template == template)
    chosen = {tunable.name: tunable.choices[0] for tunable in space.tunables} | dict(changed)
    config = tuple((tunable.name, chosen[tunable.name]) for tunable in space.tunables)
    assert ConfigSpace(space).broken(config) is not None
    candidate = backend.candidate(DEFINITION, template, dict(config))
    failure = backend.build(DEFINITION, [candidate], timeout_s=TIMEOUT_S, jobs=1)[candidate.digest]
    assert isinstance(failure, BuildFailure)
    assert message in failure.log

"""cuBLASLt as a backend: what the heuristic answers becomes a space, repeatably; else there is a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_cublaslt
import pytest
from fake_cublaslt import Fake
from kernel_calls import gemm, key, machine

from fibc import gpus, isolation, toolchain
from fibc.backends.base import Mismatch
from fibc.backends.cublaslt import CublasLtBackend
from fibc.backends.cublaslt_algorithm import Algorithm, parse
from fibc.backends.cublaslt_heuristic import (
    LIMITS_BYTES,
    MAX_ALGORITHMS,
    NUM_RESULTS,
    Heuristic,
    Problem,
    Ranked,
    Unanswered,
)
from fibc.backends.registry import NAMES, make_backends
from fibc.cache import Cache
from fibc.environment import Environment
from fibc.errors import SchemaError
from fibc.schema.candidate import Artifact
from fibc.schema.definition import Definition
from fibc.schema.feature import Cell, FeatureKey, Point
from fibc.schema.silicon import CudaValidity, Gpu
from fibc.search.space import ConfigSpace

H200 = Gpu(
    ordinal=0,
    uuid="GPU-0",
    pci_bus_id="0000:1b:00.0",
    name="NVIDIA H200",
    mig="",
    driver="580.159.04",
    shared_bytes_max=232448,
    validity=CudaValidity("sm_90a", 90, 132, 60 << 20, 150_109_880_320),
)
PROBLEM = Problem(16, 96, 512, "bfloat16", "f32")


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return fake_cublaslt.compile_fake(tmp_path_factory.mktemp("fake"), toolchain.find().cxx)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What every child was asked."""
    asked: list[dict[str, Any]] = []
    run = isolation.run

    def watched(command: Any, *, stdin: bytes, **options: Any) -> isolation.Completed:
        asked.append(json.loads(stdin))
        return run(command, stdin=stdin, **options)

    monkeypatch.setattr(isolation, "run", watched)
    yield asked


def heuristic(
    fake: Fake, cache: Cache, *, gpu: Gpu = H200, version: str = "13.0.2", timeout_s: float = 60
) -> Heuristic:
    """Return the fake's heuristic; the fake is its own driver."""
    return Heuristic(cache, gpu, version, library=fake.library, driver=str(fake.library), timeout_s=timeout_s)


def environment(gpu: Gpu | None = H200, cublas: str = "13.0.2") -> Environment:
    here = machine("avx2")
    return replace(here, gpu=gpu, versions={**here.versions, "cublas": cublas})


def backend(fake: Fake, cache: Cache) -> CublasLtBackend:
    return CublasLtBackend(environment(), cache, heuristic=heuristic(fake, cache))


def cell(first: int, last: int) -> FeatureKey:
    points = tuple(Point((("M", size),), "end") for size in dict.fromkeys((first, last)))
    return FeatureKey(Cell(((first, last),)), points, len(points) - 1, True)


def answered(found: tuple[Ranked, ...] | Unanswered) -> tuple[Ranked, ...]:
    assert not isinstance(found, Unanswered), found
    return found


def words(algorithm: Algorithm) -> list[int]:
    return [int.from_bytes(algorithm.opaque[start : start + 8], "little") for start in range(0, 64, 8)]


# ---- the heuristic -------------------------------------------------------------------------------------------------


def test_what_the_library_is_asked_and_answers_is_read_as_it_stands(fake: Fake, cache: Cache) -> None:
    first, second, *_ = answered(heuristic(fake, cache).algorithms([PROBLEM]))
    # The fake tells in an algorithm's bytes: 100 and the rank, k and m, the limit, and the mask with the alignments.
    assert words(first.algorithm) == [100, 512 | 16 << 32, LIMITS_BYTES[0], 2 | 16 << 8 | 16 << 32, 0, 0, 0, 0]
    assert (first.algorithm.compute, first.algorithm.workspace_bytes, first.waves) == ("f32", 4096, 0.5)
    assert first.config == {
        "id": 100,
        "tile": 11,
        "split_k": 12,
        "reduction": 13,
        "swizzle": 14,
        "custom": 15,
        "stages": 16,
        "inner_shape": 17,
        "cluster_shape": 18,
    }
    assert words(second.algorithm)[:3] == [100, 512 | 16 << 32, LIMITS_BYTES[1]]


def test_first_choices_come_first_and_no_algorithm_twice(fake: Fake, cache: Cache) -> None:
    problems = [PROBLEM, replace(PROBLEM, m=9)]
    found = [words(ranked.algorithm) for ranked in answered(heuristic(fake, cache).algorithms(problems))]
    order = [(rank, limit, m) for rank in range(NUM_RESULTS) for limit in LIMITS_BYTES for m in (16, 9)]
    assert [(item[0] - 100, item[2], item[1] >> 32) for item in found] == order[:MAX_ALGORITHMS]
    again = answered(heuristic(fake, cache).algorithms([PROBLEM, PROBLEM]))
    assert len({ranked.algorithm for ranked in again}) == len(again)
    # The last result of each question is marked as none.
    assert len(again) == min(MAX_ALGORITHMS, (NUM_RESULTS - 1) * len(LIMITS_BYTES))


def test_one_child_answers_for_every_default_cell_and_the_cache_ever_after(
    fake: Fake, cache: Cache, children: list[dict[str, Any]]
) -> None:
    asked = heuristic(fake, cache)
    first = answered(asked.algorithms([PROBLEM]))
    for size in (1, 5, 33, 64, 65, 96, 97, 1024, 16384):
        answered(asked.algorithms([replace(PROBLEM, m=size)]))
    assert len(children) == 1
    later = heuristic(fake, cache)
    assert answered(later.algorithms([PROBLEM])) == first
    assert len(children) == 1
    answered(later.algorithms([replace(PROBLEM, m=14418)]))  # no end of a default cell
    assert len(children) == 2
    assert [problem["m"] for problem in children[1]["problems"]] == [14418]


@pytest.mark.parametrize(
    "changed",
    [
        {"gpu": replace(H200, validity=replace(H200.validity, num_sms=16))},
        {"version": "13.0.3"},
    ],
)
def test_another_gpu_or_version_is_asked_anew(
    fake: Fake, cache: Cache, children: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    answered(heuristic(fake, cache).algorithms([PROBLEM]))
    monkeypatch.setenv("FAKE_VERSION", str(gpus.join_version(changed.get("version", "13.0.2"))))
    answered(heuristic(fake, cache, **changed).algorithms([PROBLEM]))
    assert len(children) == 2


def test_another_product_of_the_same_silicon_is_not(fake: Fake, cache: Cache, children: list[dict[str, Any]]) -> None:
    answered(heuristic(fake, cache).algorithms([PROBLEM]))
    answered(heuristic(fake, cache, gpu=replace(H200, ordinal=1, name="another", uuid="x")).algorithms([PROBLEM]))
    assert len(children) == 1


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("FAKE_INIT", "100", "asking cuBLASLt for its algorithms failed: cuInit: status 100"),
        ("FAKE_CREATE", "1", "asking cuBLASLt for its algorithms failed: cublasLtCreate: status 1"),
        ("FAKE_HEURISTIC", "7", "asking cuBLASLt for its algorithms failed: cublasLtMatmulAlgoGetHeuristic: status 7"),
        ("FAKE_VERSION", "130003", "is cuBLASLt 13.0.3, the environment has 13.0.2"),
    ],
)
def test_a_question_that_fails_says_why_and_is_not_asked_again(
    fake: Fake,
    cache: Cache,
    children: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    value: str,
    reason: str,
) -> None:
    monkeypatch.setenv(setting, value)
    asked = heuristic(fake, cache)
    for size in (16, 17):
        found = asked.algorithms([replace(PROBLEM, m=size)])
        assert isinstance(found, Unanswered)
        assert reason in found.reason
    assert len(children) == 1


def test_a_driver_that_hangs_is_left_at_the_deadline(fake: Fake, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_HANG", "1")
    found = heuristic(fake, cache, timeout_s=1.0).algorithms([PROBLEM])
    assert found == Unanswered("asking cuBLASLt for its algorithms took longer than 1 s")


def test_the_child_says_what_is_missing() -> None:
    script = Path(gpus.__file__).parent / "backends" / "cublaslt_probe.py"
    request = {"driver": "libcuda-of-nobody.so.1", "library": "/no/libcublasLt.so"}
    done = subprocess.run(
        [sys.executable, "-S", "-I", script], input=json.dumps(request), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("libcuda-of-nobody.so.1: cannot open shared object file")


# ---- the backend ---------------------------------------------------------------------------------------------------


def test_a_space_is_what_the_heuristic_says_at_both_ends_of_the_cell_upper_end_first(fake: Fake, cache: Cache) -> None:
    (space,), mismatches = backend(fake, cache).spaces(gemm(96, 512, "bfloat16"), cell(9, 16))
    assert mismatches == ()
    library, algorithm = space.tunables
    assert (library.name, library.choices, algorithm.name) == ("library", ("13.0.2",), "algorithm")
    found = [words(parse(str(choice))) for choice in algorithm.choices]
    assert [item[1] >> 32 for item in found[:2]] == [16, 9]
    assert len(found) == MAX_ALGORITHMS
    assert len(list(ConfigSpace(space).configs())) == MAX_ALGORITHMS
    assert (space.constants["size"], space.constants["N"], space.constants["num_sms"]) == (16, 96, 132)


def test_spaces_are_repeatable_and_an_m_without_algorithms_has_none(
    fake: Fake, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = gemm(96, 512, "float16")
    monkeypatch.setenv("FAKE_UNKNOWN_M", "8")
    made = backend(fake, cache)
    assert made.spaces(definition, key(8)) == (
        (),
        (Mismatch("gemm/cublaslt", "cuBLASLt 13.0.2 has no algorithm for 1..8"),),
    )
    assert made.spaces(definition, key(16)) == backend(fake, cache).spaces(definition, key(16))


@pytest.mark.parametrize(
    ("dtype", "tags", "computes"),
    [
        ("bfloat16", (), {"f32"}),
        ("bfloat16", ("math:tf32",), {"f32"}),
        ("float32", (), {"f32"}),
        ("float32", ("math:tf32",), {"f32", "tf32"}),
    ],
)
def test_tf32_is_offered_for_float32_where_the_definition_allows_it(
    fake: Fake, cache: Cache, dtype: str, tags: tuple[str, ...], computes: set[str]
) -> None:
    definition = gemm(96, 512, dtype).model_copy(update={"tags": tags})
    (space,), _ = backend(fake, cache).spaces(definition, key(16))
    assert {parse(str(choice)).compute for choice in space.tunables[1].choices} == computes


@pytest.mark.parametrize(
    ("here", "definition", "reason"),
    [
        (environment(None), gemm(8, 8, "float32"), "needs a GPU, on which cuBLASLt says which algorithms it has"),
        (
            environment(cublas=""),
            gemm(8, 8, "float32"),
            "needs the cuBLASLt that torch loads, and this torch has none (it is built for the CPU)",
        ),
        (
            environment(replace(H200, validity=replace(H200.validity, arch="sm_75", compute_capability=75))),
            gemm(8, 8, "float32"),
            "needs sm_80, the target is cuda:sm_75",
        ),
        (environment(), gemm(8, 8, "int8"), "A = A: needs float32 or float16 or bfloat16, is int8"),
    ],
)
def test_without_a_space_there_is_a_reason(
    here: Environment, definition: Definition, reason: str, cache: Cache
) -> None:
    spaces, mismatches = CublasLtBackend(here, cache).spaces(definition, key(16))
    assert (spaces, mismatches) == ((), (Mismatch("gemm/cublaslt", reason),))


def test_a_config_alone_makes_the_candidate_and_its_object_anywhere(fake: Fake, cache: Cache, tmp_path: Path) -> None:
    definition = gemm(96, 512, "bfloat16")
    asked = backend(fake, cache)
    (space,), _ = asked.spaces(definition, key(16))
    config = dict(next(iter(ConfigSpace(space).configs())))
    candidate = asked.candidate(definition, space.template, config)
    alone = CublasLtBackend(environment(None, ""), Cache(tmp_path / "another"))
    assert alone.candidate(definition, space.template, config) == candidate
    built = alone.build(definition, [candidate], timeout_s=60, jobs=1)[candidate.digest]
    assert isinstance(built, Artifact), built
    assert built.resources == {
        "kind": "library",
        "library": "cuBLASLt 13.0.2",
        "arch": "sm_90a",
        "compute": "f32",
        "workspace_bytes": 4096,
        "deterministic": True,
    }
    assert {guard.layout for guard in (*built.guards.inputs, *built.guards.outputs)} == {"rows"}


def test_the_version_and_every_byte_are_part_of_the_candidates_identity(cache: Cache) -> None:
    definition = gemm(96, 512, "bfloat16")
    alone = CublasLtBackend(environment(None), cache)
    configs = [
        {"library": library, "algorithm": str(algorithm)}
        for library in ("13.0.2", "13.0.3")
        for algorithm in (
            Algorithm("f32", 0, bytes(64)),
            Algorithm("f32", 1, bytes(64)),
            Algorithm("f32", 0, bytes([0] * 63 + [1])),
        )
    ]
    made = [alone.candidate(definition, "gemm/cublaslt", config) for config in configs]
    assert len({candidate.digest for candidate in made}) == len(configs)
    assert len({candidate.source_digest for candidate in made}) == len(configs)


@pytest.mark.parametrize(
    "config",
    [
        {"library": "13.0", "algorithm": "f32:0:01"},
        {"library": "13.0.200", "algorithm": "f32:0:01"},
        {"library": "13.0.2", "algorithm": "f64:0:01"},
        {"library": "13.0.2", "algorithm": "f32:-1:01"},
        {"library": "13.0.2", "algorithm": "f32:0:0100"},
        {"library": "13.0.2", "algorithm": f"f32:0:{'01' * 65}"},
        {"library": "13.0.2", "algorithm": "f32:0"},
    ],
)
def test_a_config_that_is_none_is_refused(cache: Cache, config: dict[str, str]) -> None:
    with pytest.raises(SchemaError, match=r"^(library|algorithm): must be"):
        CublasLtBackend(environment(None), cache).candidate(gemm(8, 8, "float32"), "gemm/cublaslt", config)


def test_the_fingerprint_follows_the_gpu_and_the_library(cache: Cache) -> None:
    definition = gemm(8, 8, "float32")
    other = replace(H200, validity=replace(H200.validity, num_sms=16))
    here = [environment(), environment(None), environment(cublas="13.0.3"), environment(other)]
    assert len({CublasLtBackend(each, cache).fingerprint(definition) for each in here}) == len(here)
    named = environment(replace(H200, name="another", ordinal=3))
    assert CublasLtBackend(named, cache).fingerprint(definition) == CublasLtBackend(here[0], cache).fingerprint(
        definition
    )


@pytest.mark.parametrize("seed", ["0", "1"])
def test_the_launcher_is_the_same_text_under_any_hash_seed(tmp_path: Path, seed: str, cache: Cache) -> None:
    config = {"library": "13.0.2", "algorithm": "f32:0:0102"}
    script = f"""
from kernel_calls import gemm, machine
from fibc.backends.cublaslt import CublasLtBackend
from fibc.cache import Cache
from pathlib import Path
backend = CublasLtBackend(machine(), Cache(Path({str(tmp_path)!r})))
print(backend.candidate(gemm(8, 8, "float32"), "gemm/cublaslt", {config!r}).source_digest)
"""
    environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environ)
    own = CublasLtBackend(machine(), cache).candidate(gemm(8, 8, "float32"), "gemm/cublaslt", config)
    assert done.stdout.strip() == own.source_digest


def test_the_registry_knows_it(cache: Cache) -> None:
    assert "cublaslt" in NAMES["cuda"]
    (made,) = make_backends(["cublaslt"], environment(None), cache)
    assert (made.name, str(made.target)) == ("cublaslt", "cuda:sm_90a")


def test_versions_are_read_back_as_they_are_written() -> None:
    for number in (110803, 120405, 130002, 130100):
        assert gpus.join_version(gpus.split_version(number)) == number
    with pytest.raises(ValueError, match="no version of cuBLAS"):
        gpus.join_version("13.0.200")

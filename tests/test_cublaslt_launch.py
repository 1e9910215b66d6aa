"""A launcher of a cuBLASLt algorithm: what it asks of the library, what it refuses, and what it keeps."""

from __future__ import annotations

from pathlib import Path

import fake_cublaslt
import pytest
from fake_cublaslt import SCRATCH, STREAM, A, B, C, Fake, call
from kernel_calls import gemm, machine

from fibc import toolchain
from fibc.backends.cublaslt import CublasLtBackend
from fibc.backends.cublaslt_algorithm import Algorithm, parse
from fibc.cache import Cache
from fibc.schema.candidate import Artifact

OPAQUE = bytes(range(64))
N, K = 96, 512
OK, DECLINED, DEVICE_ERROR = 0, 1, 2


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return fake_cublaslt.compile_fake(tmp_path_factory.mktemp("fake"), toolchain.find().cxx)


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A launcher of C[M, 96] = A[M, 512] B[96, 512]^T in bfloat16 by the algorithm of the bytes 0 to 63."""
    backend = CublasLtBackend(machine(), Cache(tmp_path_factory.mktemp("cache")))
    config = {"library": "13.0.2", "algorithm": str(Algorithm("f32", 0, OPAQUE))}
    definition = gemm(N, K, "bfloat16")
    candidate = backend.candidate(definition, "gemm/cublaslt", config)
    built = backend.build(definition, [candidate], timeout_s=60, jobs=1)[candidate.digest]
    assert isinstance(built, Artifact), built
    return built


def _size(m: int, **more: int) -> dict[str, int]:
    return {"m": m, "n": N, "k": K, **more}


def test_the_stored_algorithm_is_passed_byte_for_byte_with_the_operands_swapped(fake: Fake, artifact: Artifact) -> None:
    session = call(fake, artifact.library_path, artifact.symbol, [("prepare", 0), ("launch", _size(33))])
    assert session.returned == [OK, OK]
    assert session.lines("desc") == [{"compute": "68", "scale": "0"}]
    assert session.lines("desc_set") == [{"attribute": "3", "value": "1", "bytes": "4"}]
    (matmul,) = session.lines("matmul")
    assert matmul == {
        "alpha": "1",
        "beta": "0",
        "a_at": hex(B),
        "b_at": hex(A),
        "c_at": hex(C),
        "d_at": hex(C),
        "a": f"14/{K}x{N}/{K}",
        "b": f"14/{K}x33/{K}",
        "c": f"14/{N}x33/{N}",
        "d": f"14/{N}x33/{N}",
        "algo": OPAQUE.hex(),
        "workspace": "(nil)",
        "bytes": "0",
        "stream": hex(STREAM),
    }
    (check,) = session.lines("check")
    assert check == {name: matmul[name] for name in ("a", "b", "c", "d", "algo")}


def test_strides_of_rows_reach_the_library_and_that_of_a_single_row_does_not_matter(
    fake: Fake, artifact: Artifact
) -> None:
    steps = [
        ("prepare", 0),
        ("launch", _size(8, a=K + 8, b=K + 16, c=N + 32)),
        ("launch", _size(1, a=7, c=5)),
        ("launch", _size(1, a=0, c=0)),
    ]
    session = call(fake, artifact.library_path, artifact.symbol, steps)
    assert session.returned == [OK] * 4
    wide, single, _ = session.lines("matmul")
    assert (wide["a"], wide["b"], wide["d"]) == (f"14/{K}x{N}/{K + 16}", f"14/{K}x8/{K + 8}", f"14/{N}x8/{N + 32}")
    assert (single["b"], single["d"]) == (f"14/{K}x1/{K}", f"14/{N}x1/{N}")
    assert len(session.lines("check")) == 2


def test_rows_that_overlap_or_are_less_aligned_than_the_library_was_asked_about_are_declined(
    fake: Fake, artifact: Artifact
) -> None:
    strides = [{"a": K + 1}, {"b": K + 4}, {"c": N + 2}, {"a": K - 8}, {"a": 0}]
    steps = [("prepare", 0), *[("launch", _size(8, **stride)) for stride in strides]]
    session = call(fake, artifact.library_path, artifact.symbol, steps)
    assert session.returned == [OK, *[DECLINED] * len(strides)]
    assert session.lines("check") == []


def test_another_version_of_the_library_declines(fake: Fake, artifact: Artifact) -> None:
    steps = [("prepare", 0), ("workspace", _size(4)), ("launch", _size(4))]
    session = call(fake, artifact.library_path, artifact.symbol, steps, FAKE_VERSION=130003)
    assert session.returned == [DECLINED, 0, DECLINED]
    assert session.log == []


def test_a_torch_without_the_library_declines(artifact: Artifact) -> None:
    session = call(None, artifact.library_path, artifact.symbol, [("prepare", 0), ("launch", _size(4))])
    assert session.returned == [DECLINED, DECLINED]


def test_a_library_that_torch_is_not_linked_with_is_not_taken(fake: Fake, artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / fake.library.name).write_bytes(fake.library.read_bytes())
    alone = Fake(tmp_path)
    (tmp_path / "libtorch_cuda.so").write_bytes(fake.library.read_bytes())  # of another soname
    session = call(alone, artifact.library_path, artifact.symbol, [("prepare", 0)])
    assert session.returned == [DECLINED]


def test_an_algorithm_that_is_illegal_for_an_m_is_asked_about_once_and_declines_there_alone(
    fake: Fake, artifact: Artifact
) -> None:
    steps = [("prepare", 0), *[("launch", _size(m)) for m in (5, 6, 5, 5, 6)]]
    session = call(fake, artifact.library_path, artifact.symbol, steps, FAKE_REFUSED_M=5)
    assert session.returned == [OK, DECLINED, OK, DECLINED, DECLINED, OK]
    assert [line["b"] for line in session.lines("check")] == [f"14/{K}x5/{K}", f"14/{K}x6/{K}"]
    assert len(session.lines("matmul")) == 2


def test_the_workspace_is_what_the_library_asks_for_at_this_m(fake: Fake, artifact: Artifact) -> None:
    steps = [("prepare", 0), ("workspace", _size(3)), ("launch", _size(3)), ("workspace", _size(7))]
    session = call(fake, artifact.library_path, artifact.symbol, steps, FAKE_ROW_WORKSPACE=1 << 20)
    assert session.returned == [OK, 3 << 20, OK, 7 << 20]
    (matmul,) = session.lines("matmul")
    assert (matmul["workspace"], matmul["bytes"]) == (hex(SCRATCH), str(3 << 20))


def test_more_workspace_than_was_searched_with_declines(fake: Fake, artifact: Artifact) -> None:
    steps = [("prepare", 0), ("launch", _size(32)), ("workspace", _size(33)), ("launch", _size(33))]
    session = call(fake, artifact.library_path, artifact.symbol, steps, FAKE_ROW_WORKSPACE=1 << 20)
    assert session.returned == [OK, OK, 0, DECLINED]


def test_a_call_without_a_device_is_told_the_most_that_it_may_need(fake: Fake, artifact: Artifact) -> None:
    steps = [("workspace", _size(3, device=-1)), ("launch", _size(3, device=-1))]
    assert call(fake, artifact.library_path, artifact.symbol, steps).returned == [32 << 20, DECLINED]


def test_plans_are_kept_and_the_cache_of_them_is_bounded(fake: Fake, artifact: Artifact) -> None:
    few = [("launch", _size(m)) for m in (1, 2, 4, 8, 16, 24, 32)]
    session = call(fake, artifact.library_path, artifact.symbol, [("prepare", 0), *few, *few, *few])
    assert len(session.lines("check")) == len(few)
    assert len(session.lines("matmul")) == 3 * len(few)
    many = [("launch", _size(m)) for m in range(1, 201)]
    session = call(fake, artifact.library_path, artifact.symbol, [("prepare", 0), *many, *many])
    assert set(session.returned) == {OK}
    assert 200 < len(session.lines("check")) <= 400
    sizes = [line["b"] for line in session.lines("matmul")]
    assert sizes == [f"14/{K}x{m}/{K}" for m in range(1, 201)] * 2


def test_every_thread_has_plans_of_its_own(fake: Fake, artifact: Artifact) -> None:
    thread = ("thread", [("launch", _size(9)), ("launch", _size(9))])
    session = call(fake, artifact.library_path, artifact.symbol, [("prepare", 0), ("launch", _size(9)), thread])
    assert session.returned == [OK, OK, OK]
    assert len(session.lines("check")) == 2
    assert len(session.lines("create")) == 1


def test_every_device_has_a_handle_and_one_that_is_not_prepared_declines(fake: Fake, artifact: Artifact) -> None:
    steps = [
        ("prepare", 0),
        ("prepare", 0),
        ("launch", _size(2, device=1)),
        ("prepare", 1),
        ("launch", _size(2, device=1)),
        ("launch", _size(2)),
        ("prepare", 64),
        ("prepare", -1),
    ]
    session = call(fake, artifact.library_path, artifact.symbol, steps)
    assert session.returned == [OK, OK, DECLINED, OK, OK, OK, DECLINED, DECLINED]
    assert len(session.lines("create")) == 2
    assert len(session.lines("desc")) == 1
    assert len(session.lines("check")) == 2


@pytest.mark.parametrize(
    ("status", "returned"), [(15, DECLINED), (7, DECLINED), (13, DEVICE_ERROR), (14, DEVICE_ERROR)]
)
def test_a_refusal_is_told_from_an_error_of_the_device(
    fake: Fake, artifact: Artifact, status: int, returned: int
) -> None:
    steps = [("prepare", 0), ("launch", _size(2))]
    assert call(fake, artifact.library_path, artifact.symbol, steps, FAKE_MATMUL=status).returned == [OK, returned]


def test_a_handle_that_cannot_be_made_declines(fake: Fake, artifact: Artifact) -> None:
    assert call(fake, artifact.library_path, artifact.symbol, [("prepare", 0)], FAKE_CREATE=3).returned == [DECLINED]


def test_no_rows_launch_nothing(fake: Fake, artifact: Artifact) -> None:
    steps = [("prepare", 0), ("workspace", _size(0)), ("launch", _size(0))]
    session = call(fake, artifact.library_path, artifact.symbol, steps)
    assert session.returned == [OK, 0, OK]
    assert session.lines("check") == session.lines("matmul") == []


def test_an_algorithm_is_its_text() -> None:
    short = Algorithm("tf32", 4096, bytes([7, 0, 9]).ljust(64, bytes(1)))
    assert str(short) == "tf32:4096:070009"
    for algorithm in (short, Algorithm("f32", 0, OPAQUE), Algorithm("f32", 1, bytes(64))):
        assert parse(str(algorithm)) == algorithm
    assert Algorithm("f32", 0, OPAQUE).words[:2] == ("0x706050403020100ull", "0xf0e0d0c0b0a0908ull")

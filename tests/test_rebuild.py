"""A module made again from records: the same text, the same kernels, and it says why it does not serve here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from simulation import Machine, SimulatedBackend, write_definition
from test_compile_only import needs_triton

import fibc
import fibc.rebuild
from fibc import cli, environment
from fibc.backends import native
from fibc.backends.registry import make_backends
from fibc.cache import Cache
from fibc.calls import torch_dtype
from fibc.errors import BuildError, InputError
from fibc.gpus import stand_in
from fibc.paths import OutLayout
from fibc.published import Kernel, keep_published, read_published
from fibc.records import RecordLog
from fibc.runtime.package import load, read_table
from fibc.schema.candidate import Artifact, Candidate
from fibc.schema.decision import Decision, Verdict
from fibc.schema.definition import Definition, load_definition
from fibc.schema.feature import Cell, Feature, FeatureKey, Point
from fibc.schema.result import BuildResult
from fibc.schema.silicon import CudaValidity
from fibc.schema.table import DispatchTable, Region, Variant
from fibc.search.space import ConfigSpace

TEXTS = ("__init__.py", "__init__.pyi", "current/__init__.py", "current/module.cpp", "current/table.msgpack")


pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path, lambda block, rows: {2: 1.3, 5: 1.4}.get(block, 0.9) if rows != 2 else 0.8)
    made.install(monkeypatch)
    monkeypatch.setattr(fibc.rebuild, "make_backends", lambda *_: (SimulatedBackend(made),))
    return made


def tuned(tmp_path: Path, **options: Any) -> Path:
    """Tune the toy; return its records."""
    path = write_definition(tmp_path / "defs", (1, 2, 4))
    fibc.tune(path, out=tmp_path / "out", target="cpu", split=(1.0, 0.0, 0.0), **options)
    return OutLayout(tmp_path / "out").records("toy")


def rebuilt(records: Path, out: Path, **options: Any) -> BuildResult:
    (result,) = fibc.build(records, out=out, **options)
    return result


def texts(package: Path) -> dict[str, bytes]:
    return {name: (package / name).read_bytes() for name in TEXTS}


def without_kernels(records: Path) -> Path:
    """Write records of the same table without its kernels."""
    published = read_published(records)
    lean = records.with_name("lean.records")
    with RecordLog(lean, definition="d", environment="e") as log:
        keep_published(log, published.definition, published.table, {})
    return lean


# The law of replay ----------------------------------------------------------------------------------------------------


def test_equal_records_give_equal_bytes_of_text_anywhere(machine: Machine, tmp_path: Path) -> None:
    records = tuned(tmp_path)
    moved = tmp_path / "elsewhere" / "any.records"
    moved.parent.mkdir()
    shutil.copy(records, moved)
    shutil.rmtree(OutLayout(tmp_path / "out").compiled, ignore_errors=True)
    machine.asked.clear()
    first, second = rebuilt(moved, tmp_path / "one"), rebuilt(moved, tmp_path / "two")
    original = texts(tmp_path / "out" / "fibc_toy")
    assert texts(Path(first.package)) == texts(Path(second.package)) == original
    generation = (tmp_path / "out" / "fibc_toy" / "current").resolve().name
    assert (Path(first.package) / "current").resolve().name == generation, "its digest covers the objects, too"
    assert {origin for _, origin in first.kernels} == {"recorded"}
    assert not machine.asked, "nothing was compiled and nothing measured"


def test_a_module_that_was_made_again_imports_and_answers(machine: Machine, tmp_path: Path) -> None:
    result = rebuilt(tuned(tmp_path), tmp_path / "again")
    assert read_table(result.package) == result.table
    x, weight = torch.randn(2, 8), torch.randn(8)
    torch.testing.assert_close(load(result.package).run(x, weight), x * weight)
    names = {path.stem for path in OutLayout(tmp_path / "again").sources("toy").iterdir()}
    assert names == {variant.symbol for variant in result.table.variants}


def test_what_was_published_last_counts(machine: Machine, tmp_path: Path) -> None:
    records = tuned(tmp_path)
    second = tuned(tmp_path, fresh=True, min_speedup=1.05)
    assert second == records
    assert rebuilt(records, tmp_path / "again").table.min_speedup == 1.05


def test_a_directory_of_records_gives_a_module_for_each(machine: Machine, tmp_path: Path) -> None:
    tuned(tmp_path)
    (result,) = fibc.build(tmp_path / "out", out=tmp_path / "again")
    assert result.definition == "toy"


# Kernels that are not recorded ----------------------------------------------------------------------------------------


def test_kernels_come_from_a_store_where_the_records_have_none(machine: Machine, tmp_path: Path) -> None:
    records = tuned(tmp_path)
    lean = without_kernels(records)
    fibc.compile_only(tmp_path / "defs" / "toy.json", out=tmp_path / "store", target="cpu", split=(1.0, 0.0, 0.0))
    result = rebuilt(lean, tmp_path / "again", compiled=OutLayout(tmp_path / "store").compiled)
    assert {origin for _, origin in result.kernels} == {"compiled before"}
    assert texts(Path(result.package)) == texts(tmp_path / "out" / "fibc_toy")


def test_kernels_are_compiled_where_nothing_has_them(machine: Machine, tmp_path: Path) -> None:
    lean = without_kernels(tuned(tmp_path))
    result = rebuilt(lean, tmp_path / "again")
    assert {origin for _, origin in result.kernels} == {"compiled now"}
    assert texts(Path(result.package)) == texts(tmp_path / "out" / "fibc_toy")


def test_a_kernel_that_would_be_another_one_is_refused(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lean = without_kernels(tuned(tmp_path))
    made = SimulatedBackend.candidate

    def changed(self: SimulatedBackend, *arguments: Any) -> Candidate:
        return replace(made(self, *arguments), source_digest="another")

    monkeypatch.setattr(SimulatedBackend, "candidate", changed)
    with pytest.raises(BuildError, match=r"must be compiled as it was measured.*tune again"):
        rebuilt(lean, tmp_path / "again")
    assert not (tmp_path / "again" / "fibc_toy").exists()


# What is refused ------------------------------------------------------------------------------------------------------


def test_records_without_a_table_are_refused(machine: Machine, tmp_path: Path) -> None:
    empty = tmp_path / "empty.records"
    with RecordLog(empty, definition="d", environment="e") as log:
        log.append("note", "nothing")
    with pytest.raises(InputError, match="must hold a published table"):
        fibc.build(empty, out=tmp_path / "again")
    with pytest.raises(InputError, match="found none"):
        fibc.build(tmp_path / "no.records", out=tmp_path / "again")
    (tmp_path / "bare").mkdir()
    with pytest.raises(InputError, match="must hold records"):
        fibc.build(tmp_path / "bare", out=tmp_path / "again")


def test_a_target_that_the_records_lack_is_refused(machine: Machine, tmp_path: Path) -> None:
    records = tuned(tmp_path)
    with pytest.raises(InputError, match=r"no table for cuda:sm_90a \(accepted: cpu:avx2\)"):
        fibc.build(records, target="cuda:sm_90a", out=tmp_path / "again")


# A table for a GPU, where there is none -------------------------------------------------------------------------------

RECORDED = Path(__file__).parent.parent / "benchmarks" / "results" / "h200"


@pytest.mark.e2e
@pytest.mark.parametrize("records", sorted(RECORDED.rglob("*.records")), ids=lambda path: path.stem)
def test_the_records_of_an_h200_give_a_module_here_that_is_native_and_says_why(tmp_path: Path, records: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("for machines without a GPU")
    result = rebuilt(records, tmp_path / "out", target="cuda:sm_90a")
    assert result.definition == records.stem
    assert {origin for _, origin in result.kernels} == {"recorded"}
    (note,) = result.notes
    assert "needs a CUDA driver" in note
    definition = read_published(records).definition
    sizes = {**definition.const_axes, **dict.fromkeys(definition.var_axes, 3)}
    inputs = [
        torch.randn([sizes[axis] for axis in spec.shape or ()]).to(torch_dtype(spec.dtype))
        for spec in definition.inputs.values()
    ]
    module = load(result.package)
    output = module.run(*inputs)
    assert output.shape == tuple(sizes[axis] for axis in next(iter(definition.outputs.values())).shape or ())
    assert module.explain(*inputs)["served"] == "native"
    assert module.stats()["native"]["driver"] == 1


H200 = CudaValidity("sm_90a", 90, 132, 60 << 20, 150_109_880_320)


@needs_triton
@pytest.mark.parametrize("recorded", [True, False])
def test_a_table_for_a_gpu_is_built_where_there_is_none_and_says_why_it_is_native(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    if torch.cuda.is_available():
        pytest.skip("for machines without a GPU")
    records = gpu_records(tmp_path, with_kernels=recorded)
    monkeypatch.setattr(
        "sys.argv", ["fibc", "build", str(records), "--target", "cuda:sm_90a", "--out", str(tmp_path / "out"), "--json"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    (built,) = json.loads(capsys.readouterr().out)["built"]
    assert built["target"] == "cuda:sm_90a"
    assert {origin for _, origin in built["kernels"]} == {"recorded" if recorded else "compiled now"}
    (note,) = built["notes"]
    assert "needs a CUDA driver" in note
    assert "every call goes to the native kernel" in note
    module = load(built["package"])
    a, b = torch.randn(3, 256).bfloat16(), torch.randn(256, 256).bfloat16()
    torch.testing.assert_close(module.run(a, b), torch.matmul(a, b.T))
    assert module.stats()["native"]["driver"] == 1
    assert module.stats()["hits"] in (0, {}) or not any(module.stats()["hits"].values())


def gpu_records(tmp_path: Path, *, with_kernels: bool) -> Path:
    """Write the records of a table with one Triton variant, compiled here."""
    definition = small_gemm()
    candidate, artifact = compile_default(definition, tmp_path)
    table = gpu_table(definition, candidate, artifact)
    kernels = {artifact.symbol: Kernel(Path(artifact.object_path).read_bytes(), artifact.source)}
    records = tmp_path / "small.records"
    with RecordLog(records, definition=definition.digest, environment="h200") as log:
        keep_published(log, definition, table, kernels if with_kernels else {})
    return records


def small_gemm() -> Definition:
    document = load_definition(Path(__file__).parent.parent / "defs" / "gemm.json").to_json()
    sizes = {"M": {"type": "var"}, "N": {"type": "const", "value": 256}, "K": {"type": "const", "value": 256}}
    return Definition.model_validate(document | {"name": "small_gemm", "axes": sizes})


def compile_default(definition: Definition, tmp_path: Path) -> tuple[Candidate, Artifact]:
    gpu = replace(stand_in("sm_90a"), validity=H200)
    (backend,) = make_backends(["triton"], environment.detect(1, gpu=gpu), Cache(tmp_path / "cache"))
    key = FeatureKey(Cell(((1, 4),)), (Point((("M", 4),), "end"),), 0, synthetic=True)
    space = next(space for space in backend.spaces(definition, key)[0] if space.template == "gemm/triton_tile")
    config = ConfigSpace(space).default()
    assert config is not None
    candidate = backend.candidate(definition, space.template, dict(config))
    artifact = backend.build(definition, [candidate], timeout_s=300, jobs=1)[candidate.digest]
    assert isinstance(artifact, Artifact)
    return candidate, artifact


def gpu_table(definition: Definition, candidate: Candidate, artifact: Artifact) -> DispatchTable:
    cells = Cell(((1, 4),))
    rows: Sequence[Decision] = [Decision(cells, Verdict.REPLACE, candidate.digest, (), (), "shown")]
    return DispatchTable(
        definition=definition.name,
        definition_digest=definition.digest,
        op_type=definition.op_type,
        spec=definition.call_spec(),
        native=native.resolve(definition, None, target_kind="cuda"),
        reference_source=definition.reference,
        reference_entry=definition.entry_point,
        features=(Feature("M", None, (4,)),),
        variants=(
            Variant(artifact.symbol, candidate, artifact.digest, "sm_90a", artifact.guards, True, release_gil=False),
        ),
        rows=tuple(rows),
        regions=(Region(cells, 0, False),),
        validity=H200,
        target="cuda:sm_90a",
        environment={"gpu": "NVIDIA H200"},
        alpha=0.05,
        min_speedup=1.01,
        expected_false_replacements=0.05,
        partial=False,
        num_boundary_rejected=0,
        created="2026-11-30T00:00:00+00:00",
        fibc_version="0.1.0",
    )

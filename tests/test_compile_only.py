"""Compiling here and searching there: a store that travels, and searches that are held to it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from simulation import BLOCKS, Machine, SimulatedBackend, write_definition

import fibc
from fibc import task
from fibc.backends.base import BuildFailure, Mismatch
from fibc.backends.compiled_store import CompiledStore, Index, failed
from fibc.cache import Cache
from fibc.errors import InputError, ToolchainError
from fibc.paths import OutLayout
from fibc.schema.candidate import Candidate, ConfigValue, Target
from fibc.schema.decision import Verdict
from fibc.schema.definition import Definition, load_definition
from fibc.schema.feature import FeatureKey
from fibc.schema.result import CompileResult, TuneResult
from fibc.schema.space import Space, Tunable

SIZES = (1, 2, 4)
WINNER = 3

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path, lambda block, rows: 1.3 if block == WINNER else 0.9)
    made.install(monkeypatch)
    return made


def compile_only(tmp_path: Path, out: str = "here", **options: Any) -> CompileResult:
    path = write_definition(tmp_path / "defs", SIZES)
    options.setdefault("target", "cpu")
    return fibc.compile_only(path, out=tmp_path / out, split=(1.0, 0.0, 0.0), **options)


def tune(tmp_path: Path, out: str, **options: Any) -> TuneResult:
    path = write_definition(tmp_path / "defs", SIZES)
    return fibc.tune(path, out=tmp_path / out, split=(1.0, 0.0, 0.0), **{"target": "cpu", **options})


def store_of(tmp_path: Path, out: str = "here") -> Path:
    return OutLayout(tmp_path / out).compiled


def take_along(tmp_path: Path, out: str = "there") -> Path:
    """Move the store to another directory, as a copy to another machine does."""
    target = store_of(tmp_path, out)
    target.parent.mkdir(parents=True)
    shutil.move(store_of(tmp_path), target)
    return target


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def unpacked(root: Path) -> Iterator[bytes]:
    """Yield names and contents of everything in a store, compressed ones as they are read."""
    for name, data in files(root).items():
        yield name.encode()
        yield zstandard.ZstdDecompressor().decompress(data) if name.endswith(".zst") else data


def keep_one(tmp_path: Path, block: int) -> None:
    """Let the index name one block alone."""
    definition = load_definition(tmp_path / "defs" / "toy.json")
    store = CompiledStore(store_of(tmp_path))
    index = store.index(definition, "cpu", "cpu:avx2")
    assert index is not None
    kept = tuple(c for c in index.compiled if dict(c.config)["block"] == block)
    store.put_index(definition, Index(index.definition, index.backend, index.target, kept, (), index.source_digests))


# What is compiled -----------------------------------------------------------------------------------------------------


def test_every_config_that_a_search_would_ask_for_is_compiled_and_counted(machine: Machine, tmp_path: Path) -> None:
    result = compile_only(tmp_path)
    (template,) = result.templates
    assert (template.template, template.compiled, template.failed, template.left_out) == ("toy/kernel", 6, 0, 0)
    assert result.num_new == machine.asked["built"] == len(BLOCKS)
    assert result.num_bytes == sum(path.stat().st_size for path in store_of(tmp_path).glob("candidates/*.zst")) > 0
    assert not machine.asked["trials"]


def test_a_second_run_compiles_nothing_again(machine: Machine, tmp_path: Path) -> None:
    first = compile_only(tmp_path)
    machine.asked.clear()
    second = compile_only(tmp_path)
    assert second.num_new == machine.asked["built"] == 0
    assert second.templates == first.templates


def test_what_does_not_compile_is_told_and_not_tried_again(machine: Machine, tmp_path: Path) -> None:
    machine.unbuildable = frozenset({2, 5})
    result = compile_only(tmp_path)
    assert (result.templates[0].compiled, result.templates[0].failed) == (4, 2)
    assert result.failures == (("error: no such instruction", 2),)
    machine.unbuildable = frozenset()
    assert compile_only(tmp_path).num_new == 0
    assert compile_only(tmp_path, fresh=True).templates[0].compiled == 6


def test_what_is_over_the_size_is_left_out_and_said(machine: Machine, tmp_path: Path) -> None:
    whole = compile_only(tmp_path)
    one = whole.num_bytes / 6
    result = compile_only(tmp_path, out="small", max_mb=2.5 * one / 1e6)
    assert (result.templates[0].compiled, result.templates[0].left_out) == (2, 4)
    assert result.left_out == (("over --max-mb", 4),)
    assert sum(path.stat().st_size for path in store_of(tmp_path, "small").glob("candidates/*.zst")) <= 2.5 * one
    again = compile_only(tmp_path, out="small")
    assert (again.templates[0].compiled, again.num_new) == (6, 4)


def test_what_there_was_no_time_for_is_left_out_and_said(machine: Machine, tmp_path: Path) -> None:
    result = compile_only(tmp_path, budget_s=1e-9)
    assert result.left_out == (("after --budget-s", 6),)
    assert result.templates[0].compiled == 0


def test_a_dry_run_counts_and_writes_nothing(machine: Machine, tmp_path: Path) -> None:
    result = compile_only(tmp_path, dry_run=True)
    assert result.left_out == (("--dry-run", 6),)
    assert not machine.asked["built"]
    assert not (tmp_path / "here").exists()


def test_files_of_candidates_that_are_no_longer_made_are_removed(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_only(tmp_path)
    before = set(files(store_of(tmp_path)))
    made = SimulatedBackend.candidate

    def of_another_compiler(self: SimulatedBackend, *arguments: Any) -> Candidate:
        candidate = made(self, *arguments)
        return Candidate(candidate.backend, candidate.template, candidate.config, "another", candidate.target)

    monkeypatch.setattr(SimulatedBackend, "candidate", of_another_compiler)
    result = compile_only(tmp_path)
    assert (result.num_new, result.templates[0].compiled) == (6, 6)
    after = set(files(store_of(tmp_path)))
    assert len(after) == len(before)
    assert not {name for name in after & before if name.startswith("candidates")}


# The store ------------------------------------------------------------------------------------------------------------


def test_a_store_holds_no_path_and_no_version_of_python(machine: Machine, tmp_path: Path) -> None:
    machine.unbuildable = frozenset({2})
    compile_only(tmp_path)
    forbidden = re.compile(rb"/(?:tmp|home|usr|root|opt|work)\b|" + re.escape(str(tmp_path).encode()) + rb"|python|cp3")
    for content in unpacked(store_of(tmp_path)):
        assert not forbidden.search(content), content[:200]


def test_equal_runs_write_equal_bytes_wherever_they_are(machine: Machine, tmp_path: Path) -> None:
    compile_only(tmp_path, out="one")
    compile_only(tmp_path, out="two/deeper")
    assert files(store_of(tmp_path, "one")) == files(store_of(tmp_path, "two/deeper"))


def test_stores_may_be_copied_over_each_other(machine: Machine, tmp_path: Path) -> None:
    compile_only(tmp_path, out="one")
    before = files(store_of(tmp_path, "one"))
    compile_only(tmp_path, out="two")
    shutil.copytree(store_of(tmp_path, "two"), store_of(tmp_path, "one"), dirs_exist_ok=True)
    assert files(store_of(tmp_path, "one")) == before


def test_a_damaged_candidate_is_none(machine: Machine, tmp_path: Path) -> None:
    compile_only(tmp_path)
    damaged = next(store_of(tmp_path).glob("candidates/*.zst"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    result = compile_only(tmp_path)
    assert (result.num_new, result.templates[0].compiled) == (1, 6)


def test_a_reason_is_kept_without_this_machines_paths() -> None:
    candidate = Candidate("triton", "gemm/tile", (), "0", Target("cuda", "sm_90a"))
    log = 'Traceback:\n  File "/tmp/x/kernel.py", line 3\nptxas /tmp/x/tmp9.ptx, line 7; error: too (see /opt/a b)\n\n'
    kept = failed(candidate, BuildFailure(timed_out=False, log=log))
    assert kept.log == "ptxas tmp9.ptx, line 7; error: too (see a b)"


# Searching what was compiled ------------------------------------------------------------------------------------------


def test_a_search_held_to_the_store_tries_what_is_in_it_and_builds_nothing(machine: Machine, tmp_path: Path) -> None:
    compile_only(tmp_path)
    keep_one(tmp_path, WINNER)
    take_along(tmp_path)
    machine.asked.clear()
    result = tune(tmp_path, "there", compiled_only=True)
    assert {block for _, block in machine.tried} == {WINNER}
    assert not machine.asked["built"]
    assert result.table is not None
    assert {row.verdict for row in result.table.rows} == {Verdict.REPLACE}
    assert any("searches only the 1 candidates" in note and "--compiled-only" in note for note in result.notes)


def test_a_search_that_is_held_finds_what_a_free_one_finds(machine: Machine, tmp_path: Path) -> None:
    compile_only(tmp_path)
    held, free = tune(tmp_path, "here", compiled_only=True), tune(tmp_path, "free")
    assert held.table is not None
    assert free.table is not None
    assert [row.candidate for row in held.table.rows] == [row.candidate for row in free.table.rows]
    assert held.table.regions == free.table.regions


def test_a_free_search_takes_from_the_store_what_is_the_same(machine: Machine, tmp_path: Path) -> None:
    compile_only(tmp_path)
    keep_one(tmp_path, WINNER)
    machine.asked.clear()
    tune(tmp_path, "here")
    assert {block for _, block in machine.tried} == set(BLOCKS)
    assert machine.asked["built"] >= 5
    assert not any("searches only" in note for note in tune(tmp_path, "here").notes)


def test_without_a_compiler_a_search_is_held_to_the_store_and_says_so(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_only(tmp_path)

    def lacking(*_: object) -> str:
        raise ToolchainError("triton: not installed (install it: pip)")

    for name in ("fingerprint", "build"):
        monkeypatch.setattr(SimulatedBackend, name, lacking)
    result = tune(tmp_path, "here")
    assert result.table is not None
    assert result.table.rows[0].verdict is Verdict.REPLACE
    assert any("there is no compiler here (triton: not installed" in note for note in result.notes)


class Other(SimulatedBackend):
    """Another backend of the same kernels, whose compiler is not here."""

    name = "cublaslt"

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.is_lacking = True

    def fingerprint(self, definition: Definition) -> str:
        if self.is_lacking:
            raise ToolchainError("nvcc: not found (install it)")
        return f"other {definition.digest}"

    def spaces(self, definition: Definition, key: FeatureKey) -> tuple[tuple[Space, ...], tuple[Mismatch, ...]]:
        space = Space("toy/second", (Tunable("block", BLOCKS),), (), {})
        return (space,), ()

    def candidate(self, definition: Definition, template: str, config: Mapping[str, ConfigValue]) -> Candidate:
        if self.is_lacking:
            raise ToolchainError("nvcc: not found (install it)")
        made = super().candidate(definition, template, config)
        return replace(made, backend="cublaslt")


def with_other(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Other:
    """Let the defaults be the simulated backend and another one."""
    other = Other(machine)
    monkeypatch.setattr(task, "DEFAULTS", {"cpu": ("cpu", "cublaslt")})
    both = {"cpu": SimulatedBackend(machine), "cublaslt": other}
    monkeypatch.setattr(task, "make_backends", lambda names, *_: tuple(both[name] for name in names))
    return other


def test_what_was_compiled_of_one_backend_is_searched_beside_what_another_compiles_here(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = with_other(machine, monkeypatch)
    other.is_lacking = False
    compile_only(tmp_path)
    store = CompiledStore(store_of(tmp_path))
    definition = load_definition(tmp_path / "defs" / "toy.json")
    kept = store.index(definition, "cublaslt", "cpu:avx2")
    assert kept is not None
    first = store.index(definition, "cpu", "cpu:avx2")
    assert first is not None
    store.put_index(definition, replace(first, compiled=()))  # as --backends other would leave it
    other.is_lacking = True
    machine.asked.clear()
    result = tune(tmp_path, "here", trials=40)
    assert machine.asked["built"] >= len(BLOCKS)
    assert any(note.startswith(f"cublaslt: searches only the {len(BLOCKS)} candidates") for note in result.notes)
    assert result.trials["PASSED"] >= 2 * len(BLOCKS)
    assert not any(note.startswith("cpu:") for note in result.notes)


def test_a_default_backend_that_cannot_build_here_is_a_note_and_one_that_is_asked_for_an_error(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = with_other(machine, monkeypatch)
    for dry_run in (True, False):
        result = tune(tmp_path, "here", dry_run=dry_run)
        assert "cublaslt: nothing is searched, as it cannot build here: nvcc: not found (install it)" in result.notes
    assert result.table is not None
    monkeypatch.setattr(task, "make_backends", lambda *_: (other,))
    monkeypatch.setattr(task, "NAMES", {"cpu": ("cpu", "cublaslt")})
    with pytest.raises(ToolchainError, match="nvcc: not found"):
        tune(tmp_path, "there", backends=("cublaslt",))


def test_a_search_held_to_a_store_goes_on_where_it_was_interrupted(machine: Machine, tmp_path: Path) -> None:
    compile_only(tmp_path)
    machine.interrupt_after = 4
    assert tune(tmp_path, "here", compiled_only=True).interrupted
    machine.interrupt_after = None
    result = tune(tmp_path, "here", compiled_only=True)
    assert result.table is not None
    assert max(machine.tried.values()) <= 2, "only the interrupted trial runs again"
    assert sum(count > 1 for count in machine.tried.values()) <= 1


def test_held_to_nothing_a_search_is_refused(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--compiled-only: needs candidates compiled for toy.*--compile-only"):
        tune(tmp_path, "nowhere", compiled_only=True)


def test_a_candidate_that_was_lost_fails_and_the_others_are_tried(machine: Machine, tmp_path: Path) -> None:
    compile_only(tmp_path)
    lost = next(store_of(tmp_path).glob("candidates/*.zst"))
    lost.unlink()
    result = tune(tmp_path, "here", compiled_only=True)
    assert result.trials["COMPILE_ERROR"] == 1
    assert result.trials["PASSED"] >= 5


@pytest.mark.parametrize(
    ("backend", "timeout_s", "given_s"), [("cpu", 7, 7), ("cutlass", 7, 300), ("cutlass", 400, 400)]
)
def test_a_compilation_has_timeout_s_and_one_by_cutlass_five_minutes_at_least(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, timeout_s: float, given_s: float
) -> None:
    given: list[float] = []
    build = SimulatedBackend.build

    def spy(self: SimulatedBackend, *arguments: Any, timeout_s: float, jobs: int) -> Any:
        given.append(timeout_s)
        return build(self, *arguments, timeout_s=timeout_s, jobs=jobs)

    monkeypatch.setattr(SimulatedBackend, "build", spy)
    monkeypatch.setattr(SimulatedBackend, "name", backend)
    compile_only(tmp_path, timeout_s=timeout_s)
    tune(tmp_path, "there", timeout_s=timeout_s)
    assert set(given) == {given_s}
    given.clear()
    compile_only(tmp_path, "again", timeout_s=timeout_s, budget_s=5)
    assert max(given) <= 5, "the budget bounds them all"


# Targets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["", "cuda"])
def test_compiling_needs_an_architecture(tmp_path: Path, target: str) -> None:
    with pytest.raises(InputError, match=r"--compile-only: needs a --target .*cuda:sm_90a"):
        compile_only(tmp_path, target=target)


@needs_triton
def test_triton_candidates_for_a_gpu_that_is_not_here_hold_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = _small_gemm(tmp_path)
    result = fibc.compile_only(
        written, out=tmp_path / "out", target="cuda:sm_90a", backends=("triton",), trials=1, max_mb=0.02, timeout_s=300
    )
    assert result.target == "cuda:sm_90a"
    assert sum(item.compiled for item in result.templates) >= 1
    assert result.num_bytes <= 20_000
    forbidden = re.compile(rb"/(?:tmp|home|usr|root|opt|work)\b|python|cp3")
    for content in unpacked(store_of(tmp_path, "out")):
        assert not forbidden.search(content), content[:200]
    store = CompiledStore(store_of(tmp_path, "out"))
    index = store.index(load_definition(written), "triton", "cuda:sm_90a")
    assert index is not None
    artifact = store.get(index.compiled[0], Cache(tmp_path / "elsewhere"))
    assert artifact is not None
    assert artifact.resources["arch"] == "sm_90a"
    assert f"{artifact.symbol}_prepare".encode() in Path(artifact.library_path).read_bytes()


def _small_gemm(tmp_path: Path) -> Path:
    """Write a GEMM of one size."""
    document = json.loads((Path(__file__).parent.parent / "defs" / "gemm.json").read_text())
    document |= {"name": "small", "axes": {**document["axes"], "N": {"type": "const", "value": 256}}}
    path = tmp_path / "small.json"
    path.write_text(json.dumps(document))
    workload = {"uuid": "w1", "axes": {"M": 1}, "inputs": {"A": {"type": "random"}, "B": {"type": "random"}}}
    line = {"definition": "small", "solution": None, "workload": workload, "evaluation": None}
    path.with_suffix(".workloads.jsonl").write_text(json.dumps(line) + "\n")
    return path

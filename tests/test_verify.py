"""Provenance: a published package says what it is made of, and each part can be computed again."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from simulation import Machine, SimulatedBackend, write_definition

import fibc
import fibc.installed
import fibc.provenance
import fibc.rebuild
import fibc.verification
from fibc.paths import OutLayout
from fibc.provenance import sha256
from fibc.records import RecordLog
from fibc.runtime.package import read_table
from fibc.schema.upkeep import VerifyResult

pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path, lambda block, rows: {1: 1.3, 2: 1.2}.get(block, 0.8) if rows != 2 else 0.8)
    made.install(monkeypatch)
    for module in (fibc.rebuild, fibc.verification):
        monkeypatch.setattr(module, "make_backends", lambda *_: (SimulatedBackend(made),))
    return made


def tune(tmp_path: Path) -> Path:
    path = write_definition(tmp_path / "defs", (1, 2, 4))
    result = fibc.tune(path, out=tmp_path / "out", target="cpu", split=(1.0, 0.0, 0.0))
    return Path(result.package)


def verify(tmp_path: Path, *, rebuild: bool = False) -> VerifyResult:
    (result,) = fibc.verify(tmp_path / "out", rebuild=rebuild)
    return result


def verdicts(result: VerifyResult, verdict: str) -> list[str]:
    return [item.item for item in result.items if item.verdict == verdict]


def test_a_published_package_says_what_it_is_made_of(machine: Machine, tmp_path: Path) -> None:
    package = tune(tmp_path)
    table = read_table(package)
    manifest = json.loads((package / "current" / "manifest.json").read_text())
    assert manifest["definition_digest"] == table.definition_digest
    assert manifest["num_workloads"] == 3
    assert manifest["versions"]["torch"] == table.environment["torch"]
    (variant,) = manifest["variants"]
    assert variant["symbol"] == table.variants[0].symbol
    assert variant["source_sha256"] == sha256("// toy")
    assert variant["sanitizer"] == "not run"
    assert [(item["cell"], item["n_sessions"]) for item in manifest["regions"]] == [("1", 8), ("3..4", 8)]
    files = {path.name for path in (package / "current").iterdir() if path.is_file()} - {"manifest.json"}
    assert set(manifest["files"]) == files


def test_every_item_of_a_package_that_nobody_touched_is_the_same(machine: Machine, tmp_path: Path) -> None:
    tune(tmp_path)
    result = verify(tmp_path, rebuild=True)
    assert result.sound
    assert not [item for item in result.items if item.verdict != "same"], "the linker repeats itself here"
    names = " ".join(item.item for item in result.items)
    for part in ("definition", "workloads", "native", "tolerance", "table", "regions", "recipe", "made again _native"):
        assert part in names
    assert {"evidence of 1", "evidence of 3..4"} <= set(verdicts(result, "same"))


def test_a_night_leaves_a_package_that_verifies(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(tmp_path)
    known = dict(fibc.installed.package_facts())
    monkeypatch.setattr(fibc.installed, "package_facts", lambda: {**known, "flashinfer": "99.0"})
    machine.speedup = lambda block, rows: 0.8 if block == 1 and rows == 1 else {1: 1.3, 2: 1.2}.get(block, 0.8)
    (result,) = fibc.retune(tmp_path / "out", salt="tonight")
    assert [flip.cell for flip in result.flips] == ["1"]
    seen = verify(tmp_path, rebuild=True)
    assert [item for item in seen.items if item.verdict != "same"] == []


@pytest.mark.parametrize("name", ["table.msgpack", "surface.py", "_native"])
def test_a_changed_file_is_named(machine: Machine, tmp_path: Path, name: str) -> None:
    package = tune(tmp_path)
    (path,) = (package / "current").resolve().glob(f"{name}*")
    path.write_bytes(path.read_bytes() + b"\n")
    result = verify(tmp_path)
    assert not result.sound
    assert any(name in item.item or "cannot be read" in item.text for item in result.items if item.verdict != "same")


def test_an_added_file_is_named(machine: Machine, tmp_path: Path) -> None:
    package = tune(tmp_path)
    (package / "current" / "extra.py").touch()
    assert verdicts(verify(tmp_path), "differs") == ["file extra.py"]


def rewrite(tmp_path: Path, kind: str, change: Callable[[object], None]) -> None:
    """Write the records again, with the values of one kind changed."""
    path = OutLayout(tmp_path / "out").records("toy")
    kept = list(RecordLog(path, definition="", environment="").read())
    path.unlink()
    for (definition, environment), records in itertools.groupby(kept, lambda item: (item.definition, item.environment)):
        with RecordLog(path, definition=definition, environment=environment) as log:
            for record in records:
                if record.kind == kind:
                    change(record.value)
                log.append(record.kind, record.value)


def test_raw_pairs_that_say_something_else_are_found(machine: Machine, tmp_path: Path) -> None:
    tune(tmp_path)

    def faster(value: object) -> None:
        assert isinstance(value, dict)
        if value["stage"] == "reconfirm" and value["arm"]["key"] == "1":
            value["pairs"][0]["native_s"] *= 3.0

    rewrite(tmp_path, "samples", faster)
    assert verdicts(verify(tmp_path), "differs") == ["evidence of 1"]


def test_a_kernel_of_other_bytes_is_found(machine: Machine, tmp_path: Path) -> None:
    tune(tmp_path)

    def other(value: object) -> None:
        assert isinstance(value, dict)
        for kernel in value["kernels"].values():
            kernel["source"] += " changed"

    rewrite(tmp_path, "published", other)
    (item,) = verdicts(verify(tmp_path), "differs")
    assert item.endswith(" source")


def test_records_that_are_gone_are_missing_and_nothing_else_is(machine: Machine, tmp_path: Path) -> None:
    tune(tmp_path)
    OutLayout(tmp_path / "out").records("toy").unlink()
    result = verify(tmp_path)
    assert verdicts(result, "missing") == ["records"]
    assert not verdicts(result, "differs")


def test_another_version_of_the_bounds_is_said_and_no_damage(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(tmp_path)
    monkeypatch.setattr(fibc.verification, "tolerance_digest", lambda: "another")
    result = verify(tmp_path)
    assert verdicts(result, "unknown") == ["tolerance policy"]
    assert result.sound


def test_a_module_made_again_from_records_has_the_same_manifest(machine: Machine, tmp_path: Path) -> None:
    package = tune(tmp_path)
    (built,) = fibc.build(tmp_path / "out", out=tmp_path / "again")
    for name in ("manifest.json", "table.msgpack", "module.cpp"):
        assert (Path(built.package) / "current" / name).read_bytes() == (package / "current" / name).read_bytes()


def test_a_package_without_a_manifest_is_not_sound(machine: Machine, tmp_path: Path) -> None:
    package = tune(tmp_path)
    (package / "current" / "manifest.json").unlink()
    assert not verify(tmp_path).sound
    shutil.rmtree((package / "current").resolve())
    assert verdicts(verify(tmp_path), "missing") == ["generation"]

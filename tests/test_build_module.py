"""Building and publishing a package: cached, atomic, old generations left alone, failures said plainly."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pybind11
import pytest
import torch
import toys

from fibc import isolation, toolchain
from fibc.cache import Cache
from fibc.codegen import build as module_build
from fibc.codegen import compile as cxx
from fibc.codegen import generations, package
from fibc.errors import BuildError, InputError, RecordError, ToolchainError
from fibc.runtime import load, read_table
from fibc.schema.table import DispatchTable


def publish(toy_packages: toys.Packages, out: Path, **changes: object) -> Path:
    table = replace(toys.gemm_table(), **changes)  # type: ignore[arg-type]
    return toys.publish(table, out, toy_packages.cache, toy_packages.kernels)


def inputs(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, toys.GEMM_K), torch.randn(toys.GEMM_N, toys.GEMM_K)


def test_the_same_table_is_built_once(
    toy_packages: toys.Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = publish(toy_packages, tmp_path)
    generation = package.current(first)
    assert generation is not None
    extension = next(generation.glob("_native*"))
    before = (extension.stat().st_ino, extension.stat().st_mtime_ns)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing has to be compiled")

    monkeypatch.setattr(isolation, "run", refuse)
    publish(toy_packages, tmp_path)
    assert package.current(first) == generation
    assert (extension.stat().st_ino, extension.stat().st_mtime_ns) == before


def test_a_new_generation_stands_beside_the_old_ones_until_they_are_collected(
    toy_packages: toys.Packages, tmp_path: Path
) -> None:
    published = publish(toy_packages, tmp_path)
    old = load(published)
    seen = [package.current(published)]
    for alpha in (0.04, 0.03):
        publish(toy_packages, tmp_path, alpha=alpha)
        seen.append(package.current(published))
    assert len(set(seen)) == 3
    assert all(path.is_dir() for path in seen if path is not None)
    assert seen[0] is not None
    assert generations.collect(published, 2) == (seen[0].name,)
    assert [path.is_dir() for path in seen if path is not None] == [False, True, True]
    a, b = inputs()
    torch.testing.assert_close(old.run(a, b), a @ b.T + 1)  # still mapped, though its file is gone
    new = load(published)
    assert new is not old
    assert (old.table()["alpha"], new.table()["alpha"]) == (0.05, 0.03)
    assert load(published) is new
    assert not list(published.glob(".fibc-*"))


def test_a_failed_build_leaves_the_published_package_alone(
    toy_packages: toys.Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = publish(toy_packages, tmp_path)
    generation = package.current(published)
    garbage = tmp_path / "garbage.o"
    garbage.write_bytes(b"no object")
    table = replace(toys.gemm_table(), alpha=0.02)
    objects = {variant.symbol: garbage for variant in table.variants}
    with pytest.raises(BuildError, match=r"link of _native.*: .*ended with 1"):
        module_build.build(table, objects, published, toy_packages.cache)
    assert package.current(published) == generation
    assert not list(published.glob(".fibc-*"))
    monkeypatch.setattr(package, "swap_symlink", _fail)
    with pytest.raises(RecordError, match="disk is full"):
        publish(toy_packages, tmp_path, alpha=0.01)
    assert package.current(published) == generation


def _fail(*_: object) -> None:
    raise RecordError("disk is full")


def test_a_variant_without_an_object_is_named(toy_packages: toys.Packages, tmp_path: Path) -> None:
    table = toys.gemm_table()
    objects = {table.variants[0].symbol: toy_packages.kernels, table.variants[1].symbol: tmp_path / "gone.o"}
    names = ", ".join(variant.symbol for variant in table.variants[1:])
    with pytest.raises(BuildError, match=f"fibc_toy_gemm: no object for {names}"):
        module_build.build(table, objects, tmp_path / "package", toy_packages.cache)


def test_an_unwritable_package_is_a_record_error(toy_packages: toys.Packages, tmp_path: Path) -> None:
    (tmp_path / "fibc_toy_gemm").write_text("in the way")
    with pytest.raises(RecordError, match=r"fibc_toy_gemm: cannot be written"):
        publish(toy_packages, tmp_path)


def test_missing_python_headers_say_what_installs_them(
    toy_packages: toys.Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(ToolchainError, match=rf"Python\.h: not found in .*apt-get install python{version}-dev"):
        cxx.compile_entry("module", toy_packages.cache)


def test_fibcs_own_objects_are_compiled_anew_where_anything_that_they_follow_from_changes(
    toy_packages: toys.Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests: list[str] = []

    def compile_nothing(source: Path, digest: str, cache: Cache, includes: Sequence[Path]) -> Path:
        digests.append(digest)
        return source

    def keys() -> tuple[str, ...]:
        digests.clear()
        cxx.compile_entry("module", toy_packages.cache)
        cxx.compile_entry("harness", toy_packages.cache)
        cxx.compile_table("int x;\n", toy_packages.cache)
        return tuple(digests)

    monkeypatch.setattr(cxx, "_compile", compile_nothing)
    *python, aten = cxx.entry_includes()
    (tmp_path / "ATen").mkdir()
    (tmp_path / "ATen" / "dlpack.h").write_text((aten / "ATen" / "dlpack.h").read_text() + "// another version\n")
    found = toolchain.find()
    first = keys()
    assert keys() == first
    assert len(set(first)) == 3
    for owner, name, other, num_changed in (
        (cxx, "_headers_digest", lambda: "other", 3),
        (cxx, "COMPILE_FLAGS", ("-O1",), 3),
        (toolchain, "find", lambda: replace(found, digest="other"), 3),
        (sys, "version", "3.99", 2),
        (cxx, "EXTENSION_SUFFIX", ".other.so", 2),
        (pybind11, "__version__", "99.0", 2),
        (cxx, "entry_includes", lambda: (*python, tmp_path), 2),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            changed = keys()
        assert sum(a != b for a, b in zip(first, changed, strict=True)) == num_changed, name
    assert keys() == first


def test_the_digest_of_headers_is_that_of_every_text_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = cxx._headers_digest.__wrapped__
    monkeypatch.setattr(cxx, "INCLUDE", tmp_path)
    deep = tmp_path / "fibc" / "entry"
    deep.mkdir(parents=True)
    (tmp_path / "fibc" / "a.h").write_text("1")
    seen = [digest()]
    (deep / "b.h").write_text("2")
    seen.append(digest())
    (deep / "b.h").write_text("3")
    seen.append(digest())
    (deep / "b.h").rename(deep / "c.h")
    seen.append(digest())
    assert len(set(seen)) == 4


def test_a_compilation_that_fails_shows_the_compilers_words(toy_packages: toys.Packages) -> None:
    with pytest.raises(BuildError, match=r"compilation of .*\.cpp: .*(\n.*)*'nonsense' does not name a type"):
        cxx.compile_table("nonsense;\n", toy_packages.cache)


def test_the_table_in_a_package_is_the_table_that_was_built(toy_packages: toys.Packages) -> None:
    assert read_table(toy_packages.path("toy_gemm")) == toys.gemm_table()


def test_what_is_no_package_is_refused(toy_packages: toys.Packages, tmp_path: Path) -> None:
    for read in (load, read_table):
        with pytest.raises(InputError, match="must be a generated package, got no such directory"):
            read(tmp_path / "nothing")
        with pytest.raises(InputError, match="must be a generated package, got a directory without one"):
            read(tmp_path)
    torn = publish(toy_packages, tmp_path) / "current" / "table.msgpack"
    torn.write_bytes(torn.read_bytes()[:100])
    with pytest.raises(InputError, match="must be a dispatch table, got: "):
        read_table(torn.parents[1])


def test_loading_again_returns_the_loaded_package(toy_packages: toys.Packages) -> None:
    path = toy_packages.path("toy_gemm")
    assert load(path) is load(str(path))
    assert str(path.parent) not in sys.path


def test_a_package_that_fails_to_import_leaves_nothing_behind(toy_packages: toys.Packages, tmp_path: Path) -> None:
    published = publish(toy_packages, tmp_path)
    next((published / "current").glob("_native*")).write_bytes(b"no extension")
    before = set(sys.modules)
    with pytest.raises(ImportError):
        load(published)
    assert {name for name in set(sys.modules) - before if name.startswith("fibc_toy")} == set()


def test_two_definitions_share_a_directory(toy_packages: toys.Packages) -> None:
    table: DispatchTable = read_table(toy_packages.path("toy_update"))
    assert table.definition == "toy_update"
    assert load(toy_packages.path("toy_gemm")).run is not load(toy_packages.path("toy_update")).run

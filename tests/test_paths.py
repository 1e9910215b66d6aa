"""File names, the layout of --out, and files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fibc import settings
from fibc.errors import InputError, RecordError
from fibc.paths import NAME_MAX_BYTES, OutLayout, atomic_write, check_out_writable, safe_name, swap_symlink


def disk_full(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@given(st.text(), st.sampled_from(["", ".o", ".records", ".json.sum"]))
def test_a_safe_name_is_one_visible_file_name_that_fits(name: str, suffix: str) -> None:
    safe = safe_name(name, suffix)
    assert safe.endswith(suffix)
    assert 0 < len(safe.encode()) <= NAME_MAX_BYTES
    assert safe.isascii()
    assert not {"/", "\0", " "} & set(safe)
    assert not safe.startswith(".")


@given(st.lists(st.text(alphabet="aA./ ü\0-_", max_size=6), min_size=2, max_size=2, unique=True))
def test_different_names_stay_different(names: list[str]) -> None:
    assert safe_name(names[0]) != safe_name(names[1])


def test_an_ordinary_name_is_kept_as_it_is() -> None:
    assert safe_name("gemm_bf16_n4096_k4096", ".records") == "gemm_bf16_n4096_k4096.records"


@pytest.mark.parametrize("length", [NAME_MAX_BYTES - 8, NAME_MAX_BYTES - 7, 253, 5000])
def test_names_beyond_the_limit_of_the_file_system_are_hashed_and_can_be_written(tmp_path: Path, length: int) -> None:
    path = OutLayout(tmp_path).records("x" * length)
    atomic_write(path, b"data")
    assert path.read_bytes() == b"data"
    assert path != OutLayout(tmp_path).records("x" * (length + 1))


def test_a_file_is_replaced_as_a_whole_and_leaves_no_temporary(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file"
    atomic_write(target, b"old")
    atomic_write(target, b"new")
    assert target.read_bytes() == b"new"
    assert [entry.name for entry in target.parent.iterdir()] == ["file"]


def test_a_written_file_has_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        atomic_write(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_full_disk_leaves_the_old_file_and_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    atomic_write(target, b"old")
    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(RecordError, match="No space left"):
        atomic_write(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_writer_killed_in_the_middle_leaves_the_old_file_and_the_next_run_cleans_up(tmp_path: Path) -> None:
    layout = OutLayout(tmp_path / "out")
    targets = [
        layout.records("gemm"),
        layout.package("gemm") / "table",
        layout.dataset / "a" / "b",
        layout.root / "file",
    ]
    code = """
import os, signal, sys
from pathlib import Path
from fibc.paths import atomic_write
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
atomic_write(Path(sys.argv[1]), b"new")
"""
    for target in targets:
        atomic_write(target, b"old")
        ended = subprocess.run([sys.executable, "-c", code, str(target)], check=False)
        assert ended.returncode == -signal.SIGKILL
        assert target.read_bytes() == b"old"
        assert len(list(target.parent.glob(".fibc-*"))) == 1
    layout.remove_unfinished()
    assert sorted(path for path in layout.root.rglob("*") if path.is_file()) == sorted(targets)


def test_readers_see_only_whole_files_while_a_writer_replaces_them(tmp_path: Path) -> None:
    target = tmp_path / "file"
    contents = [bytes([digit]) * 100_000 for digit in range(20)]
    atomic_write(target, contents[0])
    stop = threading.Event()

    def write() -> None:
        for content in contents:
            atomic_write(target, content)
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while not stop.is_set():
            assert target.read_bytes() in contents
    finally:
        writer.join()


def test_a_link_is_swapped_in_one_step_and_stays_relative(tmp_path: Path) -> None:
    link = tmp_path / "current"
    for generation in ("g1", "g2"):
        (tmp_path / generation).mkdir()
        swap_symlink(link, generation)
        assert str(link.readlink()) == generation
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["current", "g1", "g2"]


def test_a_link_that_cannot_be_swapped_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "current"
    swap_symlink(link, "g1")
    for step in ("symlink_to", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, step, disk_full)
            with pytest.raises(RecordError, match="current: cannot be pointed at g2: No space left"):
                swap_symlink(link, "g2")
        assert str(link.readlink()) == "g1", f"as before a {step} that failed: it is never away"
        assert list(tmp_path.iterdir()) == [link]


def test_an_out_directory_is_made_with_its_parents_and_left_empty(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "with space ü"
    check_out_writable(out)
    assert list(out.iterdir()) == []


def test_an_out_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--out: .*file/out must be a directory .* got: Not a directory .*\(choose"):
        check_out_writable(tmp_path / "file" / "out")


def test_an_out_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="must be a directory"):
        check_out_writable(tmp_path / "file")


def test_a_refused_out_leaves_no_directory_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "mkstemp", disk_full)
    with pytest.raises(InputError, match="No space left"):
        check_out_writable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_nothing_in_out_but_packages_can_be_imported(tmp_path: Path) -> None:
    layout = OutLayout(tmp_path)
    others = [layout.dataset, layout.records("op").parent, layout.sources("op").parent, layout.studies, layout.lock]
    assert layout.package("op").name.isidentifier()
    assert not any(path.name.isidentifier() for path in others)
    assert all(path.parent == tmp_path for path in [*others, layout.package("op")])


def test_the_cache_directory_follows_its_variable_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FIBC_CACHE_DIR", raising=False)
    assert settings.cache_dir() == Path("/home/someone/.cache/fibc")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert settings.cache_dir() == Path("/home/someone/.cache/fibc")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert settings.cache_dir() == Path("/xdg/fibc")
    monkeypatch.setenv("FIBC_CACHE_DIR", "/own")
    assert settings.cache_dir() == Path("/own")


def test_no_known_home_gives_no_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: object = None) -> NoReturn:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FIBC_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert settings.cache_dir() is None

"""The content-addressed cache, also where its directory is shared, damaged, read-only or absent."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fibc import cache as cache_module
from fibc.cache import Cache
from fibc.errors import RecordError


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def blocked_root(tmp_path: Path) -> Path:
    """A directory that nobody can make, whoever runs the test: its parent is a file."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "cache"


def test_what_is_put_is_found_and_nothing_else(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    path = cache.put_bytes("object", "d1", ".o", b"code")
    assert cache.get("object", "d1", ".o") == path
    assert cache.get_bytes("object", "d1", ".o") == b"code"
    assert cache.get("object", "d1", ".so") is None
    assert cache.get("object", "d2", ".o") is None
    assert cache.get("source", "d1", ".o") is None


def test_a_file_is_copied_in(tmp_path: Path) -> None:
    (tmp_path / "built.o").write_bytes(b"code")
    path = Cache(tmp_path / "cache").put_file("object", "d1", ".o", tmp_path / "built.o")
    (tmp_path / "built.o").unlink()
    assert path.read_bytes() == b"code"


def test_another_process_finds_what_one_has_put(tmp_path: Path) -> None:
    Cache(tmp_path).put_json("gate", "d1", {"passed": True, "replaced": [1, 2.5]})
    assert Cache(tmp_path).get_json("gate", "d1") == {"passed": True, "replaced": [1, 2.5]}


def test_opening_a_cache_touches_no_disk(tmp_path: Path) -> None:
    assert Cache(tmp_path / "cache").get("object", "d1", ".o") is None
    assert not (tmp_path / "cache").exists()


@given(st.text(max_size=300), st.text(max_size=300))
def test_hostile_names_stay_inside_the_cache(tmp_path_factory: pytest.TempPathFactory, kind: str, digest: str) -> None:
    root = tmp_path_factory.getbasetemp() / "cache"
    path = Cache(root).put_bytes(kind, digest, ".o", b"x")
    assert path.resolve().parent.parent == root.resolve()
    assert Cache(root).get(kind, digest, ".o") == path


@pytest.mark.parametrize("length", [245, 253, 255, 5000])
def test_names_beyond_the_limit_of_the_file_system_are_found_again(tmp_path: Path, length: int) -> None:
    Cache(tmp_path).put_bytes("object", "d" * length, ".o", b"long")
    assert Cache(tmp_path).get_bytes("object", "d" * length, ".o") == b"long"
    assert Cache(tmp_path).get_bytes("object", "d" * (length + 1), ".o") is None


def test_an_entry_truncated_anywhere_is_a_miss_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value = {"name": "gemm", "values": [1, 2, 3]}
    path = Cache(tmp_path).put_json("note", "d1", value)
    whole = path.read_bytes()
    cache = Cache(tmp_path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert cache.get_json("note", "d1") is None
        assert cache.get("note", "d1", ".json") is None
    assert warnings_of(caplog) == [f"{path}: damaged or torn, ignored and made anew"]
    cache.put_json("note", "d1", value)
    assert cache.get_json("note", "d1") == value


def test_an_entry_without_its_sum_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = Cache(tmp_path).put_bytes("object", "d1", ".o", b"code")
    path.with_name(path.name + ".sum").unlink()
    assert Cache(tmp_path).get("object", "d1", ".o") is None
    assert len(warnings_of(caplog)) == 1


def test_json_that_another_tool_wrote_wrongly_is_a_miss_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tmp_path)
    cache.put_bytes("note", "d1", ".json", b'{"half": ')
    assert cache.get_json("note", "d1") is None
    assert cache.get_json("note", "d1") is None
    assert len(warnings_of(caplog)) == 1


def test_an_entry_that_cannot_be_read_is_a_miss_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tmp_path)
    for digest in ("d1", "d2"):
        cache.path("object", digest, ".o").mkdir(parents=True)
        assert cache.get("object", digest, ".o") is None
    assert len(warnings_of(caplog)) == 1


def test_a_cache_that_cannot_be_made_works_in_a_private_directory_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(blocked_root(tmp_path))
    assert cache.get("object", "d1", ".o") is None
    for digest in ("d1", "d2"):
        cache.put_bytes("object", digest, ".o", b"code")
        assert cache.get_bytes("object", digest, ".o") == b"code"
    assert cache.private
    private_said = [text for text in warnings_of(caplog) if "keeps its cache in" in text]
    assert len(private_said) == 1
    assert "Not a directory (set FIBC_CACHE_DIR" in private_said[0]
    assert str(cache.root) in private_said[0]


def test_a_read_only_cache_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = Cache(tmp_path).put_bytes("object", "old", ".o", b"old")

    def read_only(path: Path) -> str | None:
        return "Read-only file system" if path == tmp_path else None

    monkeypatch.setattr(cache_module, "_trouble", read_only)
    cache = Cache(tmp_path)
    new = cache.put_bytes("object", "new", ".o", b"new")
    assert cache.get("object", "old", ".o") == old
    assert cache.get("object", "new", ".o") == new
    assert tmp_path not in new.parents
    assert len(warnings_of(caplog)) == 1


def test_a_disk_that_fills_up_sends_new_entries_to_the_private_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tmp_path)
    cache.put_bytes("object", "d1", ".o", b"one")
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if tmp_path in path.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    cache.put_bytes("object", "d2", ".o", b"two")
    assert cache.get_bytes("object", "d1", ".o") == b"one"
    assert cache.get_bytes("object", "d2", ".o") == b"two"
    assert len(warnings_of(caplog)) == 1
    assert sorted(path.name for path in (tmp_path / "object").iterdir()) == ["d1.o", "d1.o.sum"]


def test_where_nothing_can_be_written_the_error_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RecordError, match=r"object/d1\.o: cannot be written: No space left on device"):
        Cache(tmp_path).put_bytes("object", "d1", ".o", b"code")


def test_a_directory_that_a_cleaner_removes_in_between_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes
    removals = iter([True, True])

    def remove_then_write(path: Path, data: bytes) -> int:
        if next(removals, False):
            shutil.rmtree(tmp_path / "object")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", remove_then_write)
    cache = Cache(tmp_path)
    assert cache.put_bytes("object", "d1", ".o", b"code").read_bytes() == b"code"
    assert not cache.private


def test_the_private_directory_goes_with_its_process() -> None:
    code = "from fibc.cache import Cache; print(Cache().put_bytes('object', 'd1', '.o', b'x'))"
    environment = {**os.environ, "FIBC_CACHE_DIR": "/dev/null/cache"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stderr.count("/dev/null/cache") == 1
    assert not Path(ended.stdout.strip()).parents[1].exists()


def test_a_forked_child_leaves_its_parents_private_directory(tmp_path: Path) -> None:
    cache = Cache(blocked_root(tmp_path))
    path = cache.put_bytes("object", "d1", ".o", b"code")
    cache_module._remove_in(os.getpid() + 1, cache.root)
    assert path.exists()
    cache_module._remove_in(os.getpid(), cache.root)
    assert not path.exists()


WRITER = """
import sys
from pathlib import Path
from fibc.cache import Cache
cache, content = Cache(Path(sys.argv[1])), b"the same bytes for the same key" * 5000
print("ready", flush=True)
input()
for number in range(25):
    cache.put_bytes("object", f"d{number}", ".o", content)
    assert cache.get_bytes("object", f"d{number}", ".o") == content
"""


def test_eight_writers_of_the_same_keys_all_find_whole_entries(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
            for _ in range(8)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        assert [(writer.communicate()[1], writer.returncode) for writer in writers] == [("", 0)] * 8
    names = {path.name for path in (tmp_path / "object").iterdir()}
    assert names == {f"d{number}.o{suffix}" for number in range(25) for suffix in ("", ".sum")}

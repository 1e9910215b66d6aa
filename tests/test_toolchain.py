"""The toolchain is found, named in messages where it is missing, and identified by its content."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fibc import toolchain
from fibc.errors import ToolchainError


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    toolchain._find.cache_clear()
    yield
    toolchain._find.cache_clear()


def _program(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)
    return path


def test_the_compiler_of_this_machine_is_found_and_says_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    found = toolchain.find()
    done = subprocess.run([found.cxx, "--version"], capture_output=True, text=True, check=True)
    assert found.version == done.stdout.splitlines()[0]
    assert all(os.access(program, os.X_OK) for program in (found.cxx, found.objcopy, found.ninja))


def test_cxx_names_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(_program(tmp_path / "my compiler", "echo mine 1.0")))
    found = toolchain.find()
    assert (found.cxx, found.version) == (tmp_path / "my compiler", "mine 1.0")


def test_another_compiler_of_the_same_name_and_version_has_another_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(_program(tmp_path / "cxx", "echo mine 1.0")))
    first = toolchain.find().digest
    toolchain._find.cache_clear()
    assert toolchain.find().digest == first
    _program(tmp_path / "cxx", "echo mine 1.0 # rebuilt")
    toolchain._find.cache_clear()
    assert toolchain.find().digest != first


def test_no_compiler_at_all_is_an_error_that_names_what_installs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"needs a C\+\+ compiler, found none .*apt-get install g\+\+"):
        toolchain.find()


@pytest.mark.parametrize(
    ("says", "message"),
    [("exit 3", "does not answer --version"), ("true", "it prints nothing"), ("kill -SEGV $$", "does not answer")],
)
def test_a_compiler_that_does_not_answer_is_an_error(
    says: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(_program(tmp_path / "cxx", says)))
    with pytest.raises(ToolchainError, match=message):
        toolchain.find()


def test_a_cxx_that_is_no_program_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match="CXX='no-such-compiler' names no program"):
        toolchain.find()


def test_missing_binutils_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(_program(tmp_path / "cxx", "echo mine 1.0")))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"objcopy: not found on PATH .*binutils"):
        toolchain.find()

"""The C++ tests of the header-only runtime, and the shared entry under strict warnings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fibc import toolchain
from fibc.codegen import compile as cxx
from fibc.paths import INCLUDE

ROOT = Path(__file__).parents[1]


def run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_headers_and_their_tests_pass(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    cmake, ctest = (shutil.which(program, path=path) for program in ("cmake", "ctest"))
    if cmake is None or ctest is None:
        pytest.skip("needs cmake (pip install cmake)")
    tools = toolchain.find()
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools.ninja}", f"-DCMAKE_CXX_COMPILER={tools.cxx}"]
    run([cmake, "-S", ROOT, "-B", tmp_path, *generator])
    run([cmake, "--build", tmp_path, "-j", "2"])
    run([ctest, "--test-dir", tmp_path, "--output-on-failure", "--no-tests=error"])


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["module", "harness"])
def test_the_entry_compiles_without_a_warning(name: str) -> None:
    includes = [f"-isystem{path}" for path in cxx.entry_includes()]
    strict = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror", "-fsyntax-only"]
    source = INCLUDE / "fibc" / "entry" / f"{name}.cpp"
    run([toolchain.find().cxx, "-std=c++17", f"-I{INCLUDE}", *includes, *strict, source])

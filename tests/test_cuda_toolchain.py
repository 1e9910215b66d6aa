"""nvcc and CUTLASS are found in a fixed order, named in messages where they are missing, and identified by content."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fibc import cuda_toolchain
from fibc.errors import ToolchainError

VERSION_H = "#define CUTLASS_MAJOR {}\n#define CUTLASS_MINOR {}\n#define CUTLASS_PATCH 1\n"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    cuda_toolchain._find.cache_clear()
    yield
    cuda_toolchain._find.cache_clear()


class Machine:
    """A machine with nothing of CUDA but what a test puts on it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._packages: dict[str, Path] = {}
        for variable in ("CUDA_HOME",):
            monkeypatch.delenv(variable, raising=False)
        (root / "bin").mkdir()
        monkeypatch.setenv("PATH", f"{root / 'bin'}:/usr/bin:/bin")
        monkeypatch.setattr(cuda_toolchain, "SYSTEM_ROOTS", root / "local")
        monkeypatch.setattr(shutil, "which", self._which)
        monkeypatch.setattr(importlib.util, "find_spec", self._find_spec)

    def nvcc(self, root: str | Path, release: str = "13.0") -> Path:
        """Put a toolkit at ``root`` and return its compiler."""
        top = self.root / root
        (top / "bin").mkdir(parents=True, exist_ok=True)
        (top / "include" / "cccl").mkdir(parents=True, exist_ok=True)
        program = top / "bin" / "nvcc"
        program.write_text(
            "#!/bin/sh\n"
            'case "$1" in\n'
            f"--version) echo 'Cuda compilation tools, release {release}, V{release}.88'; echo 'Build {release}/r1';;\n"
            f"""--dryrun) echo '#$ INCLUDES="-I{top}/bin/../include"  ' >&2\n"""
            f"""  echo '#$ SYSTEM_INCLUDES="-isystem" "{top}/include/cccl"  ' >&2;;\n"""
            "esac\n"
        )
        program.chmod(0o755)
        return program

    def cutlass(self, major: int = 4, minor: int = 2) -> Path:
        """Install the package nvidia-cutlass and return the directory of its headers."""
        package = self.root / "site" / "cutlass_library"
        headers = package / "source" / "include"
        (headers / "cutlass").mkdir(parents=True, exist_ok=True)
        (headers / "cutlass" / "version.h").write_text(VERSION_H.format(major, minor))
        self._packages["cutlass_library"] = package
        return headers

    def wheels(self, release: str = "13.0") -> Path:
        """Install nvcc's wheels and return the compiler."""
        self._packages["nvidia"] = self.root / "site" / "nvidia"
        return self.nvcc("site/nvidia/cu13", release)

    def _which(self, name: str) -> str | None:
        found = self.root / "bin" / name
        return str(found) if found.is_file() else None

    def _find_spec(self, name: str) -> importlib.machinery.ModuleSpec | None:
        if name not in self._packages:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(self._packages[name])]
        return spec


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_nvcc_comes_from_cuda_home_then_path_then_usr_local_then_the_wheels(
    bare: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare.cutlass()
    expected = [(bare.wheels(), "PyPI")]
    older, newer = bare.nvcc("local/cuda-12.9"), bare.nvcc("local/cuda-12.10")
    expected.append((newer, str(newer.parent.parent)))
    assert older != newer
    linked = bare.nvcc("local/cuda")
    expected.append((linked, str(linked.parent.parent)))
    on_path = bare.nvcc(".")
    expected.append((on_path, "PATH"))
    at_home = bare.nvcc("home")

    monkeypatch.setenv("CUDA_HOME", str(at_home.parent.parent))
    found = cuda_toolchain.find()
    assert (found.nvcc, found.origin) == (at_home, "CUDA_HOME")
    monkeypatch.delenv("CUDA_HOME")
    for program, origin in reversed(expected):
        found = cuda_toolchain.find()
        assert (found.nvcc, found.origin) == (program, origin)
        cuda_toolchain._find.cache_clear()
        program.unlink()
        if program == newer:
            older.unlink()


def test_what_is_found_says_its_versions_and_where_its_headers_are(bare: Machine) -> None:
    headers = bare.cutlass()
    bare.nvcc(".")
    found = cuda_toolchain.find()
    assert (found.version, found.cutlass_version, found.cutlass) == ("13.0", "4.2.1", headers)
    assert found.includes == (bare.root / "include", bare.root / "include" / "cccl")


def test_another_compiler_or_another_header_is_another_digest(bare: Machine) -> None:
    headers = bare.cutlass()
    bare.nvcc(".")
    digests = {cuda_toolchain.find().digest}
    cuda_toolchain._find.cache_clear()
    assert cuda_toolchain.find().digest in digests
    bare.nvcc(".", release="13.1")
    cuda_toolchain._find.cache_clear()
    digests.add(cuda_toolchain.find().digest)
    (headers / "cutlass" / "gemm.h").write_text("// new\n")
    cuda_toolchain._find.cache_clear()
    digests.add(cuda_toolchain.find().digest)
    assert len(digests) == 3


def test_the_place_of_the_tools_is_no_part_of_the_digest(bare: Machine) -> None:
    bare.cutlass()
    bare.nvcc(".")
    first = cuda_toolchain.find().digest
    (bare.root / "bin" / "nvcc").unlink()
    bare.nvcc("local/cuda")
    cuda_toolchain._find.cache_clear()
    assert cuda_toolchain.find().digest == first


INSTALLS = r'pip install "fibc\[cuda\]"'


def test_no_nvcc_is_an_error_that_says_where_it_was_looked_for_and_what_installs_it(bare: Machine) -> None:
    bare.cutlass()
    with pytest.raises(ToolchainError, match=rf"nvcc: .* found none \(looked at CUDA_HOME, PATH, .*{INSTALLS}"):
        cuda_toolchain.find()


def test_a_cuda_home_without_a_compiler_is_an_error_and_nothing_else_is_taken(
    bare: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare.cutlass()
    bare.nvcc(".")
    monkeypatch.setenv("CUDA_HOME", str(bare.root / "empty"))
    with pytest.raises(ToolchainError, match=rf"CUDA_HOME=.*empty: holds no bin/nvcc \(unset it, or .*{INSTALLS}"):
        cuda_toolchain.find()


def test_an_old_nvcc_is_an_error(bare: Machine) -> None:
    bare.cutlass()
    bare.nvcc(".", release="12.3")
    with pytest.raises(ToolchainError, match=rf"needs release 12\.4 or newer, found release 12\.3 .*{INSTALLS}"):
        cuda_toolchain.find()


def test_no_cutlass_is_an_error(bare: Machine) -> None:
    bare.nvcc(".")
    with pytest.raises(ToolchainError, match=rf"CUTLASS: needs the headers of the package nvidia-cutlass.*{INSTALLS}"):
        cuda_toolchain.find()


def test_an_old_cutlass_is_an_error(bare: Machine) -> None:
    bare.nvcc(".")
    bare.cutlass(3, 9)
    with pytest.raises(ToolchainError, match=r"needs CUTLASS 4\.2 or newer, found 3\.9\.1"):
        cuda_toolchain.find()


@pytest.mark.parametrize("says", ["exit 3", "kill -SEGV $$", "true"])
def test_an_nvcc_that_does_not_answer_is_an_error(bare: Machine, says: str) -> None:
    bare.cutlass()
    program = bare.nvcc(".")
    program.write_text(f"#!/bin/sh\n{says}\n")
    with pytest.raises(ToolchainError, match=r"does not (answer --version|say its version)"):
        cuda_toolchain.find()

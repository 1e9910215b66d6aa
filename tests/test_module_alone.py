"""A generated package by itself: no fibc, no compiler, no second runtime, anywhere on disk, on other machines."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import toys

from fibc.runtime import load
from fibc.schema.table import DispatchTable, NativeSource

ALONE = """
import importlib.abc, os, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fibc", "pybind11", "jinja2", "msgpack", "pydantic", "optuna", "ninja", "scipy"):
            raise ImportError(f"{name}: not on this machine")

sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[1])
import torch
import fibc_toy_gemm as op

a, b = torch.randn(40, 8), torch.randn(16, 8)
torch.testing.assert_close(op.run(a, b), a @ b.T + 2)
mapped = {line.split()[-1] for line in open("/proc/self/maps")}
print("runtimes", sum("omp" in os.path.basename(path) for path in mapped))
assert op.stats()["serial_regions"] == 0

child = os.fork()  # after a parallel region: another one would never end here
if child == 0:
    torch.testing.assert_close(op.run(a, b), (a.unsqueeze(1) * b).sum(-1) + 2)
    assert op.stats()["hits"]["fibc_toy_parallel"] == 2
    print("child", os.getpid() != os.getppid(), flush=True)
    os._exit(0)
print("status", os.waitpid(child, 0)[1])
"""


def python(script: str, *arguments: object, launcher: tuple[str, ...] = ()) -> str:
    command = [*launcher, sys.executable, "-I", "-c", script, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PATH": "/nonexistent"}, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def variation(toy_packages: toys.Packages, out: Path, **changes: object) -> tuple[DispatchTable, Path]:
    table = replace(toys.gemm_table(), **changes)  # type: ignore[arg-type]
    return table, toys.publish(table, out, toy_packages.cache, toy_packages.kernels)


def fresh_copy(toy_packages: toys.Packages, out: Path) -> Path:
    """Return a copy of the GEMM package, which ``load`` imports anew."""
    return Path(shutil.copytree(toy_packages.path("toy_gemm"), out / "fibc_toy_gemm", symlinks=True))


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, toys.GEMM_K), torch.randn(toys.GEMM_N, toys.GEMM_K)


def test_a_copied_package_runs_without_fibc_or_a_compiler_and_survives_a_fork(
    toy_packages: toys.Packages, tmp_path: Path
) -> None:
    out = tmp_path / "a moved dïrectory"
    fresh_copy(toy_packages, out)
    said = python(ALONE, out).split("\n")
    assert "runtimes 1" in said
    assert "child True" in said
    assert "status 0" in said


def test_a_copy_that_followed_the_link_works(
    toy_packages: toys.Packages, tmp_path: Path, inputs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    shutil.copytree(toy_packages.path("toy_gemm"), tmp_path / "fibc_toy_gemm", symlinks=False)
    module = load(tmp_path / "fibc_toy_gemm")
    torch.testing.assert_close(module.run(*inputs), inputs[0] @ inputs[1].T + 1)


def extension(package: Path) -> Path:
    return next((package / "current").glob("_native*.so"))


def test_the_extension_needs_only_the_c_library_and_names_no_path(toy_packages: toys.Packages) -> None:
    path = extension(toy_packages.path("toy_gemm"))
    dynamic = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.+?)\]", dynamic))
    assert needed <= {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
    content = path.read_bytes()
    for forbidden in (toys.SOURCE.parents[1], toy_packages.out.parent, Path(sys.prefix), Path(torch.__file__).parent):
        assert str(forbidden).encode() not in content


def test_the_extension_exports_its_initialiser_only(toy_packages: toys.Packages) -> None:
    path = extension(toy_packages.path("toy_gemm"))
    listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in listed.splitlines()] == ["PyInit__native"]


def test_entry_and_table_are_baseline_code(toy_packages: toys.Packages) -> None:
    objects = sorted((toy_packages.cache.root / "object").glob("*.o"))
    assert len(objects) >= 4  # the entry and three tables
    for path in (*objects, extension(toy_packages.path("toy_gemm"))):
        code = subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", path], capture_output=True, text=True, check=True
        ).stdout
        assert not re.findall(r"%[yz]mm\d|%k[1-7]\b|\tv(?!err|erw|m)[a-z0-9]+ ", code), path


def test_another_cpu_model_goes_native_unless_it_is_accepted(
    toy_packages: toys.Packages,
    tmp_path: Path,
    inputs: tuple[torch.Tensor, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = inputs
    elsewhere = replace(toys.validity(), model="Some other CPU", l3_bytes=1)
    _, package = variation(toy_packages, tmp_path, validity=elsewhere)
    with pytest.warns(RuntimeWarning, match=r"fibc_toy_gemm: was tuned on Some other CPU, found .*FIBC_ACCEPT_CPU=1"):
        module = load(package)
    torch.testing.assert_close(module.run(a, b), a @ b.T)
    assert module.explain(a, b)["reason"] == "cpu_model"
    assert set(module.environment["differs"]) >= {"model", "l3_bytes"}
    assert module.prepare("cpu") is False
    monkeypatch.setenv("FIBC_ACCEPT_CPU", "1")
    accepted = load(fresh(package, tmp_path / "accepted"))
    torch.testing.assert_close(accepted.run(a, b), a @ b.T + 1)


def fresh(package: Path, out: Path) -> Path:
    return Path(shutil.copytree(package, out / package.name, symlinks=True))


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        (lambda here: replace(here, l2_bytes=4096), "caches", "was tuned with 4096 bytes of L2"),
        (lambda here: replace(here, isa=("avx2", "avx999")), "isa", "needs avx2 avx999, found avx2"),
        (lambda here: replace(here, num_threads=here.num_threads + 1), "num_threads", None),
    ],
)
def test_another_machine_goes_native_and_says_why(
    toy_packages: toys.Packages,
    tmp_path: Path,
    inputs: tuple[torch.Tensor, torch.Tensor],
    change: Callable[[object], object],
    reason: str,
    message: str | None,
) -> None:
    a, b = inputs
    _, package = variation(toy_packages, tmp_path, validity=change(toys.validity()))
    if message is None:
        module = load(package)
    else:
        with pytest.warns(RuntimeWarning, match=message):
            module = load(package)
    torch.testing.assert_close(module.run(a, b), a @ b.T)
    assert module.explain(a, b)["reason"] == reason


def test_a_variant_above_the_cpus_isa_goes_native(
    toy_packages: toys.Packages, tmp_path: Path, inputs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    a, b = inputs
    variants = tuple(replace(variant, isa="avx999") for variant in toys.gemm_table().variants)
    _, package = variation(toy_packages, tmp_path, variants=variants)
    module = load(package)
    torch.testing.assert_close(module.run(a, b), a @ b.T)
    assert module.explain(a, b)["reason"] == "variant_isa"


def test_a_torch_without_the_exchange_interface_goes_native_and_says_what_it_needs(
    toy_packages: toys.Packages,
    tmp_path: Path,
    inputs: tuple[torch.Tensor, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = inputs
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    needs = r"fibc_toy_gemm: needs the DLPack exchange interface of torch 2\.10, found torch .*upgrade torch"
    with pytest.warns(RuntimeWarning, match=needs):
        module = load(fresh_copy(toy_packages, tmp_path))
    torch.testing.assert_close(module.run(a, b), a @ b.T)
    assert module.explain(a, b)["reason"] == "torch"


@pytest.mark.parametrize(("value", "disabled"), [("1", True), ("other, toy_gemm", True), ("other", False), ("", False)])
def test_the_environment_disables_all_or_some_definitions(
    toy_packages: toys.Packages,
    tmp_path: Path,
    inputs: tuple[torch.Tensor, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    disabled: bool,
) -> None:
    monkeypatch.setenv("FIBC_DISABLE", value)
    module = load(fresh_copy(toy_packages, tmp_path))
    assert module.explain(*inputs)["reason"] == ("disabled" if disabled else "hit")
    module.enable()
    assert module.explain(*inputs)["reason"] == "hit"


def test_a_native_kernel_that_cannot_be_imported_is_answered_by_the_reference(
    toy_packages: toys.Packages, tmp_path: Path
) -> None:
    native = NativeSource("not_there.fast", "from not_there import fast as call\n", "option", "0")
    _, package = variation(toy_packages, tmp_path, native=native)
    with pytest.warns(RuntimeWarning, match=r"native kernel not_there\.fast cannot be imported \(ModuleNotFoundError"):
        module = load(package)
    a, b = torch.randn(200, toys.GEMM_K), torch.randn(toys.GEMM_N, toys.GEMM_K)
    torch.testing.assert_close(module.run(a, b), a @ b.T)
    assert module.explain(a, b)["native"] == "reference"


def test_a_table_without_variants_is_all_native_and_silent(
    toy_packages: toys.Packages, tmp_path: Path, inputs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    _, package = variation(toy_packages, tmp_path, variants=(), regions=(), features=(), rows=())
    module: ModuleType = load(package)
    torch.testing.assert_close(module.run(*inputs), inputs[0] @ inputs[1].T)
    assert module.explain(*inputs)["reason"] == "region"


@pytest.mark.e2e
def test_an_older_cpu_answers_native(toy_packages: toys.Packages, tmp_path: Path) -> None:
    emulator = shutil.which("qemu-x86_64-static")
    if emulator is None:
        pytest.skip("needs qemu-x86_64-static (apt-get install qemu-user-static)")
    variation(toy_packages, tmp_path, validity=replace(toys.validity(), isa=("avx2", "avx512")))
    script = """
import sys, warnings
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import torch, fibc_toy_gemm as op
a, b = torch.randn(4, 8), torch.randn(16, 8)
torch.testing.assert_close(op.run(a, b), a @ b.T)
print(op.environment["reason"], op.environment["here"]["isa"])
"""
    said = python(script, tmp_path, launcher=(emulator, "-cpu", "Haswell"))
    assert said == "isa ['avx2']\n"

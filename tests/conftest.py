"""Options and fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import filelock
import pytest
import torch
import toys

from fibc.cache import Cache
from fibc.runtime import load


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write generated text over the golden files")


@pytest.fixture(scope="session")
def update_golden(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--update-golden"))


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A directory that all workers of a run have."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture
def shared_cache(request: pytest.FixtureRequest, run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of their own for the tests of a file: what one of them has built, the others find."""
    monkeypatch.setenv("FIBC_CACHE_DIR", str(run_directory / f"{request.path.stem}-cache"))


@pytest.fixture(scope="session")
def toy_packages(run_directory: Path) -> toys.Packages:
    """Toy packages, built once for all workers of a run."""
    root = run_directory / "toys"
    packages = toys.Packages(root / "out", root / "toys.o", Cache(root / "cache"))
    with filelock.FileLock(root.with_suffix(".lock")):
        if not root.exists():
            packages.out.mkdir(parents=True)
            toys.compile_kernels(root)
            for table in (toys.gemm_table(), toys.update_table(), toys.stub_table()):
                toys.publish(table, packages.out, packages.cache, packages.kernels)
    return packages


@pytest.fixture
def gemm(toy_packages: toys.Packages) -> Iterator[ModuleType]:
    """The toy GEMM, enabled and with its own native kernel."""
    yield from _fresh(toy_packages.path("toy_gemm"))


@pytest.fixture
def update(toy_packages: toys.Packages) -> Iterator[ModuleType]:
    """The toy update in place."""
    yield from _fresh(toy_packages.path("toy_update"))


def _fresh(path: Path) -> Iterator[ModuleType]:
    module = load(path)
    surface = module.explain.__self__
    served = getattr(torch.ops.fibc, surface.table()["definition"]).fibc_served
    served.run, served.native = surface.run, surface._call_native  # another test may have imported a copy since
    yield module
    module.enable()
    module.set_native(None)

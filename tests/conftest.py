"""Options and fixtures that several test files share, and what makes a test the same in every run.

With ``CI=true`` in the environment hypothesis draws the same examples in every run, so that none fails by a new draw.
Anywhere else each run draws others, and an example that fails is kept in ``.hypothesis`` and tried first from then on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import filelock
import pytest
import torch
import toys
from hypothesis import HealthCheck, settings

from fibc.cache import Cache
from fibc.codegen import build as modules
from fibc.runtime import load

# No example is held to a time: on a loaded machine any may take long.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True, print_blob=True)
settings.load_profile("same" if os.environ.get("CI") == "true" else "explore")


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


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The tensors of a test are its own, whichever tests ran before it in the same process."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(0)


@pytest.fixture(scope="session")
def entry_cache(run_directory: Path) -> Path:
    """A cache that holds the objects of fibc's own C++, half a minute of compiling, and nothing else."""
    root = run_directory / "entry-cache"
    with filelock.FileLock(root.with_suffix(".lock")):
        if not root.exists():
            modules.prepare(Cache(run_directory / "entry-cache-made"))
            (run_directory / "entry-cache-made").rename(root)
    return root


@pytest.fixture
def own_cache(tmp_path: Path, entry_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for a test, in which nothing is known but fibc's own objects."""
    root = tmp_path / "cache"
    shutil.copytree(entry_cache, root)
    monkeypatch.setenv("FIBC_CACHE_DIR", str(root))
    return root


@pytest.fixture
def shared_cache(
    request: pytest.FixtureRequest, run_directory: Path, entry_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of their own for the tests of a file: what one of them has built, the others find."""
    root = run_directory / f"{request.path.stem}-cache"
    with filelock.FileLock(root.with_suffix(".lock")):
        if not root.exists():
            shutil.copytree(entry_cache, root)
    monkeypatch.setenv("FIBC_CACHE_DIR", str(root))


@pytest.fixture(scope="session")
def toy_packages(run_directory: Path, entry_cache: Path) -> toys.Packages:
    """Toy packages, built once for all workers of a run."""
    root = run_directory / "toys"
    packages = toys.Packages(root / "out", root / "toys.o", Cache(root / "cache"))
    with filelock.FileLock(root.with_suffix(".lock")):
        if not root.exists():
            packages.out.mkdir(parents=True)
            shutil.copytree(entry_cache, root / "cache")
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

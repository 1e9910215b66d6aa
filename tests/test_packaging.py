"""fibc installed from its sdist and from its wheel works outside the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from simulation import write_definition

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parent.parent

OUTSIDE = """
import sys
from pathlib import Path
import fibc, fibc.search, fibc.codegen, fibc.pipeline
root = Path(fibc.__file__).parent
assert sys.prefix in str(root), root
files = "py.typed templates/kernels/gemm/matvec.toml templates/dispatch/module.cpp.j2 include/fibc/kernel_abi.h"
for needed in files.split():
    assert (root / needed).is_file(), needed
print(fibc.search.__file__)
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An sdist of the checkout, and a wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    return {"sdist": next(out.glob("*.tar.gz")), "wheel": next(out.glob("*.whl"))}


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_an_installed_fibc_is_whole_and_tunes_outside_the_checkout(
    distributions: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=120)
    python = environment / "bin" / "python"
    site = next((environment / "lib").glob("python*/site-packages"))
    # The dependencies of this environment, as a path: an editable fibc in there is not seen through it.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--no-build-isolation", str(distributions[kind])],
        check=True,
        timeout=300,
    )

    work = tmp_path / "elsewhere"
    path = write_definition(work, (1, 2))
    env = {**os.environ, "FIBC_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([str(python), "-c", OUTSIDE], cwd=work, env=env, check=True, timeout=120)
    done = subprocess.run(
        [str(environment / "bin" / "fibc"), "tune", str(path), "--out", "build", "--dry-run", "--json"],
        cwd=work,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["definition"] == "toy"

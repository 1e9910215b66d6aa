"""``fibc doctor`` says which GPUs there are, and what they lack."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fibc import cuda_toolchain
from fibc.doctor_cuda import examine_cuda, nvcc, packaged
from fibc.errors import ToolchainError
from fibc.gpus import Found
from fibc.schema.silicon import CudaValidity, Gpu

GPU = Gpu(
    0, "GPU-1", "0000:1b:00.0", "NVIDIA H200", "", "580.1", 232448, CudaValidity("sm_90a", 90, 132, 60 << 20, 1 << 37)
)


def absent() -> str:
    raise ToolchainError("nvcc is missing: install it")


def test_a_gpu_without_a_compiler_lacks_one() -> None:
    facts, missing = examine_cuda(Found((GPU,)), {"triton": lambda: "3.6.0", "nvcc": absent})
    assert facts["gpu 0"] == "NVIDIA H200 (sm_90a, 132 SMs, 60 MiB of L2, 128.0 GiB)"
    assert facts["driver"] == "580.1"
    assert facts["triton"] == "3.6.0"
    assert facts["gpu 0 state"]  # clocks where there is NVML, else why not
    assert missing == ["nvcc is missing: install it"]


def test_a_machine_without_a_gpu_lacks_nothing() -> None:
    facts, missing = examine_cuda(Found((), "no NVIDIA driver"), {"nvcc": absent})
    assert facts == {
        "gpu": "none: no NVIDIA driver",
        "nvcc": "not found (nvcc is missing: install it)",
        "gpu backends": "triton: compiles here; cutlass: what --compile-only left in --out (nvcc not found); "
        "cublaslt: asked on a GPU",
    }
    assert missing == []


def test_a_package_is_its_version_or_the_command_that_installs_it() -> None:
    assert packaged("pytest")() == pytest.__version__
    with pytest.raises(ToolchainError, match=r"no-such-package is not installed: pip install 'fibc\[cuda\]'"):
        packaged("no-such-package")()


def test_nvcc_is_the_one_that_compiles_cutlass_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(cuda_toolchain, "find", lambda: SimpleNamespace(nvcc="x/nvcc", version="13.0", origin="PATH"))
    assert nvcc() == "x/nvcc (13.0, from PATH)"

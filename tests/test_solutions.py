"""A solution says what is true of its source: its language, its entry and every header of fibc that it includes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from kernel_calls import gemm, key, machine

from fibc import cuda_toolchain, publish
from fibc.backends import cublaslt, cutlass, triton
from fibc.backends.cpu import CpuBackend
from fibc.backends.solutions import SolutionForm, solution_form
from fibc.cache import Cache
from fibc.cuda_toolchain import CudaToolchain
from fibc.errors import BuildError
from fibc.schema.candidate import Candidate, Target
from fibc.schema.trace import Solution
from fibc.search.space import ConfigSpace

GEMM = gemm(256, 512, "bfloat16")
ALGORITHM = "f32:4096:01"


def check(candidate: Candidate, source: str, form: SolutionForm) -> Solution:
    """Return the solution; its entry is in its source and its includes are there, each in turn."""
    made = publish._solution(GEMM, candidate, source)
    texts = {item.path: item.content for item in made.sources}
    assert re.search(rf"\b{form.entry}\(", texts[form.file])
    for text in texts.values():
        for included in re.findall(r'^#include "(fibc/[^"]+)"', text, re.MULTILINE):
            assert included in texts
    assert made.spec.entry_point == f"{form.file}::{form.entry}"
    return made


def test_a_candidate_for_a_cpu_is_cpp_with_the_headers_of_kernels(tmp_path: Path) -> None:
    backend = CpuBackend(machine("avx2"), Cache(tmp_path))
    (space, *_), _ = backend.spaces(GEMM, key(4))
    config = ConfigSpace(space).default()
    assert config is not None
    candidate = backend.candidate(GEMM, space.template, dict(config))
    source = backend._render(backend._templates[space.template], GEMM, candidate.config).source
    form = solution_form(candidate, source)
    made = check(candidate, source, form)
    assert (made.spec.language, form.entry, made.spec.target_hardware) == ("cpp", "fibc_entry", ("cpu",))
    assert "fibc/kernel_abi.h" in form.headers


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_triton_candidate_is_triton_and_brings_no_header(tmp_path: Path) -> None:
    backend = triton.TritonBackend(Cache(tmp_path))
    defaults = {space.template: ConfigSpace(space).default() for space in backend.spaces(GEMM, key(4))[0]}
    served = {template: config for template, config in defaults.items() if config is not None}
    assert len(served) >= 2
    for template, config in served.items():
        candidate = backend.candidate(GEMM, template, dict(config))
        kernel = backend.render(GEMM, candidate).kernel
        form = solution_form(candidate, kernel.text)
        made = check(candidate, kernel.text, form)
        assert (made.spec.language, form.file, form.entry) == ("triton", "kernel.py", kernel.function)
        assert len(made.sources) == 1
        assert made.spec.target_hardware == ("cuda:sm_90a",)


def test_a_cutlass_candidate_is_cuda_with_its_own_headers_and_a_dependency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = Path("/nowhere")
    found = CudaToolchain(nowhere / "nvcc", "PATH", "13.0", (), nowhere / "cutlass", "4.2.0", "0" * 16)
    monkeypatch.setattr(cuda_toolchain, "find", lambda: found)
    backend = cutlass.CutlassBackend(Cache(tmp_path))
    for space in backend.spaces(GEMM, key(64))[0]:
        config = ConfigSpace(space).default()
        assert config is not None
        candidate = backend.candidate(GEMM, space.template, dict(config))
        source = backend._render(backend._templates[space.template], GEMM, candidate.config).kernel
        form = solution_form(candidate, source)
        made = check(candidate, source, form)
        assert (made.spec.language, form.file, form.entry) == ("cuda", "kernel.cu", "fibc_gemm")
        assert made.spec.dependencies == ("cutlass",)
        assert form.headers
        assert all(path.startswith("fibc/cutlass/") for path in form.headers)


def test_an_algorithm_of_cublaslt_is_cpp_with_the_headers_of_launchers_and_a_dependency(tmp_path: Path) -> None:
    backend = cublaslt.CublasLtBackend(machine("avx2"), Cache(tmp_path))
    config = {"library": "13.0.2", "algorithm": ALGORITHM}
    candidate = backend.candidate(GEMM, "gemm/cublaslt", config)
    source = backend._render(backend._templates["gemm/cublaslt"], GEMM, candidate.config).source
    form = solution_form(candidate, source)
    made = check(candidate, source, form)
    assert (made.spec.language, form.entry, made.spec.dependencies) == ("cpp", "fibc_entry", ("cublas",))
    assert "fibc/cuda/cublaslt_gemm.h" in form.headers
    assert not any(path.startswith("fibc/simd/") for path in form.headers)


def test_the_kernel_of_a_triton_source_is_its_last_function_and_another_source_is_none() -> None:
    candidate = Candidate("triton", "mine/kernel", (), "0" * 16, Target("cuda", "sm_90a"))
    helper, kernel = "@triton.jit\ndef helper(x): ...\n", "@triton.jit(noinline=True)\ndef kernel(y): ...\n"
    source = f"{helper}\n\n{kernel}\n\ndef host(): ...\n"
    assert solution_form(candidate, source).entry == "kernel"
    with pytest.raises(BuildError, match="must be a source of a backend that searches"):
        solution_form(candidate, "int x;")

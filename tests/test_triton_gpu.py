"""Triton templates on a GPU: launched from C++, within the bound of float64, captured and replayed."""

from __future__ import annotations

import pytest
import torch
from triton_on_gpu import Kernel, Problem, choose, error_in_bounds, graph_us

from fibc.backends.base import BuildFailure
from fibc.backends.triton import TritonBackend
from fibc.cache import Cache

pytestmark = pytest.mark.gpu

PROBLEMS = (
    *(
        Problem("gemm", dtype, (4096, 4096), size)
        for dtype in ("bfloat16", "float16")
        for size in (1, 7, 33, 128, 1000)
    ),
    Problem("gemm", "float32", (512, 1024), 33),
    Problem("gemm", "bfloat16", (256, 7168), 16),
    Problem("gemm", "bfloat16", (40, 511), 3),
    *(Problem("norm", "bfloat16", (4096,), size, in_place) for size in (1, 33, 8192) for in_place in (False, True)),
    Problem("norm", "float16", (83,), 7),
)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_configs_are_within_the_bound_and_a_graph_of_them_replays(
    problem: Problem, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    backend = TritonBackend(Cache())
    definition = problem.definition()
    candidates = [backend.candidate(definition, *choice) for choice in choose(backend, problem, limit=4, seed=0)]
    built = backend.build(definition, candidates, timeout_s=120, jobs=8)
    assert candidates
    for candidate in candidates:
        artifact = built[candidate.digest]
        assert not isinstance(artifact, BuildFailure), (str(candidate), artifact.log)
        kernel = Kernel(artifact.library_path, artifact.symbol, problem)
        assert error_in_bounds(kernel, problem) <= 1.0, str(candidate)
        inputs = problem.inputs(seed=1)
        assert graph_us([kernel.bind(inputs, problem.outputs(inputs))]) > 0.5, str(candidate)
        assert not bool(kernel.counters.any()), str(candidate)

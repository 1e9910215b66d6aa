"""CUTLASS kernels on a GPU: exact sums, guard bands, equal bits, counters left zero, captured graphs."""

from __future__ import annotations

from pathlib import Path

import check_candidates
import pytest
from candidate_calls import Kernel
from kernel_calls import gemm, key

from fibc.backends.base import BuildFailure
from fibc.backends.cutlass import CutlassBackend
from fibc.cache import Cache
from fibc.schema.candidate import ConfigValue
from fibc.search.space import ConfigSpace

pytestmark = pytest.mark.gpu

SWAPPED, PLAIN = "gemm/cutlass_sm90_swapped", "gemm/cutlass_sm90"


@pytest.mark.parametrize(
    ("template", "size", "changed"),
    [
        (SWAPPED, 16, {}),
        (SWAPPED, 64, {"schedule": "pingpong", "tile_n": 64, "epilogue": "direct"}),
        (SWAPPED, 16, {"schedule": "cooperative", "tile_m": 128, "splits": 4, "dependent": True}),
        (SWAPPED, 64, {"schedule": "cooperative", "tile_m": 128, "tile_n": 32, "splits": 0, "cluster_m": 2}),
        (PLAIN, 256, {"schedule": "pingpong", "tile_m": 64, "tile_n": 128, "cluster_m": 2}),
        (PLAIN, 4096, {"raster": "along_m", "swizzle": 2}),
        (PLAIN, 1000, {"splits": 0}),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_kernel_computes_the_product_at_every_number_of_rows(
    tmp_path: Path, template: str, size: int, changed: dict[str, ConfigValue], dtype: str
) -> None:
    definition = gemm(4096, 4096, dtype)
    backend = CutlassBackend(Cache())
    space = next(space for space in backend.spaces(definition, key(size))[0] if space.template == template)
    default = ConfigSpace(space).default()
    assert default is not None
    candidate = backend.candidate(definition, template, dict(default) | changed)
    artifact = backend.build(definition, [candidate], timeout_s=600, jobs=1)[candidate.digest]
    assert not isinstance(artifact, BuildFailure), artifact.log
    library = Path(artifact.library_path)
    entry = {
        "name": str(candidate),
        "library": library.name,
        "symbol": artifact.symbol,
        "dtype": dtype,
        "keys": [(size, 4096, 4096)],
    }
    kernel = Kernel(entry, library.parent)
    assert kernel.prepare(0) == 0
    for n, k in ((4096, 4096), (256, 7168)):
        for rows in check_candidates.CHECKED_ROWS:
            assert check_candidates.check(kernel, rows, n, k) <= 1.0
        check_candidates.check_graph(kernel, 33, n, k)

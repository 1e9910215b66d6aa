"""Compiles the first CUTLASS candidates of some shapes, without a GPU, into a folder that another machine measures.

    python benchmarks/gpu/precompile_cutlass.py --out build/cutlass --shapes 4096x4096,256x7168 --sizes 1,16,64,256

Every instantiation is compiled once, whatever the number of shapes, into fibc's cache. The folder gets the libraries,
and ``manifest.json`` lists each with the keys where its config is valid. ``check_cutlass.py`` reads it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fibc.backends.base import BuildFailure
from fibc.backends.cutlass import CutlassBackend
from fibc.cache import Cache
from fibc.schema.candidate import Artifact, Candidate
from fibc.schema.definition import Definition
from fibc.schema.feature import Cell, FeatureKey, Point
from fibc.search.space import ConfigSpace

REFERENCE = "import torch\n\ndef run(A, B):\n    return torch.matmul(A.float(), B.float().T).to(A.dtype)\n"

SUITE = "6144x4096,4096x4096,28672x4096,4096x14336,256x7168,128x2048"
SUITE_SIZES = "1,4,8,16,33,64,128,256,1000,4096"


def gemm(n: int, k: int, dtype: str) -> Definition:
    """Return C[M, n] = A[M, k] B[n, k]^T."""
    return Definition.model_validate(
        {
            "name": f"gemm_{dtype}_n{n}_k{k}",
            "op_type": "gemm",
            "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": n}, "K": {"type": "const", "value": k}},
            "inputs": {"A": {"shape": ["M", "K"], "dtype": dtype}, "B": {"shape": ["N", "K"], "dtype": dtype}},
            "outputs": {"C": {"shape": ["M", "N"], "dtype": dtype}},
            "reference": REFERENCE,
        }
    )


def key_of(size: int) -> FeatureKey:
    """Return the key of the cell that ends with ``size``."""
    return FeatureKey(Cell(((size, size),)), (Point((("M", size),), "end"),), 0, True)


def choose(
    backend: CutlassBackend, shapes: Sequence[tuple[int, int]], sizes: Sequence[int], dtype: str, each: int
) -> dict[Candidate, list[tuple[int, int, int]]]:
    """Return the first ``each`` candidates of every shape and size, with the (m, n, k) where configs are valid."""
    chosen: dict[Candidate, list[tuple[int, int, int]]] = {}
    spaces = {}
    for n, k in shapes:
        definition = gemm(n, k, dtype)
        for size in sizes:
            found = {space.template: ConfigSpace(space) for space in backend.spaces(definition, key_of(size))[0]}
            spaces[size, n, k] = found
            configs = [(name, config) for name, space in found.items() for config in space.configs()]
            for template, config in backend.rank(definition, key_of(size), configs)[:each]:
                chosen.setdefault(backend.candidate(definition, template, dict(config)), [])
    for candidate, keys in chosen.items():
        for where, found in spaces.items():
            if candidate.template in found and found[candidate.template].holds(candidate.config):
                keys.append(where)
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default=SUITE, help="NxK, separated by commas")
    parser.add_argument("--sizes", default=SUITE_SIZES, help="M, separated by commas")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--each", type=int, default=4, help="candidates of each shape and size")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--dry-run", action="store_true", help="list what would be compiled")
    options = parser.parse_args(arguments)

    backend = CutlassBackend(Cache(), arch_name=options.arch)
    shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in options.shapes.split(","))]
    sizes = [int(size) for size in options.sizes.split(",")]
    chosen = choose(backend, shapes, sizes, options.dtype, options.each)
    for candidate, keys in chosen.items():
        print(f"{candidate}: valid at {len(keys)} keys")
    print(f"{len(chosen)} candidates")
    if options.dry_run:
        return 0

    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    built = backend.build(gemm(*shapes[0], options.dtype), list(chosen), timeout_s=options.timeout_s, jobs=options.jobs)
    entries = []
    failed = 0
    for candidate, keys in chosen.items():
        artifact = built[candidate.digest]
        if isinstance(artifact, BuildFailure):
            failed += 1
            print(f"{candidate}: {artifact.log[-2000:]}", file=sys.stderr)
            continue
        entries.append(_entry(candidate, artifact, keys, options.dtype, options.out))
    (options.out / "manifest.json").write_text(json.dumps(entries, indent=1) + "\n")
    size_mb = sum(file.stat().st_size for file in options.out.iterdir()) / 1e6
    print(f"{len(entries)} built, {failed} failed, {size_mb:.1f} MB, {time.monotonic() - begun:.0f} s")
    return 1 if failed else 0


def _entry(
    candidate: Candidate, artifact: Artifact, keys: list[tuple[int, int, int]], dtype: str, out: Path
) -> dict[str, object]:
    library = Path(artifact.library_path)
    shutil.copyfile(library, out / library.name)
    return {
        "name": str(candidate),
        "library": library.name,
        "symbol": artifact.symbol,
        "dtype": dtype,
        "keys": keys,
        "resources": artifact.resources,
    }


if __name__ == "__main__":
    sys.exit(main())

"""Compiles candidates of some shapes, without a GPU, into a folder that another machine measures.

    python benchmarks/gpu/precompile_candidates.py --out build/cutlass --shapes 4096x4096,256x7168 --sizes 1,16,64,256
    python benchmarks/gpu/precompile_candidates.py --backend triton --configs kit.json --out build/triton-kit

Without ``--configs`` the first ``--each`` candidates of every shape and size are taken: of CUTLASS by its static model,
of Triton in the order of the spaces. ``--configs`` lists what is wanted instead: ``[{"template": "gemm/triton_swap",
"shapes": ["4096x4096"], "sizes": [4, 16], "configs": [{"block_n": 64, "num_stages": 6}]}]``, where a tunable that is
not named has the value of the first valid config that agrees with those that are. One that breaks a law of its space
is compiled all the same and listed with the law, so that laws can be tested too.

The folder gets the libraries, and ``manifest.json`` lists each with the keys (M, N, K) where it is to be timed.
``check_candidates.py`` reads it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fibc.backends.base import BuildFailure
from fibc.backends.cutlass import CutlassBackend
from fibc.backends.triton import TritonBackend
from fibc.cache import Cache
from fibc.schema.candidate import Artifact, Candidate, ConfigValue
from fibc.schema.definition import Definition
from fibc.schema.feature import Cell, FeatureKey, Point
from fibc.schema.space import Space, Tunable
from fibc.search.space import ConfigSpace

REFERENCE = "import torch\n\ndef run(A, B):\n    return torch.matmul(A.float(), B.float().T).to(A.dtype)\n"

SUITE = "6144x4096,4096x4096,28672x4096,4096x14336,256x7168,128x2048"
SUITE_SIZES = "1,4,8,16,33,64,128,256,1000,4096"

Shape = tuple[int, int]
Key = tuple[int, int, int]
Wanted = dict[tuple[Shape, Candidate], list[Key]]
"""Candidates with their keys. Those of CUTLASS serve every shape and stand under the first that asks for them; those of
Triton are made for one."""


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


def shape_of(text: str) -> Shape:
    n, k = text.split("x")
    return int(n), int(k)


def _spaces(backend: CutlassBackend | TritonBackend, definition: Definition, size: int) -> dict[str, ConfigSpace]:
    return {space.template: ConfigSpace(space) for space in backend.spaces(definition, key_of(size))[0]}


def choose_cutlass(
    backend: CutlassBackend, shapes: Sequence[Shape], sizes: Sequence[int], dtype: str, each: int
) -> Wanted:
    """Return the first ``each`` candidates of every shape and size, with every key where their configs are valid."""
    chosen: dict[Candidate, Shape] = {}
    spaces: dict[Key, dict[str, ConfigSpace]] = {}
    for n, k in shapes:
        definition = gemm(n, k, dtype)
        for size in sizes:
            found = spaces[size, n, k] = _spaces(backend, definition, size)
            configs = [(name, config) for name, space in found.items() for config in space.configs()]
            for template, config in backend.rank(definition, key_of(size), configs)[:each]:
                chosen.setdefault(backend.candidate(definition, template, dict(config)), (n, k))
    return {
        (shape, candidate): [
            where
            for where, found in spaces.items()
            if candidate.template in found and found[candidate.template].holds(candidate.config)
        ]
        for candidate, shape in chosen.items()
    }


def choose_triton(
    backend: TritonBackend, shapes: Sequence[Shape], sizes: Sequence[int], dtype: str, each: int
) -> Wanted:
    """Return the first ``each`` candidates of every template, shape and size."""
    wanted: Wanted = {}
    for n, k in shapes:
        definition = gemm(n, k, dtype)
        for size in sizes:
            for template, space in _spaces(backend, definition, size).items():
                for _, config in zip(range(each), space.configs(), strict=False):
                    candidate = backend.candidate(definition, template, dict(config))
                    wanted.setdefault(((n, k), candidate), []).append((size, n, k))
    return wanted


def choose_listed(
    backend: CutlassBackend | TritonBackend, listed: Sequence[Mapping[str, Any]], dtype: str
) -> tuple[Wanted, list[str]]:
    """Return what ``listed`` asks for, with a line for every config and size where it breaks a law.

    Raises:
        SystemExit: If a template does not serve a shape, or no config agrees with a value that is asked for.
    """
    wanted: Wanted = {}
    broken: list[str] = []
    shapes: dict[Candidate, Shape] = {}
    for entry in listed:
        template = entry["template"]
        for n, k in map(shape_of, entry["shapes"]):
            definition = gemm(n, k, dtype)
            for size in entry["sizes"]:
                space = _spaces(backend, definition, size).get(template)
                if space is None:
                    raise SystemExit(f"{template}: does not serve {definition.name} at M={size}")
                for values in entry["configs"]:
                    config = complete(space.space, values)
                    law = space.broken(tuple(config.items()))
                    candidate = backend.candidate(definition, template, config)
                    if law is not None:
                        broken.append(f"{size}x{n}x{k} {candidate}: {law.constraint.message}")
                    shape = shapes.setdefault(candidate, (n, k)) if isinstance(backend, CutlassBackend) else (n, k)
                    wanted.setdefault((shape, candidate), []).append((size, n, k))
    return wanted, broken


def complete(space: Space, values: Mapping[str, ConfigValue]) -> dict[str, ConfigValue]:
    """Return the first valid config that has ``values``; the first choices beside them where none is valid.

    Raises:
        SystemExit: If a name is no tunable's.
    """
    if unknown := set(values) - {tunable.name for tunable in space.tunables}:
        raise SystemExit(f"{space.template}: no tunable {', '.join(sorted(unknown))}")
    fixed = tuple(
        Tunable(tunable.name, (values[tunable.name],)) if tunable.name in values else tunable
        for tunable in space.tunables
    )
    found = ConfigSpace(replace(space, tunables=fixed)).default()
    return dict(found) if found is not None else {tunable.name: tunable.choices[0] for tunable in fixed}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", default="cutlass", choices=("cutlass", "triton"))
    parser.add_argument("--configs", type=Path, help="a JSON file that lists what is wanted")
    parser.add_argument("--shapes", default=SUITE, help="NxK, separated by commas")
    parser.add_argument("--sizes", default=SUITE_SIZES, help="M, separated by commas")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--each", type=int, default=4, help="candidates of each shape and size")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--dry-run", action="store_true", help="list what would be compiled")
    options = parser.parse_args(arguments)

    shapes = [shape_of(shape) for shape in options.shapes.split(",")]
    sizes = [int(size) for size in options.sizes.split(",")]
    broken: list[str] = []
    backend: CutlassBackend | TritonBackend
    if options.backend == "cutlass":
        backend = CutlassBackend(Cache(), arch_name=options.arch, whole=True)
    else:
        backend = TritonBackend(Cache(), arch_name=options.arch)
    if options.configs:
        wanted, broken = choose_listed(backend, json.loads(options.configs.read_text()), options.dtype)
    elif isinstance(backend, CutlassBackend):
        wanted = choose_cutlass(backend, shapes, sizes, options.dtype, options.each)
    else:
        wanted = choose_triton(backend, shapes, sizes, options.dtype, options.each)
    for ((n, k), candidate), keys in wanted.items():
        print(f"{n}x{k} {candidate}: {len(keys)} keys")
    for line in broken:
        print(f"outside of its space: {line}")
    print(f"{len(wanted)} candidates")
    if options.dry_run:
        return 0

    begun = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    entries, failed = [], 0
    for name, artifact, keys, candidate in _built(backend, wanted, options):
        if isinstance(artifact, BuildFailure):
            failed += 1
            print(f"{name}: {artifact.log[-2000:]}", file=sys.stderr)
            continue
        entries.append(_entry(name, candidate, artifact, keys, options.dtype, options.out))
    (options.out / "manifest.json").write_text(json.dumps(entries, indent=1) + "\n")
    size_mb = sum(file.stat().st_size for file in options.out.iterdir()) / 1e6
    print(f"{len(entries)} built, {failed} failed, {size_mb:.1f} MB, {time.monotonic() - begun:.0f} s")
    return 1 if failed else 0


def _built(
    backend: CutlassBackend | TritonBackend, wanted: Wanted, options: argparse.Namespace
) -> Iterator[tuple[str, Artifact | BuildFailure, list[Key], Candidate]]:
    """Yield each candidate's name, what became of it, and its keys."""
    for shape in dict.fromkeys(shape for shape, _ in wanted):
        own = {candidate: keys for (where, candidate), keys in wanted.items() if where == shape}
        definition = gemm(*shape, options.dtype)
        built = backend.build(definition, list(own), timeout_s=options.timeout_s, jobs=options.jobs)
        for candidate, keys in own.items():
            name = str(candidate) if options.backend == "cutlass" else f"{candidate} for {shape[0]}x{shape[1]}"
            yield name, built[candidate.digest], keys, candidate


def _entry(
    name: str, candidate: Candidate, artifact: Artifact, keys: list[Key], dtype: str, out: Path
) -> dict[str, object]:
    library = Path(artifact.library_path)
    shutil.copyfile(library, out / library.name)
    return {
        "name": name,
        "template": candidate.template,
        "config": dict(candidate.config),
        "library": library.name,
        "symbol": artifact.symbol,
        "dtype": dtype,
        "keys": keys,
        "any_shape": candidate.backend == "cutlass",
        "resources": artifact.resources,
    }


if __name__ == "__main__":
    sys.exit(main())

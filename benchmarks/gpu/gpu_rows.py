"""What the GPU benchmarks measure: weight shapes, tuned sizes, sizes that tuning never saw, and their files."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fibc.schema.cells import default_features, make_keys
from fibc.schema.definition import load_definition
from fibc.schema.workload import load_workloads

DEFS = Path(__file__).resolve().parents[2] / "defs"


@dataclass(frozen=True, order=True)
class Shape:
    """A weight of ``C[M, N] = A[M, K] B[N, K]^T``."""

    n: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.n}x{self.k}"

    @property
    def definition(self) -> str:
        return f"gemm_bf16_n{self.n}_k{self.k}"

    @property
    def weight_bytes(self) -> int:
        return self.n * self.k * 2


SHAPES = (
    Shape(6144, 4096),
    Shape(4096, 4096),
    Shape(28672, 4096),
    Shape(4096, 14336),
    Shape(256, 7168),
    Shape(128, 2048),
)
"""Weights of Llama-3.1-8B, DeepSeek-V3 and Qwen3."""

TUNED_SIZES = (1, 4, 8, 16, 33, 64, 128, 256, 1000, 4096)
"""Recorded sizes M, all of them in the tune set."""

UNSEEN_SIZES = (3, 7, 13, 23, 47, 90, 181, 450, 1801)
"""Sizes that nobody recorded: no cell's end and no size at which engines capture graphs, but for those that
``seen_among`` finds. M = 3 is one: it is an end of the cell 3..4, whatever is recorded."""

NORM_ROWS = (1, 16, 64, 1024, 8192)

PEER_SHAPES = (Shape(4096, 4096), Shape(28672, 4096), Shape(4096, 14336))
PEER_SIZES = (1, 16, 64, 256)
"""Twelve rows for peers that compile for every row: the sizes of docs/measuring.md's comparison, on three weights."""


def write_gemm(directory: Path, shape: Shape, sizes: Sequence[int] = TUNED_SIZES) -> Path:
    """Write the definition of a weight, from ``defs/gemm.json``, with a workload per size; return its path."""
    document = json.loads((DEFS / "gemm.json").read_text())
    document["name"] = shape.definition
    document["description"] = f"C = A B^T in bfloat16 with a weight of {shape.n} x {shape.k}: a row of the GPU suite."
    document["axes"] = {
        "M": {"type": "var"},
        "N": {"type": "const", "value": shape.n},
        "K": {"type": "const", "value": shape.k},
    }
    return _write(directory, document, "M", sizes)


def write_norm(directory: Path, name: str, rows: Sequence[int] = NORM_ROWS) -> Path:
    """Write the definition ``defs/<name>.json`` with a workload for each number of rows; return its path."""
    document = json.loads((DEFS / f"{name}.json").read_text())
    axis = next(axis for axis, spec in document["axes"].items() if spec["type"] == "var")
    return _write(directory, document, axis, rows)


def seen_among(definition: Path, sizes: Iterable[int]) -> tuple[int, ...]:
    """Return those of ``sizes`` that are points of a key when all workloads beside ``definition`` are tuned."""
    contract = load_definition(definition)
    workloads = load_workloads(definition.with_suffix(".workloads.jsonl"), contract)
    keys = make_keys(default_features(contract, workloads), workloads, contract)
    (axis,) = contract.var_axes
    points = {dict(point.axes)[axis] for key in keys for point in key.points}
    return tuple(size for size in sizes if size in points)


def _write(directory: Path, document: dict[str, object], axis: str, sizes: Sequence[int]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    name, inputs = str(document["name"]), document["inputs"]
    assert isinstance(inputs, dict)
    path = directory / f"{name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    lines = [
        {
            "definition": name,
            "solution": None,
            "workload": {
                "uuid": str(uuid.uuid5(uuid.NAMESPACE_URL, f"fibc/benchmarks/gpu/{name}/{axis}={size}")),
                "axes": {axis: size},
                "inputs": {argument: {"type": "random"} for argument in inputs},
            },
            "evaluation": None,
        }
        for size in sizes
    ]
    path.with_suffix(".workloads.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path

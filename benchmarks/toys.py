"""Toy packages: real modules around toy kernels, for tests of the module and for the cost of dispatch."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from fibc import environment, toolchain
from fibc.cache import Cache
from fibc.codegen.build import build
from fibc.paths import INCLUDE
from fibc.schema.callspec import Argument, Axis, CallSpec
from fibc.schema.candidate import Candidate, Guards, Target, TensorGuard
from fibc.schema.decision import Comparison, Decision, Verdict
from fibc.schema.digest import digest_text
from fibc.schema.feature import Cell, Feature, Point
from fibc.schema.silicon import CudaValidity
from fibc.schema.table import CpuValidity, DispatchTable, NativeSource, Region, Variant

SOURCE = Path(__file__).with_name("toys.cpp")
CUDA_SOURCE = Path(__file__).with_name("toys.cu")
CUDA_LAUNCHERS = Path(__file__).with_name("toys_cuda.cpp")

CPU_TARGET = Target("cpu", "avx2")

GEMM_N = 16
GEMM_K = 8

GEMM_SPEC = CallSpec(
    "toy_gemm",
    (Axis("M", None), Axis("N", GEMM_N), Axis("K", GEMM_K)),
    (Argument("A", "tensor", "float32", (0, 2)), Argument("B", "tensor", "float32", (1, 2))),
    (Argument("C", "tensor", "float32", (0, 1)),),
)
"""``C = A B^T``; the variants add 1 (up to 4 rows) or 2 (up to 64 rows), or decline (up to 128 rows)."""

GEMM_NATIVE = """
import torch

def call(A, B):
    return torch.matmul(A, B.T)

def call_out(A, B, C):
    torch.matmul(A, B.T, out=C)
"""

UPDATE_SPEC = CallSpec(
    "toy_update",
    (Axis("M", None), Axis("H", None)),
    (
        Argument("x", "tensor", "float32", (0, 1)),
        Argument("state", "tensor", "float32", (0, 1)),
        Argument("scale", "scalar", "float32"),
        Argument("bias", "scalar_tensor", "float32"),
        Argument("mask", "tensor", "bool", (0, 1), optional=True),
    ),
    (Argument("out", "tensor", "float32", (0, 1)), Argument("state", "tensor", "float32", (0, 1), alias=1)),
)
"""``out = x * scale + bias``, ``state += out`` in place; the variant's ``out`` has 1 more."""

UPDATE_NATIVE = """
def call(x, state, scale, bias, mask=None):
    out = x * scale + bias
    if mask is not None:
        out = out * mask
    state += out
    return out, state
"""

STUB_SPEC = CallSpec(
    "toy_stub",
    (Axis("M", None), Axis("H", 64)),
    (
        Argument("x", "tensor", "bfloat16", (0, 1)),
        Argument("residual", "tensor", "bfloat16", (0, 1)),
        Argument("weight", "tensor", "bfloat16", (1,)),
    ),
    (Argument("out", "tensor", "bfloat16", (0, 1)),),
)
"""A norm's arguments around a kernel that does nothing."""

STUB_NATIVE = """
def call(x, residual, weight):
    return x

def call_out(x, residual, weight, out):
    return None
"""

ROWS_SPEC = CallSpec(
    "toy_rows",
    (Axis("M", None), Axis("H", None)),
    (Argument("x", "tensor", "float32", (0, 1)),),
    (Argument("y", "tensor", "float32", (0,)),),
)
"""Row sums on a GPU; the variants mark them: ``ROWS_CELLS``."""

ROWS_BF16_SPEC = replace(ROWS_SPEC, definition="toy_rows_bf16", inputs=(Argument("x", "tensor", "bfloat16", (0, 1)),))

ROWS_CELLS = (
    ("rows", 1, 4, 1.0),
    ("split", 5, 64, 2.0),
    ("cluster", 65, 128, 3.0),
    ("refuses", 129, 132, 0.0),
    ("fault", 133, 136, 0.0),
    ("idle", 137, 140, 0.0),
)
"""Symbol, first and last M, mark: a plain kernel, one with counters and scratch, one in clusters that asks for 100 KiB
of shared memory and may overlap the kernel before it, one that declines, one that faults, one that does nothing."""

ROWS_NATIVE = """
import torch

def call(x):
    return x.float().sum(-1)
"""

COMPARISON = Comparison(
    point=Point((("M", 4),), "end"),
    speedup=2.0,
    ci_low=1.9,
    ci_high=2.1,
    confidence_level=0.95,
    n_sessions=8,
    n_pairs=64,
    session_sd=0.01,
    native_us=20.0,
    candidate_us=10.0,
    stage="reconfirm",
    estimator="hodges-lehmann",
    design="paired-abba-sessions",
    residency="A=hot B=hot",
    mode="eager",
    timer="steady_clock",
    num_threads=2,
)
"""Evidence as a winner's looks."""


@dataclass(frozen=True)
class Packages:
    """Published toy packages.

    Attributes:
        out: Holds ``fibc_toy_gemm``, ``fibc_toy_update`` and ``fibc_toy_stub``.
        kernels: The object they link.
        cache: Has every object that a further build needs.
    """

    out: Path
    kernels: Path
    cache: Cache

    def path(self, definition: str) -> Path:
        return self.out / f"fibc_{definition}"


def validity() -> CpuValidity:
    """Return what a table tuned here and now is bound to."""
    return environment.detect().cpu_validity()


def gemm_table(held: CpuValidity | None = None) -> DispatchTable:
    """Return a table of two serving variants, one that declines, and a cell that stays native."""
    rows = (("plain", 1, 4), ("parallel", 5, 64), ("declines", 65, 128))
    contiguous = TensorGuard("contiguous", 4)
    guards = {
        "plain": Guards((contiguous, contiguous), (contiguous,)),
        "parallel": Guards((TensorGuard("rows", 16), contiguous), (TensorGuard("rows", 4),), 2**20),
        "declines": Guards((TensorGuard("any"), TensorGuard("any")), (contiguous,)),
    }
    variants = tuple(_variant(f"fibc_toy_{name}", guards[name]) for name in sorted(guards))
    symbols = [variant.symbol for variant in variants]
    native = Decision(Cell(((129, 256),)), Verdict.KEEP_NATIVE, "", (COMPARISON,), (), "slower than native")
    return replace(
        _table(GEMM_SPEC, GEMM_NATIVE, "torch.matmul(A, B.T)", held),
        features=(Feature("M", None, (4, 64, 128, 256)),),
        variants=variants,
        rows=(*(_row(first, last, variants[symbols.index(f"fibc_toy_{name}")]) for name, first, last in rows), native),
        regions=tuple(
            Region(Cell(((first, last),)), symbols.index(f"fibc_toy_{name}"), name == "parallel")
            for name, first, last in rows
        ),
    )


def update_table(held: CpuValidity | None = None) -> DispatchTable:
    """Return a table with an output in place, a Python number, a 0-d tensor and an optional argument."""
    rows = TensorGuard("rows")
    variant = _variant("fibc_toy_update", Guards((rows, rows, rows, rows, rows), (rows, rows)))
    return replace(
        _table(UPDATE_SPEC, UPDATE_NATIVE, "eager", held),
        features=(Feature("M", None, (64,)), Feature("H", "M", (1024,))),
        variants=(variant,),
        rows=(Decision(Cell(((1, 64), (1, 1024))), Verdict.REPLACE, variant.candidate.digest, (), (), "shown"),),
        regions=(Region(Cell(((1, 64), (1, 1024))), 0, False),),
    )


def stub_table(held: CpuValidity | None = None) -> DispatchTable:
    """Return a table whose variant does nothing for up to 64 rows."""
    guard = TensorGuard("contiguous", 16)
    variant = _variant("fibc_toy_nothing", Guards((guard, guard, guard), (guard,)))
    return replace(
        _table(STUB_SPEC, STUB_NATIVE, "nothing", held),
        features=(Feature("M", None, (64,)),),
        variants=(variant,),
        rows=(_row(1, 64, variant),),
        regions=(Region(Cell(((1, 64),)), 0, False),),
    )


def rows_table(held: CudaValidity, dtype: str = "float32") -> DispatchTable:
    """Return a table for GPUs."""
    spec = ROWS_SPEC if dtype == "float32" else ROWS_BF16_SPEC
    cells = ROWS_CELLS if dtype == "float32" else (("rows_bf16", 1, 64, 1.0),)
    guards = Guards((TensorGuard("rows", 4),), (TensorGuard("contiguous", 4),), 2**31 - 1)
    target = Target("cuda", held.arch)
    variants = tuple(_variant(f"fibc_toy_{name}", guards, target) for name in sorted(cell[0] for cell in cells))
    symbols = [variant.symbol for variant in variants]
    index = {name: symbols.index(f"fibc_toy_{name}") for name, *_ in cells}
    return replace(
        _table(spec, ROWS_NATIVE, "x.float().sum(-1)", held),
        features=(Feature("M", None, tuple(last for _, _, last, _ in cells)),),
        variants=variants,
        rows=tuple(_row(first, last, variants[index[name]]) for name, first, last, _ in cells),
        regions=tuple(Region(Cell(((first, last),)), index[name], False) for name, first, last, _ in cells),
        target=str(target),
    )


def compile_cuda_launchers(directory: Path, image: bytes) -> Path:
    """Return the object of ``toys_cuda.cpp`` around ``image``, compiled into ``directory`` without anything of CUDA.

    Args:
        image: ``toys.cu`` compiled, or any bytes where nothing will be launched.
    """
    (directory / "toys_image.h").write_text(f"#define TOYS_IMAGE {','.join(map(str, image))}\n")
    target = directory / "toys_cuda.o"
    flags = ["-std=c++17", "-O2", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"]
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
    includes = [f"-I{INCLUDE}", f"-I{directory}"]
    command: list[str | Path] = [toolchain.find().cxx, *flags, *warnings, *includes, "-c", CUDA_LAUNCHERS, "-o", target]
    subprocess.run(command, check=True)
    return target


def compile_kernels(directory: Path) -> Path:
    """Return the object of ``toys.cpp``, compiled into ``directory``."""
    target = directory / "toys.o"
    flags = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", f"-I{INCLUDE}"]
    subprocess.run([toolchain.find().cxx, *flags, "-c", SOURCE, "-o", target], check=True)
    return target


def publish(table: DispatchTable, out: Path, cache: Cache, kernels: Path) -> Path:
    """Build ``table`` over the toy kernels and return its package in ``out``."""
    target = out / f"fibc_{table.definition}"
    build(table, {variant.symbol: kernels for variant in table.variants}, target, cache)
    return target


def _variant(symbol: str, guards: Guards, target: Target = CPU_TARGET) -> Variant:
    candidate = Candidate("cpu", f"toy/{symbol}", (("block_m", 4),), digest_text(symbol), target)
    return Variant(symbol, candidate, digest_text(symbol), target.arch, guards, deterministic=True, release_gil=False)


def _row(first: int, last: int, variant: Variant) -> Decision:
    return Decision(Cell(((first, last),)), Verdict.REPLACE, variant.candidate.digest, (), (COMPARISON,), "shown")


def _table(spec: CallSpec, native: str, name: str, held: CpuValidity | CudaValidity | None) -> DispatchTable:
    return DispatchTable(
        definition=spec.definition,
        definition_digest=digest_text(spec.definition),
        op_type="toy",
        spec=spec,
        native=NativeSource(name, native, "builtin", digest_text(native)),
        reference_source=native.replace("def call(", "def run("),
        features=(),
        variants=(),
        rows=(),
        regions=(),
        validity=held or validity(),
        target=str(CPU_TARGET),
        environment={"torch": "any"},
        alpha=0.05,
        min_speedup=1.02,
        expected_false_replacements=0.15,
        partial=False,
        num_boundary_rejected=0,
        created="2026-11-30T00:00:00+00:00",
        fibc_version="0.1.0",
    )

"""Toy packages: real modules around toy kernels, for tests of the module and for the cost of dispatch."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from fibc import environment, toolchain
from fibc.cache import Cache
from fibc.codegen.build import build
from fibc.codegen.compile import INCLUDE
from fibc.schema.callspec import Argument, Axis, CallSpec
from fibc.schema.candidate import Candidate, Guards, Target, TensorGuard
from fibc.schema.decision import Comparison, Decision, Verdict
from fibc.schema.digest import digest_text
from fibc.schema.feature import Cell, Feature, Point
from fibc.schema.table import CpuValidity, DispatchTable, NativeSource, Region, Variant

SOURCE = Path(__file__).with_name("toys.cpp")

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

_COMPARISON = Comparison(
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
    native = Decision(Cell(((129, 256),)), Verdict.KEEP_NATIVE, "", (_COMPARISON,), (), "slower than native")
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


def _variant(symbol: str, guards: Guards) -> Variant:
    candidate = Candidate("cpu", f"toy/{symbol}", (("block_m", 4),), digest_text(symbol), Target("cpu", "avx2"))
    return Variant(symbol, candidate, digest_text(symbol), "avx2", guards, deterministic=True, release_gil=False)


def _row(first: int, last: int, variant: Variant) -> Decision:
    return Decision(Cell(((first, last),)), Verdict.REPLACE, variant.candidate.digest, (), (_COMPARISON,), "shown")


def _table(spec: CallSpec, native: str, name: str, held: CpuValidity | None) -> DispatchTable:
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
        target="cpu:avx2",
        environment={"torch": "any"},
        alpha=0.05,
        min_speedup=1.02,
        expected_false_replacements=0.15,
        partial=False,
        num_boundary_rejected=0,
        created="2026-11-30T00:00:00+00:00",
        fibc_version="0.1.0",
    )

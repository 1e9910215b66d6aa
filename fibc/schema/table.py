"""The dispatch table: what a generated module serves, as data."""

from __future__ import annotations

from dataclasses import dataclass

from fibc.schema.callspec import CallSpec
from fibc.schema.candidate import Candidate, Guards
from fibc.schema.decision import Comparison, Decision
from fibc.schema.feature import Cell, Feature
from fibc.schema.silicon import CudaValidity


@dataclass(frozen=True)
class Variant:
    """A candidate in a table.

    Attributes:
        symbol: Its entry in the linked object, unique in the module.
        artifact: Digest of its object code.
        isa: What it was compiled for: an ISA level, checked at import (``avx512``), or a GPU's arch (``sm_90a``).
        deterministic: Repeats were bitwise equal.
        release_gil: Its work is expected to exceed 100 us in every region that serves it.
        library: What it calls, with the version that it needs (``cuBLASLt 13.0.2``); empty for generated code.
    """

    symbol: str
    candidate: Candidate
    artifact: str
    isa: str
    guards: Guards
    deterministic: bool
    release_gil: bool
    library: str = ""


@dataclass(frozen=True)
class Region:
    """A box of feature values served by one variant: neighbouring rows merged."""

    cell: Cell
    variant: int
    release_gil: bool


@dataclass(frozen=True)
class NativeSource:
    """The native kernel as Python source that the module embeds.

    Attributes:
        name: What people read, ``torch.matmul(A, B.T)``.
        source: Module text with ``call(*inputs)`` and, where it has one, ``call_out(*inputs, *outputs)``.
        origin: ``option``, ``fi_api``, ``builtin`` or ``reference``.
        digest: Of ``source``.
        note: Why something that comes earlier in that order was passed over; empty where nothing was.
    """

    name: str
    source: str
    origin: str
    digest: str
    note: str = ""


@dataclass(frozen=True)
class CpuValidity:
    """The silicon and the thread count for which a CPU table's rows hold."""

    model: str
    isa: tuple[str, ...]
    l2_bytes: int
    l3_bytes: int
    num_threads: int


@dataclass(frozen=True)
class DispatchTable:
    """Everything that codegen needs and ``explain`` prints.

    Attributes:
        definition_digest: Digest of the definition that was tuned.
        spec: Calling convention.
        reference_source: The definition's reference, the fallback where native cannot be imported.
        reference_entry: Name of its function.
        features: Coordinates of the lookup.
        variants: Sorted by symbol.
        rows: One Decision per cell, sorted by cell.
        regions: Lowered from rows; disjoint, sorted by cell.
        validity: Where rows hold.
        environment: Facts recorded when it was tuned, printable.
        alpha: Error per key.
        min_speedup: Margin.
        expected_false_replacements: At most alpha times the number of keys that were tested.
        partial: The budget ended first, or the user interrupted.
        num_boundary_rejected: Rows that the boundary set rejected.
        boundary: Evidence of the boundary workloads that fell into replaced cells.
        mismatches: Templates that do not serve this definition, each with its reason.
        fingerprint: Digest of everything that the decisions depend on; equal means that a new run has nothing to do.
        created: ISO date and time, UTC.
        fibc_version: What made it.
        on_change: What the module does where driver, torch or a library is another one than recorded: one of
            ``fibc.schema.options.ON_CHANGE``.
        shown: Since when its replacements are shown, ISO date and time; empty: since it was created.
    """

    definition: str
    definition_digest: str
    op_type: str
    spec: CallSpec
    native: NativeSource
    reference_source: str
    features: tuple[Feature, ...]
    variants: tuple[Variant, ...]
    rows: tuple[Decision, ...]
    regions: tuple[Region, ...]
    validity: CpuValidity | CudaValidity
    target: str
    environment: dict[str, str]
    alpha: float
    min_speedup: float
    expected_false_replacements: float
    partial: bool
    num_boundary_rejected: int
    created: str
    fibc_version: str
    fingerprint: str = ""
    boundary: tuple[Comparison, ...] = ()
    mismatches: tuple[tuple[str, str], ...] = ()
    reference_entry: str = "run"
    on_change: str = "serve"
    shown: str = ""

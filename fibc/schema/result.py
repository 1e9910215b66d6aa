"""What one run of ``fibc tune`` ends with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fibc.schema.decision import Comparison
from fibc.schema.table import DispatchTable


@dataclass(frozen=True)
class SetSizes:
    """How many recorded workloads each set holds."""

    tune: int
    boundary: int
    test: int
    skipped: int
    traffic_weighted: bool
    synthetic: bool


@dataclass(frozen=True)
class TuneResult:
    """The outcome of a run, printable and JSON-able.

    Attributes:
        definition: Name of the definition.
        module: Name to import, ``fibc_gemm_bf16_n4096_k4096``.
        package: Directory of the package; empty where no module was written.
        table: What the module serves; None where no module was written.
        boundary: Evidence of the boundary workloads.
        test: Evidence of the test workloads, read once after publication.
        slower_on_test: Descriptions of test workloads that are slower than native by more than the margin.
        sets: Sizes of the sets.
        trials: Trials by status over all keys, this run and resumed ones.
        stage_s: Wall time of each stage, in seconds.
        notes: Sentences that a user must read (a native outside its bound, an empty set, void old evidence).
        up_to_date: Nothing had changed, so nothing was built or measured.
        partial: The budget ended first, or the user interrupted.
        interrupted: Ctrl-C ended the run.
        plan: What a dry run would do; empty otherwise.
    """

    definition: str
    module: str
    package: str
    table: DispatchTable | None
    boundary: tuple[Comparison, ...]
    test: tuple[Comparison, ...]
    slower_on_test: tuple[str, ...]
    sets: SetSizes
    trials: Mapping[str, int]
    stage_s: Mapping[str, float]
    notes: tuple[str, ...]
    up_to_date: bool = False
    partial: bool = False
    interrupted: bool = False
    plan: Mapping[str, int | float | str] = field(default_factory=dict)

"""The numbers of a report, as every view of it shows them. Nothing here is text for one view alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fibc.schema.result import SetSizes

NOT_RECORDED = "not recorded"
"""What every view says where records are from before fibc kept something."""

GENERATED, LIBRARY = "generated kernel", "library call"
"""Kinds of candidates: fibc's own code, and calls of an algorithm in a library."""


@dataclass(frozen=True)
class Speedup:
    """A speedup with its interval.

    Attributes:
        value: Native latency / candidate latency.
        low: Lower end of the 95 % interval.
        high: Upper end.
        stage: Whose sessions it is from.
        num_sessions: So many.
        point: Sizes that it was measured at.
        native_us: Median latency of native.
        candidate_us: Median latency of the candidate.
    """

    value: float
    low: float
    high: float
    stage: str
    num_sessions: int
    point: str
    native_us: float
    candidate_us: float


@dataclass(frozen=True)
class CellReport:
    """One cell: what serves it and why.

    Attributes:
        cell: As people write it.
        bounds: ``(first, last)`` of every feature.
        serves: Number of the variant; 0 where native serves.
        flags: Of ``synthetic``, ``partial``, ``revoked``, ``boundary rejected``.
        reason: A sentence.
        weakest: At the point with the smallest speedup: of the variant, or of the best candidate that native keeps out.
        ceiling: The largest speedup that the device allows; None where nobody recorded one.
    """

    cell: str
    bounds: tuple[tuple[int, int], ...]
    verdict: str
    serves: int
    flags: tuple[str, ...]
    reason: str
    weakest: Speedup | None
    ceiling: float | None = None


@dataclass(frozen=True)
class VariantReport:
    """A candidate that serves.

    Attributes:
        number: From 1, as in the table that `fibc tune` prints.
        kind: ``generated kernel`` or ``library call``.
        cells: That it serves.
    """

    number: int
    digest: str
    name: str
    backend: str
    kind: str
    library: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class LatencyPoint:
    """Median latencies at one size, in microseconds.

    Attributes:
        axes: Every variable axis.
        x: Coordinates by feature, else by axis.
        native_us: Native's, from the sessions of the candidate that is served or came closest.
        served_us: What the table serves there.
        runner_up_us: The best other finalist; None where there was none.
        runner_up: Its name.
    """

    cell: str
    axes: Mapping[str, int]
    x: tuple[int, ...]
    origin: str
    weight: float
    native_us: float
    served_us: float
    served: str
    runner_up_us: float | None
    runner_up: str


@dataclass(frozen=True)
class RegionReport:
    """Neighbouring cells that one variant serves."""

    bounds: tuple[tuple[int, int], ...]
    serves: int


@dataclass(frozen=True)
class TrialReport:
    """One trial of a key's search.

    Attributes:
        speedup: Screened on the search's own data, so that the best of many is too good; None where it failed.
        max_bound_ratio: Largest error over its bound; None where nothing was compared.
        duration_s: Of validating and timing it.
    """

    number: int
    digest: str
    template: str
    backend: str
    kind: str
    config: str
    status: str
    speedup: float | None
    max_bound_ratio: float | None
    duration_s: float
    timestamp: str
    log: str


@dataclass(frozen=True)
class SearchReport:
    """The search of one key, in the order of trials."""

    key: str
    trials: tuple[TrialReport, ...]

    @property
    def best(self) -> float | None:
        return max((trial.speedup for trial in self.trials if trial.speedup is not None), default=None)


@dataclass(frozen=True)
class FailureReport:
    """Trials that failed alike.

    Attributes:
        example: The last line of one of their logs.
    """

    status: str
    template: str
    count: int
    example: str


@dataclass(frozen=True)
class FastP:
    """The share of tasks that are answered correctly and more than p times as fast as native (strictly more).

    Attributes:
        family: ``set``, ``backend`` or ``kind``.
        group: ``tune``, ``triton``, ``library call``.
        about: What a task is, and what its speedup is.
        speedups: Of every task, ascending; 0 where nothing answers it correctly.
        points: fast_p at 0, 0.95 and 1.
        range_low: Where the area begins.
        range_high: Where it ends.
        auc: Area under the curve over that range, divided by its length: 1 is every task beyond the range.
    """

    family: str
    group: str
    about: str
    speedups: tuple[float, ...]
    points: Mapping[str, float]
    range_low: float
    range_high: float
    auc: float


@dataclass(frozen=True)
class Traffic:
    """What a set's traffic gains.

    Attributes:
        weighted: Sum of weight times native latency over sum of weight times served latency; None where all weights
            are equal, or none is recorded.
        mean_of_ratios: Every measured workload counts alike.
        num_workloads: Measured ones.
        covered: Their share of the set's weight; None where the set itself is not recorded.
        native_us: Mean latency of native over the traffic, in microseconds.
        reason: Why there is no weighted speedup; empty where there is one.
    """

    set_name: str
    weighted: float | None
    mean_of_ratios: float
    num_workloads: int
    covered: float | None
    native_us: float
    reason: str


@dataclass(frozen=True)
class EndToEnd:
    """An estimate for an application, by Amdahl's law.

    Attributes:
        fraction: Share of the application's time that this operator takes with native: the user's word.
        speedup: Of the operator.
        speedup_from: ``traffic-weighted`` or ``mean of ratios``.
        dispatch_ns: Added to each call by dispatch, as measured; None where no measurement was given.
        delta: The same as a share of the application's time; 0 where ``dispatch_ns`` is None.
        gain: ``fraction * (1 - 1 / speedup)``.
        worth_it: ``gain > delta``; None where no dispatch cost was given.
        estimate: The application's speedup, ``1 / (1 - gain + delta)``.
    """

    fraction: float
    speedup: float
    speedup_from: str
    dispatch_ns: float | None
    delta: float
    gain: float
    worth_it: bool | None
    estimate: float


@dataclass(frozen=True)
class Cost:
    """What it took, as a vector of seconds; None where a part is not recorded.

    Attributes:
        trial_s: Validation and first rung of all trials together, from the evaluations themselves.
        stages: Wall time by stage of the last run; empty where not recorded.
        num_pairs: Paired timings by stage.
    """

    compile_s: float | None
    validate_s: float | None
    screen_s: float | None
    confirm_s: float | None
    trial_s: float
    stages: Mapping[str, float]
    num_trials: int
    num_pairs: Mapping[str, int]


@dataclass(frozen=True)
class RunReport:
    """The run that published the table.

    Attributes:
        kind: ``tune`` or ``retune``: a night measures some cells, and the others keep their earlier evidence.
        ended: ISO 8601 in UTC.
        reasons: Why a night measured anything.
        devices: What it measured on.
        seed: Of the search and of inputs.
        num_trials: Its own.
        observed: How many timed pairs were discarded and why; empty where nothing was observed, as on a CPU.
        environment: Facts that were other ones than those that the table is shown in.
    """

    kind: str
    ended: str
    reasons: tuple[str, ...]
    devices: tuple[str, ...]
    seed: int
    num_trials: int
    observed: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class SetReport:
    """Evidence of workloads that were measured after the decision.

    Attributes:
        measured: Workloads in replaced cells.
        slower: Slower than native by more than the margin beyond doubt; a line each.
    """

    name: str
    measured: tuple[Speedup, ...]
    slower: tuple[str, ...]


@dataclass(frozen=True)
class TableReport:
    """Everything about one definition on one target.

    Attributes:
        margin: None where no table is recorded. Alike ``alpha`` and ``expected_false_replacements``.
        features: Names of the coordinates.
        sets: Sizes; None where not recorded.
        boundary: None where not recorded. Alike ``test``.
        run: None where not recorded.
    """

    source: str
    definition: str
    target: str
    native: str
    created: str
    margin: float | None
    alpha: float | None
    expected_false_replacements: float | None
    partial: bool | None
    features: tuple[str, ...]
    environment: Mapping[str, str]
    conditions: Mapping[str, str]
    gate: str
    cells: tuple[CellReport, ...]
    variants: tuple[VariantReport, ...]
    regions: tuple[RegionReport, ...]
    latencies: tuple[LatencyPoint, ...]
    searches: tuple[SearchReport, ...]
    failures: tuple[FailureReport, ...]
    fast_p: tuple[FastP, ...]
    traffic: tuple[Traffic, ...]
    end_to_end: EndToEnd | None
    cost: Cost
    sets: SetSizes | None
    boundary: SetReport | None
    test: SetReport | None
    mismatches: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    run: RunReport | None = None

    @property
    def num_replaced(self) -> int:
        return sum(cell.serves > 0 for cell in self.cells)

    def num_cells_of(self, kind: str) -> int:
        """Return how many cells variants of ``kind`` serve."""
        return sum(len(variant.cells) for variant in self.variants if variant.kind == kind)


@dataclass(frozen=True)
class Change:
    """A cell of the newer table beside what the older one served there.

    Attributes:
        what: ``flipped``, ``other variant``, ``speedup moved``, ``new``, ``gone`` or ``same``.
        before: What served; a variant's name, ``native``, or empty where no cell was.
        before_speedup: None without evidence.
    """

    cell: str
    what: str
    before: str
    after: str
    before_speedup: Speedup | None
    after_speedup: Speedup | None
    reason: str


@dataclass(frozen=True)
class TableComparison:
    """Two tables of one definition: generations, or machines.

    Attributes:
        environment: Facts that differ: name, before, after.
    """

    definition: str
    before: str
    after: str
    changes: tuple[Change, ...]
    environment: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class ReportData:
    """A whole report.

    Attributes:
        comparisons: Of the tables with those of an older report; empty where none was asked for.
        unmatched: Definitions that only one of the two sides has.
    """

    fibc_version: str
    tables: tuple[TableReport, ...]
    comparisons: tuple[TableComparison, ...] = ()
    unmatched: tuple[str, ...] = ()

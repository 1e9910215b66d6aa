"""What speedups are worth: to a set's traffic, and to an application."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fibc.errors import InputError
from fibc.reporting.data import EndToEnd, Traffic


@dataclass(frozen=True)
class Served:
    """A workload with both latencies, in microseconds; equal ones where native serves."""

    weight: float
    native_us: float
    served_us: float
    ratio: float


def traffic(set_name: str, served: Sequence[Served], total_weight: float | None) -> Traffic | None:
    """Return what a set gains; None where none of its workloads was timed.

    ``weighted`` is sum(w t_native) / sum(w t_served): what a clock would read over the whole traffic. The mean of
    ratios lets a workload of a microsecond count as much as one of a millisecond.

    Args:
        total_weight: Of the whole set, timed or not; None where the set is not recorded.
    """
    if not served:
        return None
    weights = [item.weight for item in served]
    reason = ""
    if not all(weight > 0 for weight in weights):
        reason = "no weights are recorded"
    elif len(set(weights)) == 1:
        reason = "all weights are equal"
    native = math.fsum(item.weight * item.native_us for item in served)
    spent = math.fsum(item.weight * item.served_us for item in served)
    mean_native = statistics.fmean(item.native_us for item in served)
    return Traffic(
        set_name=set_name,
        weighted=None if reason else native / spent,
        mean_of_ratios=statistics.fmean(item.ratio for item in served),
        num_workloads=len(served),
        covered=math.fsum(weights) / total_weight if total_weight else None,
        native_us=mean_native if reason else native / math.fsum(weights),
        reason=reason,
    )


def end_to_end(fraction: float, gained: Traffic, dispatch_ns: float | None) -> EndToEnd:
    """Return what an application gains of which the operator takes ``fraction`` with native.

    Its calls number ``fraction * T / native latency`` in a time T, and each pays the dispatch cost, so that
    ``delta = fraction * dispatch / native latency``.

    Raises:
        InputError: If ``fraction`` is no share.
    """
    if not 0 < fraction <= 1:
        raise InputError(f"--fraction: must be a share of the application's time, got {fraction:g} (accepted: 0 to 1)")
    speedup = gained.mean_of_ratios if gained.weighted is None else gained.weighted
    gain = fraction * (1 - 1 / speedup)
    delta = fraction * dispatch_ns / (gained.native_us * 1e3) if dispatch_ns is not None else 0.0
    return EndToEnd(
        fraction=fraction,
        speedup=speedup,
        speedup_from="mean of ratios" if gained.weighted is None else "traffic-weighted",
        dispatch_ns=dispatch_ns,
        delta=delta,
        gain=gain,
        worth_it=None if dispatch_ns is None else gain > delta,
        estimate=1 / (1 - gain + delta),
    )


def read_dispatch_ns(path: Path) -> float:
    """Return what a served call pays for dispatch, in nanoseconds: the worst hit that was measured.

    Args:
        path: What ``benchmarks/dispatch_overhead.py`` writes. Each case's cost is the median over rounds of dispatched
            minus plain, taken from the raw samples.

    Raises:
        InputError: If the file holds no such samples.
    """
    try:
        results = json.loads(path.read_text())["results"]
        hits = [
            statistics.median(dispatched - plain for dispatched, plain in result["samples_ns"])
            for result in results
            if result["name"].startswith("hit")
        ]
        return float(max(hits))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--dispatch: {path} must be a result of benchmarks/dispatch_overhead.py with raw samples, got: {error!r}"
        ) from error

"""Finalists as the raw samples show them: every candidate that raced in a cell, beside the one that won."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fibc.race import Evidence
from fibc.schema.evaluation import Arm, SessionSamples
from fibc.schema.evidence import Estimate
from fibc.schema.policy import PUBLISHED_LEVEL

ByPoint = Mapping[int, Estimate]


def last_runs(samples: Sequence[SessionSamples], stage: str) -> dict[str, list[SessionSamples]]:
    """Return the samples of ``stage`` by key, in the order of measuring.

    Where a run was repeated, its sessions begin anew; the last run counts, as it does for decisions.
    """
    runs: dict[str, list[SessionSamples]] = {}
    seen: dict[str, set[tuple[Arm, int]]] = {}
    for sample in samples:
        if sample.stage != stage or not sample.pairs:
            continue
        run, known = runs.setdefault(sample.arm.key, []), seen.setdefault(sample.arm.key, set())
        if (sample.arm, sample.session) in known:
            run.clear()
            known.clear()
        run.append(sample)
        known.add((sample.arm, sample.session))
    return runs


def estimates(samples: Sequence[SessionSamples], stage: str) -> dict[str, dict[str, ByPoint]]:
    """Return what the sessions of ``stage`` say: by key, candidate and point, from raw samples alone."""
    sessions: dict[Arm, Evidence] = {}
    for run in last_runs(samples, stage).values():
        for sample in run:
            sessions.setdefault(sample.arm, Evidence()).add(sample.pairs)
    found: dict[str, dict[str, dict[int, Estimate]]] = {}
    for arm, evidence in sessions.items():
        estimate = evidence.estimate(arm, 1 - PUBLISHED_LEVEL)
        found.setdefault(arm.key, {}).setdefault(arm.candidate, {})[arm.point] = estimate
    return {key: dict(by_candidate) for key, by_candidate in found.items()}


@dataclass(frozen=True)
class RunnerUp:
    """The best finalist of a cell beside the one that is served.

    Attributes:
        log_speedups: By point.
    """

    candidate: str
    log_speedups: Mapping[int, float]


def runner_up(contenders: Mapping[str, ByPoint], served: str) -> RunnerUp | None:
    """Return the finalist with the largest mean log speedup over its points, other than ``served``; None without one.

    Only finalists that were timed at as many points as any other are compared: one that failed early has none.
    """
    others = {digest: by_point for digest, by_point in contenders.items() if digest != served}
    most = max((len(by_point) for by_point in others.values()), default=0)
    means = {
        digest: math.fsum(estimate.mean for estimate in by_point.values()) / most
        for digest, by_point in others.items()
        if len(by_point) == most
    }
    if not means:
        return None
    best = max(means, key=lambda digest: means[digest])
    return RunnerUp(best, {point: estimate.mean for point, estimate in others[best].items()})

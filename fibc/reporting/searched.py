"""The search as it went: trials of every key in order, what failed, and what each backend could do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fibc.backends.registry import LIBRARIES
from fibc.measure import screen_value
from fibc.reporting.data import GENERATED, LIBRARY, FailureReport, FastP, SearchReport, TrialReport
from fibc.reporting.fast_p import curve
from fibc.reporting.recorded import Recorded
from fibc.schema.candidate import Candidate
from fibc.schema.evaluation import Evaluation, Status

SCREENED = "the best trial of a key, by the search's own timings: the best of many looks better than it is"


def kind_of(candidate: Candidate) -> str:
    """Return whether a candidate is generated code or a call of a library."""
    return LIBRARY if candidate.backend in LIBRARIES else GENERATED


def searches(recorded: Recorded) -> tuple[SearchReport, ...]:
    """Return the search of every key, keys in the order in which they were searched.

    A candidate that passed its trial and failed at another point of the key later is one trial, which failed.
    """
    by_key: dict[str, dict[str, tuple[int, Evaluation]]] = {}
    for evaluation in recorded.evaluations:
        trials = by_key.setdefault(evaluation.key, {})
        number = trials[evaluation.candidate][0] if evaluation.candidate in trials else len(trials) + 1
        trials[evaluation.candidate] = (number, evaluation)
    return tuple(
        SearchReport(key, tuple(_trial(number, item, recorded.candidates) for number, item in trials.values()))
        for key, trials in by_key.items()
    )


def failures(found: Iterable[SearchReport]) -> tuple[FailureReport, ...]:
    """Return how often each template failed in each way, most often first."""
    counts: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    for search in found:
        for trial in search.trials:
            if trial.status != Status.PASSED.value:
                place = trial.status, trial.template
                counts[place] += 1
                examples.setdefault(place, _last_line(trial.log))
    return tuple(
        FailureReport(status, template, count, examples[status, template])
        for (status, template), count in counts.most_common()
    )


def screened_fast_p(found: Sequence[SearchReport]) -> tuple[FastP, ...]:
    """Return fast_p over keys: of each backend, and of generated kernels and library calls."""
    groups: dict[tuple[str, str], list[float]] = {}
    names = [("backend", sorted({t.backend for s in found for t in s.trials}))]
    names.append(
        ("kind", [kind for kind in (GENERATED, LIBRARY) if any(t.kind == kind for s in found for t in s.trials)])
    )
    for family, members in names:
        for member in members:
            groups[family, member] = [
                max((t.speedup or 0.0 for t in search.trials if getattr(t, family) == member), default=0.0)
                for search in found
            ]
    return tuple(curve(family, member, SCREENED, speedups) for (family, member), speedups in groups.items())


def _trial(number: int, evaluation: Evaluation, candidates: Mapping[str, Candidate]) -> TrialReport:
    candidate = candidates.get(evaluation.candidate)
    passed = evaluation.status is Status.PASSED and evaluation.pairs
    config = "" if candidate is None else ", ".join(f"{name}={value}" for name, value in candidate.config)
    return TrialReport(
        number=number,
        digest=evaluation.candidate,
        template="" if candidate is None else candidate.template,
        backend="" if candidate is None else candidate.backend,
        kind=GENERATED if candidate is None else kind_of(candidate),
        config=config,
        status=evaluation.status.value,
        speedup=math.exp(screen_value(evaluation.pairs)) if passed else None,
        max_bound_ratio=evaluation.correctness.max_bound_ratio if evaluation.correctness is not None else None,
        duration_s=evaluation.duration_s,
        timestamp=evaluation.timestamp,
        log=evaluation.log,
    )


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""

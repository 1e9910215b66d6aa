"""One decision over several devices of the same silicon: what each says, taken together, and which stand apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fibc import stats
from fibc.schema.evidence import Assessment, Estimate
from fibc.schema.policy import Policy

MIN_DEVICES = 4
"""From so many on a device is one replicate. Below, a bound over so few means would be wider than any speedup, and the
sessions of all of them are the replicates, as they are on one."""

OUTLIER_SPREADS = 3.0
"""A device stands apart where its mean is so many spreads, and more than the margin, away from the median device."""

MAD_TO_SD = 1.4826
"""Standard deviations in a median absolute deviation of normal noise."""


@dataclass(frozen=True)
class Pooled:
    """Devices taken together.

    Attributes:
        outliers: A sentence for each device that stands apart at an arm. It counts all the same: it serves, too.
    """

    assessment: Assessment
    outliers: tuple[str, ...]


def pool(devices: Sequence[tuple[str, Assessment]], policy: Policy) -> Pooled:
    """Return one assessment over ``devices``, each with its name; all have measured the same arms.

    An arm that failed on one device failed; one that a device had no time for has no estimate.
    """
    if len(devices) == 1:
        return Pooled(devices[0][1], ())
    first = devices[0][1]
    estimates: list[Estimate | None] = []
    outliers: list[str] = []
    for index, arm in enumerate(first.arms):
        seen = [(name, item.estimates[index]) for name, item in devices]
        known = [(name, estimate) for name, estimate in seen if estimate is not None]
        estimates.append(_together([estimate for _, estimate in known]) if len(known) == len(devices) else None)
        outliers += [f"{text} in {arm.key}, point {arm.point}" for text in _apart(known, policy)]
    return Pooled(
        Assessment(
            first.stage,
            first.arms,
            tuple(estimates),
            tuple(failure for _, item in devices for failure in item.failures),
            tuple(sample for _, item in devices for sample in item.samples),
        ),
        tuple(outliers),
    )


def _together(estimates: Sequence[Estimate]) -> Estimate:
    means = tuple(item.mean for item in estimates)
    effects = means if len(means) >= MIN_DEVICES else tuple(effect for item in estimates for effect in item.effects)
    alpha = estimates[0].alpha
    return Estimate(
        arm=estimates[0].arm,
        effects=effects,
        mean=stats.mean(effects),
        sd=stats.standard_deviation(effects),
        lower=stats.lower_bound(effects, alpha),
        upper=stats.upper_bound(effects, alpha),
        alpha=alpha,
        num_pairs=sum(item.num_pairs for item in estimates),
        native_s=statistics.median(item.native_s for item in estimates),
        candidate_s=statistics.median(item.candidate_s for item in estimates),
    )


def _apart(known: Sequence[tuple[str, Estimate]], policy: Policy) -> list[str]:
    if len(known) < MIN_DEVICES:
        return []
    centre = statistics.median(estimate.mean for _, estimate in known)
    spread = MAD_TO_SD * statistics.median(abs(estimate.mean - centre) for _, estimate in known)
    limit = max(OUTLIER_SPREADS * spread, policy.margin)
    return [
        f"{name}: {math.exp(estimate.mean):.3f}x where the devices have {math.exp(centre):.3f}x"
        for name, estimate in known
        if abs(estimate.mean - centre) > limit
    ]

"""Winners on a GPU, each alone for seconds: a binary once for every power of 16 of the size."""

from __future__ import annotations

import math

from fibc.bench import ArmFailed
from fibc.environment import Environment
from fibc.schema.feature import FeatureKey, Point
from fibc.shop import Shop
from fibc.sustained import BLOCK_S, Sustained

KIND = "sustained"

CHECK_S = 4 * BLOCK_S + 1.0
"""A check, with a session's start."""

CHECKS_A_RACE = 0.25
"""Of 27 and 23 keys of the tunes on an H200 (2026-11-30) 7 and 23 were replaced, by 4 and 9 binaries."""


def sustain(shop: Shop, winner: str, key: FeatureKey) -> Sustained | ArmFailed | None:
    """Return how a winner does at the largest point of a key, or how it failed; None where nothing is to be checked.

    Where no time is left nothing can be published either.

    Args:
        winner: Digest of the candidate.
    """
    if not has_power_cap(shop.task.environment) or not shop.time_left():
        return None
    largest = max(key.points, key=_size)
    artifact = shop.artifacts[winner]
    about = artifact.digest, int(math.log2(_size(largest))) // 4
    if about not in shop.sustained:
        try:
            seen: Sustained | ArmFailed = shop.evaluator.sustained(winner, artifact, largest)
        except ArmFailed as error:
            seen = error
        shop.sustained[about] = seen
        facts = (
            {"native_s": list(seen.native_s), "candidate_s": list(seen.candidate_s)}
            if isinstance(seen, Sustained)
            else {}
        )
        shop.log.append(KIND, {"candidate": winner, "point": str(largest), "text": str(seen), **facts})
    return shop.sustained[about]


def has_power_cap(environment: Environment) -> bool:
    """Return whether a kernel that runs alone may be slowed down for what it draws: on a GPU."""
    return environment.gpu is not None


def _size(point: Point) -> int:
    return math.prod(size for _, size in point.axes)

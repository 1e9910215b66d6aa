"""Finalists under a sanitizer: each binary once, and what was found is recorded."""

from __future__ import annotations

import math

from fibc import sanitizer as tool
from fibc.sanitizer import Sanitizer
from fibc.schema import codec
from fibc.schema.evaluation import Status
from fibc.schema.feature import FeatureKey
from fibc.schema.sanitized import Sanitized
from fibc.shop import Shop

KIND = "sanitized"


def recall(shop: Shop, sanitizer: Sanitizer) -> None:
    """Take in what earlier runs have found with the same sanitizer."""
    found = (codec.from_plain(Sanitized, value) for value in shop.log.own(KIND))
    shop.sanitized |= {item.artifact: item for item in found if item.sanitizer == str(sanitizer)}


def sanitize(shop: Shop, sanitizer: Sanitizer, candidate: str, key: FeatureKey) -> Sanitized | None:
    """Return what is found of a finalist, from its binary's first key at its smallest point; None if time ran out.

    Args:
        candidate: Its digest.

    Raises:
        EvaluationError: If the sanitizer does not work here.
    """
    artifact = shop.artifacts[candidate]
    if (known := shop.sanitized.get(artifact.digest)) is not None:
        return known
    if not shop.time_left():
        return None
    smallest = min(key.points, key=lambda point: math.prod(size for _, size in point.axes))
    limit_s = shop.budget.deadline_s(tool.TIMEOUT_S)
    found = tool.sanitize(sanitizer, shop.evaluator.setup, candidate, artifact, smallest, timeout_s=limit_s)
    if found.status is Status.TIMEOUT and not shop.time_left():
        return None
    shop.sanitized[artifact.digest] = found
    shop.log.append(KIND, found)
    return found


def facts(shop: Shop, candidates: set[str]) -> dict[str, str]:
    """Return what a table says of the sanitizing of its variants; empty where none was asked for."""
    if shop.task.sanitizer is None:
        return {}
    binaries = [shop.artifacts[candidate].digest for candidate in candidates]
    tools = [shop.sanitized[digest].tools for digest in binaries if digest in shop.sanitized]
    runs = ", ".join(f"{sum(name in ran for ran in tools)} by {name}" for name in tool.TOOLS)
    return {"sanitizer": f"{shop.task.sanitizer}: of {len(binaries)} variants {runs}"}

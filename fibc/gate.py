"""What must hold before anything is tuned: a sound reference, and a host that finds native equal to itself."""

from __future__ import annotations

from typing import Any

from fibc import measure
from fibc.cache import Cache
from fibc.errors import GateError, InputError
from fibc.evaluate import REFERENCE_TIMEOUT_S
from fibc.schema.decision import SESSION
from fibc.schema.digest import digest_json
from fibc.schema.evidence import GateResult
from fibc.schema.feature import FeatureKey
from fibc.shop import Shop

GATE_KEYS = 3
"""The gate's comparisons run at the smallest keys: their calls are the shortest, and so the most easily biased."""


def check_reference(shop: Shop) -> None:
    """Run the reference once, at the smallest point.

    Raises:
        InputError: If it raises, hangs, or returns another shape or dtype than the definition says.
    """
    smallest = _by_size(shop)[0]
    limit_s = shop.budget.deadline_s(REFERENCE_TIMEOUT_S)
    problems = shop.evaluator.reference_check(smallest.points[:1], limit_s=limit_s)
    if problems:
        raise InputError("\n".join(problems))


def check_native(shop: Shop) -> tuple[str, ...]:
    """Return where native is outside the bound that candidates are held to: reported, never fatal."""
    return shop.evaluator.native_check(_by_size(shop)[:1])


def require_gate(shop: Shop, cache: Cache) -> tuple[str, ...]:
    """Compare native with itself, once per host, timer and environment; return what the user must know.

    Raises:
        GateError: If it looks different from itself, twice.
    """
    session = "" if shop.task.environment.gpu is None else SESSION
    digest = gate_digest(shop.task.environment.digest, shop.conditions.mode, shop.conditions.timer, session)
    known = cache.get_json("gate", digest)
    if known is not None and known.get("passed"):
        return ()
    keys = _by_size(shop)[:GATE_KEYS]
    bench, _ = shop.evaluator.aa_bench(keys, shop.task.policy.gate_comparisons)
    result = measure.aa_gate(bench, shop.task.policy, shop.task.options.seed)
    shop.log.append("gate", gate_record(result, shop.task.native.name))
    shop.keep_samples(result.samples)
    if not result.passed:
        raise GateError(
            f"{result}: this host cannot tell faster from equal, so nothing is tuned "
            "(end other work on it, then run the same command again)"
        )
    cache.put_json("gate", digest, gate_record(result, shop.task.native.name))
    return (str(result),)


def gate_digest(environment: str, mode: str = "eager", timer: str = "steady_clock", session: str = "") -> str:
    """Return the identity of a gate's result: the environment and how it was timed, by default as on a CPU.

    Args:
        session: What a session is, where it has not always been the same: on a GPU.
    """
    return digest_json([environment, mode, timer, *([session] if session else [])])


def gate_record(result: GateResult, native: str) -> dict[str, Any]:
    """Return ``result`` as plain data, without its raw samples."""
    return {
        "passed": result.passed,
        "num_comparisons": result.num_comparisons,
        "replaces_at_zero": result.replaces_at_zero,
        "replaces_at_margin": result.replaces_at_margin,
        "repeated": result.repeated,
        "native": native,
        "text": str(result),
    }


def _by_size(shop: Shop) -> list[FeatureKey]:
    return sorted(shop.task.keys, key=lambda key: key.cell)

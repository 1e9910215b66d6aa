"""The check that a winner stays one when it runs alone for long: a power-hungry kernel may throttle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

BLOCK_S = 1.0
"""A GPU's power management answers within milliseconds, its temperature within seconds."""


@dataclass(frozen=True)
class Sustained:
    """Seconds per call of four blocks: native, candidate, candidate, native."""

    native_s: tuple[float, float]
    candidate_s: tuple[float, float]

    @property
    def speedup(self) -> float:
        """Return native over candidate, each the geometric mean of its blocks: a drift that is linear cancels."""
        return math.sqrt(math.prod(self.native_s) / math.prod(self.candidate_s))

    @property
    def holds(self) -> bool:
        """Return whether the candidate is not slower."""
        return self.speedup >= 1.0

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "does not hold"
        return f"{verdict} in blocks of a second and more: {self.speedup:.3f}x"


def check_sustained(block: Callable[[bool, float], float], *, block_s: float = BLOCK_S) -> Sustained:
    """Run the four blocks (ABBA).

    Args:
        block: ``block(native, seconds)`` runs one side for about so long without a pause; returns seconds per call.
        block_s: Of each block.
    """
    first_native, first_candidate = block(True, block_s), block(False, block_s)
    second_candidate, second_native = block(False, block_s), block(True, block_s)
    return Sustained((first_native, second_native), (first_candidate, second_candidate))

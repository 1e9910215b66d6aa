"""What is known of candidates before a search asks: evaluations of this environment, and failures that last."""

from __future__ import annotations

from fibc.records import RecordLog
from fibc.schema.evaluation import Evaluation, Status
from fibc.schema.feature import FeatureKey

STAYS_BROKEN = frozenset(
    {
        Status.COMPILE_ERROR,
        Status.RESOURCE,
        Status.INCORRECT_SHAPE,
        Status.INCORRECT_DTYPE,
        Status.INCORRECT_NUMERICAL,
    }
)
"""Failures that belong to a candidate's binary, whatever driver or torch it met; after a crash or a timeout in another
environment it is tried again."""


class Known:
    """The evaluations of a log, read once and kept up with.

    Attributes:
        earlier: What other environments of the same silicon showed.
    """

    def __init__(self, log: RecordLog) -> None:
        """Read the log, whose evaluations are appended here from now on."""
        self._log = log
        self.earlier = log.earlier_evaluations()
        self._recorded = log.evaluations()
        still = (item for item in self.earlier if item.status in STAYS_BROKEN)
        self._broken = {item.candidate: item for item in (*still, *self._recorded.values()) if _failed(item)}

    def find(self, key: FeatureKey, candidate: str) -> Evaluation | None:
        """Return what is known of a candidate at a key: a failed one is not tried again at any."""
        return self.at(key, candidate) or self._broken.get(candidate)

    def at(self, key: FeatureKey, candidate: str) -> Evaluation | None:
        """Return the last evaluation of a candidate at a key itself."""
        return self._recorded.get((str(key), candidate))

    def append(self, evaluation: Evaluation) -> None:
        """Record what was seen now."""
        self._log.append("evaluation", evaluation)
        self._recorded[evaluation.key, evaluation.candidate] = evaluation
        if _failed(evaluation):
            self._broken[evaluation.candidate] = evaluation

    def natives_s(self) -> dict[str, float]:
        """Return native's shortest call by key, where one was timed."""
        seen: dict[str, float] = {}
        for item in self._recorded.values():
            for pair in item.pairs:
                seen[item.key] = min(pair.native_s, seen.get(item.key, pair.native_s))
        return seen


def _failed(evaluation: Evaluation) -> bool:
    return evaluation.status is not Status.PASSED

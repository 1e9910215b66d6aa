"""What the stages of one run share: the definition, the machinery, the records and the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fibc.backends.base import Backend, Mismatch
from fibc.evaluate import Evaluator
from fibc.progress import Progress
from fibc.records import RecordLog
from fibc.schema.candidate import Artifact, Candidate
from fibc.schema.definition import Definition
from fibc.schema.evaluation import SessionSamples
from fibc.schema.options import TuneOptions
from fibc.schema.policy import Policy
from fibc.search.budget import Budget


@dataclass
class Shop:
    """One run's machinery, made by the pipeline and handed to every stage.

    Attributes:
        log: Evidence: evaluations and raw samples; holds for this definition, environment and native.
        verdicts: Finalists and decisions; holds for this run's fingerprint alone.
        candidates: Every candidate seen, by digest.
        artifacts: What was built, by the candidate's digest.
    """

    definition: Definition
    backends: Sequence[Backend]
    evaluator: Evaluator
    policy: Policy
    options: TuneOptions
    budget: Budget
    log: RecordLog
    verdicts: RecordLog
    progress: Progress
    candidates: dict[str, Candidate] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)

    def time_left(self) -> bool:
        return not self.budget.expired()

    def keep_samples(self, samples: Sequence[SessionSamples]) -> None:
        """Append raw samples to the evidence."""
        for sample in samples:
            self.log.append("samples", sample)

    def introduce(self, backend: Backend, template: str, config: Mapping[str, int | str | bool]) -> Candidate:
        """Return the candidate of a config, recorded once."""
        candidate = backend.candidate(self.definition, template, config)
        if candidate.digest not in self.candidates:
            self.candidates[candidate.digest] = candidate
            self.log.append("candidate", candidate)
        return candidate


def mismatches(found: Sequence[Mismatch]) -> tuple[tuple[str, str], ...]:
    """Return ``found`` as a table keeps it."""
    return tuple((mismatch.template, mismatch.reason) for mismatch in found)

"""What the stages of one run share: the task, the machinery, the records and the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fibc.backends.base import Backend
from fibc.bench import ArmFailed
from fibc.evaluate import Evaluator
from fibc.progress import Progress
from fibc.records import RecordLog
from fibc.schema.candidate import Artifact, Candidate, ConfigValue
from fibc.schema.decision import Conditions
from fibc.schema.evaluation import SessionSamples
from fibc.schema.result import BuildCounts
from fibc.schema.sanitized import Sanitized
from fibc.search.budget import Budget
from fibc.stopwatch import Stopwatch
from fibc.sustained import Sustained
from fibc.task import Task


@dataclass
class Shop:
    """One run's machinery, made by the pipeline and handed to every stage.

    Attributes:
        conditions: How both sides of every comparison are timed.
        log: Evidence: candidates, evaluations and raw samples; holds for this definition, environment and native.
        verdicts: Finalists and decisions; holds for this run's fingerprint alone.
        candidates: Every candidate seen, by digest.
        artifacts: What was built, by the candidate's digest.
        sustained: How winners did alone for long, by the digest of the binary and the size's power of 16.
        sanitized: What a sanitizer found, by the digest of the binary.
        spent: What the search took: ``compile``, ``validate``, ``screen``.
        builds: How the search came by it.
    """

    task: Task
    evaluator: Evaluator
    conditions: Conditions
    budget: Budget
    log: RecordLog
    verdicts: RecordLog
    progress: Progress
    candidates: dict[str, Candidate] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    sanitized: dict[str, Sanitized] = field(default_factory=dict)
    sustained: dict[tuple[str, int], Sustained | ArmFailed] = field(default_factory=dict)
    spent: Stopwatch = field(default_factory=Stopwatch)
    builds: BuildCounts = field(default_factory=BuildCounts)

    def time_left(self) -> bool:
        return not self.budget.expired()

    def time_to_start(self, num_sessions: int = 1) -> bool:
        """Whether time is left, and enough of it to start the processes of so many fresh sessions."""
        return self.budget.fits(self.evaluator.starting_s(num_sessions))

    def keep_samples(self, samples: Sequence[SessionSamples]) -> None:
        """Append raw samples to the evidence."""
        for sample in samples:
            self.log.append("samples", sample)

    def introduce(self, backend: Backend, template: str, config: Mapping[str, ConfigValue]) -> Candidate:
        """Return the candidate of a config, recorded once."""
        candidate = backend.candidate(self.task.definition, template, config)
        if candidate.digest not in self.candidates:
            self.candidates[candidate.digest] = candidate
            self.log.append("candidate", candidate)
        return candidate


def conditions_of(evaluator: Evaluator) -> Conditions:
    """Return how ``evaluator`` times both sides."""
    facts = evaluator.facts
    return Conditions(facts["residency"], facts["mode"], facts["timer"], int(facts["threads"]))

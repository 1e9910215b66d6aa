"""Evaluations: append-only facts about a candidate, whether it passed or failed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Outcome of an evaluation: FlashInfer-Trace's seven words, and three that only fibc's own records use.

    A trace file maps REJECTED to no trace at all (it never ran), RESOURCE and CRASH to RUNTIME_ERROR.
    """

    PASSED = "PASSED"
    INCORRECT_SHAPE = "INCORRECT_SHAPE"
    INCORRECT_NUMERICAL = "INCORRECT_NUMERICAL"
    INCORRECT_DTYPE = "INCORRECT_DTYPE"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    COMPILE_ERROR = "COMPILE_ERROR"
    TIMEOUT = "TIMEOUT"
    REJECTED = "REJECTED"
    RESOURCE = "RESOURCE"
    CRASH = "CRASH"


@dataclass(frozen=True)
class Correctness:
    """How far outputs were from the reference, over every case of a validation.

    Attributes:
        max_absolute_error: Largest |y - y*|.
        max_relative_error: Largest |y - y*| / |y*| where y* is not zero.
        max_bound_ratio: Largest |y - y*| / bound; above 1 is a failure.
        deterministic: Repeats were bitwise equal.
        num_cases: Cases that were run.
    """

    max_absolute_error: float
    max_relative_error: float
    max_bound_ratio: float
    deterministic: bool
    num_cases: int


@dataclass(frozen=True)
class Pair:
    """Two adjacent timings, in seconds per call."""

    native_s: float
    candidate_s: float
    native_first: bool


@dataclass(frozen=True)
class Evaluation:
    """One trial: a candidate validated at a key and, where it passed, timed against native.

    Attributes:
        candidate: Digest of the candidate.
        key: ``str`` of the key's cell.
        status: The outcome.
        log: Why it failed: the tail of the compiler's or the worker's output; empty where it passed.
        correctness: Present where outputs were compared.
        pairs: The first rung's paired rounds; empty unless it passed.
        environment: Digest of the environment.
        duration_s: Wall time of validation and timing.
        timestamp: When, ISO 8601 in UTC.
    """

    candidate: str
    key: str
    status: Status
    log: str
    correctness: Correctness | None
    pairs: tuple[Pair, ...]
    environment: str
    duration_s: float
    timestamp: str = ""


@dataclass(frozen=True)
class Arm:
    """One comparison that a Bench can time: a candidate against native at one point of one key."""

    key: str
    point: int
    candidate: str


@dataclass(frozen=True)
class SessionSamples:
    """Raw pairs of one arm in one session.

    Attributes:
        stage: ``gate``, ``screen``, ``confirm``, ``reconfirm``, ``boundary`` or ``test``.
        session: Index of the session within its stage, from 0.
        seed: Seed of the session's inputs and order.
    """

    arm: Arm
    stage: str
    session: int
    seed: int
    pairs: tuple[Pair, ...]

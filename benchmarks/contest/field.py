"""Where pickers take their timings: the seam that a machine and a simulation stand behind, and a meter around it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from fibc.bench import Bench, Session
from fibc.schema.candidate import NATIVE
from fibc.schema.decision import Conditions
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Arm, Status
from fibc.schema.feature import FeatureKey

UNDELAYED = "undelayed"
"""The candidate that is native without the delay that a control gives to native."""


@dataclass(frozen=True)
class Pad:
    """What a control adds to native's every call. ``amount`` is in nanoseconds on a CPU, in cycles on a GPU."""

    amount: int


@dataclass(frozen=True)
class Checked:
    """What validation says of a candidate at a key.

    Attributes:
        log: Why it did not pass.
        deterministic: Repeats were bitwise equal.
    """

    status: Status
    log: str
    deterministic: bool


class Field(Protocol):
    """One definition's kernels in processes that time them.

    Contract:
        * An arm whose candidate ``is_native`` is native itself, loaded a second time. ``UNDELAYED`` is native without
          the pad. Any other candidate is the digest of a kernel that was built.
        * ``bench`` may be called any number of times; one session is open at a time.
        * Sessions of a ``fresh`` bench are processes of their own, or on a GPU buffers of their own; those of another
          may share inputs and memory layout.

    Attributes:
        facts: How timings are made, printable.
        conditions: The same as decisions carry it.
    """

    facts: Mapping[str, str]
    conditions: Conditions

    def check(self, candidate: str, key: FeatureKey) -> Checked:
        """Validate a candidate at a key, as a trial of ``fibc tune`` does."""
        ...

    def hold(self, key: FeatureKey) -> None:
        """Make the key's inputs once for all sessions that follow and are not fresh."""
        ...

    def bench(self, arms: Sequence[Arm], *, fresh: bool) -> Bench: ...

    def calls_per_timing(self, arm: Arm) -> int:
        """Return how many calls a timing of the arm covers, once one was made."""
        ...


class Fields(Protocol):
    """Opens fields."""

    def open(self, definition: Definition, pad: Pad | None = None) -> AbstractContextManager[Field]:
        """Start processes for a definition, which end with the block."""
        ...


def is_native(candidate: str) -> bool:
    """Whether a candidate is native under some name: ``native``, ``native 17``."""
    return candidate.partition(" ")[0] == NATIVE


@dataclass
class Spent:
    """What a picker has used: timings, and the seconds that they lasted."""

    num_timings: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one timing."""
        self.num_timings += 1
        self.seconds += seconds


class Meter:
    """Counts what arms cost, by key, over any number of benches.

    Attributes:
        spent: By ``str`` of the key.
    """

    def __init__(self, calls_per_timing: Callable[[Arm], int]) -> None:
        self._calls_per_timing = calls_per_timing
        self.spent: dict[str, Spent] = defaultdict(Spent)

    def around(self, bench: Bench, arms: Sequence[Arm]) -> Bench:
        """Return ``bench``, whose arms are ``arms``, with both halves of every pair counted."""
        return _MeteredBench(self, bench, arms)

    def add(self, arm: Arm, seconds_per_call: Sequence[float]) -> None:
        """Count timings of an arm or of its native."""
        for seconds in seconds_per_call:
            self.spent[arm.key].add(seconds * self._calls_per_timing(arm))


@dataclass(frozen=True)
class _MeteredBench:
    meter: Meter
    inner: Bench
    arms: Sequence[Arm]

    @contextmanager
    def session(self, seed: int) -> Iterator[Session]:
        with self.inner.session(seed) as session:
            yield _MeteredSession(self, session)


@dataclass(frozen=True)
class _MeteredSession:
    bench: _MeteredBench
    inner: Session

    def pair(self, candidate: int, native_first: bool) -> tuple[float, float]:
        seconds = self.inner.pair(candidate, native_first)
        self.bench.meter.add(self.bench.arms[candidate], seconds)
        return seconds

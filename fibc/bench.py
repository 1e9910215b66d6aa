"""The seam between measuring and machines: a Bench times arms in sessions, on hardware or in a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from fibc.errors import FibcError
from fibc.schema.digest import digest_text
from fibc.schema.evaluation import Status


class ArmFailed(FibcError):  # noqa: N818 - names an outcome of a candidate, not an error of fibc
    """A candidate crashed, timed out or answered wrongly in a session, which stays usable for the other arms.

    Attributes:
        arm: Index of the arm in the bench.
        status: What happened.
        log: Tail of what the worker said.
    """

    def __init__(self, arm: int, status: Status, log: str) -> None:
        super().__init__(f"arm {arm}: {status}: {log}")
        self.arm = arm
        self.status = status
        self.log = log


class ArmsFailed(FibcError):  # noqa: N818 - as above
    """Outputs were found wrong after timing, when a session was left; its samples of these arms count for nothing."""

    def __init__(self, failures: Sequence[ArmFailed]) -> None:
        super().__init__("; ".join(map(str, failures)))
        self.failures = tuple(failures)


class Session(Protocol):
    """One process in which arms can be timed.

    Contract:
        * ``pair`` times both halves one directly after the other, in the order asked for: the same inputs, cores and
          thread count, equal work, equal inner counts, long enough for the timer.
        * Before an arm's first pair both halves are warmed up, untimed.
        * A candidate's fault raises ``ArmFailed`` and leaves the session usable for the other arms. Anything else that
          is raised means that the bench itself does not work.
    """

    def pair(self, candidate: int, native_first: bool) -> tuple[float, float]:
        """Return seconds per call of (native, candidate), both positive; ``candidate`` is the index of an arm."""
        ...


class Bench(Protocol):
    """Times a fixed list of arms, which it knows by index.

    Contract:
        * A session's inputs follow from ``seed``. Where inference follows (confirm and later), a session is an exec'd
          process with a memory layout of its own. One is open at a time.
        * Leaving the session checks the outputs of its arms once more, raises ``ArmsFailed`` where some are wrong, and
          ends its processes either way.
    """

    def session(self, seed: int) -> AbstractContextManager[Session]:
        """Open a session."""
        ...


def session_seed(seed: int, stage: str, index: int) -> int:
    """Return the 32-bit seed of a session, which fixes its inputs and the order of its pairs."""
    return int(digest_text(str(seed), stage, str(index))[:8], 16)

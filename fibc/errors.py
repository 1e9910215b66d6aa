"""The one tree of errors that fibc raises on purpose."""

from __future__ import annotations

from collections.abc import Iterable


class FibcError(Exception):
    """Base of every error that the command line prints without a traceback.

    ``exit_status`` is what the command line exits with: 2 for bad input or usage, 1 for work that failed.
    """

    exit_status = 1


class InputError(FibcError):
    """Bad input or usage: a file, a definition, a workload or an option that breaks a law."""

    exit_status = 2


class SchemaError(InputError):
    """One or more problems in data that crossed the border, each a line ``where: law, got, accepted``.

    Attributes:
        problems: Every problem found, in reading order; never empty.
    """

    def __init__(self, problems: Iterable[str] | str) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class ToolchainError(InputError):
    """A compiler or tool that the work needs is missing; the message names the command that installs it."""


class BuildError(FibcError):
    """A build of fibc's own code failed. A candidate's failed build is an Evaluation, never this error."""


class EvaluationError(FibcError):
    """The evaluator itself could not work (no worker starts). A candidate's failure is an Evaluation."""


class BrokenError(FibcError):
    """A timing failed, and no candidate is to blame: native, the clock, or what else runs on the device."""


class GateError(FibcError):
    """The A/A gate refused to tune on this host."""


class RecordError(FibcError):
    """A record cannot be written (disk full, unwritable); what was finished before is kept."""

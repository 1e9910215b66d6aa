"""The seam through which a family of kernels enters the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fibc.schema.candidate import Artifact, Candidate, ConfigValue, Target
from fibc.schema.definition import Definition
from fibc.schema.feature import FeatureKey
from fibc.schema.space import Space


@dataclass(frozen=True)
class Mismatch:
    """Why a template does not serve a definition, as ``fibc explain`` prints it."""

    template: str
    reason: str


@dataclass(frozen=True)
class BuildFailure:
    """A candidate that did not build.

    Attributes:
        timed_out: The deadline ended it.
        log: Tail of the compiler's output.
        resource: It was compiled, and needs more than the target has; ``log`` says of what.
    """

    timed_out: bool
    log: str
    resource: bool = False


class Backend(Protocol):
    """Builds candidates of one family for one target.

    Contract:
        * ``spaces`` and ``candidate`` write nothing but the cache, and the same arguments give the same values.
          ``spaces`` needs no compiler; ``candidate`` may (its identity covers the compiler) and raises
          ``ToolchainError`` without one.
        * ``build`` may be called again with the same candidates: it answers from its cache. It never raises for a
          candidate's fault (that is a BuildFailure) and raises ``ToolchainError`` where nothing can be built at all.
        * ``build`` runs compilers in child processes with a deadline each, and leaves none behind.
        * Two threads may call ``candidate`` and ``build`` at once, with the same candidates too. A thread that wears a
          ``Leash`` has what ``build`` runs ended by it, and gets ``CutError``.
        * Artifacts belong to the backend's cache and stay valid while its directory exists.
    """

    name: str
    target: Target

    def fingerprint(self, definition: Definition) -> str:
        """Return a digest of all that candidates follow from: templates, compiler, flags.

        Raises:
            ToolchainError: If nothing can be built here.
        """
        ...

    def spaces(self, definition: Definition, key: FeatureKey) -> tuple[tuple[Space, ...], tuple[Mismatch, ...]]:
        """Return the spaces of the templates that match, and why the others do not."""
        ...

    def candidate(self, definition: Definition, template: str, config: Mapping[str, ConfigValue]) -> Candidate:
        """Return the candidate of a config that satisfies the space; renders, does not build."""
        ...

    def build(
        self, definition: Definition, candidates: Sequence[Candidate], *, timeout_s: float, jobs: int
    ) -> dict[str, Artifact | BuildFailure]:
        """Build every candidate; the keys are their digests."""
        ...

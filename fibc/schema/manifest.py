"""The manifest of a published generation: what it was made of, each part by its digest, so that it can be verified."""

from __future__ import annotations

from dataclasses import dataclass, field

NAME = "manifest.json"
"""Of the file in a generation's directory."""


@dataclass(frozen=True)
class VariantOrigin:
    """What a variant was made of.

    Attributes:
        candidate: Template with its config, as people read it.
        recipe: Digest of the rendered source with the compiler and the flags that compile it.
        source_sha256: Of the source text.
        object_sha256: Of the relocatable object that the module links.
        library: What it calls, with the version that it needs; empty for generated code.
        validated: Keys at which it was compared with the reference, all passed.
        num_cases: Cases that were compared there.
        max_bound_ratio: Largest error as a part of its bound.
        deterministic: Repeats were bitwise equal.
        sanitizer: What a sanitizer said; ``not run`` where none was.
    """

    symbol: str
    candidate: str
    recipe: str
    source_sha256: str
    object_sha256: str
    library: str
    validated: tuple[str, ...]
    num_cases: int
    max_bound_ratio: float
    deterministic: bool
    sanitizer: str = "not run"


@dataclass(frozen=True)
class RegionEvidence:
    """A cell that a variant serves, with the weakest evidence for it."""

    cell: str
    symbol: str
    point: str
    stage: str
    speedup: float
    ci_low: float
    ci_high: float
    n_sessions: int
    n_pairs: int


@dataclass(frozen=True)
class Manifest:
    """Everything that a generation follows from.

    Attributes:
        table: Digest of the whole table.
        definition_digest: Of the contract.
        native: Digest of the native kernel's source.
        workloads: Digest of the calls that it was tuned from, and of their traffic.
        num_workloads: How many calls that were.
        tolerance: Digest of the code that bounds errors.
        versions: Facts of the environment, tools and libraries included.
        evidence: Environment key of the evidence.
        files: SHA-256 of the generation's other files, by name.
    """

    definition: str
    fibc_version: str
    created: str
    table: str
    definition_digest: str
    native: str
    workloads: str
    num_workloads: int
    tolerance: str
    evidence: str
    versions: dict[str, str]
    variants: tuple[VariantOrigin, ...]
    regions: tuple[RegionEvidence, ...]
    files: dict[str, str] = field(default_factory=dict)

"""What a table is made of, written down when it is published."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import fibc
from fibc.published import Kernel, Snapshot
from fibc.schema.codec import to_plain
from fibc.schema.decision import Verdict
from fibc.schema.digest import digest_json, digest_text
from fibc.schema.evaluation import Evaluation, Status
from fibc.schema.manifest import Manifest, RegionEvidence, VariantOrigin
from fibc.schema.table import DispatchTable, Variant

TOLERANCE_SOURCES = ("bound.py", "error_model.py", "check.py")
"""Modules of fibc that say how far an output may be from the reference."""


def make_manifest(
    table: DispatchTable, snapshot: Snapshot, kernels: Mapping[str, Kernel], evaluations: Iterable[Evaluation]
) -> Manifest:
    """Return the manifest of ``table``; the same arguments give the same manifest.

    Args:
        kernels: Of its variants, by symbol.
        evaluations: Of its definition, on any machine and in any environment.
    """
    shown = list(evaluations)
    return Manifest(
        definition=table.definition,
        fibc_version=table.fibc_version,
        created=table.created,
        table=digest_json(to_plain(table)),
        definition_digest=table.definition_digest,
        native=table.native.digest,
        workloads=snapshot.workloads_digest,
        num_workloads=len(snapshot.workloads),
        tolerance=tolerance_digest(),
        evidence=snapshot.evidence,
        versions=dict(table.environment),
        variants=tuple(_origin(variant, kernels[variant.symbol], shown) for variant in table.variants),
        regions=tuple(_regions(table)),
    )


def tolerance_digest() -> str:
    """Return the digest of the code that bounds errors, as it is installed."""
    root = Path(fibc.__path__[0])
    return digest_text(*((root / name).read_bytes() for name in TOLERANCE_SOURCES))


def sha256(data: bytes | str) -> str:
    """Return the SHA-256 of ``data`` in hex."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def validation_of(variant: Variant, evaluations: Iterable[Evaluation]) -> tuple[tuple[str, ...], int, float]:
    """Return at which keys a variant passed, over how many cases, with which largest part of the bound."""
    last = {item.key: item for item in evaluations if item.candidate == variant.candidate.digest}
    passed = {key: item for key, item in last.items() if item.status is Status.PASSED and item.correctness is not None}
    seen = [item.correctness for item in passed.values() if item.correctness is not None]
    ratio = max((item.max_bound_ratio for item in seen), default=0.0)
    return tuple(sorted(passed)), sum(item.num_cases for item in seen), ratio


def _origin(variant: Variant, kernel: Kernel, evaluations: Iterable[Evaluation]) -> VariantOrigin:
    keys, num_cases, ratio = validation_of(variant, evaluations)
    return VariantOrigin(
        symbol=variant.symbol,
        candidate=str(variant.candidate),
        recipe=variant.candidate.source_digest,
        source_sha256=sha256(kernel.source),
        object_sha256=sha256(kernel.object_code),
        library=variant.library,
        validated=keys,
        num_cases=num_cases,
        max_bound_ratio=ratio,
        deterministic=variant.deterministic,
    )


def _regions(table: DispatchTable) -> Iterator[RegionEvidence]:
    symbols = {variant.candidate.digest: variant.symbol for variant in table.variants}
    for row in table.rows:
        evidence = row.reconfirm or row.confirm
        if row.verdict is not Verdict.REPLACE or row.revoked or not evidence:
            continue
        weakest = min(evidence, key=lambda item: item.ci_low)
        yield RegionEvidence(
            cell=str(row.cell),
            symbol=symbols.get(row.candidate, row.candidate),
            point=str(weakest.point),
            stage=weakest.stage,
            speedup=weakest.speedup,
            ci_low=weakest.ci_low,
            ci_high=weakest.ci_high,
            n_sessions=weakest.n_sessions,
            n_pairs=weakest.n_pairs,
        )

"""A tuning task: everything that is known before any work is done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fibc.backends import native as native_kernels
from fibc.backends.base import Backend
from fibc.backends.registry import make_backends
from fibc.cache import Cache
from fibc.environment import Environment, detect
from fibc.schema.cells import default_features, make_keys, tuning_order
from fibc.schema.definition import Definition, load_definition
from fibc.schema.digest import digest_json
from fibc.schema.feature import Feature, FeatureKey
from fibc.schema.options import TuneOptions
from fibc.schema.policy import Policy
from fibc.schema.result import SetSizes
from fibc.schema.sets import Sets, split
from fibc.schema.table import NativeSource
from fibc.schema.workload import Workload
from fibc.schema.workload_source import find_workloads, synthetic_sweep


@dataclass(frozen=True)
class Task:
    """What is tuned, against what, with which means.

    Attributes:
        workloads: As recorded, or swept.
        keys: In the order in which the budget is spent.
        notes: What the user must read about workloads and native.
        synthetic: Nobody recorded the workloads.
        evidence_digest: Digest of what measurements depend on; others' evidence is not used.
        fingerprint: Digest of what decisions depend on; equal means that nothing is left to do.
    """

    definition: Definition
    workloads: tuple[Workload, ...]
    sets: Sets
    features: tuple[Feature, ...]
    keys: tuple[FeatureKey, ...]
    native: NativeSource
    environment: Environment
    backends: tuple[Backend, ...]
    policy: Policy
    options: TuneOptions
    notes: tuple[str, ...]
    synthetic: bool
    evidence_digest: str
    fingerprint: str

    @property
    def set_sizes(self) -> SetSizes:
        return SetSizes(
            tune=len(self.sets.tune),
            boundary=len(self.sets.boundary),
            test=len(self.sets.test),
            skipped=len(self.sets.skipped),
            traffic_weighted=self.sets.traffic_weighted,
            synthetic=self.synthetic,
        )

    @property
    def mismatches(self) -> tuple[tuple[str, str], ...]:
        """Templates that do not serve the definition, each with its reason."""
        found = (backend.spaces(self.definition, self.keys[0])[1] for backend in self.backends)
        return tuple((item.template, item.reason) for items in found for item in items)


def read_task(definition: Path | str, workloads: Path | str | None, options: TuneOptions, cache: Cache) -> Task:
    """Read and resolve everything that a run needs. Reads files and this machine, and changes nothing.

    Raises:
        SchemaError: With every problem of the definition, its workloads or a template.
        InputError: If native or a backend is not such.
    """
    contract = load_definition(definition)
    found = find_workloads(definition, contract, workloads)
    recorded = found[0] if found is not None else synthetic_sweep(contract)
    synthetic = all(workload.synthesised for workload in recorded)
    environment = detect()
    backends = make_backends(options.backends, environment, cache, [Path(path) for path in options.templates])
    native = native_kernels.resolve(contract, options.native, target_kind=backends[0].target.kind)
    features = default_features(contract, recorded)
    sets = split(recorded, options.split, features)
    keys = tuning_order(make_keys(features, sets.tune, contract))
    policy = Policy(
        min_speedup=options.min_speedup, alpha=options.alpha, num_keys=len(keys) if options.alpha_table else 1
    )
    evidence_digest = digest_json([environment.digest, native.digest])
    return Task(
        definition=contract,
        workloads=tuple(recorded),
        sets=sets,
        features=features,
        keys=keys,
        native=native,
        environment=environment,
        backends=backends,
        policy=policy,
        options=options,
        notes=tuple(_notes(contract, sets, native, synthetic=synthetic)),
        synthetic=synthetic,
        evidence_digest=evidence_digest,
        fingerprint=digest_json(
            [
                contract.digest,
                [[workload.to_json(), workload.weight] for workload in recorded],
                evidence_digest,
                [backend.fingerprint(contract) for backend in backends],
                repr(policy),
                [options.trials, list(options.split), options.seed],
            ]
        ),
    )


def _notes(definition: Definition, sets: Sets, native: NativeSource, *, synthetic: bool) -> Iterator[str]:
    if synthetic:
        yield (
            f"{definition.name}: SYNTHETIC workloads: no recorded ones were found beside the definition or in its "
            "dataset, so sizes that nobody saw in production are tuned (pass recorded ones with --workloads)"
        )
    if native.note:
        yield f"native is {native.name}: {native.note}"
    for skipped in sets.skipped:
        yield f"workload {skipped.workload.uuid} is skipped: {skipped.reason}"
    yield from sets.notes

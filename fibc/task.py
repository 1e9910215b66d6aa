"""A tuning task: everything that is known before any work is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fibc import gpus, settings
from fibc import sanitizer as sanitizers
from fibc.backends import native as native_kernels
from fibc.backends.base import Backend
from fibc.backends.compiled import CompiledBackend
from fibc.backends.compiled_store import CompiledStore
from fibc.backends.registry import DEFAULTS, LIBRARIES, NAMES, make_backends
from fibc.cache import Cache
from fibc.environment import Environment, detect
from fibc.errors import InputError, ToolchainError
from fibc.sanitizer import PROGRAM, Sanitizer
from fibc.schema import codec
from fibc.schema.cells import default_features, make_keys, tuning_order
from fibc.schema.decision import SESSION
from fibc.schema.definition import Definition, load_definition
from fibc.schema.digest import digest_json
from fibc.schema.feature import Feature, FeatureKey
from fibc.schema.options import CPU_MODE, MODES, TARGETS, TuneOptions
from fibc.schema.policy import Policy
from fibc.schema.result import SetSizes
from fibc.schema.sets import Sets, split
from fibc.schema.silicon import Gpu
from fibc.schema.table import NativeSource
from fibc.schema.workload import Workload
from fibc.schema.workload_source import find_workloads, synthetic_sweep


@dataclass(frozen=True)
class Task:
    """What is tuned, against what, with which means.

    Attributes:
        workloads: As recorded, or swept.
        keys: In the order in which the budget is spent.
        trials: Per key.
        notes: What the user must read about workloads and native.
        mode: How calls are timed, one of ``schema.options.MODES``.
        sanitizer: What finalists are run under; None where it is not asked for.
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
    trials: int
    notes: tuple[str, ...]
    mode: str
    sanitizer: Sanitizer | None
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

    def fingerprint_with(self, evidence_digest: str) -> str:
        """Return what the fingerprint would be over evidence of another environment."""
        return _fingerprint(
            self.definition,
            self.workloads,
            evidence_digest,
            self.backends,
            self.policy,
            self.options,
            self.trials,
            self.sanitizer,
        )

    @property
    def mismatches(self) -> tuple[tuple[str, str], ...]:
        """Templates that do not serve the definition, each with its reason."""
        found = (backend.spaces(self.definition, self.keys[0])[1] for backend in self.backends)
        return tuple((item.template, item.reason) for items in found for item in items)


def read_task(
    definition: Path | str,
    workloads: Path | str | None,
    options: TuneOptions,
    cache: Cache,
    store: CompiledStore | None = None,
    *,
    needs_device: bool = True,
) -> Task:
    """Read and resolve everything that a run needs. Reads files and this machine, and changes nothing.

    Args:
        store: Candidates that were compiled before, for backends to take.
        needs_device: Ask for the target's device; else what is known of its architecture stands for it.

    Raises:
        SchemaError: With every problem of the definition, its workloads or a template.
        InputError: If native or a backend is not such, or nothing was compiled where only that shall be searched.
    """
    contract = load_definition(definition)
    found = find_workloads(definition, contract, workloads)
    recorded = found[0] if found is not None else synthetic_sweep(contract)
    return make_task(contract, recorded, options, cache, store, needs_device=needs_device)


def make_task(
    contract: Definition,
    recorded: Sequence[Workload],
    options: TuneOptions,
    cache: Cache,
    store: CompiledStore | None = None,
    *,
    native: NativeSource | None = None,
    needs_device: bool = True,
) -> Task:
    """Resolve a run over workloads that are known; see ``read_task``.

    Args:
        native: The baseline; None resolves it from the options and the definition.
    """
    synthetic = all(workload.synthesised for workload in recorded)
    gpu = _gpu(options, needs_device=needs_device)
    mode = _mode(options, gpu)
    sanitizer = _sanitizer(options, gpu) if needs_device else None
    environment = detect(gpu=gpu)
    names = options.backends or DEFAULTS["cpu" if gpu is None else "cuda"]
    backends = make_backends(names, environment, cache, [Path(path) for path in options.templates])
    backend_notes: tuple[str, ...] = ()
    if store is not None:
        backends, backend_notes = _over_store(backends, contract, store, cache, only=options.compiled_only)
    if not options.backends:
        backends, absent = _present(backends, contract)
        backend_notes += absent
    if native is None:
        native = native_kernels.resolve(contract, options.native, target_kind=backends[0].target.kind)
    features = default_features(contract, recorded)
    sets = split(recorded, options.split, features)
    keys = tuning_order(make_keys(features, sets.tune, contract))
    margin = settings.DEFAULT_MIN_SPEEDUP_CPU if gpu is None else settings.DEFAULT_MIN_SPEEDUP_GPU
    policy = Policy(
        min_speedup=options.min_speedup or margin,
        alpha=options.alpha,
        num_keys=len(keys) if options.alpha_table else 1,
    )
    trials = options.trials or (settings.DEFAULT_TRIALS if gpu is None else settings.DEFAULT_TRIALS_GPU)
    evidence_digest = digest_json([environment.digest, native.digest, *_timed(environment, mode)])
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
        trials=trials,
        notes=(*_notes(contract, sets, native, synthetic=synthetic), *backend_notes),
        mode=mode,
        sanitizer=sanitizer,
        synthetic=synthetic,
        evidence_digest=evidence_digest,
        fingerprint=_fingerprint(
            contract, tuple(recorded), evidence_digest, backends, policy, options, trials, sanitizer
        ),
    )


def _fingerprint(
    definition: Definition,
    workloads: Sequence[Workload],
    evidence_digest: str,
    backends: Sequence[Backend],
    policy: Policy,
    options: TuneOptions,
    trials: int,
    sanitizer: Sanitizer | None,
) -> str:
    return digest_json(
        [
            definition.digest,
            [[workload.to_json(), workload.weight] for workload in workloads],
            evidence_digest,
            [backend.fingerprint(definition) for backend in backends],
            repr(policy),
            [trials, list(options.split), options.seed],
            *([str(sanitizer)] if sanitizer is not None else []),
        ]
    )


def _gpu(options: TuneOptions, *, needs_device: bool) -> Gpu | None:
    """Return the GPU to tune for, None for the CPU.

    Raises:
        InputError: If a GPU is asked for and there is none.
    """
    kinds = {kind for kind, names in NAMES.items() if set(names) & set(options.backends)} | {options.target_kind} - {""}
    if len(kinds) > 1:
        raise InputError(
            f"--backends: must all serve one target, got {', '.join(options.backends)} with target {options.target}"
            f" (accepted: {'; '.join(f'{kind}: ' + ', '.join(names) for kind, names in NAMES.items())})"
        )
    if kinds == {"cpu"}:
        return None
    if not needs_device:
        if not options.target_arch:
            raise InputError(
                f"--compile-only: needs a --target whose architecture is known, got {options.target or 'none'} "
                f"(accepted: {', '.join(name for name in TARGETS if name not in ('', 'cuda'))})"
            )
        return gpus.stand_in(options.target_arch)
    found = gpus.find()
    if not kinds:
        return next(iter(found.gpus), None)
    gpu = found.first()
    if options.target_arch not in ("", gpu.validity.arch):
        raise InputError(
            f"--target {options.target}: the first visible GPU must be of that architecture, got {gpu} (accepted: one "
            "that CUDA_VISIBLE_DEVICES shows first; without one --compile-only)"
        )
    return gpu


def _mode(options: TuneOptions, gpu: Gpu | None) -> str:
    """Return how calls are timed.

    Raises:
        InputError: If the target has no such mode.
    """
    if gpu is not None:
        return options.mode or MODES[0]
    if options.mode not in ("", CPU_MODE):
        raise InputError(f"--mode: needs a GPU for {options.mode}, the target is a CPU (accepted: {CPU_MODE})")
    return CPU_MODE


def _sanitizer(options: TuneOptions, gpu: Gpu | None) -> Sanitizer | None:
    """Return the sanitizer that is asked for.

    Raises:
        InputError: If the target is no GPU.
        ToolchainError: If it is not installed.
    """
    if not options.sanitize:
        return None
    if gpu is None:
        raise InputError(f"--sanitize: needs a GPU, the target is a CPU (accepted: --target cuda, or no {PROGRAM})")
    return sanitizers.find()


def _timed(environment: Environment, mode: str) -> list[Any]:
    """Return what evidence depends on beside the environment: a mode that is not the target's own, and on a GPU what a
    session is, which was something else before.

    A caller without graphs pays for the host too, so its CPU belongs to evidence of the eager mode.
    """
    if environment.gpu is None:
        return []
    if mode == MODES[0]:
        return [SESSION]
    return [SESSION, mode, codec.to_plain(environment.cpu_validity())] if mode == "eager" else [SESSION, mode]


def _over_store(
    backends: Sequence[Backend], definition: Definition, store: CompiledStore, cache: Cache, *, only: bool
) -> tuple[tuple[Backend, ...], tuple[str, ...]]:
    """Return the backends, those that have compiled candidates over the store, and what the user must read of it.

    A backend whose compiler is not here searches only inside what was compiled; so do all where ``only`` is asked, but
    for a library's: what its algorithms take to build is a launcher, and only the device knows which they are.

    Raises:
        InputError: If only what was compiled shall be searched, and nothing was.
    """
    over: list[Backend] = []
    notes: list[str] = []
    for backend in backends:
        index = store.index(definition, backend.name, str(backend.target))
        if index is None:
            if only and backend.name not in LIBRARIES:
                notes.append(f"{backend.name}: nothing was compiled for {backend.target}, and nothing is searched")
            else:
                over.append(backend)
            continue
        lacking = "" if only else _lacking(backend, definition)
        held = only or bool(lacking)
        over.append(CompiledBackend(backend, store, index, cache, only=held))
        if held:
            why = f"as there is no compiler here ({lacking})" if lacking else "as --compiled-only asks"
            notes.append(f"{backend.name}: searches only the {len(index.compiled)} candidates in {store.root}, {why}")
    if only and not any(isinstance(backend, CompiledBackend) for backend in over):
        raise InputError(
            f"--compiled-only: needs candidates compiled for {definition.name}, {store.root} has none of "
            f"{', '.join(f'{backend.name} for {backend.target}' for backend in backends)} "
            f"(compile them: fibc tune ... --target {backends[0].target} --compile-only)"
        )
    return tuple(over), tuple(notes)


def _present(backends: Sequence[Backend], definition: Definition) -> tuple[tuple[Backend, ...], tuple[str, ...]]:
    """Return the backends that can build here or need not, and a note for each of the others.

    Those that nobody asked for by name are searched where they can be. All are returned where none can build: the
    caller then meets the error of the first.
    """
    lacking = {backend.name: why for backend in backends if (why := _lacking(backend, definition))}
    if len(lacking) == len(backends):
        return tuple(backends), ()
    notes = tuple(f"{name}: nothing is searched, as it cannot build here: {why}" for name, why in lacking.items())
    return tuple(backend for backend in backends if backend.name not in lacking), notes


def _lacking(backend: Backend, definition: Definition) -> str:
    """Return what keeps the backend from building, or an empty string."""
    try:
        backend.fingerprint(definition)
    except ToolchainError as error:
        return str(error)
    return ""


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

"""The candidates of a contest: chosen near each template's best guess, built once, kept as files that travel."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from contest.plan import Plan
from fibc.backends.base import Backend
from fibc.backends.registry import make_backends
from fibc.cache import Cache
from fibc.environment import Environment
from fibc.errors import BuildError, InputError
from fibc.paths import atomic_write
from fibc.schema import codec
from fibc.schema.candidate import Artifact, Candidate, ConfigValue
from fibc.schema.definition import Definition
from fibc.schema.digest import digest_json
from fibc.schema.feature import FeatureKey
from fibc.search.space import ConfigSpace

WRONG_TEMPLATES = Path(__file__).parent / "templates"
"""Kernels that are wrong on purpose: they leave out a part of K, and are faster for it."""

BACKENDS = {"cpu": ("cpu",), "cuda": ("triton",)}
"""What is contested, by target: kernels that compile in a second, so that a contest can have hundreds."""

BUILD_TIMEOUT_S = 120.0

INDEX = "bundle.json"


@dataclass(frozen=True)
class Built:
    """A candidate with its library."""

    candidate: Candidate
    artifact: Artifact


@dataclass(frozen=True)
class Entry:
    """What is contested of one definition.

    Attributes:
        candidates: Digests by ``str`` of the key.
        wrong: Digests of kernels that are wrong on purpose.
    """

    definition: Definition
    candidates: Mapping[str, tuple[str, ...]]
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bundle:
    """Everything that was built for a contest.

    Attributes:
        entries: One per weight.
        built: By digest.
    """

    target: str
    entries: tuple[Entry, ...]
    built: Mapping[str, Built]

    @property
    def digest(self) -> str:
        """Identity: of the candidates and their object code."""
        codes = {digest: item.artifact.digest for digest, item in sorted(self.built.items())}
        chosen = [[entry.definition.digest, dict(entry.candidates), entry.wrong] for entry in self.entries]
        return digest_json([self.target, codes, chosen])

    def save(self, directory: Path) -> None:
        """Write the bundle: libraries, and an index that names them without a path."""
        directory.mkdir(parents=True, exist_ok=True)
        for item in self.built.values():
            shutil.copyfile(item.artifact.library_path, directory / _library(item.artifact))
        index = {
            "target": self.target,
            "entries": [
                {
                    "definition": entry.definition.to_json(),
                    "candidates": dict(entry.candidates),
                    "wrong": list(entry.wrong),
                }
                for entry in self.entries
            ],
            "built": [
                {
                    "candidate": codec.to_plain(item.candidate),
                    "artifact": codec.to_plain(replace(item.artifact, object_path="", library_path="")),
                }
                for item in self.built.values()
            ],
        }
        atomic_write(directory / INDEX, json.dumps(index, indent=1).encode())


def load(directory: Path) -> Bundle:
    """Return the bundle in ``directory``.

    Raises:
        InputError: If there is none.
    """
    try:
        index = json.loads((directory / INDEX).read_text())
    except OSError as error:
        raise InputError(f"{directory}: must hold a bundle, got: {error.strerror} (make it with --prepare)") from error
    built = [_load(directory, item) for item in index["built"]]
    return Bundle(
        index["target"],
        tuple(
            Entry(
                Definition.model_validate(entry["definition"]),
                {key: tuple(digests) for key, digests in entry["candidates"].items()},
                tuple(entry["wrong"]),
            )
            for entry in index["entries"]
        ),
        {item.candidate.digest: item for item in built},
    )


def _load(directory: Path, plain: Mapping[str, Any]) -> Built:
    artifact = codec.from_plain(Artifact, plain["artifact"])
    library = str((directory / _library(artifact)).absolute())
    return Built(codec.from_plain(Candidate, plain["candidate"]), replace(artifact, library_path=library))


def _library(artifact: Artifact) -> str:
    return f"{artifact.symbol}.so"


def prepare(plan: Plan, environment: Environment, cache: Cache, *, jobs: int) -> Bundle:
    """Choose and build the candidates of a plan. Needs compilers, and no device.

    Raises:
        BuildError: If a wrong kernel does not build, without which a control shows nothing.
    """
    names = BACKENDS[plan.target]
    bench = _Bench(
        plan,
        make_backends(names, environment, cache),
        make_backends(names, environment, cache, [WRONG_TEMPLATES]),
        jobs,
    )
    entries = tuple(
        Entry(
            definition,
            {str(key): bench.fill(definition, key) for key in plan.keys},
            bench.wrong(definition, plan.keys[0]),
        )
        for definition in plan.definitions
    )
    return Bundle(plan.target, entries, bench.built)


@dataclass
class _Bench:
    """A workbench: builds, and keeps what was built."""

    plan: Plan
    backends: Sequence[Backend]
    wrong_backends: Sequence[Backend]
    jobs: int
    built: dict[str, Built] = field(default_factory=dict)

    def fill(self, definition: Definition, key: FeatureKey) -> tuple[str, ...]:
        """Return as many candidates as the plan asks for, no two with the same object code."""
        proposals = propose(self.backends, definition, key, self.plan.seed)
        chosen: dict[str, str] = {}
        while wanted := list(itertools.islice(proposals, self.plan.num_candidates - len(chosen))):
            for digest, item in self._build(definition, wanted).items():
                chosen.setdefault(item.artifact.digest, digest)
        return tuple(chosen.values())

    def wrong(self, definition: Definition, key: FeatureKey) -> tuple[str, ...]:
        """Return every config of the templates that are wrong on purpose."""
        proposals = [
            Proposal(backend, space.template, config)
            for backend in self.wrong_backends
            for space in backend.spaces(definition, key)[0]
            if (WRONG_TEMPLATES / f"{space.template}.toml").is_file()
            for config in ConfigSpace(space).configs()
        ]
        made = tuple(self._build(definition, proposals))
        if not made or len(made) < len(proposals):
            raise BuildError(f"{WRONG_TEMPLATES}: {len(proposals)} wrong kernels must build, {len(made)} did")
        return made

    def _build(self, definition: Definition, proposals: Sequence[Proposal]) -> dict[str, Built]:
        """Return what builds; of a kernel whose sums have no order nobody could tell after timing if it was right."""
        made: dict[str, Built] = {}
        for backend in dict.fromkeys(proposal.backend for proposal in proposals):
            candidates = {
                candidate.digest: candidate
                for candidate in (
                    backend.candidate(definition, proposal.template, dict(proposal.config))
                    for proposal in proposals
                    if proposal.backend is backend
                )
            }
            results = backend.build(definition, [*candidates.values()], timeout_s=BUILD_TIMEOUT_S, jobs=self.jobs)
            made |= {
                digest: Built(candidates[digest], item)
                for digest, item in results.items()
                if isinstance(item, Artifact) and item.resources.get("deterministic", True)
            }
        self.built |= made
        return made


@dataclass(frozen=True)
class Proposal:
    """A config of a template."""

    backend: Backend
    template: str
    config: tuple[tuple[str, ConfigValue], ...]


def propose(backends: Sequence[Backend], definition: Definition, key: FeatureKey, seed: int) -> Iterator[Proposal]:
    """Yield configs for a key, templates in turn: of each its default first, then what lies nearest to that.

    Neighbours of a good guess are what a search ends up among: several that are nearly equally fast.
    """
    rng = random.Random(f"{seed} {definition.name} {key}")
    turns = [
        _near_default(backend, ConfigSpace(space), rng)
        for backend in backends
        for space in backend.spaces(definition, key)[0]
    ]
    while turns:
        for turn in list(turns):
            proposal = next(turn, None)
            if proposal is None:
                turns.remove(turn)
            else:
                yield proposal


def _near_default(backend: Backend, space: ConfigSpace, rng: random.Random) -> Iterator[Proposal]:
    default = space.default()
    if default is not None:
        yield Proposal(backend, space.template, default)
        for config in space.near(default, rng):
            yield Proposal(backend, space.template, config)

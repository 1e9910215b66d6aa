"""A backend over a store: what was compiled elsewhere is taken from there, and the search may be held to that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fibc.backends.base import Backend, BuildFailure, Mismatch
from fibc.backends.compiled_store import CompiledStore, Index, as_failure
from fibc.cache import Cache
from fibc.errors import InputError
from fibc.schema.candidate import Artifact, Candidate, ConfigValue
from fibc.schema.definition import Definition
from fibc.schema.digest import digest_json
from fibc.schema.feature import FeatureKey
from fibc.schema.space import Config, Space


class CompiledBackend:
    """Answers builds of ``inner`` from a store where it can; see ``Backend`` for the contract.

    With ``only`` it offers nothing else, and needs neither a compiler of kernels nor Triton: a candidate is what the
    index says, whatever templates and compilers are here now.
    """

    def __init__(self, inner: Backend, store: CompiledStore, index: Index, cache: Cache, *, only: bool) -> None:
        """Prepare; nothing is read yet.

        Args:
            index: Of the store, for ``inner`` and the definition that will be asked about.
            cache: Where files are unpacked.
            only: Offer what the index holds and nothing else.
        """
        self.name = inner.name
        self.target = inner.target
        self._inner = inner
        self._store = store
        self._index = index
        self._cache = cache
        self._only = only
        self._failed = {item.candidate.digest: item for item in index.failed}
        self._compiled = {candidate.digest for candidate in index.compiled}
        every = (*index.compiled, *(item.candidate for item in index.failed))
        self._by_config = {(candidate.template, candidate.config): candidate for candidate in every}

    def fingerprint(self, definition: Definition) -> str:
        if not self._only:
            return self._inner.fingerprint(definition)
        return digest_json([str(self.target), sorted(self._compiled)])

    def spaces(self, definition: Definition, key: FeatureKey) -> tuple[tuple[Space, ...], tuple[Mismatch, ...]]:
        spaces, mismatches = self._inner.spaces(definition, key)
        if not self._only:
            return spaces, mismatches
        held: list[Space] = []
        missed = list(mismatches)
        for space in spaces:
            if configs := _in_order(space, self._index.configs(space.template)):
                text = self._index.source_digests.get(space.template, space.source_digest)
                held.append(replace(space, configs=configs, source_digest=text))
            else:
                missed.append(Mismatch(space.template, f"none of its configs was compiled for {self.target}"))
        return tuple(held), tuple(missed)

    def candidate(self, definition: Definition, template: str, config: Mapping[str, ConfigValue]) -> Candidate:
        if not self._only:
            return self._inner.candidate(definition, template, config)
        known = self._by_config.get((template, tuple(config.items())))
        if known is None:
            raise InputError(f"{template}: must be a config that was compiled, got {dict(config)}")
        return known

    def build(
        self, definition: Definition, candidates: Sequence[Candidate], *, timeout_s: float, jobs: int
    ) -> dict[str, Artifact | BuildFailure]:
        results: dict[str, Artifact | BuildFailure] = {}
        missing: list[Candidate] = []
        for candidate in candidates:
            stored = self._store.get(candidate, self._cache) if candidate.digest in self._compiled else None
            if stored is not None:
                results[candidate.digest] = stored
            elif (known := self._failed.get(candidate.digest)) is not None and (self._only or not known.timed_out):
                results[candidate.digest] = as_failure(known)
            else:
                missing.append(candidate)
        if missing and self._only:
            lost = "was compiled and is lost: its file is missing or damaged (compile again with --compile-only)"
            results |= {candidate.digest: BuildFailure(timed_out=False, log=lost) for candidate in missing}
        elif missing:
            results |= self._inner.build(definition, missing, timeout_s=timeout_s, jobs=jobs)
        return results


def _in_order(space: Space, compiled: tuple[Config, ...]) -> tuple[Config, ...]:
    """Return what was compiled: in the order of a space that has one, then what the space no longer lists."""
    held = dict.fromkeys(compiled)
    return tuple(dict.fromkeys((*(config for config in space.configs or () if config in held), *compiled)))

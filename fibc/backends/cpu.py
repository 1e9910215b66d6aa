"""The CPU backend: C++ kernel templates compiled for one ISA level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fibc import toolchain
from fibc.backends.base import BuildFailure, Mismatch
from fibc.backends.build import COMPILE_FLAGS, Unit, build_units
from fibc.backends.headers import header_texts
from fibc.backends.match import Match, guards
from fibc.backends.templates import TemplateSet, axes_in_call, banner, names_of, space_of
from fibc.cache import Cache
from fibc.environment import Environment
from fibc.errors import InputError
from fibc.paths import INCLUDE
from fibc.schema.candidate import Artifact, Candidate, ConfigValue, Target
from fibc.schema.definition import Definition
from fibc.schema.digest import digest_json, digest_text
from fibc.schema.feature import FeatureKey
from fibc.schema.isa import ISA_NAMES, compiler_flags, isa_level
from fibc.schema.space import Space
from fibc.schema.template import Template

KIND = "cpu"

KERNEL_HEADERS = ("fibc/kernel_abi.h", "fibc/simd")
"""What kernels may include, files or directories of files below ``INCLUDE``. Their content is part of a candidate's
identity."""

PRELUDE = "#include <immintrin.h>\n#include <stdint.h>\n#include <string.h>\n"
"""What ``fibc/simd/vec.h`` includes. Reading it takes 0.3 s, more than many a kernel takes to compile (g++ 12.2)."""

BELOW_ALL_LEVELS = "baseline"
"""Arch of the target where the CPU runs no level: every template is a mismatch, and native serves."""


@dataclass(frozen=True)
class _Rendered:
    source: str
    digest: str


class CpuBackend:
    """C++ templates through the system's compiler; see ``Backend`` for the contract.

    A template is rendered with its tunables by their names, its axes (a constant's value, or a variable axis's index
    into ``call->axes``), ``inputs`` and ``outputs`` (role to index), its dtype variables, its constants, and ``isa``.
    """

    name = "cpu"

    def __init__(
        self,
        environment: Environment,
        cache: Cache,
        templates_dirs: Sequence[Path] = (),
        *,
        isa: str | None = None,
    ) -> None:
        """Load the templates.

        Args:
            environment: Whose best ISA level is the target.
            cache: Holds what builds make.
            templates_dirs: More directories of templates.
            isa: Another level to compile for, also one that this CPU cannot run.

        Raises:
            SchemaError: With every problem of every template.
            InputError: If ``isa`` is no level.
        """
        if isa is not None and isa not in ISA_NAMES:
            raise InputError(f"isa: must be a level, got {isa!r} (accepted: {', '.join(ISA_NAMES)})")
        best = environment.isa[-1] if environment.isa else BELOW_ALL_LEVELS
        self.target = Target(KIND, isa or best)
        self._environment = environment
        self._cache = cache
        self._templates = TemplateSet(KIND, templates_dirs, self._lacks)
        self._headers = digest_json(header_texts(KERNEL_HEADERS))
        self._rendered: dict[tuple[str, str, tuple[tuple[str, ConfigValue], ...]], _Rendered] = {}

    def fingerprint(self, definition: Definition) -> str:
        served = self._templates.serving(definition)
        parts = [[item.name, repr(item), self._templates.render.source(item.source_name)] for item in served]
        return digest_json([str(self.target), self._build_digest, parts])

    def spaces(self, definition: Definition, key: FeatureKey) -> tuple[tuple[Space, ...], tuple[Mismatch, ...]]:
        def space(template: Template, found: Match) -> Space:
            names = self._names(template, definition, found)
            return space_of(template, key, names, digest_json([template.digest, self._headers]))

        return self._templates.spaces(definition, space)

    def candidate(self, definition: Definition, template: str, config: Mapping[str, ConfigValue]) -> Candidate:
        chosen = self._templates[template]
        ordered = tuple((name, config[name]) for name in chosen.tunables)
        rendered = self._render(chosen, definition, ordered)
        return Candidate(self.name, template, ordered, rendered.digest, self.target)

    def build(
        self, definition: Definition, candidates: Sequence[Candidate], *, timeout_s: float, jobs: int
    ) -> dict[str, Artifact | BuildFailure]:
        units = {}
        for candidate in candidates:
            source = self._render(self._templates[candidate.template], definition, candidate.config).source
            units[candidate.digest] = Unit(candidate.digest, source)
        built = build_units(
            tuple(units.values()),
            self._toolchain,
            flags=compiler_flags(self.target.arch),
            include=INCLUDE,
            cache=self._cache,
            timeout_s=timeout_s,
            jobs=jobs,
            prelude=PRELUDE,
        )
        results: dict[str, Artifact | BuildFailure] = {}
        for candidate in candidates:
            outcome = built[candidate.digest]
            if isinstance(outcome, BuildFailure):
                results[candidate.digest] = outcome
                continue
            template = self._templates[candidate.template]
            results[candidate.digest] = outcome.artifact(
                units[candidate.digest].source,
                guards(template, self._templates.matched(template, definition)),
                {"isa": self.target.arch},
            )
        return results

    @cached_property
    def _toolchain(self) -> toolchain.Toolchain:
        return toolchain.find()

    @cached_property
    def _build_digest(self) -> str:
        """Digest of everything but the source that a binary follows from."""
        flags = [*COMPILE_FLAGS, *compiler_flags(self.target.arch)]
        return digest_json([self._toolchain.digest, flags, PRELUDE, self._headers])

    def _lacks(self, template: Template) -> str:
        needs = template.needs or ISA_NAMES[0]
        if self.target.arch == BELOW_ALL_LEVELS or ISA_NAMES.index(self.target.arch) < ISA_NAMES.index(needs):
            return f"needs ISA level {needs}, the target is {self.target}"
        return ""

    def _names(self, template: Template, definition: Definition, found: Match) -> dict[str, ConfigValue]:
        """Return the values of the names that constraints may use, all but ``size``."""
        level = isa_level(self.target.arch)
        return {
            **names_of(template, definition, found),
            "lanes": level.lanes,
            "vector_registers": level.vector_registers,
            "l2_bytes": self._environment.l2_bytes,
            "num_threads": self._environment.num_threads,
        }

    def _render(
        self, template: Template, definition: Definition, config: tuple[tuple[str, ConfigValue], ...]
    ) -> _Rendered:
        """Return the source, headed by a banner with its digest."""
        key = (template.name, definition.digest, config)
        if key not in self._rendered:
            found = self._templates.matched(template, definition)
            values = {
                **axes_in_call(template, definition, found),
                **dict(config),
                **found.dtypes,
                **found.constants,
                "inputs": found.inputs,
                "outputs": found.outputs,
                "isa": self.target.arch,
            }
            body = self._templates.render(template.source_name, values)
            source = banner(template, self.target, config, body) + body
            self._rendered[key] = _Rendered(source, digest_text(source, self._build_digest))
        return self._rendered[key]

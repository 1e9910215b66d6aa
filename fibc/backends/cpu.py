"""The CPU backend: C++ kernel templates compiled for one ISA level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import fibc
from fibc import toolchain
from fibc.backends.base import BuildFailure, Mismatch
from fibc.backends.build import COMPILE_FLAGS, Unit, build_units
from fibc.backends.match import Match, guards, match
from fibc.cache import Cache
from fibc.environment import Environment
from fibc.errors import InputError
from fibc.render import Renderer
from fibc.schema.candidate import Artifact, Candidate, ConfigValue, Target
from fibc.schema.definition import DTYPE_BITS, Definition
from fibc.schema.digest import digest_json, digest_text
from fibc.schema.feature import FeatureKey
from fibc.schema.isa import ISA_NAMES, compiler_flags, isa_level
from fibc.schema.space import Space, Tunable
from fibc.schema.template import SIZE_NAME, Template, load_templates

KIND = "cpu"

PACKAGE = Path(fibc.__file__).parent
BUILTIN_TEMPLATES = PACKAGE / "templates" / "kernels"
INCLUDE = PACKAGE / "include"
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
        roots = (BUILTIN_TEMPLATES, *templates_dirs)
        self._templates = {template.name: template for template in load_templates(roots, KIND)}
        self._headers = _headers_digest()
        self._renderer = Renderer(roots)
        self._rendered: dict[tuple[str, str, tuple[tuple[str, ConfigValue], ...]], _Rendered] = {}

    def fingerprint(self, definition: Definition) -> str:
        served = [
            template for template in self._templates.values() if isinstance(self._match(template, definition), Match)
        ]
        parts = [[template.name, repr(template), self._renderer.source(template.source_name)] for template in served]
        return digest_json([str(self.target), self._build_digest, parts])

    def spaces(self, definition: Definition, key: FeatureKey) -> tuple[tuple[Space, ...], tuple[Mismatch, ...]]:
        spaces: list[Space] = []
        mismatches: list[Mismatch] = []
        for template in self._templates.values():
            found = self._match(template, definition)
            if isinstance(found, str):
                mismatches.append(Mismatch(template.name, found))
                continue
            names = self._constants(template, definition, found)
            names[SIZE_NAME] = key.cell.bounds[0][1] if key.cell.bounds else 1
            tunables = tuple(Tunable(name, choices) for name, choices in template.tunables.items())
            text = digest_json([template.digest, self._headers])
            spaces.append(Space(template.name, tunables, template.laws(), names, text, starts=template.guesses()))
        return tuple(spaces), tuple(mismatches)

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
            found = self._match(template, definition)
            assert isinstance(found, Match), "a candidate exists only of a template that matches"
            results[candidate.digest] = Artifact(
                digest=outcome.digest,
                object_path=str(outcome.object_path),
                library_path=str(outcome.library_path),
                symbol=outcome.symbol,
                size_bytes=outcome.size_bytes,
                source=units[candidate.digest].source,
                guards=guards(template, found),
                resources={"isa": self.target.arch},
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

    def _match(self, template: Template, definition: Definition) -> Match | str:
        needs = template.needs or ISA_NAMES[0]
        if self.target.arch == BELOW_ALL_LEVELS or ISA_NAMES.index(self.target.arch) < ISA_NAMES.index(needs):
            return f"needs ISA level {needs}, the target is {self.target}"
        return match(template, definition)

    def _constants(self, template: Template, definition: Definition, found: Match) -> dict[str, ConfigValue]:
        """Return the values of the names that constraints may use, all but ``size``."""
        level = isa_level(self.target.arch)
        return {
            **{axis: definition.const_axes[found.axes[axis]] for axis in template.const_axes},
            **found.dtypes,
            **{f"{variable}_bytes": DTYPE_BITS[dtype] // 8 for variable, dtype in found.dtypes.items()},
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
            found = self._match(template, definition)
            if isinstance(found, str):
                raise InputError(f"{template.name}: does not serve {definition.name}: {found}")
            positions = list(definition.axes)
            axes = {
                axis: definition.const_axes[name] if axis in template.const_axes else positions.index(name)
                for axis, name in found.axes.items()
            }
            values = {**axes, **dict(config), **found.dtypes, **found.constants}
            body = self._renderer(
                template.source_name,
                {**values, "inputs": found.inputs, "outputs": found.outputs, "isa": self.target.arch},
            )
            settings = ", ".join(f"{name} = {value}" for name, value in config) or "no tunables"
            banner = (
                f"// Generated by fibc from {template.name} for {self.target}: do not edit.\n"
                f"// {settings}\n"
                f"// digest {digest_text(body)}\n"
            )
            source = banner + body
            self._rendered[key] = _Rendered(source, digest_text(source, self._build_digest))
        return self._rendered[key]


def kernel_headers() -> dict[str, str]:
    """Return the text of every header that kernels may include, by the path that they include."""
    roots = (INCLUDE / name for name in KERNEL_HEADERS)
    files = [file for root in roots for file in (sorted(root.glob("*.h")) if root.is_dir() else [root])]
    return {file.relative_to(INCLUDE).as_posix(): file.read_text() for file in files}


def _headers_digest() -> str:
    return digest_json(kernel_headers())

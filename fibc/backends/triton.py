"""The Triton backend: kernel templates compiled ahead of time for one GPU architecture, launched from C++."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fibc import toolchain
from fibc.backends import triton_compile
from fibc.backends.base import BuildFailure, Mismatch
from fibc.backends.build import COMPILE_FLAGS, Built, Unit, build_units
from fibc.backends.cubin import KernelFacts, read_kernel
from fibc.backends.gpu_target import DEFAULT_ARCH, KIND, gpu_target
from fibc.backends.headers import LAUNCH_HEADERS, header_texts
from fibc.backends.match import Match, guards
from fibc.backends.resources import blocks_per_sm, shortage
from fibc.backends.templates import TemplateSet, banner, names_of, space_of
from fibc.backends.triton_compile import Compiled, KernelSource, compile_kernels
from fibc.backends.triton_launch import LAUNCHER, Bound, check_parameters, kernel_source, launcher_source
from fibc.cache import Cache
from fibc.paths import INCLUDE, TEMPLATES
from fibc.render import Renderer
from fibc.schema.arch import arch
from fibc.schema.candidate import Artifact, Candidate, ConfigValue, Target
from fibc.schema.definition import Definition
from fibc.schema.digest import digest_json
from fibc.schema.feature import FeatureKey
from fibc.schema.space import Space
from fibc.schema.template import TF32_NAME, TF32_TAG, Template

NAME = "triton"


@dataclass(frozen=True)
class Rendered:
    """A candidate before it is compiled: what it is bound to, its kernel, and the banner of its launcher."""

    bound: Bound
    kernel: KernelSource
    banner: str


class TritonBackend:
    """Triton templates; see ``Backend`` for the contract. Neither Triton nor a GPU is needed before ``candidate``.

    A template is rendered with its tunables and constant axes by their names, its dtype variables, its constants
    (``eps``), ``num_sms``, ``capability`` and ``allow_tf32``. An axis that varies is an argument of the kernel.
    """

    name = NAME

    def __init__(
        self,
        cache: Cache,
        templates_dirs: Sequence[Path] = (),
        *,
        arch_name: str = DEFAULT_ARCH,
        num_sms: int | None = None,
        l2_bytes: int | None = None,
    ) -> None:
        """Load the templates.

        Args:
            cache: Holds what builds make.
            templates_dirs: More directories of templates.
            arch_name: Architecture to compile for, also one that is not here.
            num_sms: Multiprocessors of the GPU; None takes the architecture's usual ones. Alike ``l2_bytes``.

        Raises:
            SchemaError: With every problem of every template.
            InputError: If ``arch_name`` is no architecture.
        """
        self._gpu = gpu_target(arch_name, num_sms, l2_bytes)
        self._arch = self._gpu.arch
        self.target = Target(KIND, arch_name)
        self._cache = cache
        self._templates = TemplateSet(NAME, templates_dirs, self._lacks)
        self._launch_renderer = Renderer((TEMPLATES,))
        self._rendered: dict[tuple[str, str, tuple[tuple[str, ConfigValue], ...]], Rendered] = {}

    def fingerprint(self, definition: Definition) -> str:
        parts = self._templates.texts(definition)
        compiler = [self._triton.version, self._triton.ptxas]
        return digest_json([str(self.target), self._gpu.num_sms, compiler, self._host_digest, parts])

    def spaces(self, definition: Definition, key: FeatureKey) -> tuple[tuple[Space, ...], tuple[Mismatch, ...]]:
        def space(template: Template, found: Match) -> Space:
            names = self._names(template, definition, found)
            return space_of(template, key, names, self._templates.text_digest(template))

        return self._templates.spaces(definition, space)

    def candidate(self, definition: Definition, template: str, config: Mapping[str, ConfigValue]) -> Candidate:
        chosen = self._templates[template]
        ordered = tuple((name, config[name]) for name in chosen.tunables)
        rendered = self._render(chosen, definition, ordered)
        launch = [repr(chosen.launch), sorted(rendered.bound.axes.items()), repr(guards(chosen, rendered.bound.found))]
        source_digest = digest_json([rendered.kernel.digest(self._triton), launch])
        return Candidate(self.name, template, ordered, source_digest, self.target)

    def render(self, definition: Definition, candidate: Candidate) -> Rendered:
        """Return the kernel's source, headed by a banner with its digest, and how it is launched."""
        return self._render(self._templates[candidate.template], definition, candidate.config)

    def build(
        self, definition: Definition, candidates: Sequence[Candidate], *, timeout_s: float, jobs: int
    ) -> dict[str, Artifact | BuildFailure]:
        rendered = {c.digest: self.render(definition, c) for c in candidates}
        compiled = compile_kernels(
            {digest: item.kernel for digest, item in rendered.items()},
            self._triton,
            cache=self._cache,
            timeout_s=timeout_s,
            jobs=jobs,
        )
        results: dict[str, Artifact | BuildFailure] = {}
        facts: dict[str, KernelFacts] = {}
        units: dict[str, Unit] = {}
        for digest, outcome in compiled.items():
            if isinstance(outcome, BuildFailure):
                results[digest] = outcome
                continue
            facts[digest] = read_kernel(outcome.cubin, outcome.facts["name"])
            check_parameters(rendered[digest].bound, outcome, facts[digest].parameters)
            if lacking := shortage(self._arch, **_needs(facts[digest], outcome)):
                results[digest] = BuildFailure(timed_out=False, log=lacking, resource=True)
                continue
            item = rendered[digest]
            source = launcher_source(item.bound, outcome, item.banner, self._launch_renderer)
            units[digest] = Unit(digest_json([digest, self._host_digest]), source)
        built = build_units(
            tuple(units.values()),
            toolchain.find(),
            flags=(),
            include=INCLUDE,
            cache=self._cache,
            timeout_s=timeout_s,
            jobs=jobs,
        )
        for digest, unit in units.items():
            launcher, kernel = built[unit.digest], compiled[digest]
            assert isinstance(kernel, Compiled)
            results[digest] = (
                launcher
                if isinstance(launcher, BuildFailure)
                else self._artifact(rendered[digest], kernel, facts[digest], launcher)
            )
        return results

    def _artifact(self, rendered: Rendered, compiled: Compiled, facts: KernelFacts, launcher: Built) -> Artifact:
        needs = _needs(facts, compiled)
        template = rendered.bound.template
        return launcher.artifact(
            rendered.kernel.text,
            guards(template, rendered.bound.found),
            {
                "kind": "generated",
                "arch": self.target.arch,
                **needs,
                "spill_bytes": facts.stack_bytes,
                "cubin_bytes": len(compiled.cubin),
                "blocks_per_sm": blocks_per_sm(self._arch, **needs),
                "deterministic": template.deterministic,
            },
        )

    @cached_property
    def _triton(self) -> triton_compile.TritonToolchain:
        return triton_compile.find()

    @cached_property
    def _host_digest(self) -> str:
        """Digest of everything but the kernel that a launcher's object follows from."""
        launcher = self._launch_renderer.sources(LAUNCHER)
        return digest_json([toolchain.find().digest, list(COMPILE_FLAGS), header_texts(LAUNCH_HEADERS), launcher])

    def _lacks(self, template: Template) -> str:
        if template.needs and self._arch.capability < arch(template.needs).capability:
            return f"needs {template.needs}, the target is {self.target}"
        return ""

    def _names(self, template: Template, definition: Definition, found: Match) -> dict[str, ConfigValue]:
        """Return the values of the names that constraints may use, all but ``size``."""
        return {
            **names_of(template, definition, found),
            **self._gpu.names,
            TF32_NAME: TF32_TAG in (definition.tags or ()),
        }

    def _render(
        self, template: Template, definition: Definition, config: tuple[tuple[str, ConfigValue], ...]
    ) -> Rendered:
        key = (template.name, definition.digest, config)
        if key not in self._rendered:
            found = self._templates.matched(template, definition)
            values = {**self._names(template, definition, found), **dict(config)}
            body = self._templates.render(
                template.source_name, {**values, **found.constants, "capability": self._arch.capability}
            )
            text = banner(template, self.target, config, body, comment="#") + body
            bound = Bound(template, definition, found, values)
            kernel = kernel_source(bound, text, self._arch.capability)
            self._rendered[key] = Rendered(
                bound, kernel, banner(template, self.target, config, body).removesuffix("\n")
            )
        return self._rendered[key]


def _needs(facts: KernelFacts, compiled: Compiled) -> dict[str, int]:
    """Return what a block takes, by the names of ``shortage``."""
    return {
        "registers": facts.registers,
        "num_warps": int(compiled.facts["num_warps"]),
        "shared_bytes": int(compiled.facts["shared"]),
    }

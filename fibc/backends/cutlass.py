"""The CUTLASS backend: C++ kernel templates compiled by nvcc for one GPU architecture, launched from C++."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fibc import cuda_toolchain, toolchain
from fibc.backends.base import BuildFailure, Mismatch
from fibc.backends.build import COMPILE_FLAGS, Built, Unit, build_units
from fibc.backends.cubin import KernelFacts, read_kernel, sections, word_lines
from fibc.backends.cutlass_compile import FUNCTION, KernelCompiler, compile_kernels
from fibc.backends.cutlass_rank import Config, Shape, by_estimate, rank
from fibc.backends.gpu_target import DEFAULT_ARCH, KIND, gpu_target
from fibc.backends.headers import LAUNCH_HEADERS, header_texts
from fibc.backends.match import Match, guards
from fibc.backends.resources import blocks_per_sm, shortage
from fibc.backends.templates import TemplateSet, headline, names_of, settings, size_of, space_of
from fibc.cache import Cache
from fibc.errors import BuildError
from fibc.paths import INCLUDE
from fibc.schema.arch import ARCH_NAMES, WARP_SIZE, arch
from fibc.schema.candidate import Artifact, Candidate, ConfigValue, Target
from fibc.schema.definition import DTYPE_BITS, Definition
from fibc.schema.digest import digest_json, digest_text
from fibc.schema.feature import FeatureKey
from fibc.schema.space import Space, Start
from fibc.schema.template import TF32_NAME, Template

NAME = "cutlass"

PARAMETER_HEADERS = ("fibc/cutlass/launch",)
"""Headers that make a kernel's parameters, files or directories of files below ``INCLUDE``. Like the kernel they decide
what runs on the device, and are part of a candidate's identity."""

LAUNCHER_HEADERS = (*LAUNCH_HEADERS, "fibc/cutlass")
"""What else a launcher includes: part of a unit's identity alone."""

MEASURED_CAPABILITY = 90
"""Compute capability from which kernels were measured by their author; older ones were compiled and inspected."""

LAUNCHER_FLAGS = ("-O2", "-fexceptions", "-fpermissive", "-w", "-DNDEBUG")
"""CUTLASS's headers throw where nothing is instantiated, and redefine a name in a class, which g++ does not like."""

_FACTS_SECTION = ".fibc.facts"

NUM_FIRST = 3
"""Configs of a template that a search tries before it draws any: the model has the best that was measured at a key
among its first three (benchmarks/results/h200/candidates_cutlass.json)."""


@dataclass(frozen=True)
class _Rendered:
    """A template's kernel for a config, and what its launcher is rendered from.

    Attributes:
        kernel: What nvcc compiles; equal for configs that differ only in how the kernel is launched.
        values: Of the launcher, all but what follows from the cubin.
    """

    template: Template
    found: Match
    kernel: str
    values: Mapping[str, object]
    banner: str


class CutlassBackend:
    """CUTLASS templates; see ``Backend`` for the contract. Neither nvcc nor a GPU is needed before ``candidate``.

    A template is rendered twice, with ``part`` as ``kernel`` and as ``launcher``: with its tunables by their names, its
    dtype variables, ``inputs`` and ``outputs`` (role to index), and for the launcher ``cubin`` (lines of words),
    ``cubin_bytes`` and ``params_bytes``. Sizes are arguments of the kernel: what is compiled depends on no definition.
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
        whole: bool = False,
    ) -> None:
        """Load the templates.

        Args:
            cache: Holds what builds make.
            templates_dirs: More directories of templates.
            arch_name: Architecture to compile for, also one that is not here.
            num_sms: Multiprocessors of the GPU; None takes the architecture's usual ones. Alike ``l2_bytes``.
            whole: Offer every config that keeps the laws, not only the templates' shortlists.

        Raises:
            SchemaError: With every problem of every template.
            InputError: If ``arch_name`` is no architecture.
        """
        self._gpu = gpu_target(arch_name, num_sms, l2_bytes)
        self._arch = self._gpu.arch
        self.target = Target(KIND, arch_name)
        self._whole = whole
        self._cache = cache
        self._templates = TemplateSet(NAME, templates_dirs, self._lacks)
        self._rendered: dict[tuple[str, str, tuple[tuple[str, ConfigValue], ...]], _Rendered] = {}

    def fingerprint(self, definition: Definition) -> str:
        parts = self._templates.texts(definition)
        return digest_json([str(self.target), self._gpu.num_sms, self._compiler.digest(""), self._launch_digest, parts])

    def spaces(self, definition: Definition, key: FeatureKey) -> tuple[tuple[Space, ...], tuple[Mismatch, ...]]:
        def space(template: Template, found: Match) -> Space:
            names = {**names_of(template, definition, found), **self._gpu.names, TF32_NAME: False}
            return space_of(template, key, names, self._templates.text_digest(template))

        spaces, mismatches = self._templates.spaces(definition, space)
        return tuple(self._shortlisted(definition, key, spaces)), mismatches

    def candidate(self, definition: Definition, template: str, config: Mapping[str, ConfigValue]) -> Candidate:
        chosen = self._templates[template]
        ordered = tuple((name, config[name]) for name in chosen.tunables)
        rendered = self._render(chosen, definition, ordered)
        launcher = [
            self._launcher(rendered, b"", 0),
            header_texts(PARAMETER_HEADERS),
            repr(guards(chosen, rendered.found)),
        ]
        source_digest = digest_json([self._compiler.digest(rendered.kernel), launcher])
        return Candidate(self.name, template, ordered, source_digest, self.target)

    def build(
        self, definition: Definition, candidates: Sequence[Candidate], *, timeout_s: float, jobs: int
    ) -> dict[str, Artifact | BuildFailure]:
        rendered = {c.digest: self._render(self._templates[c.template], definition, c.config) for c in candidates}
        compiled = compile_kernels(
            [item.kernel for item in rendered.values()],
            self._compiler,
            cache=self._cache,
            timeout_s=timeout_s,
            jobs=jobs,
        )
        results: dict[str, Artifact | BuildFailure] = {}
        facts: dict[str, KernelFacts] = {}
        units: dict[str, Unit] = {}
        for digest, item in rendered.items():
            cubin = compiled[item.kernel]
            if isinstance(cubin, BuildFailure):
                results[digest] = cubin
                continue
            facts[digest] = read_kernel(cubin, FUNCTION)
            source = self._launcher(item, cubin, _params_bytes(item.template, facts[digest]))
            units[digest] = Unit(digest_text(source, self._launch_digest), source)
        built = build_units(
            tuple(units.values()),
            self._compiler.host,
            flags=self._launcher_flags,
            include=INCLUDE,
            cache=self._cache,
            timeout_s=timeout_s,
            jobs=jobs,
        )
        for digest, unit in units.items():
            launcher = built[unit.digest]
            results[digest] = (
                launcher
                if isinstance(launcher, BuildFailure)
                else self._artifact(rendered[digest], facts[digest], launcher)
            )
        return results

    def rank(
        self, definition: Definition, key: FeatureKey, configs: Iterable[tuple[str, Config]]
    ) -> list[tuple[str, Config]]:
        """Return configs of ``spaces`` with their templates, those to try first in front.

        Of whole spaces kinds take turns, as many configs are alike; those of a shortlist are not.
        """
        configs = list(configs)
        for name in dict.fromkeys(template for template, _ in configs):
            found = self._templates.matched(self._templates[name], definition)
            if {"N", "K"} <= set(self._templates[name].const_axes) and "T" in found.dtypes:
                n, k = (definition.const_axes[found.axes[axis]] for axis in ("N", "K"))
                dtype = found.dtypes["T"]
                shape = Shape(size_of(key), n, k, dtype, DTYPE_BITS[dtype] // 8, self._gpu.num_sms)
                return rank(shape, configs) if self._whole else by_estimate(shape, configs)
        return configs

    def _shortlisted(self, definition: Definition, key: FeatureKey, spaces: Sequence[Space]) -> Iterator[Space]:
        """Yield the spaces, those of templates with a shortlist held to it, what the model expects most of in front."""
        listed = {} if self._whole else {space.template: self._templates[space.template].listed() for space in spaces}
        ranked = self.rank(definition, key, [(name, config) for name, configs in listed.items() for config in configs])
        for space in spaces:
            if listed.get(space.template):
                configs = tuple(config for template, config in ranked if template == space.template)
                starts = (*space.starts, *(Start("", config) for config in configs[:NUM_FIRST]))
                yield replace(space, configs=configs, starts=starts)
            else:
                yield space

    def _artifact(self, rendered: _Rendered, facts: KernelFacts, launcher: Built) -> Artifact | BuildFailure:
        shared_bytes, threads = _launch_facts(launcher.object_path)
        needs = {"registers": facts.registers, "num_warps": threads // WARP_SIZE, "shared_bytes": shared_bytes}
        if lacking := shortage(self._arch, **needs):
            return BuildFailure(timed_out=False, log=lacking, resource=True)
        return launcher.artifact(
            rendered.banner + rendered.kernel,
            guards(rendered.template, rendered.found),
            {
                "arch": self.target.arch,
                **needs,
                "spill_bytes": facts.stack_bytes,
                "blocks_per_sm": blocks_per_sm(self._arch, **needs),
                "deterministic": rendered.template.deterministic,
                "unmeasured": self._arch.capability < MEASURED_CAPABILITY,
            },
        )

    @cached_property
    def _compiler(self) -> KernelCompiler:
        return KernelCompiler(cuda_toolchain.find(), toolchain.find(), self.target.arch)

    @cached_property
    def _launcher_flags(self) -> tuple[str, ...]:
        cuda = self._compiler.cuda
        includes = [part for path in (cuda.cutlass, *cuda.includes) for part in ("-isystem", str(path))]
        return (*LAUNCHER_FLAGS, *includes)

    @cached_property
    def _launch_digest(self) -> str:
        """Digest of everything but the kernel and the template that a launcher's object follows from."""
        compilers = [self._compiler.host.digest, self._compiler.cuda.digest]
        return digest_json(
            [compilers, COMPILE_FLAGS, LAUNCHER_FLAGS, header_texts(LAUNCHER_HEADERS + PARAMETER_HEADERS)]
        )

    def _lacks(self, template: Template) -> str:
        least = arch(template.needs or ARCH_NAMES[0]).capability
        if self._arch.capability < least or self._arch.capability // 10 != least // 10:
            made_for = f"{least // 10}.{least % 10} to {least // 10}.9"
            return f"is made for compute capability {made_for}, the target is {self.target}"
        return ""

    def _render(
        self, template: Template, definition: Definition, config: tuple[tuple[str, ConfigValue], ...]
    ) -> _Rendered:
        """Return the kernel's source, and what its launcher takes."""
        key = (template.name, definition.digest, config)
        if key not in self._rendered:
            found = self._templates.matched(template, definition)
            values = {**dict(config), **found.dtypes, "inputs": found.inputs, "outputs": found.outputs}
            body = self._templates.render(template.source_name, {**values, "part": "kernel"})
            kernel = f"// {headline(template, self.target)}\n// digest {digest_text(body)}\n{body}"
            self._rendered[key] = _Rendered(template, found, kernel, values, f"// {settings(config)}\n")
        return self._rendered[key]

    def _launcher(self, rendered: _Rendered, cubin: bytes, params_bytes: int) -> str:
        """Return the C++ translation unit that holds ``cubin`` and launches it.

        Args:
            params_bytes: Size of the kernel's parameters in the cubin, to which the launcher's are held.
        """
        values = {
            **rendered.values,
            "part": "launcher",
            "cubin": word_lines(cubin),
            "cubin_bytes": len(cubin),
            "params_bytes": params_bytes,
        }
        head = f"// {headline(rendered.template, self.target)}\n"
        return head + rendered.banner + self._templates.render(rendered.template.source_name, values)


def _params_bytes(template: Template, facts: KernelFacts) -> int:
    if len(facts.parameters) != 1:
        raise BuildError(f"{template.name}: the kernel must have one parameter, the cubin says {facts.parameters}")
    return facts.parameters[0]


def _launch_facts(object_path: Path) -> tuple[int, int]:
    """Return the bytes of dynamic shared memory and the threads of a block that a launcher's object says."""
    content = dict(sections(object_path.read_bytes()))
    shared_bytes, threads = struct.unpack("<II", content[_FACTS_SECTION])
    return shared_bytes, threads

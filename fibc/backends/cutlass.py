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
from fibc.backends.cubin import KernelFacts, read_kernel, sections
from fibc.backends.cutlass_compile import FUNCTION, INCLUDE, KernelCompiler, compile_kernels
from fibc.backends.cutlass_rank import Config, Shape, by_estimate, rank
from fibc.backends.match import Match, guards, match
from fibc.backends.resources import blocks_per_sm, shortage
from fibc.cache import Cache
from fibc.errors import BuildError, InputError
from fibc.render import Renderer
from fibc.schema.arch import ARCH_NAMES, WARP_SIZE, arch
from fibc.schema.candidate import Artifact, Candidate, ConfigValue, Target
from fibc.schema.definition import DTYPE_BITS, Definition
from fibc.schema.digest import digest_json, digest_text
from fibc.schema.feature import FeatureKey
from fibc.schema.space import Space, Start, Tunable
from fibc.schema.template import SIZE_NAME, TF32_NAME, Template, load_templates

NAME = "cutlass"
KIND = "cuda"
DEFAULT_ARCH = "sm_90a"

BUILTIN_TEMPLATES = INCLUDE.parent / "templates" / "kernels"

PARAMETER_HEADERS = ("fibc/cutlass/launch",)
"""Headers that make a kernel's parameters, files or directories of files below ``INCLUDE``. Like the kernel they decide
what runs on the device, and are part of a candidate's identity."""

LAUNCH_HEADERS = ("fibc/kernel_abi.h", "fibc/cuda", "fibc/cutlass")
"""What else a launcher includes: part of a unit's identity alone."""

MEASURED_CAPABILITY = 90
"""Compute capability from which kernels were measured by their author; older ones were compiled and inspected."""

LAUNCHER_FLAGS = ("-O2", "-fexceptions", "-fpermissive", "-w", "-DNDEBUG")
"""CUTLASS's headers throw where nothing is instantiated, and redefine a name in a class, which g++ does not like."""

_FACTS_SECTION = ".fibc.facts"

_WORDS_A_LINE = 8

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
        if arch_name not in ARCH_NAMES:
            raise InputError(f"arch: must be known, got {arch_name!r} (accepted: {', '.join(ARCH_NAMES)})")
        self.target = Target(KIND, arch_name)
        self._arch = arch(arch_name)
        self._num_sms = num_sms or self._arch.num_sms
        self._l2_bytes = l2_bytes or self._arch.l2_bytes
        self._whole = whole
        self._cache = cache
        roots = (BUILTIN_TEMPLATES, *templates_dirs)
        self._templates = {template.name: template for template in load_templates(roots, NAME)}
        self._renderer = Renderer(roots)
        self._rendered: dict[tuple[str, str, tuple[tuple[str, ConfigValue], ...]], _Rendered] = {}

    def fingerprint(self, definition: Definition) -> str:
        served = [t for t in self._templates.values() if isinstance(self._match(t, definition), Match)]
        parts = [[t.name, repr(t), self._renderer.sources(t.source_name)] for t in served]
        return digest_json([str(self.target), self._num_sms, self._compiler.digest(""), self._launch_digest, parts])

    def spaces(self, definition: Definition, key: FeatureKey) -> tuple[tuple[Space, ...], tuple[Mismatch, ...]]:
        spaces: list[Space] = []
        mismatches: list[Mismatch] = []
        for template in self._templates.values():
            found = self._match(template, definition)
            if isinstance(found, str):
                mismatches.append(Mismatch(template.name, found))
                continue
            names = self._constants(template, definition, found)
            names[SIZE_NAME] = _size(key)
            tunables = tuple(Tunable(name, choices) for name, choices in template.tunables.items())
            text = digest_json([template.digest, self._renderer.sources(template.source_name)])
            spaces.append(Space(template.name, tunables, template.laws(), names, text, starts=template.guesses()))
        return tuple(self._shortlisted(definition, key, spaces)), tuple(mismatches)

    def candidate(self, definition: Definition, template: str, config: Mapping[str, ConfigValue]) -> Candidate:
        chosen = self._templates[template]
        ordered = tuple((name, config[name]) for name in chosen.tunables)
        rendered = self._render(chosen, definition, ordered)
        launcher = [self._launcher(rendered, b"", 0), headers(PARAMETER_HEADERS), repr(guards(chosen, rendered.found))]
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
            found = self._match(self._templates[name], definition)
            assert isinstance(found, Match), "a space exists only of a template that matches"
            if {"N", "K"} <= set(self._templates[name].const_axes) and "T" in found.dtypes:
                n, k = (definition.const_axes[found.axes[axis]] for axis in ("N", "K"))
                dtype = found.dtypes["T"]
                shape = Shape(_size(key), n, k, dtype, DTYPE_BITS[dtype] // 8, self._num_sms)
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
        return Artifact(
            digest=launcher.digest,
            object_path=str(launcher.object_path),
            library_path=str(launcher.library_path),
            symbol=launcher.symbol,
            size_bytes=launcher.size_bytes,
            source=rendered.banner + rendered.kernel,
            guards=guards(rendered.template, rendered.found),
            resources={
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
        return digest_json([compilers, COMPILE_FLAGS, LAUNCHER_FLAGS, headers(LAUNCH_HEADERS + PARAMETER_HEADERS)])

    def _match(self, template: Template, definition: Definition) -> Match | str:
        least = arch(template.needs or ARCH_NAMES[0]).capability
        if self._arch.capability < least or self._arch.capability // 10 != least // 10:
            made_for = f"{least // 10}.{least % 10} to {least // 10}.9"
            return f"is made for compute capability {made_for}, the target is {self.target}"
        return match(template, definition)

    def _constants(self, template: Template, definition: Definition, found: Match) -> dict[str, ConfigValue]:
        """Return the values of the names that constraints may use, all but ``size``."""
        return {
            **{axis: definition.const_axes[found.axes[axis]] for axis in template.const_axes},
            **found.dtypes,
            **{f"{variable}_bytes": DTYPE_BITS[dtype] // 8 for variable, dtype in found.dtypes.items()},
            "shared_bytes_max": self._arch.shared_bytes_max,
            "registers_max": self._arch.registers_max,
            "num_sms": self._num_sms,
            "l2_bytes": self._l2_bytes,
            TF32_NAME: False,
        }

    def _render(
        self, template: Template, definition: Definition, config: tuple[tuple[str, ConfigValue], ...]
    ) -> _Rendered:
        """Return the kernel's source, and what its launcher takes."""
        key = (template.name, definition.digest, config)
        if key not in self._rendered:
            found = self._match(template, definition)
            if isinstance(found, str):
                raise InputError(f"{template.name}: does not serve {definition.name}: {found}")
            values = {**dict(config), **found.dtypes, "inputs": found.inputs, "outputs": found.outputs}
            body = self._renderer(template.source_name, {**values, "part": "kernel"})
            kernel = (
                f"// Generated by fibc from {template.name} for {self.target}: do not edit.\n"
                f"// digest {digest_text(body)}\n{body}"
            )
            settings = ", ".join(f"{name} = {value}" for name, value in config) or "no tunables"
            self._rendered[key] = _Rendered(template, found, kernel, values, f"// {settings}\n")
        return self._rendered[key]

    def _launcher(self, rendered: _Rendered, cubin: bytes, params_bytes: int) -> str:
        """Return the C++ translation unit that holds ``cubin`` and launches it.

        Args:
            params_bytes: Size of the kernel's parameters in the cubin, to which the launcher's are held.
        """
        values = {
            **rendered.values,
            "part": "launcher",
            "cubin": list(_words(cubin)),
            "cubin_bytes": len(cubin),
            "params_bytes": params_bytes,
        }
        head = f"// Generated by fibc from {rendered.template.name} for {self.target}: do not edit.\n"
        return head + rendered.banner + self._renderer(rendered.template.source_name, values)


def _size(key: FeatureKey) -> int:
    """Return the upper end of the key's first feature."""
    return key.cell.bounds[0][1] if key.cell.bounds else 1


def _params_bytes(template: Template, facts: KernelFacts) -> int:
    if len(facts.parameters) != 1:
        raise BuildError(f"{template.name}: the kernel must have one parameter, the cubin says {facts.parameters}")
    return facts.parameters[0]


def headers(names: Iterable[str]) -> dict[str, str]:
    """Return the text of headers of fibc, files or directories of files below ``INCLUDE``, by their paths there."""
    roots = (INCLUDE / name for name in names)
    files = [file for root in roots for file in (sorted(root.glob("*.h")) if root.is_dir() else [root])]
    return {file.relative_to(INCLUDE).as_posix(): file.read_text() for file in files}


def _launch_facts(object_path: Path) -> tuple[int, int]:
    """Return the bytes of dynamic shared memory and the threads of a block that a launcher's object says."""
    content = dict(sections(object_path.read_bytes()))
    shared_bytes, threads = struct.unpack("<II", content[_FACTS_SECTION])
    return shared_bytes, threads


def _words(cubin: bytes) -> list[str]:
    """Return lines of 8-byte words; the last word is filled up with zeros."""
    padded = cubin + bytes(-len(cubin) % 8)
    numbers = struct.unpack(f"<{len(padded) // 8}Q", padded)
    return [
        ", ".join(f"0x{number:x}" for number in numbers[start : start + _WORDS_A_LINE])
        for start in range(0, len(numbers), _WORDS_A_LINE)
    ]

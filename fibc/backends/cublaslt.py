"""The cuBLASLt backend: the algorithms that the library's heuristic returns, each as a candidate that calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from fibc import gpus, toolchain
from fibc.backends.base import BuildFailure, Mismatch
from fibc.backends.build import COMPILE_FLAGS, Built, Unit, build_units
from fibc.backends.cublaslt_algorithm import Algorithm, parse
from fibc.backends.cublaslt_heuristic import LIMITS_BYTES, Heuristic, Problem, Unanswered
from fibc.backends.gpu_target import DEFAULT_ARCH, KIND
from fibc.backends.headers import LAUNCH_HEADERS, header_texts
from fibc.backends.match import Match, guards
from fibc.backends.templates import TemplateSet, axes_in_call, banner, names_of, space_of
from fibc.cache import Cache
from fibc.environment import Environment
from fibc.errors import SchemaError
from fibc.paths import INCLUDE
from fibc.schema.arch import ARCHES, arch
from fibc.schema.candidate import Artifact, Candidate, ConfigValue, Target
from fibc.schema.definition import Definition
from fibc.schema.digest import digest_json
from fibc.schema.feature import FeatureKey
from fibc.schema.silicon import Gpu
from fibc.schema.space import Space, Start, Tunable
from fibc.schema.template import TF32_NAME, TF32_TAG, Template

NAME = "cublaslt"

CALLING_HEADERS = ("fibc/cuda/cublaslt.h", "fibc/cuda/cublaslt_gemm.h")
"""What is asked of the library stands in these, so they are part of a candidate's identity."""

LIBRARY, ALGORITHM = "library", "algorithm"
"""The tunables: the library's version, of which a space has one, and an ``Algorithm`` as text."""


@dataclass(frozen=True)
class _Rendered:
    source: str
    digest: str
    found: Match
    algorithm: Algorithm
    library: str


class CublasLtBackend:
    """Templates that call cuBLASLt; see ``Backend`` for the contract. ``spaces`` writes answers to the cache.

    ``spaces`` asks the library on the GPU, at both ends of a key's cell, and has none without a GPU; a config holds all
    that ``candidate`` and ``build`` need, so records can be built anywhere. A template is rendered with its constant
    axes by their names, its other axes (an index into ``call->axes``), ``inputs`` and ``outputs`` (role to index), its
    dtype variables, ``library`` and ``version`` (text and number), ``compute``, ``words``, ``max_workspace_bytes``.
    """

    name = NAME

    def __init__(
        self,
        environment: Environment,
        cache: Cache,
        templates_dirs: Sequence[Path] = (),
        *,
        arch_name: str = DEFAULT_ARCH,
        heuristic: Heuristic | None = None,
    ) -> None:
        """Load the templates.

        Args:
            environment: Whose GPU is asked and is the target, and whose version of the library the candidates are of.
            cache: Holds what builds make and what the library answered.
            templates_dirs: More directories of templates.
            arch_name: Architecture of the target where there is no GPU.
            heuristic: Another one than that of the environment.

        Raises:
            SchemaError: With every problem of every template.
        """
        self._gpu: Gpu | None = environment.gpu
        self._version = environment.versions.get("cublas", "")
        self.target = Target(KIND, arch_name if self._gpu is None else self._gpu.validity.arch)
        self._cache = cache
        if heuristic is None and self._gpu is not None and self._version:
            heuristic = Heuristic(cache, self._gpu, self._version)
        self._heuristic = heuristic
        self._templates = TemplateSet(NAME, templates_dirs, self._lacks)
        self._calling_headers = header_texts(CALLING_HEADERS)
        self._rendered: dict[tuple[str, str, tuple[tuple[str, ConfigValue], ...]], _Rendered] = {}

    def fingerprint(self, definition: Definition) -> str:
        parts = self._templates.texts(definition)
        silicon = None if self._gpu is None else list(self._gpu.validity.identity)
        return digest_json([str(self.target), self._version, silicon, self._host_digest, parts])

    def spaces(self, definition: Definition, key: FeatureKey) -> tuple[tuple[Space, ...], tuple[Mismatch, ...]]:
        return self._templates.spaces(definition, partial(self._space, definition, key))

    def candidate(self, definition: Definition, template: str, config: Mapping[str, ConfigValue]) -> Candidate:
        ordered = tuple((name, config[name]) for name in (LIBRARY, ALGORITHM))
        rendered = self._render(self._templates[template], definition, ordered)
        return Candidate(self.name, template, ordered, rendered.digest, self.target)

    def build(
        self, definition: Definition, candidates: Sequence[Candidate], *, timeout_s: float, jobs: int
    ) -> dict[str, Artifact | BuildFailure]:
        rendered = {c.digest: self._render(self._templates[c.template], definition, c.config) for c in candidates}
        units = {
            digest: Unit(digest_json([digest, self._host_digest]), item.source) for digest, item in rendered.items()
        }
        built = build_units(
            tuple(units.values()),
            toolchain.find(),
            flags=(),
            include=INCLUDE,
            cache=self._cache,
            timeout_s=timeout_s,
            jobs=jobs,
        )
        results: dict[str, Artifact | BuildFailure] = {}
        for candidate in candidates:
            outcome = built[units[candidate.digest].digest]
            results[candidate.digest] = (
                outcome
                if isinstance(outcome, BuildFailure)
                else self._artifact(self._templates[candidate.template], rendered[candidate.digest], outcome)
            )
        return results

    def _artifact(self, template: Template, rendered: _Rendered, built: Built) -> Artifact:
        return built.artifact(
            rendered.source,
            guards(template, rendered.found),
            {
                "kind": "library",
                "library": f"cuBLASLt {rendered.library}",
                "arch": self.target.arch,
                "compute": rendered.algorithm.compute,
                "workspace_bytes": rendered.algorithm.workspace_bytes,
                "deterministic": template.deterministic,
            },
        )

    @cached_property
    def _host_digest(self) -> str:
        """Digest of everything but the source that a launcher's object follows from."""
        return digest_json([toolchain.find().digest, list(COMPILE_FLAGS), header_texts(LAUNCH_HEADERS)])

    def _lacks(self, template: Template) -> str:
        if template.needs and self._capability < arch(template.needs).capability:
            return f"needs {template.needs}, the target is {self.target}"
        return ""

    @property
    def _capability(self) -> int:
        """Compute capability of the target; with a GPU it need be none that kernels are compiled for."""
        return arch(self.target.arch).capability if self._gpu is None else self._gpu.validity.compute_capability

    def _space(self, definition: Definition, key: FeatureKey, template: Template, found: Match) -> Space | str:
        """Return the space at ``key``, or why there is none."""
        if self._gpu is None:
            return "needs a GPU, on which cuBLASLt says which algorithms it has"
        if self._heuristic is None:
            return "needs the cuBLASLt that torch loads, and this torch has none (it is built for the CPU)"
        answer = self._heuristic.algorithms(_problems(definition, found, key))
        if isinstance(answer, Unanswered):
            return answer.reason
        if not answer:
            return f"cuBLASLt {self._version} has no algorithm for {key}"
        algorithms = tuple(str(ranked.algorithm) for ranked in answer)
        tunables = (Tunable(LIBRARY, (self._version,)), Tunable(ALGORITHM, algorithms))
        names = self._names(template, definition, found, self._gpu)
        space = space_of(template, key, names, self._templates.text_digest(template))
        # A library's own guesses are few, and each costs a second of a compiler: all are tried, in its order.
        starts = tuple(Start("", ((ALGORITHM, algorithm),)) for algorithm in algorithms)
        return replace(space, tunables=tunables, starts=starts)

    def _names(self, template: Template, definition: Definition, found: Match, gpu: Gpu) -> dict[str, ConfigValue]:
        """Return the values of the names that constraints may use, all but ``size``."""
        return {
            **names_of(template, definition, found),
            "shared_bytes_max": gpu.shared_bytes_max,
            "registers_max": ARCHES[-1].registers_max,
            "num_sms": gpu.validity.num_sms,
            "l2_bytes": gpu.validity.l2_bytes,
            TF32_NAME: TF32_TAG in (definition.tags or ()),
        }

    def _render(
        self, template: Template, definition: Definition, config: tuple[tuple[str, ConfigValue], ...]
    ) -> _Rendered:
        """Return the launcher's source, headed by a banner with its digest."""
        key = (template.name, definition.digest, config)
        if key not in self._rendered:
            found = self._templates.matched(template, definition)
            chosen = dict(config)
            library, algorithm = str(chosen[LIBRARY]), parse(str(chosen[ALGORITHM]))
            values = {
                **axes_in_call(template, definition, found),
                **found.dtypes,
                **found.constants,
                "inputs": found.inputs,
                "outputs": found.outputs,
                "library": library,
                "version": _number(library),
                "compute": algorithm.compute,
                "words": algorithm.words,
                "max_workspace_bytes": max(LIMITS_BYTES),
            }
            body = self._templates.render(template.source_name, values)
            source = banner(template, self.target, config, body) + body
            digest = digest_json([source, self._calling_headers])
            self._rendered[key] = _Rendered(source, digest, found, algorithm, library)
        return self._rendered[key]


def _problems(definition: Definition, found: Match, key: FeatureKey) -> list[Problem]:
    """Return what is asked at a key: the sizes at both ends of its cell, the upper one first."""
    sizes = [dict(point.axes)[found.axes["M"]] for point in key.points]
    n, k = (definition.const_axes[found.axes[axis]] for axis in ("N", "K"))
    dtype = found.dtypes["T"]
    computes = ["f32"]
    if dtype == "float32" and TF32_TAG in (definition.tags or ()):
        computes.append("tf32")
    ends = dict.fromkeys((max(sizes), min(sizes)))
    return [Problem(size, n, k, dtype, compute) for compute in computes for size in ends]


def _number(version: str) -> int:
    try:
        return gpus.join_version(version)
    except ValueError as error:
        raise SchemaError(f"library: must be a version of cuBLASLt, got {version!r} (accepted: 13.0.2)") from error

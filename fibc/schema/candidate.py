"""Candidates and what a build makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from fibc.schema.digest import digest_json

ConfigValue = int | str | bool

NATIVE = "native"
"""Name of the native candidate's backend, and of the choice that a table makes where evidence ends."""


@dataclass(frozen=True)
class Target:
    """What code is compiled for: ``cpu:avx512`` now, ``cuda:sm_90a`` through the same seams later."""

    kind: str
    arch: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}"


@dataclass(frozen=True)
class Candidate:
    """A backend, a template and a config for one contract. Its digest is its identity.

    Attributes:
        backend: Name of the backend that builds it.
        template: Name of the template, ``gemm/matvec``.
        config: Tunables in the template's order, ``(("block_m", 4), ...)``.
        source_digest: Digest of the rendered source and the flags that compile it.
        target: What it is compiled for.
    """

    backend: str
    template: str
    config: tuple[tuple[str, ConfigValue], ...]
    source_digest: str
    target: Target

    @property
    def digest(self) -> str:
        """Identity: equal for equal backend, template, config, source and target."""
        config = [list(item) for item in self.config]
        return digest_json([self.backend, self.template, config, self.source_digest, str(self.target)])

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.config)
        return f"{self.template}({values})"


@dataclass(frozen=True)
class TensorGuard:
    """What a variant assumes of one tensor argument beyond the contract's dtype, device and shape.

    Attributes:
        layout: ``contiguous`` (row-major, size-1 axes' strides never matter), ``rows`` (last axis has stride 1, the
            other strides are free and non-negative) or ``any``.
        alignment_bytes: The data pointer is a multiple of it. With ``rows`` so are the strides between rows that a
            caller chooses: all but row-major ones, of which the definition's sizes decide.
    """

    layout: str = "contiguous"
    alignment_bytes: int = 1


@dataclass(frozen=True)
class Guards:
    """Run-time preconditions of a variant, one TensorGuard per input and per output in call order.

    Attributes:
        max_offset_elems: Largest element offset that the code can address (2^31 - 1 where it computes in int32).
    """

    inputs: tuple[TensorGuard, ...]
    outputs: tuple[TensorGuard, ...]
    max_offset_elems: int = 2**63 - 1


@dataclass(frozen=True)
class Artifact:
    """A built candidate: code and its resource use. Lives in the build cache, found by its digest.

    Attributes:
        digest: Digest of the object code; equal binaries are measured once.
        object_path: The relocatable object (``.o``) that a generated module links.
        library_path: The shared library that a worker loads; exports ``symbol`` with the ABI of ``fibc/kernel_abi.h``.
            Empty where ``source`` is Python with ``call(*inputs)``: what benchmarks compare with, never a variant.
        symbol: Name of the exported entry.
        size_bytes: Size of the object's code.
        source: The rendered source text.
        guards: What the code assumes of its arguments.
        resources: Backend's own facts (ISA level, registers, shared memory), for pruning and reports.
    """

    digest: str
    object_path: str
    library_path: str
    symbol: str
    size_bytes: int
    source: str
    guards: Guards
    resources: dict[str, ConfigValue] = field(default_factory=dict)

    @property
    def is_python(self) -> bool:
        return not self.library_path

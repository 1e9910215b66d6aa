"""A candidate's source as a FlashInfer-Trace solution: its language, entry, headers and libraries, by backend."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fibc.backends import cpu, cublaslt, cutlass, triton
from fibc.backends.build import ENTRY
from fibc.backends.cutlass_compile import FUNCTION, included_headers
from fibc.backends.headers import LAUNCH_HEADERS, header_texts
from fibc.errors import BuildError
from fibc.schema.candidate import Candidate
from fibc.schema.trace import Language

_JITTED = re.compile(r"^@triton\.jit(?:\([^()]*\))?\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)
"""A Triton function; the kernel is the last one, behind what it calls."""


CPU = "cpu"


@dataclass(frozen=True)
class SolutionForm:
    """What a solution says of a source text.

    Attributes:
        file: Its name.
        entry: The function in it that is the kernel.
        headers: Text of fibc's headers that it includes, by the path that it includes.
        dependencies: Libraries that it needs beyond its language's own, as FlashInfer-Bench names them.
    """

    language: Language
    file: str
    entry: str
    headers: dict[str, str] = field(default_factory=dict)
    dependencies: tuple[str, ...] = ()


def solution_form(candidate: Candidate, source: str) -> SolutionForm:
    """Return what a solution says of ``source``, the text of ``candidate``'s artifact.

    A CUTLASS kernel is ``cuda`` with a dependency, as FlashInfer-Bench has no other word for it before 2026.

    Raises:
        BuildError: If the source is not one of the candidate's backend.
    """
    if candidate.backend == CPU:
        return SolutionForm("cpp", "kernel.cpp", ENTRY, header_texts(cpu.KERNEL_HEADERS))
    if candidate.backend == triton.NAME and (kernels := _JITTED.findall(source)):
        return SolutionForm("triton", "kernel.py", kernels[-1])
    if candidate.backend == cutlass.NAME:
        return SolutionForm("cuda", "kernel.cu", FUNCTION, included_headers(source), ("cutlass",))
    if candidate.backend == cublaslt.NAME:
        return SolutionForm("cpp", "kernel.cpp", ENTRY, header_texts(LAUNCH_HEADERS), ("cublas",))
    raise BuildError(f"{candidate}: must be a source of a backend that searches, got one of {candidate.backend}")

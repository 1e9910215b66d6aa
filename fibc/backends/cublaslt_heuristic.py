"""What cuBLASLt's heuristic returns for a GEMM's sizes: asked once by a child on the GPU, then kept in the cache."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fibc import gpus, isolation
from fibc.backends import cublaslt_probe
from fibc.backends.cublaslt_algorithm import Algorithm
from fibc.cache import Cache
from fibc.schema.cells import default_edges
from fibc.schema.digest import digest_json, digest_text
from fibc.schema.feature import Feature
from fibc.schema.silicon import Gpu

LIMITS_BYTES = (32 << 20, 0)
"""Workspace that the heuristic is allowed. 32 MiB is what torch gives cuBLAS on Hopper; an algorithm without workspace
may win where it spares a reduction, and its launch is cheaper on the host."""

NUM_RESULTS = 8
"""Results asked for under each limit; from about here on the heuristic has no more."""

MAX_ALGORITHMS = 16
"""Most that a key's search is offered."""

ALIGNMENT_BYTES = 16
"""Of every pointer, what the template's guards demand. The library's own default is 256, which views into larger
tensors do not have."""

REDUCTION_SCHEMES = 2
"""CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, beside which none is always allowed: partial sums stay in float32 and are
rounded once. The others round them to the output's type first, which exceeds the bound that outputs are held to."""

DRIVER = "libcuda.so.1"

TIMEOUT_S = 120.0
"""The first context on a machine of eight GPUs takes over ten seconds, the library half a gigabyte from disk."""

LADDER_LARGEST = 16384
"""The first question is asked for the ends of every default cell up to here as well: another child for each key would
take seconds each."""

_KIND = "cublaslt"


@dataclass(frozen=True)
class Problem:
    """C[m, n] = A[m, k] B[n, k]^T, contiguous, in elements."""

    m: int
    n: int
    k: int
    dtype: str
    compute: str


@dataclass(frozen=True)
class Ranked:
    """An algorithm with what people read of it, names of ``cublaslt_probe.CONFIG``."""

    algorithm: Algorithm
    waves: float
    config: Mapping[str, int] = field(hash=False)


@dataclass(frozen=True)
class Unanswered:
    """Why there is no answer."""

    reason: str


Answer = tuple[tuple[Ranked, ...], ...]
"""Of one problem: best first, for each of ``LIMITS_BYTES``."""


class Heuristic:
    """The heuristic of one version of the library on one GPU. What a key gets is repeatable: the first answer stays."""

    def __init__(
        self,
        cache: Cache,
        gpu: Gpu,
        version: str,
        *,
        library: Path | None = None,
        driver: str = DRIVER,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Prepare; nothing is asked.

        Args:
            gpu: The GPU to ask on.
            version: Of the library, ``13.0.2``.
            library: Another file than the one that this process has loaded with torch.
            driver: Another driver library.
            timeout_s: Deadline of the child.
        """
        self._cache = cache
        self._gpu = gpu
        self._version = version
        self._library = library
        self._driver = driver
        self._timeout_s = timeout_s
        self._known: dict[Problem, Answer] = {}
        self._unanswered: Unanswered | None = None

    def algorithms(self, problems: Sequence[Problem]) -> tuple[Ranked, ...] | Unanswered:
        """Return the algorithms for ``problems`` together, at most ``MAX_ALGORITHMS``, each once.

        First comes the first choice for the first problem; then the others' first choices, and so on by rank.
        """
        missing = [problem for problem in problems if not self._is_known(problem)]
        if missing:
            if self._unanswered is not None:
                return self._unanswered
            self._unanswered = self._ask([*missing, *self._beside(missing)])
            if self._unanswered is not None:
                return self._unanswered
        return tuple(_merged([self._known[problem] for problem in problems]))[:MAX_ALGORITHMS]

    def _beside(self, missing: Sequence[Problem]) -> Iterator[Problem]:
        """Yield the problems of one kind each at the ends of every default cell, as far as nothing is known of them."""
        ranges = Feature("M", None, default_edges(LADDER_LARGEST)).ranges()
        sizes = dict.fromkeys(size for ends in ranges for size in ends)
        seen = set(missing)
        for problem in missing:
            for size in sizes:
                other = replace(problem, m=size)
                if other not in seen and not self._is_known(other):
                    seen.add(other)
                    yield other

    def _is_known(self, problem: Problem) -> bool:
        if problem not in self._known:
            stored = self._cache.get_json(_KIND, self._digest(problem))
            if stored is not None:
                self._known[problem] = _answer(problem, stored)
        return problem in self._known

    def _digest(self, problem: Problem) -> str:
        asked = {**vars(problem), **_REQUEST, "probe": digest_text(Path(cublaslt_probe.__file__).read_bytes())}
        return digest_json([asked, self._version, list(self._gpu.validity.identity)])

    def _ask(self, problems: Sequence[Problem]) -> Unanswered | None:
        """Have a child ask, and store the answers; return why it could not."""
        library = self._library or gpus.cublas_library()
        if library is None:
            return Unanswered("the cuBLASLt that torch had loaded is gone from this process")
        with tempfile.TemporaryDirectory(prefix="fibc-cublaslt-") as name:
            file = Path(name) / "answer.json"
            request = {
                **_REQUEST,
                "driver": self._driver,
                "library": str(library),
                "ordinal": self._gpu.ordinal,
                "answer": str(file),
                "problems": [vars(problem) for problem in problems],
            }
            done = isolation.run(
                [sys.executable, "-S", "-I", cublaslt_probe.__file__],
                timeout_s=self._timeout_s,
                stdin=json.dumps(request).encode(),
            )
            if done.timed_out:
                return Unanswered(f"asking cuBLASLt for its algorithms took longer than {self._timeout_s:g} s")
            if not done.ok:
                tail = (done.stderr_tail.strip().splitlines() or [f"status {done.returncode}"])[-1]
                return Unanswered(f"asking cuBLASLt for its algorithms failed: {tail}")
            answer = json.loads(file.read_text())
        version = gpus.split_version(answer["version"])
        if version != self._version:
            return Unanswered(f"{library} is cuBLASLt {version}, the environment has {self._version}")
        for problem, stored in zip(problems, answer["answers"], strict=True):
            self._cache.put_json(_KIND, self._digest(problem), stored)
            self._known[problem] = _answer(problem, stored)
        return None


_REQUEST: Mapping[str, Any] = {
    "alignment_bytes": ALIGNMENT_BYTES,
    "reduction_schemes": REDUCTION_SCHEMES,
    "num_results": NUM_RESULTS,
    "limits_bytes": list(LIMITS_BYTES),
}
"""What is asked of every problem."""


def _answer(problem: Problem, stored: Sequence[Sequence[Mapping[str, Any]]]) -> Answer:
    def ranked(entry: Mapping[str, Any]) -> Ranked:
        algorithm = Algorithm(problem.compute, entry["workspace_bytes"], bytes.fromhex(entry["algorithm"]))
        return Ranked(algorithm, entry["waves"], entry["config"])

    return tuple(tuple(ranked(entry) for entry in entries) for entries in stored)


def _merged(answers: Sequence[Answer]) -> Iterator[Ranked]:
    """Yield every algorithm once, by rank, then by limit, then by problem."""
    seen: set[tuple[str, bytes]] = set()
    for rank in range(NUM_RESULTS):
        for limit in range(len(LIMITS_BYTES)):
            for answer in answers:
                for ranked in answer[limit][rank : rank + 1]:
                    identity = ranked.algorithm.compute, ranked.algorithm.opaque
                    if identity not in seen:
                        seen.add(identity)
                        yield ranked

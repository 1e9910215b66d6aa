"""Fields on this machine: fibc's evaluator, with native under any name among the arms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from contest.candidates import Built
from contest.field import UNDELAYED, Checked, Pad, is_native
from contest.plan import key_at
from fibc.backends import native as native_kernels
from fibc.bench import Bench
from fibc.cache import Cache
from fibc.environment import Environment
from fibc.evaluate import Evaluator
from fibc.evaluators import evaluator_on
from fibc.schema.candidate import NATIVE, Artifact, Guards
from fibc.schema.decision import Conditions
from fibc.schema.definition import Definition
from fibc.schema.digest import digest_text
from fibc.schema.evaluation import Arm
from fibc.schema.feature import FeatureKey
from fibc.schema.table import NativeSource
from fibc.shop import conditions_of

TIMEOUT_S = 60.0

PADDING = {
    "cpu": (
        "from time import perf_counter_ns as _now",
        "    until = _now() + _PAD\n    while _now() < until:\n        pass",
    ),
    "cuda": (
        "import torch",
        "    if _PAD:\n        torch.cuda._sleep(_PAD)",
    ),
}
"""Import and body of a delay, by target."""


def padded(native: NativeSource, pad: Pad, target: str) -> NativeSource:
    """Return a native whose calls take longer by the pad."""
    needed, delay = PADDING[target]
    source = f"""{native.source}

{needed}

_work = call
_PAD = {pad.amount!r}


def call(*arguments):
    result = _work(*arguments)
{delay}
    return result
"""
    return NativeSource(f"{native.name}, delayed", source, "option", digest_text(source))


@dataclass(frozen=True)
class Machine:
    """Opens evaluators; see ``Fields``."""

    target: str
    built: Mapping[str, Built]
    environment: Environment
    cache: Cache
    seed: int

    @contextmanager
    def open(self, definition: Definition, pad: Pad | None = None) -> Iterator[EvaluatorField]:
        native = native_kernels.resolve(definition, target_kind=self.target)
        with evaluator_on(
            self.environment,
            definition,
            native if pad is None else padded(native, pad, self.target),
            self.cache,
            seed=self.seed,
            mode="",
            timeout_s=TIMEOUT_S,
        ) as evaluator:
            undelayed = Artifact("", "", "", "", 0, padded(native, Pad(0), self.target).source, Guards((), ()))
            yield EvaluatorField(evaluator, self.built, undelayed, forks=self.environment.gpu is None)


class EvaluatorField:
    """See ``Field``."""

    def __init__(self, evaluator: Evaluator, built: Mapping[str, Built], undelayed: Artifact, *, forks: bool) -> None:
        """Take an evaluator that has started.

        Args:
            built: Candidates, by digest.
            undelayed: Python source of ``UNDELAYED``: with the same frame around native as a delayed one.
            forks: Sessions that are not fresh are forks; else they are one process, which keeps its weights anyway.
        """
        self._forks = forks
        self._evaluator = evaluator
        self._built = built
        self._artifacts = {digest: item.artifact for digest, item in built.items()} | {UNDELAYED: undelayed}
        self.facts: Mapping[str, str] = evaluator.facts
        self.conditions: Conditions = conditions_of(evaluator)

    def check(self, candidate: str, key: FeatureKey) -> Checked:
        built = self._built[candidate]
        with self._evaluator.trial(built.candidate, built.artifact, key) as trial:
            seen = trial.correctness
            return Checked(trial.status, trial.log, seen is not None and seen.deterministic)

    def hold(self, key: FeatureKey) -> None:
        if self._forks:
            self._evaluator.native_check((key,))

    def bench(self, arms: Sequence[Arm], *, fresh: bool) -> Bench:
        real = [replace(arm, candidate=NATIVE) if is_native(arm.candidate) else arm for arm in arms]
        return self._evaluator.bench(real, self._artifacts, [key_of(arm) for arm in arms], fresh_process=fresh)

    def calls_per_timing(self, arm: Arm) -> int:
        inner = self._evaluator.known_inner(key_of(arm).points[arm.point])
        assert inner is not None, "a timing was made"
        return inner


def key_of(arm: Arm) -> FeatureKey:
    """Return the key that an arm names."""
    return key_at(int(arm.key))

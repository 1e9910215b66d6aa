"""Static pruning: how much of a space its constraints leave, and what each of them takes away."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from fibc.schema.space import Space
from fibc.search.space import Config, ConfigSpace


@dataclass(frozen=True)
class Census:
    """A space counted.

    Attributes:
        total: Configs without constraints.
        valid: Configs that keep all of them.
        rejected: ``(message of the constraint, configs)``, most first. A config counts for the first law that it
            breaks once its tunables, in the template's order, decide it.
    """

    template: str
    total: int
    valid: int
    rejected: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        reasons = "".join(f"; {count} pruned: {message}" for message, count in self.rejected)
        return f"{self.template}: {self.valid} of {self.total} configs{reasons}"


def census(space: Space) -> Census:
    """Count ``space``; cost grows with the valid configs, not with the product of the choices.

    Of a space with ``configs`` only these are counted.
    """
    configs = ConfigSpace(space)
    if space.configs is not None:
        broken = [configs.broken(config) for config in space.configs]
        messages = Counter(law.constraint.message for law in broken if law is not None)
        return Census(space.template, len(broken), broken.count(None), tuple(messages.most_common()))
    sizes = [len(tunable.choices) for tunable in configs.tunables]
    rejected: Counter[str] = Counter()

    def count(partial: Config) -> int:
        law = configs.broken(partial, depth=len(partial))
        if law is not None:
            rejected[law.constraint.message] += math.prod(sizes[len(partial) :])
            return 0
        if len(partial) == len(sizes):
            return 1
        tunable = configs.tunables[len(partial)]
        return sum(count((*partial, (tunable.name, choice))) for choice in tunable.choices)

    valid = count(())
    return Census(space.template, configs.num_configs, valid, tuple(rejected.most_common()))


def count_valid(space: Space) -> int:
    """Return how many configs of ``space`` keep every constraint."""
    return census(space).valid

"""Recorded evaluations replayed: how fast a sampler would have found the best config."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fibc.errors import SchemaError
from fibc.paths import atomic_write
from fibc.schema.codec import from_plain, to_plain
from fibc.schema.space import Space
from fibc.search.sampler import SAMPLERS
from fibc.search.space import Config, ConfigSpace
from fibc.search.study import open_study

Place = tuple[str, Config]

POLICIES = (*SAMPLERS, "grid")
"""Samplers of a study, and the order in which spaces are written."""


@dataclass(frozen=True)
class Recording:
    """Every valid config of one key with its value.

    Attributes:
        about: Device, command and date.
        spaces: Of the templates.
        values: ln(native latency / candidate latency) by (template, config); None for a candidate that failed.
    """

    about: str
    spaces: tuple[Space, ...]
    values: Mapping[Place, float | None]

    @property
    def best(self) -> float:
        """The best value; -inf where all failed."""
        return max((value for value in self.values.values() if value is not None), default=-math.inf)


def save(path: Path, recording: Recording) -> None:
    """Write ``recording`` as JSON, a trial a line: its values in the order of the template's tunables."""
    lines = ",\n".join(
        json.dumps([template, [value for _, value in config], value])
        for (template, config), value in recording.values.items()
    )
    about, spaces = json.dumps(recording.about), json.dumps([to_plain(space) for space in recording.spaces])
    atomic_write(path, f'{{"about": {about},\n"spaces": {spaces},\n"trials": [\n{lines}\n]}}\n'.encode())


def load(path: Path) -> Recording:
    """Read a recording.

    Raises:
        SchemaError: If it is malformed, or a valid config has no value.
    """
    try:
        plain: dict[str, Any] = json.loads(path.read_text())
        spaces = tuple(from_plain(Space, space) for space in plain["spaces"])
        names = {space.template: [tunable.name for tunable in space.tunables] for space in spaces}
        values = {
            (template, tuple(zip(names[template], config, strict=True))): value
            for template, config, value in plain["trials"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SchemaError(f"{path}: is no recording, got: {error!r}") from error
    for space in spaces:
        for config in ConfigSpace(space).configs():
            if (space.template, config) not in values:
                raise SchemaError(f"{path}: {space.template}: every valid config needs a value, got none for {config}")
    return Recording(plain["about"], spaces, values)


def replay(recording: Recording, policy: str, *, seed: int, trials: int) -> tuple[Place, ...]:
    """Return the configs that ``policy`` asks for, in order, where the recording answers."""
    if policy == "grid":
        return tuple(_grid(recording.spaces))[:trials]
    study = open_study(None, "replay", recording.spaces, seed=seed, trials=trials, sampler=policy)
    asked: list[Place] = []
    while (proposal := study.ask()) is not None:
        place = proposal.template, proposal.config
        asked.append(place)
        study.tell(proposal.number, recording.values[place])
    return tuple(asked)


def regret(recording: Recording, asked: tuple[Place, ...]) -> tuple[float, ...]:
    """Return, after each trial, how far the best so far lies behind the best of all, in log units (0.01 is 1 %)."""
    curve: list[float] = []
    best = -math.inf
    for place in asked:
        value = recording.values[place]
        best = max(best, -math.inf if value is None else value)
        curve.append(recording.best - best)
    return tuple(curve)


def mean_regret(recording: Recording, policy: str, *, trials: int, num_seeds: int) -> tuple[float, ...]:
    """Return the regret after each trial, averaged over seeds 0, 1, ...; a curve that ended early keeps its last."""
    curves = [
        _padded(regret(recording, replay(recording, policy, seed=seed, trials=trials)), trials)
        for seed in range(num_seeds)
    ]
    return tuple(sum(column) / num_seeds for column in zip(*curves, strict=True))


def _grid(spaces: tuple[Space, ...]) -> Iterator[Place]:
    for space in spaces:
        for config in ConfigSpace(space).configs():
            yield space.template, config


def _padded(curve: tuple[float, ...], length: int) -> tuple[float, ...]:
    return curve + curve[-1:] * (length - len(curve))

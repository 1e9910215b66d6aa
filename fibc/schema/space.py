"""The search space of a template: tunables and the constraints between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fibc.schema.candidate import ConfigValue

Config = tuple[tuple[str, ConfigValue], ...]
"""Tunables in the template's order with their values, as in ``Candidate.config``."""


@dataclass(frozen=True)
class Tunable:
    """A named choice. Choices of integers are ordered; the first is the default."""

    name: str
    choices: tuple[ConfigValue, ...]


@dataclass(frozen=True)
class Constraint:
    """A law between tunables and constant axes, in the safe language of ``fibc.schema.expression``."""

    expression: str
    message: str


@dataclass(frozen=True)
class Start:
    """A guess that is tried before a search draws.

    Attributes:
        when: Where the guess is for, an expression over ``Space.constants``; empty: everywhere.
        values: Some tunables; the others have their first choices that keep every constraint. A guess that keeps them
            with no choice is no guess.
    """

    when: str
    values: Config


@dataclass(frozen=True)
class Space:
    """What a study may ask for.

    Attributes:
        template: Name of the template, ``gemm/matvec``.
        tunables: In the template's order.
        constraints: All must hold, checked before a build.
        constants: Names that constraints may use beside tunables: constant axes by role (``N``), dtypes by their
            variable (``T``) with their sizes in bytes (``T_bytes``), ``size`` (the key's upper end, in elements of its
            first feature), and facts of the target.
        source_digest: Of the template's text: trials of another text are of another study.
        configs: Where given, no other config is valid: those that were compiled before, or that are worth a long build.
            The first one is the default.
        starts: Guesses, best first. The first that is valid is the default, whatever the order of choices.
    """

    template: str
    tunables: tuple[Tunable, ...]
    constraints: tuple[Constraint, ...]
    constants: Mapping[str, ConfigValue]
    source_digest: str = ""
    configs: tuple[Config, ...] | None = None
    starts: tuple[Start, ...] = ()

"""Facts of an environment, told apart: what evidence is bound to, what calls for measuring again, what is noted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What follows where a fact has changed."""

    IDENTITY = "identity"
    """Other silicon, or another thread count: the rows do not hold there, and calls go native."""
    TRIGGER = "trigger"
    """The same binaries serve on, and are to be measured again: no evidence is forgotten."""
    NOTE = "note"
    """Recorded, and nothing follows."""


ROLES: Mapping[str, Role] = {
    **dict.fromkeys(("cpu", "isa", "l2", "l3", "threads", "silicon", "mig"), Role.IDENTITY),
    **dict.fromkeys(
        (
            "torch",
            "driver",
            "cublas",
            "cublas package",
            "flashinfer",
            "compiler",
            "triton",
            "nvcc",
            "cpus",
            "microcode",
            "cpu clock max",
            "power limit",
            "sm clock default",
            "sm clock max",
        ),
        Role.TRIGGER,
    ),
}
"""Names as ``Environment.facts`` has them; every other one is a note. What built a variant is no fact of the
environment: it is in the variant's own digest, and an installed toolchain that is another one changes no binary."""

CONDITIONS = ("driver", "torch", "cublas", "flashinfer")
"""Facts that belong to the key of a measurement beside the silicon: native runs in them, or every launch does. Evidence
under another value is kept, and read as what an earlier environment showed (``RecordLog.earlier_evaluations``)."""

ABSENT = "not installed"


@dataclass(frozen=True)
class Difference:
    """A fact that is another one than it was."""

    name: str
    then: str
    now: str
    role: Role

    def __str__(self) -> str:
        return f"{self.name}: {self.then} -> {self.now}"


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> tuple[Difference, ...]:
    """Return the facts that differ, identity first, then triggers, then notes; each group sorted by name.

    A fact that one side does not know (absent or empty) says nothing.
    """
    found = [
        Difference(name, then[name], now[name], ROLES.get(name, Role.NOTE))
        for name in then.keys() & now.keys()
        if then[name] and now[name] and then[name] != now[name]
    ]
    order = list(Role)
    return tuple(sorted(found, key=lambda item: (order.index(item.role), item.name)))


def of_role(found: tuple[Difference, ...], *roles: Role) -> tuple[Difference, ...]:
    """Return those of ``found`` that have one of ``roles``."""
    return tuple(item for item in found if item.role in roles)

"""The state of published packages: which generation serves, how old its evidence is, what has changed since."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fibc import gpus
from fibc.codegen.generations import generations
from fibc.environment import detect
from fibc.errors import FibcError, InputError
from fibc.runs import last_run
from fibc.runtime.package import read_table
from fibc.schema.decision import Verdict
from fibc.schema.facts import ABSENT, Difference, Role, differences
from fibc.schema.silicon import CudaValidity
from fibc.schema.table import DispatchTable
from fibc.schema.upkeep import PackageStatus

PREFIX = "fibc_"


def find_packages(path: Path) -> tuple[Path, ...]:
    """Return the packages at ``path``: itself, or those of an ``--out`` directory.

    Raises:
        InputError: If there is none.
    """
    if (path / "__init__.py").is_file() and path.name.startswith(PREFIX):
        return (path.absolute(),)
    found = tuple(sorted(item.absolute() for item in path.glob(f"{PREFIX}*/") if (item / "__init__.py").is_file()))
    if not found:
        raise InputError(f"{path}: must hold published packages, found none (accepted: an --out, or <out>/fibc_NAME)")
    return found


def examine(package: Path) -> PackageStatus:
    """Return the state of ``package`` on this machine."""
    name = package.name.removeprefix(PREFIX)
    known = generations(package)
    place = next((index for index, item in enumerate(known) if item.serving), -1)
    if place < 0:
        return PackageStatus(name, str(package), problem="no generation is published")
    status = PackageStatus(
        name,
        str(package),
        generation=known[place].name,
        created=known[place].created,
        earlier=tuple(item.name for item in known[:place]),
        later=tuple(item.name for item in known[place + 1 :]),
    )
    try:
        table = read_table(package)
    except FibcError as error:
        return replace(status, problem=str(error))
    shown = table.shown or table.created
    return replace(
        status,
        definition=table.definition,
        shown=shown,
        age_s=age_s(shown),
        target=table.target,
        num_replaced=sum(row.verdict is Verdict.REPLACE and not row.revoked for row in table.rows),
        num_cells=len(table.rows),
        partial=table.partial,
        differences=compare(table),
        run=last_run(package, table),
    )


def examine_all(packages: Iterable[Path]) -> tuple[PackageStatus, ...]:
    """Return the state of each package."""
    return tuple(map(examine, packages))


def compare(table: DispatchTable) -> tuple[Difference, ...]:
    """Return what differs here from where the evidence of ``table`` was collected."""
    if not isinstance(table.validity, CudaValidity):
        return differences(table.environment, detect(table.validity.num_threads).facts())
    found = gpus.find().gpus
    if not found:
        return (Difference("silicon", table.environment.get("silicon", table.validity.arch), ABSENT, Role.IDENTITY),)
    alike = [gpu for gpu in found if gpu.validity.identity == table.validity.identity]
    cpu_is_beside = ("cpu", "isa", "l2", "l3", "threads", "microcode", "cpus", "cpu clock max")
    seen = differences(table.environment, detect(1, gpu=(alike or list(found))[0]).facts())
    return tuple(item for item in seen if item.name not in cpu_is_beside)


def age_s(moment: str) -> float:
    """Return the seconds since an ISO date and time; 0 for one that is none or lies ahead."""
    try:
        then = datetime.datetime.fromisoformat(moment)
    except ValueError:
        return 0.0
    return max(0.0, (datetime.datetime.now(datetime.UTC) - then).total_seconds())

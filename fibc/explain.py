"""Why a table or a definition is served as it is, for ``fibc explain``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fibc import gpus
from fibc.backends.registry import NAMES, make_backends
from fibc.cache import Cache
from fibc.environment import detect
from fibc.errors import InputError
from fibc.runtime import oracle
from fibc.runtime.package import read_table
from fibc.schema.arch import ARCH_NAMES
from fibc.schema.cells import default_features, make_keys
from fibc.schema.decision import Decision, Verdict
from fibc.schema.definition import load_definition
from fibc.schema.feature import feature_values
from fibc.schema.table import DispatchTable
from fibc.schema.workload_source import synthetic_sweep


@dataclass(frozen=True)
class TableExplained:
    """A whole table."""

    table: DispatchTable


@dataclass(frozen=True)
class CallExplained:
    """One call by its sizes, as far as sizes decide it.

    Attributes:
        serves: The variant, or ``native``.
        reason: ``hit``, or why native serves.
        row: The cell's decision; None outside every cell.
        library: What the variant calls; empty where its code is generated, or native serves.
    """

    axes: Mapping[str, int]
    serves: str
    reason: str
    row: Decision | None
    library: str = ""


@dataclass(frozen=True)
class DefinitionExplained:
    """Which templates serve a definition on this machine, and why the others do not."""

    definition: str
    target: str
    matches: tuple[str, ...]
    mismatches: tuple[tuple[str, str], ...]


Explained = TableExplained | CallExplained | DefinitionExplained


def explain(path: Path, axes: Mapping[str, int]) -> Explained:
    """Explain the package or the definition at ``path``; with ``axes`` one call of the package.

    Raises:
        InputError: If there is neither at ``path``, or ``axes`` are not those of the definition.
    """
    if path.is_file():
        if axes:
            raise InputError(f"--axes: needs a package that fibc wrote, got the file {path}")
        return _explain_definition(path)
    table = read_table(path)
    return _explain_call(table, axes) if axes else TableExplained(table)


def _explain_call(table: DispatchTable, sizes: Mapping[str, int]) -> CallExplained:
    variable = [axis.name for axis in table.spec.axes if axis.value is None]
    if sorted(sizes) != sorted(variable):
        raise InputError(
            f"--axes: needs every variable axis of {table.definition} once, got {', '.join(sizes)} "
            f"(accepted: {','.join(f'{name}=SIZE' for name in variable)})"
        )
    axes = {axis.name: sizes[axis.name] if axis.value is None else axis.value for axis in table.spec.axes}
    isa = tuple(variant.isa for variant in table.variants)  # on the machine that was tuned on
    choice = oracle.choose_axes(table, axes, oracle.Surroundings(isa=isa))
    values = feature_values(table.features, axes)
    row = next((row for row in table.rows if row.cell.holds(values)), None)
    serves, library = "native", ""
    if choice.region is not None and choice.reason == oracle.HIT:
        variant = table.variants[table.regions[choice.region].variant]
        serves, library = str(variant.candidate), variant.library
    return CallExplained(dict(sizes), serves, _reason(choice.reason, row), row, library)


def _reason(reason: str, row: Decision | None) -> str:
    if reason == oracle.HIT:
        return row.reason if row is not None else reason
    if reason == "region":
        if row is None:
            return "no cell holds these sizes: native serves where nothing was measured"
        verdict = "revoked" if row.revoked else row.verdict.value
        return f"{verdict}: {row.reason}" if row.verdict is not Verdict.REPLACE else row.reason
    return reason


def _explain_definition(path: Path) -> DefinitionExplained:
    definition = load_definition(path)
    sweep = synthetic_sweep(definition)
    key = make_keys(default_features(definition, sweep), sweep, definition)[0]
    every = [name for names in NAMES.values() for name in names]
    known = (gpu for gpu in gpus.find().gpus if gpu.validity.arch in ARCH_NAMES)  # code is compiled for no other
    backends = make_backends(every, detect(gpu=next(known, None)), Cache())
    matches: list[str] = []
    mismatches: list[tuple[str, str]] = []
    for backend in backends:
        spaces, missed = backend.spaces(definition, key)
        matches += [space.template for space in spaces]
        mismatches += [(item.template, item.reason) for item in missed]
    target = ", ".join(dict.fromkeys(str(backend.target) for backend in backends))
    return DefinitionExplained(definition.name, target, tuple(matches), tuple(mismatches))

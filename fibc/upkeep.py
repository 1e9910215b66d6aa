"""Looking after published tables: their state, the nightly retune, going back, removing old generations.

A night in which nothing has changed ends within seconds: what imports torch is imported where something is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fibc import gpus, preflight, watch
from fibc.codegen import generations
from fibc.codegen.generations import Generation
from fibc.errors import FibcError, InputError
from fibc.lock import lock_out
from fibc.paths import OutLayout
from fibc.published import find_published
from fibc.records import RecordLog
from fibc.runtime.package import read_table
from fibc.schema.retune_options import RetuneOptions
from fibc.schema.silicon import CudaValidity, Gpu
from fibc.schema.table import DispatchTable
from fibc.schema.upkeep import PackageStatus, RetuneResult, VerifyResult
from fibc.settings import DEFAULT_KEEP, DEFAULT_LOCK_WAIT_S
from fibc.traffic import KIND as TRAFFIC
from fibc.traffic import read_traffic

if TYPE_CHECKING:
    from fibc.progress import Progress


@dataclass(frozen=True)
class _Plan:
    """What is to be done for a package, and why."""

    state: PackageStatus
    table: DispatchTable
    layout: OutLayout
    options: RetuneOptions
    reasons: tuple[str, ...]
    recheck: bool
    share: float | None


def status(path: Path | str) -> tuple[PackageStatus, ...]:
    """Return the state of each package at ``path``: generation, age of its evidence, what differs here.

    Args:
        path: An ``--out`` directory, or one package in it.

    Raises:
        InputError: If there is no package.
    """
    return watch.examine_all(watch.find_packages(Path(path)))


def retune(
    path: Path | str, *, progress: Progress | None = None, salt: str = "", **options: Any
) -> tuple[RetuneResult, ...]:
    """Show the winners of published tables again where something has changed, and search again what flipped.

    Args:
        path: An ``--out`` directory, or one package in it.
        progress: Told what happens.
        salt: Of the seeds of tonight's sessions. Empty: the name of the generation that serves, which differs from that
            of every other night; a night that shall be repeated in every detail gives its own.
        options: Fields of ``RetuneOptions``.

    Returns:
        What became of each package; one that failed does not end the night of the others.

    Raises:
        SchemaError: If an option is out of range.
        InputError: If there is no package, or another run holds the directory.
    """
    chosen = RetuneOptions(**options)
    packages = watch.find_packages(Path(path))
    layout = OutLayout(packages[0].parent)
    plans = [_plan(package, layout, chosen, is_only=len(packages) == 1) for package in packages]
    results = [plan for plan in plans if isinstance(plan, RetuneResult)]
    if len(results) < len(plans):
        with lock_out(layout, wait_s=DEFAULT_LOCK_WAIT_S, say=_say(progress)):
            results = [plan if isinstance(plan, RetuneResult) else _work(plan, progress, salt) for plan in plans]
    return tuple(results)


def rollback(path: Path | str, to: str = "") -> tuple[tuple[str, Generation], ...]:
    """Let the generation before the serving one serve in each package at ``path``; return definition and generation.

    Where one of the packages has none, nothing changes.

    Args:
        to: Name of a generation of the one package at ``path``.

    Raises:
        InputError: If there is no such generation, or the directory is in use.
    """
    packages = watch.find_packages(Path(path))
    with lock_out(OutLayout(packages[0].parent), wait_s=DEFAULT_LOCK_WAIT_S, say=_say(None)):
        for package in packages:
            generations.find_earlier(package, to)
        return tuple(
            (package.name.removeprefix(watch.PREFIX), generations.roll_back(package, to)) for package in packages
        )


def gc(path: Path | str, keep: int = DEFAULT_KEEP) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Remove all but the last ``keep`` generations of each package; return definition and what was removed.

    Raises:
        InputError: If ``keep`` is less than 1, there is no package, or the directory is in use.
    """
    if keep < 1:
        raise InputError(f"--keep: out of range, got {keep} (accepted: 1 and more)")
    packages = watch.find_packages(Path(path))
    with lock_out(OutLayout(packages[0].parent), wait_s=DEFAULT_LOCK_WAIT_S, say=_say(None)):
        return tuple(
            (package.name.removeprefix(watch.PREFIX), generations.collect(package, keep)) for package in packages
        )


def verify(path: Path | str, *, rebuild: bool = False) -> tuple[VerifyResult, ...]:
    """Compute every item of the manifest of each package at ``path`` again, and compare.

    Args:
        rebuild: Link each module again from the recorded kernels, and compare all of its files.

    Raises:
        InputError: If there is no package.
    """
    from fibc.cache import Cache
    from fibc.verification import verify_package

    packages = watch.find_packages(Path(path))
    layout, cache = OutLayout(packages[0].parent), Cache()
    return tuple(verify_package(package, layout, cache, rebuild=rebuild) for package in packages)


def _plan(package: Path, layout: OutLayout, options: RetuneOptions, *, is_only: bool) -> RetuneResult | _Plan:
    """Return what is to be done for a package, or its result where that is nothing."""
    state = watch.examine(package)
    if state.problem:
        return _ended(state, "failed", state.problem)
    if state.foreign:
        differs = "; ".join(map(str, state.foreign))
        return _ended(state, "failed", f"the table belongs to other silicon ({differs}): tune here instead")
    table = read_table(package)
    reasons = [str(item) for item in state.triggers]
    if state.age_s > options.max_age_s:
        reasons.append(f"shown {state.age_s / 86400:.1f} days ago, more than {options.max_age_s / 86400:g}")
    share, rise = _traffic(table, layout, options, is_only=is_only)
    reasons += rise
    recheck = bool(reasons)
    reasons += [f"forced: {cell}" for cell in options.force]
    reasons += [f"more workloads: {options.workloads}"] if options.workloads else []
    if cut_short := [str(row.cell) for row in table.rows if row.partial]:
        reasons.append(f"cut short by an earlier budget: {', '.join(cut_short)}")
    if not reasons:
        age = f"{state.age_s / 3600:.1f} hours"
        return _ended(state, "unchanged", f"nothing has changed, and its replacements were shown {age} ago")
    return _Plan(state, table, layout, options, tuple(reasons), recheck, share)


def _work(plan: _Plan, progress: Progress | None, salt: str) -> RetuneResult:
    """Look at the machine, then measure."""
    state, table, layout = plan.state, plan.table, plan.layout
    if plan.options.devices == "all" and not isinstance(table.validity, CudaValidity):
        return _ended(state, "failed", f"--devices all: needs a table for GPUs, got one for {table.target}")
    on_machine = preflight.check_machine(layout.root)
    found = _gpus(table, plan.options)
    on_gpus = preflight.check_gpus(found)
    findings = (*on_machine, *on_gpus)
    # The first is what the run itself is on; another one that is not well is left out, and the night goes on.
    bad = [finding for finding in (*on_machine, *on_gpus[:1]) if not finding.ok]
    if bad:
        text = "; ".join(f"{finding.name}: {finding.text}" for finding in bad)
        return replace(_ended(state, "failed", f"preflight: {text}"), findings=findings)
    well = tuple(gpu for gpu, finding in zip(found[1:], on_gpus[1:], strict=True) if finding.ok)
    from fibc.cache import Cache
    from fibc.progress import Quiet
    from fibc.retuning import Night, retune_package

    try:
        published = find_published(layout.records(table.definition), table)
        if published is None:
            raise InputError(f"{layout.records(table.definition)}: holds nothing of generation {state.generation}")
        night = Night(
            published,
            state.generation,
            layout,
            plan.options,
            plan.reasons,
            plan.recheck,
            plan.share,
            well,
            salt or state.generation,
        )
        result = retune_package(night, Cache(), progress or Quiet())
    except FibcError as error:
        return replace(_ended(state, "failed", str(error)), findings=findings)
    return replace(result, findings=findings)


def _gpus(table: DispatchTable, options: RetuneOptions) -> tuple[Gpu, ...]:
    """Return the GPUs that a night is about: of the table's silicon, the first one or all; none for a CPU's table."""
    if not isinstance(table.validity, CudaValidity):
        return ()
    held = table.validity.identity
    alike = tuple(gpu for gpu in gpus.find().gpus if gpu.validity.identity == held)
    return alike if options.devices == "all" else alike[:1]


def _traffic(
    table: DispatchTable, layout: OutLayout, options: RetuneOptions, *, is_only: bool
) -> tuple[float | None, list[str]]:
    """Return the share of calls outside regions where statistics tell it, and a sentence where it has risen."""
    seen = read_traffic(map(Path, options.stats), table, is_only=is_only)
    if seen is None:
        return None, []
    log = RecordLog(layout.records(table.definition), definition="", environment="")
    before = [r.value["share"] for r in log.read() if r.kind == TRAFFIC and r.definition == table.definition_digest]
    last = before[-1] if before else 0.0
    if not seen.has_risen(last):
        return seen.share, []
    return seen.share, [
        f"{seen.share:.1%} of {seen.calls} calls are outside all regions, {last:.1%} before "
        "(record their sizes, and pass them with --workloads)"
    ]


def _ended(state: PackageStatus, action: str, why: str) -> RetuneResult:
    return RetuneResult(
        state.definition,
        state.package,
        action,
        (why,),
        generation=state.generation,
        num_replaced=state.num_replaced,
    )


def _say(progress: Progress | None) -> Callable[[str], None]:
    return progress.note if progress is not None else lambda text: None

"""The next generation of a table: its rows as a night has left them, over the kernels that still serve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import version

from fibc import decide
from fibc.backends.recorded import restore
from fibc.cache import Cache
from fibc.clock import now
from fibc.codegen import lower
from fibc.errors import InputError
from fibc.prove import Proof
from fibc.published import Published
from fibc.recheck import Rechecked, Standing, serving, weakest
from fibc.runs import Run
from fibc.schema.candidate import Candidate
from fibc.schema.decision import Comparison, Decision
from fibc.schema.feature import Cell, Point, feature_values
from fibc.schema.table import DispatchTable, Variant
from fibc.schema.upkeep import Flip
from fibc.shop import Shop

NATIVE = "native"


def take_over(shop: Shop, published: Published, cache: Cache) -> tuple[Decision, ...]:
    """Bring the kernels of a published table into the shop, as they are; return its rows, each naming its variant.

    Raises:
        InputError: If a kernel was not recorded.
        BuildError: If one does not link.
    """
    table = published.table
    for variant in table.variants:
        kernel = published.kernels.get(variant.symbol)
        if kernel is None:
            raise InputError(f"{table.definition}: its records hold no kernel {variant.symbol} (tune again)")
        shop.artifacts[variant.candidate.digest] = restore(variant, kernel, cache)
        shop.candidates[variant.candidate.digest] = variant.candidate
        shop.log.append("candidate", variant.candidate)
    return tuple(named(row, table) for row in table.rows)


def merge(rows: Iterable[Decision], checked: Iterable[Rechecked], proof: Proof | None) -> tuple[Decision, ...]:
    """Return the rows after a night: what was proven anew, else what was shown again, else what was there."""
    new = () if proof is None else proof.decisions
    settled = {item.row.cell: item.settled for item in checked}
    kept = [settled.get(row.cell, row) for row in rows if not any(_overlap(row.cell, item.cell) for item in new)]
    return tuple(sorted([*kept, *new], key=lambda row: row.cell))


def renew(
    shop: Shop, table: DispatchTable, rows: tuple[Decision, ...], proof: Proof | None, *, fingerprint: str, shown: str
) -> DispatchTable:
    """Return the table of ``rows``.

    Args:
        table: The generation before.
        fingerprint: Empty where a whole tune would have more to do.
        shown: Since when its replacements are shown; empty: now.
    """
    task = shop.task
    nondeterministic = {variant.candidate.digest for variant in table.variants if not variant.deterministic} | {
        digest
        for (_, digest), evaluation in shop.log.evaluations().items()
        if evaluation.correctness is not None and not evaluation.correctness.deterministic
    }
    variants = lower.build_variants(rows, shop.artifacts, shop.candidates, nondeterministic)
    created = now()
    retuned = () if proof is None else proof.decisions
    boundary = [
        item
        for item in table.boundary
        if not any(decision.cell.holds(feature_values(task.features, dict(item.point.axes))) for decision in retuned)
    ]
    return replace(
        table,
        native=task.native,
        features=task.features,
        variants=variants,
        rows=rows,
        regions=lower.lower(rows, variants, shop.artifacts),
        environment=task.environment.facts() if not shown else table.environment,
        expected_false_replacements=decide.expected_false_replacements(
            sum(bool(row.confirm) for row in rows), task.policy
        ),
        partial=any(row.partial for row in rows),
        num_boundary_rejected=sum(row.boundary_rejected for row in rows),
        created=created,
        fibc_version=version("fibc"),
        fingerprint=fingerprint,
        boundary=(*boundary, *(() if proof is None else proof.boundary)),
        shown=shown or created,
    )


def still_tested(
    run: Run | None, before: DispatchTable, after: DispatchTable
) -> tuple[tuple[Comparison, ...], tuple[str, ...]]:
    """Return what ``run`` read of the test set, and found slower, in cells that one variant served before and serves.

    A night reads no test workload: what is known of a variant that stays still holds, and nothing is of another one.
    """
    if run is None:
        return (), ()
    kept = tuple(item for item in run.test if _same_server(item.point, before, after))
    named_so = tuple(f"{item.point}: " for item in kept)
    return kept, tuple(line for line in run.slower_on_test if line.startswith(named_so))


def _same_server(point: Point, before: DispatchTable, after: DispatchTable) -> bool:
    servers = []
    for table in (before, after):
        values = feature_values(table.features, dict(point.axes))
        row = next((row for row in table.rows if row.cell.holds(values)), None)
        servers.append(_server(row, table))
    return servers[0] == servers[1] != ""


def find_flips(
    before: DispatchTable,
    checked: Sequence[Rechecked],
    rows: Sequence[Decision] | None,
    candidates: dict[str, Candidate],
) -> tuple[Flip, ...]:
    """Return the cells that are served otherwise than before.

    Args:
        rows: After the night; None where nothing was decided: then those whose winner does not hold.
    """
    old = {row.cell: row for row in before.rows}
    if rows is None:
        doubtful = (item for item in checked if item.standing in (Standing.FLIPPED, Standing.VANISHED))
        return tuple(_flip(item.row, None, _checked(item.row.cell, checked), candidates) for item in doubtful)
    flips = []
    for row in rows:
        earlier: list[Decision | None] = [item for cell, item in old.items() if _overlap(cell, row.cell)]
        earlier = earlier or [None]
        flips += [
            _flip(item, row, None if item is None else _checked(item.cell, checked), candidates)
            for item in earlier
            if _server(item, before) != _candidate(row)
        ]
    return tuple(flips)


def _flip(
    old: Decision | None, new: Decision | None, checked: Rechecked | None, candidates: dict[str, Candidate]
) -> Flip:
    then = None if old is None or not serving([old]) else weakest(old.reconfirm or old.confirm)
    now_shown = None if checked is None else weakest(checked.settled.reconfirm if checked.settled != old else ())
    cell = new.cell if new is not None else old.cell if old is not None else Cell(())
    why = [checked.why] if checked is not None and checked.standing is not Standing.HOLDS else []
    if new is not None and not new.revoked and (checked is None or new != checked.settled):
        why.append(new.reason)
    return Flip(
        cell=str(cell),
        old=_name(old, candidates),
        new="" if new is None else _name(new, candidates),
        then=then,
        now=now_shown,
        shown=None if new is None or not serving([new]) else weakest(new.reconfirm or new.confirm),
        why="; ".join(why),
    )


def _name(row: Decision | None, candidates: dict[str, Candidate]) -> str:
    digest = "" if row is None else _candidate(row)
    return str(candidates.get(digest, digest)) if digest else NATIVE


def _candidate(row: Decision) -> str:
    return row.candidate if serving([row]) else ""


def _server(row: Decision | None, table: DispatchTable) -> str:
    """Return the digest of what serves ``row``, as its variant is called."""
    return "" if row is None else _candidate(named(row, table))


def _checked(cell: Cell, checked: Iterable[Rechecked]) -> Rechecked | None:
    return next((item for item in checked if item.row.cell == cell), None)


def named(row: Decision, table: DispatchTable) -> Decision:
    """Return ``row`` with its candidate called as its variant is: equal binaries are one variant under one name."""
    if not serving([row]):
        return row
    variant = _variant_of(row.cell, table)
    return row if variant is None else replace(row, candidate=variant.candidate.digest)


def _variant_of(cell: Cell, table: DispatchTable) -> Variant | None:
    for region in table.regions:
        if _overlap(region.cell, cell):
            return table.variants[region.variant]
    return None


def _overlap(left: Cell, right: Cell) -> bool:
    pairs = zip(left.bounds, right.bounds, strict=True)
    return all(first <= other_last and other_first <= last for (first, last), (other_first, other_last) in pairs)

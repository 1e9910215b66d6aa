"""Every item of a generation's manifest computed again from what is on the disk, and compared."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from fibc import stats
from fibc.backends.registry import make_backends
from fibc.cache import Cache
from fibc.codegen import lower
from fibc.codegen.build import build
from fibc.codegen.package import current
from fibc.environment import Environment
from fibc.errors import FibcError
from fibc.paths import OutLayout
from fibc.provenance import sha256, tolerance_digest, validation_of
from fibc.published import Published, find_published
from fibc.rebuild import environment_of
from fibc.recheck import serving
from fibc.records import RecordLog
from fibc.renew import named
from fibc.runtime.package import read_table
from fibc.schema import codec
from fibc.schema.candidate import Artifact, Guards
from fibc.schema.decision import Comparison, Decision
from fibc.schema.digest import digest_json, digest_text
from fibc.schema.evaluation import SessionSamples
from fibc.schema.manifest import NAME, Manifest
from fibc.schema.policy import PUBLISHED_LEVEL
from fibc.schema.table import DispatchTable
from fibc.schema.upkeep import Verified, VerifyResult

SAME, DIFFERS, MISSING, UNKNOWN = "same", "differs", "missing", "unknown"


def verify_package(package: Path, layout: OutLayout, cache: Cache, *, rebuild: bool) -> VerifyResult:
    """Compute everything again that the serving generation of ``package`` says of itself.

    Args:
        rebuild: Link the module again from the recorded objects, and compare all of its files.
    """
    name = package.name.removeprefix("fibc_")
    generation = current(package)
    if generation is None:
        return VerifyResult(name, str(package), "", (Verified("generation", MISSING, "none is published"),))
    try:
        table = read_table(package)
        manifest = codec.from_plain(Manifest, json.loads((generation / NAME).read_text()))
    except (FibcError, OSError, ValueError) as error:
        item = Verified("manifest and table", MISSING, f"cannot be read: {error}")
        return VerifyResult(name, str(package), generation.name, (item,))
    items = [*_files(generation, manifest), _table(table, manifest), *_regions(table)]
    items.append(_same("tolerance policy", manifest.tolerance, tolerance_digest(), other="of another version of fibc"))
    published = find_published(layout.records(table.definition), table)
    if published is None:
        text = f"{layout.records(table.definition)} holds nothing of this generation"
        items.append(Verified("records", MISSING, text))
    else:
        items += _recorded(published, manifest, layout)
        items += _recipes(published, cache)
        if rebuild:
            items += _rebuilt(published, generation, cache)
    return VerifyResult(table.definition, str(package), generation.name, tuple(items))


def _same(item: str, recorded: str, found: str, *, other: str = "") -> Verified:
    """Compare digests. ``other`` says why a difference is no damage; then it is only not known."""
    if recorded == found:
        return Verified(item, SAME, found[:16])
    return Verified(
        item, UNKNOWN if other else DIFFERS, f"recorded {recorded[:16]}, found {found[:16]} {other}".strip()
    )


def _files(generation: Path, manifest: Manifest) -> Iterator[Verified]:
    for name, recorded in sorted(manifest.files.items()):
        path = generation / name
        if path.is_file():
            yield _same(f"file {name}", recorded, sha256(path.read_bytes()))
        else:
            yield Verified(f"file {name}", MISSING, str(path))
    for path in sorted(generation.iterdir()):
        if path.is_file() and path.name not in (*manifest.files, NAME):
            yield Verified(f"file {path.name}", DIFFERS, "the manifest does not name it")


def _table(table: DispatchTable, manifest: Manifest) -> Verified:
    return _same("table", manifest.table, digest_json(codec.to_plain(table)))


def _regions(table: DispatchTable) -> Iterator[Verified]:
    """Lower the rows again."""
    guards = Guards((), ())
    artifacts = {v.candidate.digest: Artifact(v.artifact, "", "", v.symbol, 0, "", guards) for v in table.variants}
    rows = [named(row, table) for row in table.rows]
    try:
        found = lower.lower(rows, table.variants, artifacts)
    except KeyError as error:
        yield Verified("regions", DIFFERS, f"a row names no variant of the table: {error}")
        return
    same = found == table.regions
    yield Verified("regions", SAME if same else DIFFERS, f"{len(found)} lowered from {len(rows)} rows")


def _recorded(published: Published, manifest: Manifest, layout: OutLayout) -> Iterator[Verified]:
    """Compare what the records hold."""
    table = published.table
    yield _same("definition", manifest.definition_digest, published.definition.digest)
    yield _same("native", manifest.native, digest_text(table.native.source))
    if published.snapshot is not None:
        yield _same("workloads", manifest.workloads, published.snapshot.workloads_digest)
    log = RecordLog(layout.records(table.definition), definition=table.definition_digest, environment="")
    evaluations = log.every_evaluation()
    variants = {variant.symbol: variant for variant in table.variants}
    for origin in manifest.variants:
        what = f"variant {origin.symbol}"
        kernel = published.kernels.get(origin.symbol)
        if kernel is None or origin.symbol not in variants:
            yield Verified(what, MISSING, "the records hold no such kernel")
            continue
        yield _same(f"{what} source", origin.source_sha256, sha256(kernel.source))
        yield _same(f"{what} object", origin.object_sha256, sha256(kernel.object_code))
        keys, num_cases, ratio = validation_of(variants[origin.symbol], evaluations)
        same = set(origin.validated) <= set(keys)
        text = f"{num_cases} cases at {len(keys)} keys, at most {ratio:.3g} of the bound; sanitizer {origin.sanitizer}"
        yield Verified(f"{what} validation", SAME if same else DIFFERS, text)
    samples = log.every_sample()
    for row in serving(table.rows):
        yield _evidence(row, samples)


def _evidence(row: Decision, samples: Iterable[SessionSamples]) -> Verified:
    """Compute a row's published comparisons again from raw pairs."""
    published = row.reconfirm or row.confirm
    mine = [item for item in samples if item.arm.key == str(row.cell) and item.arm.candidate == row.candidate]
    shown = 0
    for index, comparison in enumerate(published):
        at_point = [item for item in mine if item.arm.point == index and item.stage == comparison.stage]
        if not at_point:
            return Verified(f"evidence of {row.cell}", MISSING, f"no raw pairs at {comparison.point}")
        if not any(_reproduces(run, comparison) for run in _runs(at_point, comparison.n_sessions)):
            return Verified(f"evidence of {row.cell}", DIFFERS, f"raw pairs at {comparison.point} say something else")
        shown += comparison.n_pairs
    return Verified(f"evidence of {row.cell}", SAME, f"{shown} raw pairs at {len(published)} points")


def _runs(samples: list[SessionSamples], num: int) -> Iterator[list[SessionSamples]]:
    """Yield the runs of ``num`` sessions, latest first."""
    for first in range(len(samples) - num, -1, -1):
        run = samples[first : first + num]
        if [item.session for item in run] == list(range(run[0].session, run[0].session + num)):
            yield run


def _reproduces(run: list[SessionSamples], comparison: Comparison) -> bool:
    effects = [stats.session_effect(item.pairs) for item in run]
    low, high = stats.interval(effects, PUBLISHED_LEVEL)
    pairs = (
        (stats.mean(effects), comparison.speedup),
        (low, comparison.ci_low),
        (high, comparison.ci_high),
    )
    return all(math.isclose(math.exp(effect), value, rel_tol=1e-9) for effect, value in pairs)


def _recipes(published: Published, cache: Cache) -> Iterator[Verified]:
    """Render every variant again with the templates and compilers that are here."""
    table = published.table
    environment: Environment = environment_of(table)
    for variant in table.variants:
        wanted, item = variant.candidate, f"variant {variant.symbol} recipe"
        try:
            backend = make_backends([wanted.backend], environment, cache)[0]
            found = backend.candidate(published.definition, wanted.template, dict(wanted.config)).source_digest
        except (FibcError, KeyError) as error:
            yield Verified(item, UNKNOWN, f"cannot be rendered here: {error}")
        else:
            yield _same(item, wanted.source_digest, found, other="(templates or compilers here are others)")


def _rebuilt(published: Published, generation: Path, cache: Cache) -> Iterator[Verified]:
    """Link the module again, and compare its files."""
    with tempfile.TemporaryDirectory(prefix="fibc-verify-") as name:
        objects = {}
        for symbol, kernel in published.kernels.items():
            digest = digest_text(symbol, kernel.object_code)
            objects[symbol] = cache.put_bytes("recorded", digest, ".o", kernel.object_code)
        try:
            again = build(published.table, objects, Path(name) / generation.parent.name, cache, published.manifest)
        except FibcError as error:
            yield Verified("module made again", UNKNOWN, str(error))
            return
        for path in sorted(path for path in generation.iterdir() if path.is_file()):
            made = again / path.name
            if made.is_file():
                why = "(the linker or Python's headers here are others)" if path.name.startswith("_native") else ""
                yield _same(f"made again {path.name}", sha256(path.read_bytes()), sha256(made.read_bytes()), other=why)

"""From decisions to what a user keeps: the table, its package, and the dataset of what was seen."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from fibc import decide, sanitize
from fibc.backends.solutions import solution_form
from fibc.cache import Cache
from fibc.clock import now
from fibc.codegen import lower
from fibc.codegen.build import build
from fibc.errors import FibcError
from fibc.paths import OutLayout
from fibc.prove import Proof
from fibc.provenance import make_manifest
from fibc.published import Kernel, Snapshot, keep_published, write_sources
from fibc.runtime.package import read_table
from fibc.schema.candidate import Candidate
from fibc.schema.codec import to_plain
from fibc.schema.dataset import write_dataset
from fibc.schema.definition import Definition
from fibc.schema.export import to_solution, to_trace, workload_at
from fibc.schema.table import DispatchTable
from fibc.schema.trace import Solution, Trace
from fibc.shop import Shop
from fibc.task import Task


def finished_table(layout: OutLayout, task: Task) -> DispatchTable | None:
    """Return the published table where it is whole and nothing that it depends on has changed since."""
    package = layout.package(task.definition.name)
    if not package.is_dir():
        return None
    try:
        table = read_table(package)
    except FibcError:  # damaged, or of another version: a miss, and the new module takes its place
        return None
    return table if table.fingerprint == task.fingerprint and not table.partial else None


def make_table(shop: Shop, proof: Proof, *, interrupted: bool) -> DispatchTable:
    """Return the table of ``proof``: variants, rows with their evidence, and the regions lowered from them."""
    task = shop.task
    definition = task.definition
    nondeterministic = {
        digest
        for (_, digest), evaluation in shop.log.evaluations().items()
        if evaluation.correctness is not None and not evaluation.correctness.deterministic
    }
    variants = lower.build_variants(proof.decisions, shop.artifacts, shop.candidates, nondeterministic)
    return DispatchTable(
        definition=definition.name,
        definition_digest=definition.digest,
        op_type=definition.op_type,
        spec=definition.call_spec(),
        native=task.native,
        reference_source=definition.reference,
        reference_entry=definition.entry_point,
        features=task.features,
        variants=variants,
        rows=proof.decisions,
        regions=lower.lower(proof.decisions, variants, shop.artifacts),
        validity=task.environment.validity(),
        target=str(task.backends[0].target),
        environment=task.environment.facts() | sanitize.facts(shop, {v.candidate.digest for v in variants}),
        alpha=task.policy.key_alpha,
        min_speedup=task.policy.min_speedup,
        expected_false_replacements=decide.expected_false_replacements(proof.num_tested, task.policy),
        partial=interrupted or shop.budget.partial,
        num_boundary_rejected=proof.num_boundary_rejected,
        created=now(),
        fibc_version=version("fibc"),
        fingerprint=task.fingerprint,
        boundary=proof.boundary,
        mismatches=task.mismatches,
        on_change=task.options.on_change,
    )


def publish(shop: Shop, table: DispatchTable, layout: OutLayout, cache: Cache) -> Path:
    """Build the module of ``table``, put it and its kernels' sources in their places; return the package.

    What is published is recorded with its kernels first, so that ``fibc build`` makes the same module anywhere, and
    ``fibc retune`` finds the kernels of whatever generation serves.
    """
    task = shop.task
    objects = {artifact.symbol: Path(artifact.object_path) for artifact in shop.artifacts.values()}
    sources = {artifact.symbol: artifact.source for artifact in shop.artifacts.values()}
    symbols = [variant.symbol for variant in table.variants]
    kernels = {symbol: Kernel(objects[symbol].read_bytes(), sources[symbol]) for symbol in symbols}
    snapshot = Snapshot(task.workloads, task.options, task.evidence_digest)
    manifest = to_plain(make_manifest(table, snapshot, kernels, shop.log.every_evaluation()))
    keep_published(shop.log, task.definition, table, kernels, snapshot, manifest)
    package = layout.package(table.definition)
    build(table, objects, package, cache, manifest)
    write_sources(layout, table, sources)
    return package


def keep_dataset(shop: Shop, layout: OutLayout, proof: Proof) -> None:
    """Write definition, workloads, a solution per built candidate and a trace per evaluation."""
    task, definition = shop.task, shop.task.definition
    by_key = {str(key): key for key in task.keys}
    recorded = {workload.uuid: workload for workload in task.workloads}
    candidates = shop.log.candidates()
    published = {
        (str(decision.cell), decision.candidate): decision.reconfirm
        for decision in proof.decisions
        if decision.candidate
    }
    traces: list[Trace] = []
    for (key_name, digest), evaluation in sorted(shop.log.evaluations().items()):
        key, candidate = by_key.get(key_name), candidates.get(digest)
        if key is None or candidate is None:
            continue
        point = key.points[key.screen_point]
        trace = to_trace(
            definition,
            recorded.get(point.workload) or workload_at(dict(point.axes), definition),
            candidate,
            evaluation,
            task.native,
            hardware=task.environment.hardware,
            libs=task.environment.versions,
            timestamp=evaluation.timestamp,
            comparisons=published.get((key_name, digest), ()),
        )
        if trace is not None:
            traces.append(trace)
    built = [(shop.candidates[digest], artifact.source) for digest, artifact in sorted(shop.artifacts.items())]
    solutions = [_solution(definition, candidate, source) for candidate, source in built]
    write_dataset(layout.dataset, definition, task.workloads, solutions, traces)


def _solution(definition: Definition, candidate: Candidate, source: str) -> Solution:
    form = solution_form(candidate, source)
    return to_solution(
        definition,
        candidate,
        source,
        language=form.language,
        file=form.file,
        entry=form.entry,
        headers=form.headers,
        dependencies=form.dependencies,
    )

"""Compiling without measuring: what a search would ask for goes into a store that travels to the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fibc.backends.base import Backend, BuildFailure
from fibc.backends.compiled_store import CompiledStore, Failed, Index, failed, pack
from fibc.errors import InputError
from fibc.progress import Progress
from fibc.schema.candidate import Candidate
from fibc.schema.result import CompiledTemplate, CompileResult
from fibc.schema.space import Space
from fibc.search.budget import Budget
from fibc.search.spread import Planned, plan
from fibc.settings import DEFAULT_TRIALS, compile_timeout_s
from fibc.task import Task

BATCH_PER_JOB = 16
"""Candidates built at once per compiler: the process that compiles Triton kernels takes two seconds to start."""

OVER_SIZE = "over --max-mb"
OUT_OF_TIME = "after --budget-s"
NOT_DONE = "--dry-run"


def precompile(
    task: Task, store: CompiledStore, *, max_bytes: int, budget: Budget, progress: Progress
) -> CompileResult:
    """Fill ``store`` with candidates for every key of the task.

    What is in the store stays, but for candidates of other template texts or compilers; what is known not to compile is
    not tried again, a deadline excepted. The index is written after every batch, so that an interrupted run is gone on
    with.

    Args:
        max_bytes: Of the definition's candidates in the store.

    Raises:
        InputError: If no template serves the definition.
        ToolchainError: If nothing can be compiled here.
        RecordError: If the store cannot be written.
    """
    owner: dict[str, Backend] = {}
    keys: list[list[Space]] = []
    for key in task.keys:
        found = [(backend, space) for backend in task.backends for space in backend.spaces(task.definition, key)[0]]
        owner |= {space.template: backend for backend, space in found}
        keys.append([space for _, space in found])
    if not owner:
        reasons = "; ".join(f"{template}: {reason}" for template, reason in task.mismatches)
        raise InputError(f"{task.definition.name}: no template serves it for {task.backends[0].target}: {reasons}")
    run = _Run(task, store, owner, keys, max_bytes, budget)
    planned = list(plan(keys, seed=task.options.seed, per_template=task.options.trials or DEFAULT_TRIALS))
    if task.options.dry_run:
        run.leave_out(planned, NOT_DONE)
        return run.result(interrupted=False)
    size = BATCH_PER_JOB * task.options.jobs
    progress.stage("compile", -(-len(planned) // size))
    interrupted = False
    try:
        for start in range(0, len(planned), size):
            run.take(planned[start : start + size])
            progress.step(run.line)
    except KeyboardInterrupt:
        interrupted = True
    store.prune()
    return run.result(interrupted=interrupted)


class _Run:
    """The state of one run."""

    def __init__(
        self,
        task: Task,
        store: CompiledStore,
        owner: dict[str, Backend],
        keys: Sequence[Sequence[Space]],
        max_bytes: int,
        budget: Budget,
    ) -> None:
        self._task = task
        self._store = store
        self._owner = owner
        self._max_bytes = max_bytes
        self._budget = budget
        self._left_out: Counter[tuple[str, str]] = Counter()
        self._num_new = 0
        texts = {space.template: space.source_digest for spaces in keys for space in spaces}
        self._indexes = {backend.name: self._index(backend, texts) for backend in owner.values()}
        self._sizes = {
            candidate.digest: store.size_bytes(candidate)
            for index in self._indexes.values()
            for candidate in index.compiled
        }

    @property
    def line(self) -> str:
        num = sum(len(index.compiled) for index in self._indexes.values())
        return f"{num} candidates, {sum(self._sizes.values()) / 1e6:.1f} MB"

    def take(self, planned: Sequence[Planned]) -> None:
        """Compile a batch, and keep what fits."""
        for name, backend in {backend.name: backend for backend in self._owner.values()}.items():
            missing = self._missing(backend, planned)
            if why := self._spent():
                self._left_out.update((candidate.template, why) for candidate in missing)
            elif missing:
                self._indexes[name] = self._build(backend, self._indexes[name], missing)
                self._store.put_index(self._task.definition, self._indexes[name])

    def leave_out(self, planned: Sequence[Planned], why: str) -> None:
        """Count what is not in the store, and do nothing."""
        for backend in {backend.name: backend for backend in self._owner.values()}.values():
            missing = self._missing(backend, planned)
            self._left_out.update((candidate.template, why) for candidate in missing)

    def result(self, *, interrupted: bool) -> CompileResult:
        """Return what the store holds now."""
        task = self._task
        templates = {template: CompiledTemplate(template, 0, 0, 0, 0) for template in sorted(self._owner)}
        failures: Counter[str] = Counter()
        for index in self._indexes.values():
            for candidate in index.compiled:
                seen = templates[candidate.template]
                num_bytes = seen.num_bytes + self._sizes[candidate.digest]
                templates[candidate.template] = replace(seen, compiled=seen.compiled + 1, num_bytes=num_bytes)
            for item in index.failed:
                seen = templates[item.candidate.template]
                templates[item.candidate.template] = replace(seen, failed=seen.failed + 1)
                failures["took too long" if item.timed_out else item.log] += 1
        for (template, _), count in self._left_out.items():
            templates[template] = replace(templates[template], left_out=templates[template].left_out + count)
        reasons: Counter[str] = Counter()
        for (_, why), count in self._left_out.items():
            reasons[why] += count
        return CompileResult(
            definition=task.definition.name,
            target=str(task.backends[0].target),
            store=str(self._store.root),
            num_keys=len(task.keys),
            templates=tuple(templates.values()),
            failures=tuple(failures.most_common()),
            left_out=tuple(reasons.most_common()),
            mismatches=task.mismatches,
            num_new=self._num_new,
            duration_s=round(self._budget.elapsed(), 1),
            notes=task.notes,
            interrupted=interrupted,
        )

    def _index(self, backend: Backend, texts: dict[str, str]) -> Index:
        """Return the index that this run goes on with: what an earlier one compiled and this one could compile too."""
        definition, target = self._task.definition, str(backend.target)
        own = {template: text for template, text in texts.items() if self._owner[template] is backend}
        known = None if self._task.options.fresh else self._store.index(definition, backend.name, target)
        compiled: tuple[Candidate, ...] = ()
        failures: tuple[Failed, ...] = ()
        if known is not None:
            compiled = tuple(c for c in known.compiled if self._is_current(backend, c) and self._store.size_bytes(c))
            failures = tuple(item for item in known.failed if self._is_current(backend, item.candidate))
        return Index(definition.name, backend.name, target, compiled, failures, own)

    def _is_current(self, backend: Backend, candidate: Candidate) -> bool:
        """Whether the config still gives this candidate: not of another template text, and not of another compiler."""
        if self._owner.get(candidate.template) is not backend:
            return False
        try:
            now = backend.candidate(self._task.definition, candidate.template, dict(candidate.config))
        except KeyError:  # it lacks a tunable that the template has now
            return False
        return now == candidate

    def _missing(self, backend: Backend, planned: Sequence[Planned]) -> list[Candidate]:
        """Return the candidates of ``backend`` that are not in the store and are not known to fail."""
        index = self._indexes[backend.name]
        known = {candidate.digest for candidate in index.compiled}
        known |= {item.candidate.digest for item in index.failed if not item.timed_out}
        mine = (item for item in planned if self._owner[item.template] is backend)
        wanted = (backend.candidate(self._task.definition, p.template, dict(p.config)) for p in mine)
        return [candidate for candidate in wanted if candidate.digest not in known]

    def _spent(self) -> str:
        """Return what is used up, or an empty string."""
        if sum(self._sizes.values()) >= self._max_bytes:
            return OVER_SIZE
        return OUT_OF_TIME if self._budget.expired() else ""

    def _build(self, backend: Backend, index: Index, missing: Sequence[Candidate]) -> Index:
        options = self._task.options
        timeout_s = self._budget.deadline_s(compile_timeout_s(backend.name, options.timeout_s))
        built = backend.build(self._task.definition, missing, timeout_s=timeout_s, jobs=options.jobs)
        compiled = {candidate.digest: candidate for candidate in index.compiled}
        failures = {item.candidate.digest: item for item in index.failed}
        for candidate in missing:
            made = built[candidate.digest]
            if isinstance(made, BuildFailure):
                if made.timed_out and self._budget.expired():
                    self._left_out[candidate.template, OUT_OF_TIME] += 1
                else:
                    failures[candidate.digest] = failed(candidate, made)
                continue
            packed = pack(made)
            if sum(self._sizes.values()) + len(packed) > self._max_bytes:
                self._left_out[candidate.template, OVER_SIZE] += 1
                continue
            self._store.put(candidate, packed)
            self._sizes[candidate.digest] = len(packed)
            compiled[candidate.digest] = candidate
            failures.pop(candidate.digest, None)
            self._num_new += 1
        return replace(index, compiled=tuple(compiled.values()), failed=tuple(failures.values()))

"""The pipeline on a simulated machine: what is true decides, and nothing else does."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from simulation import BLOCKS, Machine, SimulatedEvaluator, write_definition

import fibc
import fibc.evaluators
import fibc.key_search
import fibc.pipeline
import fibc.prove
import fibc.sustain
import fibc.task
from fibc import gpu_lock, gpus, terminal
from fibc.cache import Cache
from fibc.decide import MAX_SPLITS
from fibc.environment import detect
from fibc.errors import GateError, InputError
from fibc.gate import gate_digest
from fibc.paths import OutLayout
from fibc.process_bench import Outcome
from fibc.records import Record, RecordLog
from fibc.runtime.package import load, read_table
from fibc.schema import codec
from fibc.schema.decision import Verdict
from fibc.schema.digest import digest_json
from fibc.schema.evaluation import Status
from fibc.schema.observed import Observed
from fibc.schema.options import MODES, TuneOptions
from fibc.schema.policy import Policy
from fibc.schema.result import TuneResult
from fibc.schema.silicon import Gpu
from fibc.task import Task, read_task

SIZES = (1, 2, 3, 4, 7, 8)


pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    def make(speedup: Callable[[int, int], float], **facts: object) -> Machine:
        made = Machine(tmp_path, speedup, **facts)  # type: ignore[arg-type]
        made.install(monkeypatch)
        return made

    return make


def tune(tmp_path: Path, sizes: tuple[int, ...] = SIZES, **options: Any) -> TuneResult:
    path = write_definition(tmp_path / "defs", sizes)
    split = options.pop("split", (1.0, 0.0, 0.0))
    return fibc.tune(path, out=tmp_path / "out", target="cpu", split=split, **options)


def blocks(result: TuneResult) -> dict[str, int | None]:
    """Return the block that serves each cell, None for native."""
    assert result.table is not None
    known = {variant.candidate.digest: dict(variant.candidate.config)["block"] for variant in result.table.variants}
    served = {}
    for row in result.table.rows:
        block = known[row.candidate] if row.verdict is Verdict.REPLACE else None
        assert block is None or isinstance(block, int)
        served[str(row.cell)] = block
    return served


def test_the_fastest_block_serves_where_it_is_faster_and_native_elsewhere(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    machine(lambda block, rows: {3: 1.30, 4: 1.20}.get(block, 0.9) if rows <= 2 else 0.8)
    result = tune(tmp_path)
    assert blocks(result) == {"1": 3, "2": 3, "3..4": None, "5..8": None}
    assert result.table is not None
    assert [(str(region.cell), region.variant) for region in result.table.regions] == [("1..2", 0)]
    published = result.table.rows[0].reconfirm[0]
    assert published.speedup == pytest.approx(1.30, rel=0.01)
    assert published.ci_low <= 1.30 * 1.005
    assert published.ci_high >= 1.30 * 0.995
    assert result.table.expected_false_replacements <= 0.05 * 4
    assert not result.partial


def test_the_module_that_was_written_imports_and_answers(machine: Callable[..., Machine], tmp_path: Path) -> None:
    import torch

    machine(lambda block, rows: 1.5 if block == 2 else 0.7)
    result = tune(tmp_path)
    module = load(result.package)
    x, weight = torch.randn(2, 8), torch.randn(8)
    torch.testing.assert_close(module.run(x, weight), x * weight)
    assert read_table(result.package) == result.table


def test_a_second_run_with_nothing_changed_builds_and_measures_nothing(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.2 if block == 1 else 0.8)
    first = tune(tmp_path)
    made.asked.clear()
    second = tune(tmp_path)
    assert second.up_to_date
    assert second.table == first.table
    assert not made.asked


def test_a_cell_that_an_earlier_run_decided_is_not_searched_again(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.2 if block == 1 else 0.8)
    first = tune(tmp_path)
    log = RecordLog(OutLayout(tmp_path / "out").records("toy"), definition="", environment="")
    log.compact(lambda record: record.kind != "finalists")
    shutil.rmtree(first.package)
    made.asked.clear()
    second = tune(tmp_path)
    assert blocks(second) == blocks(first)
    assert made.asked["trials"] == 0
    assert made.asked["benches"] == 0


def test_a_key_of_long_trials_gets_a_quarter_of_them(
    machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fibc.key_search, "LONG_TRIAL_S", 0.0)
    made = machine(lambda block, rows: 1.2 if block == 1 else 0.9)
    result = tune(tmp_path, trials=16, jobs=2)
    assert made.asked["trials"] == 4 * 4
    assert not result.partial


def test_keys_of_heavy_calls_are_proven_after_the_others(
    machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fibc.prove, "HEAVY_CALL_S", 0.0)
    machine(lambda block, rows: 1.2 if block == 1 else 0.9)
    result = tune(tmp_path)
    assert set(blocks(result).values()) == {1}
    assert not result.partial


def test_stages_share_sessions(machine: Callable[..., Machine], tmp_path: Path) -> None:
    """Whole cells, halves and winners: 8 confirm sessions, 8 of the halves beside the winners', 8 of the halves'."""
    machine(lambda block, rows: (1.3 if rows != 9 else 0.8) if block == 5 else 0.7)
    result = tune(tmp_path, sizes=(1, 2, 4, 8, 9, 16))
    log = RecordLog(OutLayout(tmp_path / "out").records("toy"), definition="", environment="")
    seeds: dict[str, set[int]] = {}
    for record in log.read():
        if record.kind == "samples" and record.value["stage"] in {"confirm", "reconfirm"}:
            seeds.setdefault(record.value["stage"], set()).add(record.value["seed"])
    assert blocks(result)["1"] == 5
    assert len(seeds["confirm"] & seeds["reconfirm"]) >= 8, "halves race in the sessions of the first reconfirm"


def test_fresh_forgets_and_measures_again(machine: Callable[..., Machine], tmp_path: Path) -> None:
    made = machine(lambda block, rows: 1.2 if block == 1 else 0.8)
    tune(tmp_path)
    made.asked.clear()
    assert not tune(tmp_path, fresh=True).up_to_date
    assert made.asked["trials"] >= len(BLOCKS)


def test_an_interrupted_run_keeps_its_trials_and_the_next_one_goes_on(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.2 if block == 1 else 0.8, interrupt_after=9)
    result = tune(tmp_path)
    assert result.interrupted
    assert result.table is None
    made.interrupt_after = None
    result = tune(tmp_path)
    assert blocks(result)["1"] == 1
    assert max(made.tried.values()) <= 2, "only the interrupted trial runs again"
    assert sum(count > 1 for count in made.tried.values()) <= 1


def test_a_failed_candidate_is_recorded_and_never_tried_again(machine: Callable[..., Machine], tmp_path: Path) -> None:
    made = machine(
        lambda block, rows: 1.2 if block == 1 else 0.9,
        statuses={2: Status.CRASH, 3: Status.INCORRECT_NUMERICAL},
        unbuildable=frozenset({4}),
    )
    result = tune(tmp_path)
    assert result.trials["CRASH"] == 1
    assert result.trials["INCORRECT_NUMERICAL"] == 1
    assert result.trials["COMPILE_ERROR"] == 1
    assert sum(count for (_, block), count in made.tried.items() if block in {2, 3}) == 2
    assert set(blocks(result).values()) == {1}


def test_equal_binaries_are_measured_once(machine: Callable[..., Machine], tmp_path: Path) -> None:
    made = machine(lambda block, rows: 1.2 if block in {1, 2} else 0.9, twins={2: 1})
    result = tune(tmp_path, sizes=(1,))
    assert sum(made.tried["1", block] for block in (1, 2)) == 1
    assert result.table is not None
    assert len(result.table.variants) == 1


def test_a_cell_is_split_where_a_finalist_wins_a_part_of_it(machine: Callable[..., Machine], tmp_path: Path) -> None:
    machine(lambda block, rows: (1.3 if rows > 12 else 0.8) if block == 5 else 0.9)
    result = tune(tmp_path, sizes=(1, 9, 16))
    served = blocks(result)
    assert served["13..16"] == 5
    assert served["9..12"] is None


def test_the_boundary_set_takes_a_row_back(machine: Callable[..., Machine], tmp_path: Path) -> None:
    sizes = tuple(range(17, 33))
    probe = tune_sets(tmp_path, sizes)
    slow = next(size for size in probe["boundary"] if size not in probe["points"])
    machine(lambda block, rows: 0.7 if rows == slow else 1.3)
    result = tune(tmp_path, sizes=sizes, split=(0.6, 0.2, 0.2))
    assert result.table is not None
    assert result.table.num_boundary_rejected == 1
    row = next(row for row in result.table.rows if str(row.cell) == "17..32")
    assert row.revoked
    assert row.verdict is Verdict.KEEP_NATIVE
    assert f"rows={slow}" in row.reason


def tune_sets(tmp_path: Path, sizes: tuple[int, ...]) -> dict[str, list[int]]:
    """Return the sizes of the boundary set, and of all points, as the pipeline will see them."""
    task = read_task(write_definition(tmp_path / "defs", sizes), None, TuneOptions(split=(0.6, 0.2, 0.2)), Cache())
    points = [dict(point.axes)["rows"] for key in task.keys for point in key.points]
    return {"boundary": [workload.axes["rows"] for workload in task.sets.boundary], "points": points}


def test_the_test_set_is_read_and_decides_nothing(machine: Callable[..., Machine], tmp_path: Path) -> None:
    sizes = tuple(range(17, 65))
    machine(lambda block, rows: 1.3)
    result = tune(tmp_path, sizes=sizes, split=(0.6, 0.2, 0.2))
    assert len(result.test) == result.sets.test > 0
    assert not result.slower_on_test
    assert {item.stage for item in result.test} == {"test"}


def test_a_host_that_finds_native_faster_than_itself_is_refused(
    machine: Callable[..., Machine], own_cache: Path, tmp_path: Path
) -> None:
    machine(lambda block, rows: 1.3, gate_bias=1.05)
    with pytest.raises(GateError, match="40 of 40"):
        tune(tmp_path)
    assert not (tmp_path / "out" / "fibc_toy").exists()


def test_without_time_the_result_is_partial_and_says_so(machine: Callable[..., Machine], tmp_path: Path) -> None:
    machine(lambda block, rows: 1.3)
    result = tune(tmp_path, budget_s=1e-6)
    assert result.partial
    assert result.table is not None
    assert set(blocks(result).values()) == {None}
    assert any("out of time" in note for note in result.notes)
    again = tune(tmp_path)
    assert not again.up_to_date
    assert not again.partial
    assert set(blocks(again).values()) != {None}


def test_evidence_of_an_earlier_definition_is_void_and_the_tool_says_so(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.2 if block == 1 else 0.8)
    tune(tmp_path)
    made.asked.clear()
    path = write_definition(tmp_path / "defs", SIZES, reference="def run(x, weight):\n    return weight * x\n")
    result = fibc.tune(path, out=tmp_path / "out", target="cpu", split=(1.0, 0.0, 0.0))
    assert any("void" in note for note in result.notes)
    assert made.asked["trials"] > 0


def test_a_dry_run_says_what_it_would_do_and_does_nothing(machine: Callable[..., Machine], tmp_path: Path) -> None:
    made = machine(lambda block, rows: 1.3)
    result = tune(tmp_path, dry_run=True)
    assert result.plan["keys"] == 4
    assert result.plan["candidates"] == len(BLOCKS)
    assert result.table is None
    assert not made.asked
    assert not (tmp_path / "out").exists()


def test_the_gpu_is_locked_while_anything_is_measured_and_at_no_other_time(
    machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = machine(lambda block, rows: 1.3)
    seen: list[tuple[str, bool]] = []

    @contextlib.contextmanager
    def lock(gpu: Gpu | None, *, wait_s: float, say: Callable[[str], None]) -> Iterator[None]:
        assert gpu is None  # of a CPU's environment
        assert wait_s > 0
        seen.append(("taken", not made.asked))
        yield
        seen.append(("given back", made.asked["benches"] > 2))

    monkeypatch.setattr(fibc.pipeline, "lock_device", lock)
    tune(tmp_path, dry_run=True)
    assert seen == []
    assert tune(tmp_path, sizes=tuple(range(17, 65)), split=(0.6, 0.2, 0.2)).test
    assert seen == [("taken", True), ("given back", True)]
    assert tune(tmp_path, sizes=tuple(range(17, 65)), split=(0.6, 0.2, 0.2)).up_to_date
    assert len(seen) == 2


def test_a_tune_is_refused_where_another_run_measures_on_the_gpu(
    machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = machine(lambda block, rows: 1.3)
    gpu = gpus.stand_in("sm_90a")
    monkeypatch.setattr(fibc.task, "_gpu", lambda options, *, needs_device: replace(gpu, uuid=f"GPU-{os.getpid()}"))
    monkeypatch.setattr(fibc.pipeline, "DEFAULT_LOCK_WAIT_S", 0.0)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(gpu_lock, "lock_gpu", partial(gpu_lock.lock_gpu, directories=(shared,)))
    (shared / f"fibc-GPU-{os.getpid()}.lock").touch()
    with (shared / f"fibc-GPU-{os.getpid()}.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=f"gpu GPU-{os.getpid()}: another run measures there"):
            tune(tmp_path)
    assert not made.asked


def test_evidence_of_one_mode_is_not_evidence_of_another(
    machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(lambda block, rows: 1.3)
    path = write_definition(tmp_path / "defs", SIZES)

    def task(mode: str = "", **changed: Any) -> Task:
        return read_task(path, None, TuneOptions(mode=mode, **changed), Cache())

    assert (task().mode, task("eager").mode) == ("eager", "eager")
    assert task().evidence_digest == task("eager").evidence_digest
    gpu = gpus.stand_in("sm_90a")
    monkeypatch.setattr(fibc.task, "_gpu", lambda options, *, needs_device: gpu)
    default = task()
    assert default.mode == "graph"
    assert default.evidence_digest == task("graph").evidence_digest == default_digest(default)
    digests = {mode: task(mode).evidence_digest for mode in MODES}
    prints = {mode: task(mode).fingerprint for mode in MODES}
    assert len(set(digests.values())) == len(set(prints.values())) == 3
    other = replace(detect(gpu=gpu), model="another CPU")
    monkeypatch.setattr(fibc.task, "detect", lambda *, gpu: other)
    moved = {mode for mode in MODES if task(mode).evidence_digest != digests[mode]}
    assert moved == {"eager"}, "without graphs a caller pays for the host"


def default_digest(task: Task) -> str:
    """Return the digest under which evidence of the default mode is recorded since sessions are processes."""
    return digest_json([task.environment.digest, task.native.digest, "process"])


def test_whatever_a_decision_depends_on_makes_another_table_and_nothing_else_does(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    machine(lambda block, rows: 1.3)
    path = write_definition(tmp_path / "defs", SIZES)
    weighted = write_definition(tmp_path / "weighted", SIZES)
    workloads = weighted.with_suffix(".workloads.jsonl")
    first, *others = map(json.loads, workloads.read_text().splitlines())
    first["workload"]["count"] = 100
    workloads.write_text("".join(json.dumps(line) + "\n" for line in (first, *others)))

    def fingerprint(at: Path = path, **changed: Any) -> str:
        return read_task(at, None, TuneOptions(**changed), Cache()).fingerprint

    swapped = "def run(x, weight):\n    return weight * x\n"
    first_print = fingerprint()
    prints = {
        "margin": fingerprint(min_speedup=1.5),
        "alpha": fingerprint(alpha=0.01),
        "alpha of the table": fingerprint(alpha_table=True),
        "trials": fingerprint(trials=7),
        "seed": fingerprint(seed=7),
        "split": fingerprint(split=(1.0, 0.0, 0.0)),
        "traffic": fingerprint(weighted),
        "workloads": fingerprint(write_definition(tmp_path / "more", (*SIZES, 900))),
        "reference": fingerprint(write_definition(tmp_path / "other", SIZES, swapped)),
    }
    assert len({first_print, *prints.values()}) == 1 + len(prints), prints
    assert fingerprint(budget_s=60.0, jobs=1, timeout_s=9.0, on_change="native") == first_print


def test_a_gate_is_passed_for_one_environment_mode_and_timer_alone() -> None:
    every = [
        (one, mode, timer) for one in ("here", "there") for mode in MODES for timer in ("steady_clock", "cuda_event")
    ]
    assert len({gate_digest(*conditions) for conditions in every}) == len(every) == 12


def test_the_mode_reaches_the_workers_and_the_plan(
    machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(lambda block, rows: 1.3)
    assert tune(tmp_path, dry_run=True).plan["mode"] == "eager"
    given: list[str] = []
    made: Any = vars(fibc.evaluators)["Evaluator"]

    def spy(*arguments: Any, mode: str, **options: Any) -> Any:
        given.append(mode)
        return made(*arguments, **options)

    monkeypatch.setattr(fibc.evaluators, "Evaluator", spy)
    tune(tmp_path, mode="eager")
    assert given == ["eager"]


def test_the_record_is_read_as_often_for_many_keys_as_for_few(
    machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(lambda block, rows: 1.2 if block == 1 else 0.8)
    reads: list[str] = []
    read = RecordLog.read

    def counted(log: RecordLog) -> Iterator[Record]:
        reads.append(log.environment)
        return read(log)

    monkeypatch.setattr(RecordLog, "read", counted)
    counts = []
    for sizes in ((1, 2), SIZES):
        reads.clear()
        tune(tmp_path / str(len(sizes)), sizes)
        counts.append(len(reads))
    assert counts[0] == counts[1] < 20


def test_what_was_seen_of_the_gpu_is_in_the_result_and_recorded(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    seen = Observed(40, 2, {"an XID event (79)": 1}, {"driver": "580"})
    machine(lambda block, rows: 1.3, observed=seen)
    result = tune(tmp_path)
    assert result.observed == seen
    log = RecordLog(OutLayout(tmp_path / "out").records("toy"), definition="", environment="")
    assert [codec.from_plain(Observed, r.value) for r in log.read() if r.kind == "observed"] == [seen]
    text = io.StringIO()
    terminal.print_result(Console(file=text, width=200), result)
    shown = "1 of 40 timed pairs discarded (1 for an XID event (79)), 2 under the software power cap"
    assert f"gpu       {shown}\n" in text.getvalue()


def test_a_winner_whose_output_was_wrong_after_it_had_been_timed_is_revoked(
    machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(lambda block, rows: 1.3 if block == 1 else 0.8)
    bench = SimulatedEvaluator.bench

    def late(self: SimulatedEvaluator, *arguments: Any, fresh_process: bool) -> Any:
        if fresh_process:  # a session of the proof
            stale = Outcome(Status.INCORRECT_NUMERICAL, "stale", None)
            self.late_failures |= {digest: stale for digest, block in self._blocks.items() if block == 1}
        return bench(self, *arguments, fresh_process=fresh_process)

    monkeypatch.setattr(SimulatedEvaluator, "bench", late)
    result = tune(tmp_path)
    assert result.table is not None
    assert {(row.verdict, row.revoked) for row in result.table.rows} == {(Verdict.KEEP_NATIVE, True)}
    assert all("failed in fresh sessions" in row.reason and "INCORRECT" in row.reason for row in result.table.rows)
    assert set(blocks(result).values()) == {None}


def test_a_guarantee_over_the_table_pays_for_every_half_that_a_split_can_make() -> None:
    keys = 10
    policy = Policy(alpha=0.05, num_keys=keys)
    shop: Any = SimpleNamespace(task=SimpleNamespace(policy=policy, options=TuneOptions(alpha_table=True)))
    alphas = [fibc.prove._policy_at(shop, depth).key_alpha for depth in range(MAX_SPLITS + 1)]
    assert alphas[0] == pytest.approx(0.05 / keys / 2)
    assert sum(keys * 2**depth * alpha for depth, alpha in enumerate(alphas)) == pytest.approx(0.05)
    shop.task.options = TuneOptions()
    assert fibc.prove._policy_at(shop, 2) is policy


def test_a_winner_on_a_gpu_that_slows_down_when_it_runs_alone_is_revoked(
    machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = machine(lambda block, rows: 1.3 if block == (1 if rows <= 16 else 2) else 0.8, alone={2: 0.9})
    sizes = (1, 8, 16, 24, 32)
    assert set(blocks(tune(tmp_path, sizes=sizes)).values()) == {1, 2}
    assert not made.asked["sustained"], "a CPU has no power cap that a kernel meets alone"
    monkeypatch.setattr(fibc.sustain, "has_power_cap", lambda environment: True)
    result = tune(tmp_path, sizes=sizes, fresh=True)
    assert result.table is not None
    rows = {str(row.cell): row for row in result.table.rows}
    assert {cell: served is not None for cell, served in blocks(result).items()} == {
        cell: int(cell.split(".")[-1]) <= 16 for cell in rows
    }
    lost = rows["17..32"]
    assert (lost.revoked, lost.verdict) == (True, Verdict.KEEP_NATIVE)
    assert lost.reason == "revoked: the winner does not hold in blocks of a second and more: 0.900x"
    assert rows["9..16"].reason.endswith("fresh sessions; holds in blocks of a second and more: 1.100x")
    assert made.asked["sustained"] <= 4, "a binary is run once for every power of 16"


def test_an_out_that_cannot_be_written_is_refused_before_any_work(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    made = machine(lambda block, rows: 1.3)
    (tmp_path / "out").write_text("a file")
    with pytest.raises(InputError, match="--out"):
        tune(tmp_path)
    assert not made.asked


def test_the_dataset_holds_a_solution_per_variant_and_a_trace_per_evaluation(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    from fibc.schema.dataset import read_dataset

    machine(lambda block, rows: 1.2 if block == 1 else 0.8)
    result = tune(tmp_path)
    dataset = read_dataset(tmp_path / "out" / "fibc-dataset")
    assert not dataset.problems
    assert len(dataset.traces["toy"]) == sum(result.trials.values())
    assert result.table is not None
    for variant in result.table.variants:
        assert f"toy_{variant.candidate.digest}" in dataset.solutions
    published = [t for t in dataset.traces["toy"] if t.evaluation is not None and t.evaluation.correctness is not None]
    assert published

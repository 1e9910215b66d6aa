"""The append-only log: what was written whole is found again, whatever happened to the file."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fibc import records
from fibc.errors import RecordError
from fibc.records import MAGIC, Record, RecordLog
from fibc.schema.candidate import Candidate, Target
from fibc.schema.decision import Decision, Verdict
from fibc.schema.evaluation import Arm, Correctness, Evaluation, Pair, SessionSamples, Status
from fibc.schema.feature import Cell

NO_LIMIT = resource.RLIM_INFINITY

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def open_log(path: Path, definition: str = "def1", environment: str = "env1") -> RecordLog:
    return RecordLog(path, definition=definition, environment=environment)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def evaluation(candidate: str, key: str = "1", status: Status = Status.PASSED) -> Evaluation:
    correctness = Correctness(1e-3, float("inf"), 0.5, deterministic=True, num_cases=7)
    pairs = (Pair(2e-6, 1e-6, True), Pair(2.5e-6, 1.25e-6, False))
    return Evaluation(candidate, key, status, "", correctness, pairs, "env1", 0.25)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records" / "gemm.records"


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.text(min_size=1, max_size=12), PLAIN), max_size=5))
def test_what_is_appended_is_read_back_in_order(tmp_path: Path, written: list[tuple[str, Any]]) -> None:
    path = tmp_path / "log"
    path.unlink(missing_ok=True)
    with open_log(path) as log:
        for kind, value in written:
            log.append(kind, value)
    assert list(open_log(path).read()) == [Record(kind, "def1", "env1", value) for kind, value in written]


def test_typed_records_are_read_back_equal(path: Path) -> None:
    candidate = Candidate("cpu", "gemm/matvec", (("rows", 4), ("prefetch", True)), "source", Target("cpu", "avx512"))
    samples = SessionSamples(Arm("1", 0, candidate.digest), "confirm", 3, 2**32 - 1, (Pair(2e-6, 1e-6, True),))
    decision = Decision(Cell(((1, 1),)), Verdict.KEEP_NATIVE, "", (), (), "native is faster")
    with open_log(path) as log:
        log.append("candidate", candidate)
        log.append("evaluation", evaluation(candidate.digest))
        log.append("samples", samples)
        log.append("decision", decision)
        log.append("gate", {"replaced": 1})
    log = open_log(path)
    assert log.candidates() == {candidate.digest: candidate}
    assert log.evaluations() == {("1", candidate.digest): evaluation(candidate.digest)}
    assert log.samples() == log.samples("confirm") == (samples,)
    assert log.samples("test") == ()
    assert log.decisions() == (decision,)
    assert list(log.own("gate")) == [{"replaced": 1}]


def test_the_last_evaluation_of_a_candidate_at_a_key_counts(path: Path) -> None:
    log = open_log(path)
    log.append("evaluation", evaluation("c1", "1", Status.CRASH))
    log.append("evaluation", evaluation("c1", "2"))
    log.append("evaluation", evaluation("c1", "1"))
    assert log.evaluations() == {("1", "c1"): evaluation("c1", "1"), ("2", "c1"): evaluation("c1", "2")}


def test_a_log_that_does_not_exist_is_empty_and_reading_does_not_make_it(path: Path) -> None:
    assert list(open_log(path).read()) == []
    assert not path.parent.exists()


def test_evidence_of_another_definition_or_environment_is_not_returned_but_kept(path: Path) -> None:
    for definition, environment in (("def1", "env1"), ("def2", "env1"), ("def1", "env2")):
        with open_log(path, definition, environment) as log:
            log.append("evaluation", evaluation(f"{definition} {environment}"))
    log = open_log(path)
    assert list(log.evaluations()) == [("1", "def1 env1")]
    assert log.void() == (
        f"the definition has changed: 1 records of its earlier digest are void and not used ({path})",
    )
    assert open_log(path.with_name("other")).void() == ()
    assert len(list(log.read())) == 3


def test_a_log_cut_at_any_byte_keeps_every_whole_record_and_warns_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_log(path) as log:
        ends = []
        for number in range(4):
            log.append("note", {"number": number, "text": "x" * number})
            ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        caplog.clear()
        log = open_log(path)
        num_whole = sum(end <= length for end in ends)
        assert [record.value["number"] for record in log.read()] == list(range(num_whole))
        assert [record.value["number"] for record in log.read()] == list(range(num_whole))
        assert len(warnings_of(caplog)) == (0 if length in (0, *ends) else 1)


def test_a_log_goes_on_behind_a_torn_record(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_log(path) as log:
        log.append("note", 0)
        size = path.stat().st_size
        log.append("note", 1)
    whole = path.read_bytes()
    for length in range(size + 1, len(whole)):
        path.write_bytes(whole[:length])
        with open_log(path) as log:
            log.append("note", 2)
        assert [record.value for record in open_log(path).read()] == [0, 2]


def test_any_damaged_byte_costs_only_its_own_record(path: Path) -> None:
    with open_log(path) as log:
        ends = [0]
        for number in range(3):
            log.append("note", [number, MAGIC.decode()])
            ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x41
        path.write_bytes(damaged)
        lost = next(number for number in range(3) if position < ends[number + 1])
        assert [record.value[0] for record in open_log(path).read()] == [n for n in range(3) if n != lost]


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_garbage_is_no_record_and_hides_none(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(garbage)
    with open_log(path) as log:
        log.append("note", "behind")
    assert [record.value for record in open_log(path).read()] == ["behind"]


def test_a_record_that_unpacks_to_more_than_memory_allows_is_damage(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_log(path) as log:
        log.append("note", "x" * 5000)
        log.append("note", "small")
    monkeypatch.setattr(records, "_MAX_PAYLOAD_BYTES", 1000)
    assert [record.value for record in open_log(path).read()] == ["small"]


def test_kinds_and_shapes_of_another_version_are_kept_and_passed_over(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_log(path) as log:
        log.append("hologram", {"since": "version 9"})
        log.append("evaluation", {"candidate": "c9", "hue": "blue"})
        log.append("evaluation", evaluation("c1"))
    log = open_log(path)
    assert list(log.evaluations()) == [("1", "c1")]
    assert len(warnings_of(caplog)) == 1
    log.compact(lambda _: True)
    assert [record.kind for record in log.read()] == ["hologram", "evaluation", "evaluation"]


def test_a_file_size_limit_loses_only_the_record_that_met_it(path: Path) -> None:
    log = open_log(path)
    log.append("note", "kept")
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
        with pytest.raises(
            RecordError, match=r"gemm\.records: a record of \d+ bytes cannot be written: File too large"
        ):
            log.append("note", "lost")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == size + 10
    log.append("note", "after")
    log.close()
    assert [record.value for record in open_log(path).read()] == ["kept", "after"]


def test_a_full_disk_is_an_error_that_keeps_what_was_there() -> None:
    with pytest.raises(RecordError, match=r"/dev/full: .* No space left on device \(earlier records are kept"):
        open_log(Path("/dev/full")).append("note", "lost")


def test_short_writes_are_completed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:3]))
    with open_log(path) as log:
        log.append("note", "slow disk")
    assert [record.value for record in open_log(path).read()] == ["slow disk"]


def test_decisions_and_gates_reach_the_disk_at_once_and_the_rest_when_the_log_is_closed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    log = open_log(path)
    log.append("evaluation", evaluation("c1"))
    assert synced == []
    log.append("gate", {"replaced": 0})
    log.append("note", "tail")
    log.close()
    assert len(synced) == 2
    assert synced[-1] == path.stat().st_size


def test_compaction_drops_damage_and_what_is_not_wanted_and_the_log_can_go_on(path: Path) -> None:
    for definition in ("old", "def1"):
        with open_log(path, definition) as log:
            log.append("note", definition)
    path.write_bytes(path.read_bytes() + MAGIC + b"torn")
    log = open_log(path)
    log.compact(lambda record: record.definition == "def1")
    log.append("note", "more")
    assert [record.value for record in log.read()] == ["def1", "more"]
    assert list(path.parent.iterdir()) == [path]


def test_a_compaction_that_fails_leaves_the_log_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(path)
    log.append("note", "kept")
    log.close()
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(RecordError):
        log.compact(lambda _: False)
    assert path.read_bytes() == before


def test_a_process_killed_between_appends_loses_nothing_that_was_appended(path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from fibc.records import RecordLog
log = RecordLog(Path(sys.argv[1]), definition="def1", environment="env1")
for number in range(50):
    log.append("note", number)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [record.value for record in open_log(path).read()] == list(range(50))


def test_the_log_says_where_it_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with pytest.raises(RecordError, match="log: cannot be read: Is a directory"):
        list(open_log(tmp_path / "log").read())

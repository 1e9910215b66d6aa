"""Facts of an environment: what makes other evidence of it, and what only calls for measuring again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fibc.environment import detect
from fibc.records import RecordLog
from fibc.schema.candidate import Candidate, Target
from fibc.schema.evaluation import Evaluation, Pair, Status
from fibc.schema.facts import ABSENT, Difference, Role, differences, of_role


def test_a_difference_says_what_follows_from_it() -> None:
    then = {"cpu": "A", "torch": "2.13.0", "python": "3.11.1", "flashinfer": ABSENT, "cublas": "13.0.2"}
    now = {"cpu": "B", "torch": "2.14.0", "python": "3.11.2", "flashinfer": "0.6.0", "cublas": ""}
    found = differences(then, now)
    assert [(item.name, item.role) for item in found] == [
        ("cpu", Role.IDENTITY),
        ("flashinfer", Role.TRIGGER),
        ("torch", Role.TRIGGER),
        ("python", Role.NOTE),
    ], "cublas is not known without torch, and says nothing"
    assert str(found[2]) == "torch: 2.13.0 -> 2.14.0"
    assert of_role(found, Role.NOTE) == (Difference("python", "3.11.1", "3.11.2", Role.NOTE),)
    assert differences(now, now) == ()


def test_a_library_is_no_part_of_the_identity_and_part_of_the_key() -> None:
    found = detect(2)
    for name in ("torch", "driver", "cublas", "flashinfer"):
        other = replace(found, versions={**found.versions, name: "99"})
        assert other.identity == found.identity
        assert other.digest != found.digest
    for name in ("compiler", "cpus", "microcode", "kernel", "python"):
        other = replace(found, versions={**found.versions, name: "99"})
        assert (other.identity, other.digest) == (found.identity, found.digest)
    assert replace(found, num_threads=3).identity != found.identity


def test_this_machines_facts_are_known_without_torch() -> None:
    facts = detect(2).facts()
    assert facts["cpus"].isdecimal()
    assert facts["compiler"]
    assert facts["torch"].split(".")[0] == "2"
    assert differences(facts, detect(2).facts()) == ()


CANDIDATE = Candidate("cpu", "toy/kernel", (("block", 1),), "source", Target("cpu", "avx2"))


def evaluation(environment: str, status: Status, ratio: float) -> Evaluation:
    pairs = (Pair(ratio, 1.0, True),) if status is Status.PASSED else ()
    return Evaluation(CANDIDATE.digest, "1", status, "", None, pairs, environment, 0.1)


def test_evidence_of_the_same_silicon_is_found_after_an_upgrade(tmp_path: Path) -> None:
    path = tmp_path / "toy.records"
    for environment, identity, status in (
        ("old torch", "silicon", Status.PASSED),
        ("other silicon", "elsewhere", Status.CRASH),
        ("new torch", "silicon", Status.TIMEOUT),
    ):
        with RecordLog(path, definition="d", environment=environment, identity=identity) as log:
            for _ in range(2):
                log.note_environment({"torch": environment})
            log.append("candidate", CANDIDATE)
            log.append("evaluation", evaluation(environment, status, 1.5))
    here = RecordLog(path, definition="d", environment="new torch", identity="silicon")
    assert [item.status for item in here.earlier_evaluations()] == [Status.PASSED]
    assert [item.status for item in here.evaluations().values()] == [Status.TIMEOUT]
    assert here.every_candidate() == {CANDIDATE.digest: CANDIDATE}
    assert sum(record.kind == "environment" for record in here.read()) == 3, "each is written once"
    other = RecordLog(path, definition="another", environment="new torch", identity="silicon")
    assert other.earlier_evaluations() == ()

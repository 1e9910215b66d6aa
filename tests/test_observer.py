"""A pair that something else than the kernels has bent is repeated; too many of them end the measuring."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from fibc import nvml
from fibc.errors import BrokenError
from fibc.nvml import Reading
from fibc.observer import LOOK_EVERY_S, MAX_PAUSES, PAUSE_S, Observer, OwnProcesses, find_fault

QUIET = Reading(sm_clock_mhz=1980, reasons=0, ecc_errors=1, xids=())
OWN, FOREIGN = 100, 666


class FakeMonitor:
    """A GPU whose readings a test sets."""

    uuid = "GPU-1"
    default_clock_mhz = 1980

    def __init__(self) -> None:
        self.reading = QUIET
        self.present = {OWN}
        self.num_reads = self.num_looks = 0

    def read(self) -> Reading:
        self.num_reads += 1
        reading, self.reading = self.reading, replace(self.reading, xids=())
        return reading

    def processes(self) -> frozenset[int]:
        self.num_looks += 1
        return frozenset(self.present)

    def facts(self) -> dict[str, str]:
        return {"gpu uuid": self.uuid}


class Scene:
    """An observer on a fake GPU and a fake clock; a pair takes a millisecond."""

    def __init__(self, *, present: tuple[int, ...] = (OWN,)) -> None:
        self.monitor = FakeMonitor()
        self.monitor.present = set(present)
        self.now_s = 0.0
        self.paused: list[float] = []
        self.num_pauses_needed = 0
        self.leaves_after = 0
        self.num_pairs = 0
        self.observer = Observer(
            self.monitor, lambda pid: pid == OWN, own_pid=OWN, clock=lambda: self.now_s, pause=self.pause
        )

    def pause(self, seconds: float) -> None:
        self.paused.append(seconds)
        self.now_s += seconds
        if len(self.paused) >= self.num_pauses_needed:
            self.monitor.reading = QUIET
        if len(self.paused) == self.leaves_after:
            self.monitor.present.discard(FOREIGN)

    def pair(self, change: Callable[[int], None] = lambda number: None) -> int:
        """Time one pair; ``change(number)`` happens during the one of that number. Return the number that was kept."""

        def run() -> int:
            self.num_pairs += 1
            self.now_s += 1e-3
            change(self.num_pairs)
            return self.num_pairs

        return self.observer.pair(run)


def bend_first(scene: Scene, bent: Reading) -> Callable[[int], None]:
    def change(number: int) -> None:
        scene.monitor.reading = bent if number == 1 else QUIET

    return change


@pytest.mark.parametrize(
    ("bent", "why"),
    [
        (replace(QUIET, sm_clock_mhz=1484), "an SM clock under 75% of 1980 MHz"),
        (replace(QUIET, reasons=nvml.HW_SLOWDOWN), "hardware slowdown"),
        (replace(QUIET, reasons=nvml.SW_THERMAL | 0x1), "software thermal slowdown"),
        (replace(QUIET, reasons=nvml.HW_THERMAL), "hardware thermal slowdown"),
        (replace(QUIET, reasons=nvml.HW_POWER_BRAKE), "hardware power brake"),
        (replace(QUIET, ecc_errors=2), "an uncorrected ECC error"),
        (replace(QUIET, xids=(79,)), r"an XID event \(79\)"),
    ],
)
def test_a_bent_pair_is_repeated_after_a_pause_and_counted(bent: Reading, why: str) -> None:
    scene = Scene()
    assert scene.pair(bend_first(scene, bent)) == 2
    assert len(scene.paused) == 1
    assert str(scene.observer.discards) == f"1 of 2 (1 for {why})".replace("\\", "")


def test_no_pair_is_begun_while_a_hot_gpu_cools_down() -> None:
    scene = Scene()
    scene.num_pauses_needed = 7
    assert scene.pair(bend_first(scene, replace(QUIET, reasons=nvml.HW_THERMAL))) == 2
    assert len(scene.paused) == 7


@pytest.mark.parametrize(
    "sound",
    [
        replace(QUIET, sm_clock_mhz=1485),
        replace(QUIET, reasons=0x1),
        replace(QUIET, reasons=0x2),
        replace(QUIET, reasons=nvml.SW_POWER_CAP, sm_clock_mhz=1600),
    ],
)
def test_idle_applications_clocks_and_the_power_cap_above_the_least_clock_keep_a_pair(sound: Reading) -> None:
    scene = Scene()
    assert scene.pair(bend_first(scene, sound)) == 1
    assert scene.observer.discards.capped == (sound.reasons == nvml.SW_POWER_CAP)


def test_a_clock_that_was_low_before_the_pair_was_an_idle_gpus() -> None:
    assert find_fault(replace(QUIET, sm_clock_mhz=345, reasons=0x1), QUIET, 1980, ()) is None


def test_slowdown_that_ended_during_the_pair_counts() -> None:
    assert find_fault(replace(QUIET, reasons=nvml.HW_THERMAL), QUIET, 1980, ()) == "hardware thermal slowdown"


def test_a_process_that_comes_discards_pairs_until_it_goes() -> None:
    scene = Scene()
    scene.pair()

    def change(number: int) -> None:
        scene.now_s += LOOK_EVERY_S
        if number == 2:
            scene.monitor.present.add(FOREIGN)

    scene.leaves_after = 5
    assert scene.pair(change) == 3
    assert str(scene.observer.discards) == "1 of 3 (1 for another process on the GPU (666))"
    assert len(scene.paused) == 5


def test_a_process_that_stays_is_an_error_before_any_pair_is_timed() -> None:
    scene = Scene(present=(OWN, FOREIGN))
    with pytest.raises(BrokenError, match="gpu GPU-1: must be used by this run alone, and is by 666"):
        scene.pair()
    assert scene.num_pairs == 0
    assert scene.now_s == pytest.approx(MAX_PAUSES * PAUSE_S)


def test_a_process_that_is_just_ending_is_waited_for() -> None:
    scene = Scene(present=(OWN, FOREIGN))
    scene.leaves_after = 3
    assert scene.pair() == 1
    assert (len(scene.paused), scene.observer.discards.num) == (3, 0)


def test_processes_numbered_in_another_namespace_are_told_apart_only_when_they_come_later() -> None:
    scene = Scene(present=(4001, 4002))
    assert scene.observer.blind
    assert scene.pair() == 1
    scene.now_s += LOOK_EVERY_S
    scene.monitor.present.add(4003)
    with pytest.raises(BrokenError, match="is by 4003"):
        scene.pair()
    assert "another namespace" in scene.observer.facts()["processes"]


def test_more_than_a_fifth_of_discarded_pairs_is_an_error_that_says_why() -> None:
    scene = Scene()
    hot = replace(QUIET, reasons=nvml.HW_THERMAL)

    def every_fourth(number: int) -> None:
        scene.monitor.reading = hot if number % 4 == 0 else QUIET

    with pytest.raises(BrokenError) as raised:
        for _ in range(100):
            scene.pair(every_fourth)
    assert str(raised.value) == (
        "gpu: at most 20% of all pairs may be discarded, got 7 of 28 (7 for hardware thermal slowdown)"
    )


def test_a_fifth_of_discarded_pairs_is_not_too_many() -> None:
    scene = Scene()
    hot = replace(QUIET, reasons=nvml.HW_THERMAL)

    def every_fifth(number: int) -> None:
        scene.monitor.reading = hot if number % 5 == 0 else QUIET

    for _ in range(100):
        scene.pair(every_fifth)
    assert scene.observer.discards.num == 24  # of 124


def test_a_pair_costs_one_reading_and_processes_are_looked_at_ten_times_a_second() -> None:
    scene = Scene()
    for _ in range(500):
        scene.pair()
    assert scene.monitor.num_reads == 501
    assert scene.monitor.num_looks == 1 + 5  # half a second of pairs of a millisecond
    facts = scene.observer.facts()
    assert facts["discarded pairs"] == "0 of 500"
    assert facts["pairs under the software power cap"] == "0 of 500"


def test_an_error_of_the_candidate_comes_through() -> None:
    scene = Scene()

    def fail() -> int:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        scene.observer.pair(fail)
    assert scene.observer.discards.timed == 0


def test_children_are_ours_and_others_are_not() -> None:
    is_ours = OwnProcesses(os.getpid())
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert is_ours(child.pid)
        assert is_ours(os.getpid())
        assert not is_ours(1)
        child.communicate(b"\n")

"""NVML is read through its C interface, and what it does not support is missing and no error."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fibc import nvml
from fibc.nvml import NvmlError, NvmlMonitor, Reading
from fibc.schema.silicon import CudaValidity, Gpu

WHOLE = Gpu(
    0, "GPU-1", "0000:1b:00.0", "NVIDIA H200", "", "580.1", 232448, CudaValidity("sm_90a", 90, 132, 60 << 20, 1 << 37)
)
SLICE = Gpu(
    0, "MIG-7", "0000:1b:00.0", "MIG", "1g.18gb", "580.1", 232448, CudaValidity("sm_90a", 90, 16, 15 << 20, 1 << 34)
)

NOT_SUPPORTED, INSUFFICIENT_SIZE, TIMEOUT, GPU_IS_LOST = 3, 7, 10, 15


class FakeNvml:
    """Functions of the library; numbers are by the call's name and its integer arguments."""

    def __init__(
        self,
        numbers: Mapping[tuple[Any, ...], int] | None = None,
        compute: Sequence[tuple[int, int]] = ((100, 0),),
        xids: Sequence[int] = (),
        missing: Sequence[str] = (),
    ) -> None:
        self.numbers = {
            ("nvmlDeviceGetClockInfo", 1): 1755,
            ("nvmlDeviceGetMaxClockInfo", 1): 1980,
            ("nvmlDeviceGetDefaultApplicationsClock", 0): 1830,
            ("nvmlDeviceGetCurrentClocksEventReasons",): 0x4,
            ("nvmlDeviceGetTotalEccErrors", 1, 0): 2,
            ("nvmlDeviceGetPowerManagementLimit",): 700_000,
            ("nvmlDeviceGetPowerUsage",): 431_400,
            ("nvmlDeviceGetTemperature", 0): 54,
            **(numbers or {}),
        }
        self.compute = list(compute)
        self.xids = list(xids)
        self.missing = missing
        self.status: dict[str, int] = {}
        self.lookups: list[tuple[str, bytes]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.missing or not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *arguments: self.status.get(name) or self._run(name, *arguments)

    def _run(self, name: str, *arguments: Any) -> int:
        if name in ("nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetHandleByUUID"):
            self.lookups.append((name, arguments[0]))
            arguments[1]._obj.value = 0x1000
        elif name == "nvmlDeviceGetGpuInstanceId":
            arguments[1]._obj.value = 3
        elif name in ("nvmlDeviceGetUUID", "nvmlSystemGetDriverVersion"):
            arguments[-2].value = b"GPU-physical" if name == "nvmlDeviceGetUUID" else b"580.159.04"
        elif name == "nvmlEventSetCreate":
            arguments[0]._obj.value = 0x2000
        elif name == "nvmlEventSetWait_v2":
            if not self.xids:
                return TIMEOUT
            arguments[1]._obj.event_data = self.xids.pop(0)
        elif name.endswith("RunningProcesses_v3"):
            return self._processes(self.compute if "Compute" in name else [(900, 3)], *arguments)
        elif name != "nvmlDeviceRegisterEvents":
            key = (name, *arguments[1:-1])
            if key not in self.numbers:
                return NOT_SUPPORTED
            arguments[-1]._obj.value = self.numbers[key]
        return 0

    def _processes(self, seen: Sequence[tuple[int, int]], device: Any, count: Any, infos: Any) -> int:
        capacity, count._obj.value = count._obj.value, len(seen)
        if capacity < len(seen):
            return INSUFFICIENT_SIZE
        for info, (pid, instance) in zip(infos, seen, strict=False):
            info.pid, info.gpu_instance = pid, instance
        return 0


def test_the_physical_gpu_is_found_by_its_bus_and_read() -> None:
    library = FakeNvml()
    monitor = NvmlMonitor(library, WHOLE)
    assert library.lookups == [("nvmlDeviceGetHandleByPciBusId_v2", b"0000:1b:00.0")]
    assert (monitor.uuid, monitor.default_clock_mhz) == ("GPU-physical", 1830)
    assert monitor.read() == Reading(sm_clock_mhz=1755, reasons=nvml.SW_POWER_CAP, ecc_errors=2, xids=())
    assert monitor.facts() == {
        "gpu uuid": "GPU-physical",
        "driver": "580.159.04",
        "sm clock": "1755 MHz",
        "sm clock default": "1830 MHz",
        "sm clock max": "1980 MHz",
        "clock reasons": "software power cap",
        "power limit": "700 W",
        "power": "431 W",
        "temperature": "54 C",
        "ecc": "2",
        "xid events": "reported",
    }


def test_the_highest_clock_stands_for_a_default_that_is_not_reported() -> None:
    library = FakeNvml()
    del library.numbers["nvmlDeviceGetDefaultApplicationsClock", 0]
    assert NvmlMonitor(library, WHOLE).default_clock_mhz == 1980


def test_a_gpu_without_ecc_power_or_events_is_read_all_the_same() -> None:
    library = FakeNvml()
    for key in [key for key in library.numbers if key[0].startswith(("nvmlDeviceGetPower", "nvmlDeviceGetTotal"))]:
        del library.numbers[key]
    library.status["nvmlDeviceRegisterEvents"] = NOT_SUPPORTED
    monitor = NvmlMonitor(library, WHOLE)
    assert monitor.read() == Reading(1755, 0x4, 0, ())
    facts = monitor.facts()
    assert (facts["power"], facts["ecc"], facts["xid events"]) == ("not reported", "0", "not reported")


def test_reasons_have_an_older_name_in_older_drivers() -> None:
    older = FakeNvml(
        {("nvmlDeviceGetCurrentClocksThrottleReasons",): 0x20}, missing=["nvmlDeviceGetCurrentClocksEventReasons"]
    )
    assert NvmlMonitor(older, WHOLE).read().reasons == nvml.SW_THERMAL


def test_any_other_refusal_is_an_error_that_names_the_call() -> None:
    library = FakeNvml()
    monitor = NvmlMonitor(library, WHOLE)
    library.status["nvmlDeviceGetClockInfo"] = GPU_IS_LOST
    with pytest.raises(NvmlError, match="nvmlDeviceGetClockInfo: NVML status 15"):
        monitor.read()


@pytest.mark.parametrize("count", [1, 16, 17, 200])
def test_every_process_is_seen_however_many_there_are(count: int) -> None:
    monitor = NvmlMonitor(FakeNvml(compute=[(pid, 0) for pid in range(count)]), WHOLE)
    assert monitor.processes() == {*range(count), 900}


def test_on_a_slice_only_its_own_processes_count() -> None:
    library = FakeNvml(compute=[(100, 3), (101, 4)])
    monitor = NvmlMonitor(library, SLICE)
    assert ("nvmlDeviceGetHandleByUUID", b"MIG-7") in library.lookups
    assert monitor.processes() == {100, 900}
    assert monitor.uuid == "GPU-physical"


def test_errors_that_the_driver_logged_are_told_once() -> None:
    library = FakeNvml(xids=[31, 79])
    monitor = NvmlMonitor(library, WHOLE)
    assert monitor.read().xids == (31, 79)
    assert monitor.read().xids == ()


def test_structures_are_as_long_as_the_headers_have_them() -> None:
    assert ctypes.sizeof(nvml._ProcessInfo) == 24
    assert ctypes.sizeof(nvml._EventData) == 32

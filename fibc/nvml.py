"""What the driver's management library (NVML) reports of one physical GPU. It is read and never set."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from fibc.schema.silicon import Gpu

LIBRARY = "libnvidia-ml.so.1"

SW_POWER_CAP = 0x4
HW_SLOWDOWN = 0x8
SW_THERMAL = 0x20
HW_THERMAL = 0x40
HW_POWER_BRAKE = 0x80

REASONS = {
    0x1: "idle",
    0x2: "applications clocks",
    SW_POWER_CAP: "software power cap",
    HW_SLOWDOWN: "hardware slowdown",
    0x10: "sync boost",
    SW_THERMAL: "software thermal slowdown",
    HW_THERMAL: "hardware thermal slowdown",
    HW_POWER_BRAKE: "hardware power brake",
    0x100: "display clocks",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons: why the clock is below its maximum."""

_NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND, _INSUFFICIENT_SIZE, _TIMEOUT = 3, 4, 6, 7, 10
_OPTIONAL = (_NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND)
_GRAPHICS_CLOCK, _SM_CLOCK = 0, 1
_UNCORRECTED, _VOLATILE = 1, 0
_XID_EVENT = 0x8
_GPU_TEMPERATURE = 0
_TEXT_BYTES = 96
_MORE_PROCESSES = 16


class NvmlError(Exception):
    """A call failed; the message names it.

    Attributes:
        status: nvmlReturn_t.
    """

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call}: NVML status {status}")
        self.status = status


@dataclass(frozen=True)
class Reading:
    """The state of a GPU at one moment.

    Attributes:
        sm_clock_mhz: Now.
        reasons: Bits of ``REASONS``.
        ecc_errors: Uncorrected ones since the driver was loaded; 0 where they are not counted.
        xids: Errors that the driver logged since the last reading.
    """

    sm_clock_mhz: int
    reasons: int
    ecc_errors: int
    xids: tuple[int, ...]


class Monitor(Protocol):
    """One physical GPU as NVML sees it.

    Attributes:
        uuid: Of the physical GPU, also where a MIG slice of it is used.
        default_clock_mhz: SM clock that it is meant to run at; the highest one where no default is reported.
    """

    uuid: str
    default_clock_mhz: int

    def read(self) -> Reading:
        """Return the state now; costs some calls to the driver."""
        ...

    def processes(self) -> frozenset[int]:
        """Return the ids of all processes that use the GPU, or the same MIG slice of it."""
        ...

    def facts(self) -> dict[str, str]:
        """Return what belongs to a record, printable."""
        ...


class _ProcessInfo(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _EventData(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("event_type", ctypes.c_ulonglong),
        ("event_data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class NvmlMonitor:
    """A ``Monitor`` over the library."""

    def __init__(self, library: Any, gpu: Gpu) -> None:
        """Find the physical GPU by its bus.

        Args:
            library: ``libnvidia-ml.so.1`` as ctypes loads it, initialised.

        Raises:
            NvmlError: If NVML does not know it.
        """
        self._library = library
        self._device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByPciBusId_v2", gpu.pci_bus_id.encode(), ctypes.byref(self._device))
        self.uuid = self._text("nvmlDeviceGetUUID", self._device)
        default = self._optional("nvmlDeviceGetDefaultApplicationsClock", _GRAPHICS_CLOCK)
        self.default_clock_mhz = default or self._number("nvmlDeviceGetMaxClockInfo", _SM_CLOCK)
        self._instance = self._gpu_instance(gpu) if gpu.mig else None
        self._events = self._listen()

    def read(self) -> Reading:
        """Return the state now."""
        return Reading(
            sm_clock_mhz=self._number("nvmlDeviceGetClockInfo", _SM_CLOCK),
            reasons=self._reasons(),
            ecc_errors=self._optional("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE) or 0,
            xids=self._xids(),
        )

    def processes(self) -> frozenset[int]:
        """Return the processes with a context, compute and graphics."""
        found: set[int] = set()
        for kind in ("Compute", "Graphics"):
            found |= self._processes(f"nvmlDeviceGet{kind}RunningProcesses_v3")
        return frozenset(found)

    def facts(self) -> dict[str, str]:
        """Return clocks, power, temperature and driver as they are now."""
        power_limit = self._optional("nvmlDeviceGetPowerManagementLimit")
        power = self._optional("nvmlDeviceGetPowerUsage")
        temperature = self._optional("nvmlDeviceGetTemperature", _GPU_TEMPERATURE)
        return {
            "gpu uuid": self.uuid,
            "driver": self._text("nvmlSystemGetDriverVersion"),
            "sm clock": f"{self._number('nvmlDeviceGetClockInfo', _SM_CLOCK)} MHz",
            "sm clock default": f"{self.default_clock_mhz} MHz",
            "sm clock max": f"{self._number('nvmlDeviceGetMaxClockInfo', _SM_CLOCK)} MHz",
            "clock reasons": names_of(self._reasons()) or "none",
            "power limit": _watts(power_limit),
            "power": _watts(power),
            "temperature": "not reported" if temperature is None else f"{temperature} C",
            "ecc": str(self._optional("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE) or 0),
            "xid events": "not reported" if self._events is None else "reported",
        }

    def _reasons(self) -> int:
        return self._number(
            "nvmlDeviceGetCurrentClocksEventReasons"
            if hasattr(self._library, "nvmlDeviceGetCurrentClocksEventReasons")
            else "nvmlDeviceGetCurrentClocksThrottleReasons"  # its name before driver 535
        )

    def _processes(self, call: str) -> set[int]:
        capacity = _MORE_PROCESSES
        while True:
            count = ctypes.c_uint(capacity)
            infos = (_ProcessInfo * capacity)()
            try:
                self._call(call, self._device, ctypes.byref(count), infos)
            except NvmlError as error:
                if error.status in _OPTIONAL:
                    return set()
                if error.status != _INSUFFICIENT_SIZE:
                    raise
                capacity = count.value + _MORE_PROCESSES  # more may come before the next call
                continue
            seen = (infos[index] for index in range(count.value))
            return {info.pid for info in seen if self._instance in (None, info.gpu_instance)}

    def _gpu_instance(self, gpu: Gpu) -> int:
        part = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", gpu.uuid.encode(), ctypes.byref(part))
        number = ctypes.c_uint()
        self._call("nvmlDeviceGetGpuInstanceId", part, ctypes.byref(number))
        return number.value

    def _listen(self) -> ctypes.c_void_p | None:
        """Return a set of events that receives errors from now on; None where the driver reports none."""
        events = ctypes.c_void_p()
        self._call("nvmlEventSetCreate", ctypes.byref(events))
        try:
            self._call("nvmlDeviceRegisterEvents", self._device, ctypes.c_ulonglong(_XID_EVENT), events)
        except NvmlError as error:
            if error.status not in _OPTIONAL:
                raise
            return None
        return events

    def _xids(self) -> tuple[int, ...]:
        if self._events is None:
            return ()
        found: list[int] = []
        while True:
            data = _EventData()
            try:
                self._call("nvmlEventSetWait_v2", self._events, ctypes.byref(data), 0)
            except NvmlError as error:
                if error.status == _TIMEOUT:
                    return tuple(found)
                raise
            found.append(int(data.event_data))

    def _number(self, call: str, *arguments: int) -> int:
        value = ctypes.c_ulonglong()  # wide enough for either kind of result; x86 and Arm are little-endian
        self._call(call, self._device, *arguments, ctypes.byref(value))
        return value.value

    def _optional(self, call: str, *arguments: int) -> int | None:
        try:
            return self._number(call, *arguments)
        except NvmlError as error:
            if error.status in _OPTIONAL:
                return None
            raise

    def _text(self, call: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self._call(call, *arguments, buffer, ctypes.c_uint(len(buffer)))
        return buffer.value.decode(errors="replace")

    def _call(self, name: str, *arguments: Any) -> None:
        function: Callable[..., int] | None = getattr(self._library, name, None)
        status = _NOT_SUPPORTED if function is None else function(*arguments)
        if status != 0:
            raise NvmlError(name, status)


def open_monitor(gpu: Gpu) -> NvmlMonitor:
    """Return the monitor of ``gpu``; NVML stays initialised until the process ends.

    Raises:
        NvmlError: If NVML refuses.
        OSError: If there is no NVML.
    """
    library = ctypes.CDLL(LIBRARY)
    status = library.nvmlInit_v2()
    if status != 0:
        raise NvmlError("nvmlInit_v2", status)
    return NvmlMonitor(library, gpu)


def names_of(reasons: int) -> str:
    """Return the reasons as text; empty where there are none."""
    return ", ".join(name for bit, name in REASONS.items() if reasons & bit)


def _watts(milliwatts: int | None) -> str:
    return "not reported" if milliwatts is None else f"{milliwatts / 1000:.0f} W"

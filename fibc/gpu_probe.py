"""What the CUDA driver says of the devices that this process may use, asked without a context on any of them.

As a script (``python -S -I fibc/gpu_probe.py``) it prints one JSON object, see ``read``. It runs in a process of its
own: after ``cuInit`` a process can fork no child that uses CUDA, and a driver that hangs or dies takes along only this
one.
"""

import ctypes
import json
import re
from typing import Any

NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE: none there, or CUDA_VISIBLE_DEVICES leaves none."""

NUM_SMS, L2_BYTES, MAJOR, MINOR, SHARED_BYTES_MAX = 16, 38, 75, 76, 97
"""CUdevice_attribute."""

_MIG = re.compile(r" MIG (\S+)")
_UUID_GROUPS = ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))


class DriverError(Exception):
    """The driver is there and refuses; the message names the call and the driver's reason."""


def read(driver: Any) -> dict[str, Any]:
    """Return ``{"cuda": 13000, "gpus": [...]}``, one object per visible device, in the order of their ordinals.

    Args:
        driver: ``libcuda.so.1`` as ctypes loads it.

    Raises:
        DriverError: If a call fails.
    """
    status = driver.cuInit(0)
    version = ctypes.c_int()
    _check(driver, "cuDriverGetVersion", driver.cuDriverGetVersion(ctypes.byref(version)))
    if status == NO_DEVICE:
        return {"cuda": version.value, "gpus": []}
    _check(driver, "cuInit", status)
    count = ctypes.c_int()
    _check(driver, "cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count)))
    return {"cuda": version.value, "gpus": [_device(driver, ordinal) for ordinal in range(count.value)]}


def _device(driver: Any, ordinal: int) -> dict[str, Any]:
    device = ctypes.c_int()
    _check(driver, "cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), ordinal))
    name, bus, uuid = (ctypes.create_string_buffer(size) for size in (256, 32, 16))
    total = ctypes.c_size_t()
    _check(driver, "cuDeviceGetName", driver.cuDeviceGetName(name, len(name), device))
    _check(driver, "cuDeviceGetPCIBusId", driver.cuDeviceGetPCIBusId(bus, len(bus), device))
    _check(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid_v2(uuid, device))
    _check(driver, "cuDeviceTotalMem_v2", driver.cuDeviceTotalMem_v2(ctypes.byref(total), device))
    text = name.value.decode(errors="replace")
    mig = _MIG.search(text)
    digits = uuid.raw.hex()
    return {
        "ordinal": ordinal,
        "name": text,
        "mig": mig[1] if mig else "",
        "uuid": ("MIG-" if mig else "GPU-") + "-".join(digits[begin:end] for begin, end in _UUID_GROUPS),
        "pci_bus_id": bus.value.decode(errors="replace").lower(),
        "memory_bytes": total.value,
        "compute_capability": [_attribute(driver, MAJOR, device), _attribute(driver, MINOR, device)],
        "num_sms": _attribute(driver, NUM_SMS, device),
        "l2_bytes": _attribute(driver, L2_BYTES, device),
        "shared_bytes_max": _attribute(driver, SHARED_BYTES_MAX, device),
    }


def _attribute(driver: Any, attribute: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    status = driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    _check(driver, f"cuDeviceGetAttribute({attribute})", status)
    return value.value


def _check(driver: Any, call: str, status: int) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorString(status, ctypes.byref(text))
    raise DriverError(f"{call}: {(text.value or b'unknown error').decode()} ({status})")


def main() -> None:
    """Print what there is, or ``{"problem": why}``."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        print(json.dumps({"problem": "no NVIDIA driver: libcuda.so.1 is not there"}))
        return
    try:
        print(json.dumps(read(driver)))
    except DriverError as error:
        print(json.dumps({"problem": str(error)}))


if __name__ == "__main__":
    main()

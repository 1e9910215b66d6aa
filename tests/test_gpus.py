"""GPUs are known by their silicon: what the driver says of it, whatever they are called and whichever are visible."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fibc import gpu_probe, gpus
from fibc.environment import detect
from fibc.errors import InputError
from fibc.gpus import Found
from fibc.schema.silicon import CudaValidity, Gpu, arch_of, rounded_memory

GIB = 1 << 30
H200_BYTES = 150_109_880_320
"""139.8 GiB: what the driver reports of an H200."""


@dataclass(frozen=True)
class Device:
    """A device as a fake driver has it."""

    name: str = "NVIDIA H200"
    uuid: str = "00112233445566778899aabbccddeeff"
    bus: str = "0000:1B:00.0"
    memory_bytes: int = H200_BYTES
    capability: tuple[int, int] = (9, 0)
    num_sms: int = 132
    l2_bytes: int = 60 << 20


class FakeDriver:
    """The functions of libcuda that the probe calls."""

    def __init__(self, devices: Sequence[Device], status: int = 0) -> None:
        self.devices = devices
        self.status = status

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.status

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = 13000
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.devices)
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = ordinal + 40  # a handle is no ordinal
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:  # noqa: N802
        name.value = self._of(device).name.encode()
        return 0

    def cuDeviceGetPCIBusId(self, bus: Any, size: int, device: Any) -> int:  # noqa: N802
        bus.value = self._of(device).bus.encode()
        return 0

    def cuDeviceGetUuid_v2(self, uuid: Any, device: Any) -> int:  # noqa: N802
        uuid.raw = bytes.fromhex(self._of(device).uuid)
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, device: Any) -> int:  # noqa: N802
        total._obj.value = self._of(device).memory_bytes
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:  # noqa: N802
        chosen = self._of(device)
        values = {16: chosen.num_sms, 38: chosen.l2_bytes, 75: chosen.capability[0], 76: chosen.capability[1]}
        value._obj.value = {**values, 97: 232448}[attribute]
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:  # noqa: N802
        if status != 803:
            return 1
        text._obj.value = b"system has unsupported display driver / cuda driver combination"
        return 0

    def _of(self, device: ctypes.c_int) -> Device:
        return self.devices[device.value - 40]


def seen(*devices: Device) -> tuple[Gpu, ...]:
    return tuple(gpus.gpu_of(entry, "580.1") for entry in gpu_probe.read(FakeDriver(devices))["gpus"])


def test_the_driver_is_asked_for_the_silicon() -> None:
    (gpu,) = seen(Device())
    assert gpu == Gpu(
        ordinal=0,
        uuid="GPU-00112233-4455-6677-8899-aabbccddeeff",
        pci_bus_id="0000:1b:00.0",
        name="NVIDIA H200",
        mig="",
        driver="580.1",
        shared_bytes_max=232448,
        validity=CudaValidity("sm_90a", 90, 132, 60 << 20, H200_BYTES),
    )
    assert str(gpu) == "NVIDIA H200 (sm_90a, 132 SMs, 60 MiB of L2, 139.8 GiB)"


def test_a_name_an_ordinal_and_an_address_are_no_part_of_the_identity() -> None:
    other = Device(name="GH200 480GB", uuid="f" * 32, bus="0000:02:00.0", memory_bytes=H200_BYTES + (200 << 20))
    first, second = seen(Device(), other)
    assert second.ordinal == 1
    assert first.validity.identity == second.validity.identity == ("sm_90a", 90, 132, 60 << 20, 144 * GIB)


def test_a_slice_is_another_silicon_than_the_whole_and_knows_its_physical_gpu() -> None:
    slice_ = Device(name="NVIDIA H200 MIG 1g.18gb", num_sms=16, l2_bytes=15 << 20, memory_bytes=16 * GIB)
    whole, part = seen(Device(), slice_)
    assert part.validity == CudaValidity("sm_90a", 90, 16, 15 << 20, 16 * GIB)
    assert part.validity.identity != whole.validity.identity
    assert (whole.mig, part.mig) == ("", "1g.18gb")
    assert part.uuid.startswith("MIG-")
    assert part.pci_bus_id == whole.pci_bus_id


@pytest.mark.parametrize(
    ("total_mib", "gib"),
    [(143155, 144), (143771, 144), (81079, 80), (81559, 80), (40326, 40), (95830, 96), (22563, 24), (15095, 16)],
)
def test_the_memory_that_a_driver_holds_back_does_not_change_the_size(total_mib: int, gib: int) -> None:
    assert rounded_memory(total_mib << 20) == gib * GIB


@pytest.mark.parametrize(("capability", "arch"), [(75, "sm_75"), (86, "sm_86"), (90, "sm_90a"), (103, "sm_103a")])
def test_the_arch_is_specific_from_hopper_on(capability: int, arch: str) -> None:
    assert arch_of(capability) == arch


def test_no_visible_device_is_no_error_of_the_driver_and_another_refusal_is() -> None:
    assert gpu_probe.read(FakeDriver([], status=100)) == {"cuda": 13000, "gpus": []}
    with pytest.raises(gpu_probe.DriverError, match=r"cuInit: system has unsupported .* \(803\)"):
        gpu_probe.read(FakeDriver([], status=803))
    with pytest.raises(gpu_probe.DriverError, match=r"cuInit: unknown error \(999\)"):
        gpu_probe.read(FakeDriver([], status=999))


def test_a_run_uses_the_first_visible_gpu_and_says_why_there_is_none() -> None:
    found = seen(Device(), Device(num_sms=78))
    assert Found(found).first().validity.num_sms == 132
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES"):
        Found(()).first()
    with pytest.raises(InputError, match=r"and no driver \(accepted"):
        Found((), "no driver").first()


def test_this_machine_is_asked_without_an_error(tmp_path: Path) -> None:
    found = gpus.find()
    assert bool(found.gpus) != bool(found.problem) or found == Found(())


def test_a_library_version_is_text(tmp_path: Path) -> None:
    assert gpus.split_version(130002) == "13.0.2"
    assert gpus.split_version(120804) == "12.8.4"
    (tmp_path / "maps").write_text("7f00-7f01 r-xp 0 08:01 5    /usr/lib/libm.so.6\n7f02-7f03 rw-p 0 0:0 0\n")
    assert gpus.cublas_version(tmp_path / "maps") == ""
    assert gpus.cublas_version(tmp_path / "absent") == ""


# The environment


def test_a_gpus_environment_is_its_silicon_the_driver_torch_and_cublas() -> None:
    (gpu,) = seen(Device())
    found = detect(2, gpu=gpu)
    assert found.cuda_validity() == gpu.validity
    assert found.facts()["gpu"] == "NVIDIA H200 (sm_90a, 132 SMs, 60 MiB of L2, 139.8 GiB)"
    assert found.versions["driver"] == "580.1"
    changed = [
        replace(found, gpu=replace(gpu, validity=replace(gpu.validity, num_sms=78))),
        *(replace(found, versions={**found.versions, name: "9.9"}) for name in ("driver", "torch", "cublas")),
        replace(found, gpu=None),
    ]
    assert len({found.digest, *(other.digest for other in changed)}) == 6
    same = [replace(found, model="another CPU", num_threads=96), replace(found, gpu=replace(gpu, name="x", ordinal=3))]
    assert {other.digest for other in same} == {found.digest}


def test_a_cpus_environment_has_no_cuda_validity() -> None:
    with pytest.raises(InputError, match="needs an NVIDIA GPU"):
        detect(2).cuda_validity()

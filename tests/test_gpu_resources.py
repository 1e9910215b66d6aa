"""What a kernel takes of a GPU and its compilers of this machine, in numbers that are known from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from fibc.backends.cubin import read_kernel
from fibc.backends.memory import jobs_that_fit, room
from fibc.backends.resources import blocks_per_sm, shortage
from fibc.errors import BuildError
from fibc.schema.arch import ARCHES, arch

H200 = arch("sm_90a")


@pytest.mark.parametrize(
    ("registers", "num_warps", "shared_bytes", "blocks"),
    [
        (32, 8, 0, 8),  # 64 warps
        (32, 1, 0, 32),  # as many blocks as a multiprocessor holds
        (168, 12, 0, 1),  # 64512 of 65536 registers
        (255, 8, 0, 1),
        (128, 4, 0, 4),
        (129, 4, 0, 3),  # 136 are handed out
        (32, 4, 232_448, 1),
        (32, 4, 116_000, 1),
        (32, 4, 115_712, 2),  # twice with 1 KiB each is all of 228 KiB
        (32, 4, 232_449, 0),
        (255, 16, 0, 0),
        (256, 1, 0, 0),
    ],
)
def test_blocks_of_a_multiprocessor_are_those_of_the_occupancy_calculator(
    registers: int, num_warps: int, shared_bytes: int, blocks: int
) -> None:
    assert blocks_per_sm(H200, registers=registers, num_warps=num_warps, shared_bytes=shared_bytes) == blocks


def test_a_shortage_says_what_is_short_and_what_helps() -> None:
    assert shortage(H200, registers=128, num_warps=4, shared_bytes=232_448) is None
    assert shortage(H200, registers=128, num_warps=4, shared_bytes=294_912) == (
        "shared memory: needs 294912 bytes, sm_90a has 232448 (fewer stages or a smaller tile need less)"
    )
    assert shortage(H200, registers=255, num_warps=16, shared_bytes=0) == (
        "occupancy: 16 warps of 255 registers a thread need more than the 65536 registers of sm_90a "
        "(fewer warps or a smaller maxnreg need less)"
    )


def test_architectures_rise_and_a_block_never_has_more_than_its_multiprocessor() -> None:
    assert [item.capability for item in ARCHES] == sorted({item.capability for item in ARCHES})
    for item in ARCHES:
        assert item.shared_bytes_max + item.shared_bytes_reserved == item.shared_bytes_per_sm
        assert item.has_tensor_maps == (item.name == "sm_90a")


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(100), b"no cubin at all" * 20])
def test_what_is_no_cubin_is_an_error(data: bytes) -> None:
    with pytest.raises(BuildError, match="cubin of gemm: cannot be read"):
        read_kernel(data, "gemm")


def write_memory(root: Path, available_kb: int, limit: str, used: int) -> tuple[Path, Path]:
    meminfo = root / "meminfo"
    meminfo.write_text(f"MemTotal:  100000000 kB\nMemFree:  1 kB\nMemAvailable: {available_kb} kB\n")
    (root / "memory.max").write_text(f"{limit}\n")
    (root / "memory.current").write_text(f"{used}\n")
    return meminfo, root


@pytest.mark.parametrize(
    ("available_kb", "limit", "used", "jobs"),
    [
        (8 << 20, "max", 0, 8),  # 8 GiB and no limit
        (8 << 20, str(5 << 30), 1 << 30, 4),  # of the container's 5 GiB one is used
        (2 << 20, str(64 << 30), 0, 2),
        (1, "max", 0, 1),  # one runs whatever there is
        (64 << 20, str(1 << 30), 2 << 30, 1),
        (64 << 20, "max", 0, 16),  # no more than were asked for
    ],
)
def test_as_many_compilers_run_as_memory_holds(
    available_kb: int, limit: str, used: int, jobs: int, tmp_path: Path
) -> None:
    meminfo, cgroup = write_memory(tmp_path, available_kb, limit, used)
    assert jobs_that_fit(16, 1 << 30, meminfo=meminfo, cgroup=cgroup) == jobs


def test_unknown_memory_is_no_limit(tmp_path: Path) -> None:
    assert jobs_that_fit(16, 1 << 30, meminfo=tmp_path / "none", cgroup=tmp_path) == 16


def test_compilers_of_two_threads_share_the_memory_that_is_free(tmp_path: Path) -> None:
    meminfo, none = tmp_path / "meminfo", tmp_path / "none"
    meminfo.write_text(f"MemAvailable: {10 << 20} kB\n")
    with (
        room(6, 1 << 30, meminfo=meminfo, cgroup=none) as first,
        room(6, 1 << 30, meminfo=meminfo, cgroup=none) as other,
    ):
        assert (first, other) == (6, 4)
        with room(6, 1 << 30, meminfo=meminfo, cgroup=none) as third:
            assert third == 1
    with room(6, 1 << 30, meminfo=meminfo, cgroup=none) as again:
        assert again == 6

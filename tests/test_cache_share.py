"""The share of the last cache: found from how fast reads of growing sizes are, once per environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from fibc import cache_share
from fibc.cache import Cache
from fibc.environment import Environment

MIB = 1 << 20


def machine(share_mib: int, fast: float = 45e9, slow: float = 21e9) -> cache_share.Read:
    """Return reads of a machine that keeps ``share_mib``; of a larger size a part still comes from the cache."""

    def read_s(size: int) -> float:
        kept = min(size, max(0, 2 * share_mib * MIB - size))
        return kept / fast + (size - kept) / slow

    return read_s


def test_the_share_is_the_smallest_size_that_comes_from_memory_rather_than_from_the_cache() -> None:
    for share_mib in (40, 64, 100, 160):
        found = cache_share.measure(480 * MIB, machine(share_mib))
        assert found is not None
        assert share_mib <= found / MIB <= 2 * share_mib


def test_a_machine_that_has_the_whole_cache_or_where_nothing_can_be_told_has_no_smaller_share() -> None:
    assert cache_share.measure(480 * MIB, machine(480)) is None
    assert cache_share.measure(480 * MIB, machine(64, fast=22e9)) is None


def test_a_small_cache_is_taken_as_it_is_told() -> None:
    def never(size: int) -> float:
        raise AssertionError("read")

    assert cache_share.measure(16 * MIB, never) is None
    assert cache_share.measure(0, never) is None


def test_it_is_measured_once_per_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    def reader(environment: Environment) -> cache_share.Read:
        def read_s(size: int) -> float:
            reads.append(size)
            return machine(24)(size)

        return read_s

    monkeypatch.setattr(cache_share, "reader", reader)
    monkeypatch.setattr(cache_share, "total_bytes", lambda: 1 << 40)
    here = Environment("test", ("avx2",), 2 * MIB, 64 * MIB, 2)
    first = cache_share.find(here, Cache(tmp_path))
    assert first is not None
    assert max(reads) == 128 * MIB
    reads.clear()
    assert cache_share.find(here, Cache(tmp_path)) == first
    assert not reads


def test_a_machine_with_little_memory_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_share, "total_bytes", lambda: 1 << 30)
    assert cache_share.find(Environment("test", ("avx2",), 2 * MIB, 480 * MIB, 2), Cache(tmp_path)) is None


def test_real_memory_is_read_at_a_real_speed() -> None:
    seconds = cache_share.reader(Environment("test", ("avx2",), 2 * MIB, 8 * MIB, 1))(16 * MIB)
    assert 1e8 < 16 * MIB / seconds < 1e12

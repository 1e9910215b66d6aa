"""Calls of a module or a kernel, with what was counted or what they cost the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


def reason_of(module: ModuleType, call: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of ``call`` and the one thing that was counted: ``hit`` or why native served."""
    before = module.stats()
    result = call()
    after = module.stats()
    assert after["calls"] == before["calls"] + 1
    if after["hits"] != before["hits"]:
        return result, "hit"
    return result, next(name for name, count in after["native"].items() if count != before["native"].get(name, 0))


def host_us(call: Callable[[], Any], count: int = 500) -> float:
    """Return the least mean of seven batches, with the device never more than a batch behind."""
    means = []
    for _ in range(7):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            call()
        means.append((time.perf_counter() - began) / count * 1e6)
    torch.cuda.synchronize()
    return min(means)

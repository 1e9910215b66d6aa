"""What the first use of a module costs, in a process of its own: import, prepare, first call, first capture.

    python first_use.py PACKAGE ROWS N K [--unprepared]

prints one JSON object of milliseconds. The context is there before: whoever serves has one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fibc.runtime.package import load


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return milliseconds until the work is done on the device too, and its result."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3, result


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def main() -> None:
    package, rows, n, k = sys.argv[1], *map(int, sys.argv[2:5])
    torch.set_grad_enabled(False)
    a, b = torch.randn(rows, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
    native_first, _ = timed(lambda: torch.matmul(a, b.T))
    graph_of_native, _ = timed(lambda: captured(lambda: torch.matmul(a, b.T)))
    spent: dict[str, float] = {"native first call": native_first, "native first capture": graph_of_native}
    spent["import"], module = timed(lambda: load(Path(package)))
    if "--unprepared" not in sys.argv:
        spent["prepare"], _ = timed(module.prepare)
    spent["first call"], _ = timed(lambda: module.run(a, b))
    spent["second call"], _ = timed(lambda: module.run(a, b))
    spent["first capture"], graph = timed(lambda: captured(lambda: module.run(a, b)))
    spent["first replay"], _ = timed(graph.replay)
    hits = sum(module.stats()["hits"].values())
    print(json.dumps({"ms": spent, "hits": hits}))


if __name__ == "__main__":
    main()

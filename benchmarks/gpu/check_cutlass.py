"""Checks and times prebuilt CUTLASS candidates on a GPU: needs torch and the folder that precompile_cutlass.py made.

    python benchmarks/gpu/check_cutlass.py build/cutlass --out results.json

Every library is checked against float64 at several numbers of rows: with inputs of a few bits, whose sums in float32
are exact, so that the output must be the rounded product bit for bit, and with random ones; into an output between
guard bands; twice, with equal bits and with counters that are zero again; and from a captured graph. Then it is timed
at each of its keys beside ``torch.mm``: graphs over copies of the weights that together exceed L2, replayed in turn.
Last comes what a call costs the host.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

gpu: Any = torch.cuda
"""For its functions without types."""

CHECKED_ROWS = (1, 3, 16, 33, 64, 256, 1000)
COUNTER_BYTES = 65536
OK = 0
GUARD_ELEMS = 4096
POISON = 0x7F
L2_BYTES = 60 << 20
LAUNCHES_PER_GRAPH = 20
REPEATS = 15


class Tensor(ctypes.Structure):
    """``fibc_tensor``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    ]


class Cuda(ctypes.Structure):
    """``fibc_cuda``."""

    _fields_ = [
        ("stream", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("capturing", ctypes.c_int32),
        ("counters", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    ]


class Call(ctypes.Structure):
    """``fibc_call``."""

    _fields_ = [
        ("inputs", ctypes.POINTER(Tensor)),
        ("outputs", ctypes.POINTER(Tensor)),
        ("scalars", ctypes.c_void_p),
        ("axes", ctypes.c_void_p),
        ("parallel", ctypes.c_void_p),
        ("num_threads", ctypes.c_int32),
        ("cuda", ctypes.POINTER(Cuda)),
    ]


def view(tensor: torch.Tensor) -> Tensor:
    """Return ``tensor`` as a kernel sees it."""
    ints = ctypes.c_int64 * tensor.dim()
    return Tensor(tensor.data_ptr(), ints(*tensor.shape), ints(*tensor.stride()))


class Kernel:
    """A candidate's library."""

    def __init__(self, entry: dict[str, Any], folder: Path) -> None:
        self.name = str(entry["name"])
        self.dtype = getattr(torch, entry["dtype"])
        self.keys = [tuple(key) for key in entry["keys"]]
        library = ctypes.CDLL(str(folder / entry["library"]))
        self._entry = getattr(library, entry["symbol"])
        self._workspace = getattr(library, entry["symbol"] + "_workspace")
        self._workspace.restype = ctypes.c_int64
        self.prepare = getattr(library, entry["symbol"] + "_prepare")
        self.counters = torch.zeros(COUNTER_BYTES, dtype=torch.uint8, device="cuda")
        self._scratch = torch.empty(256, dtype=torch.uint8, device="cuda")

    def bind(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Callable[[], int]:
        """Return a function that launches on torch's current stream and returns the status."""
        inputs, outputs = (Tensor * 2)(view(a), view(b)), (Tensor * 1)(view(c))
        call = Call(inputs, outputs, None, None, None, 1, None)
        needed = self._workspace(ctypes.byref(call))
        if needed > self._scratch.numel():
            torch.cuda.synchronize()
            self._scratch = torch.empty(needed, dtype=torch.uint8, device="cuda")
        scratch = self._scratch  # kept by the closure, like the tensors
        cuda = Cuda(None, 0, 0, self.counters.data_ptr(), scratch.data_ptr())
        call.cuda = ctypes.pointer(cuda)
        kept = (a, b, c, inputs, outputs, cuda, scratch)

        def launch() -> int:
            cuda.stream = torch.cuda.current_stream().cuda_stream
            return int(self._entry(ctypes.byref(call))) if kept else -1

        return launch


def checked(status: int, kernel: Kernel) -> None:
    if status != OK:
        raise SystemExit(f"{kernel.name}: returned {status}")


def check(kernel: Kernel, rows: int, n: int, k: int) -> float:
    """Return the largest error of random inputs against float64, in units of the output's last place.

    Raises:
        SystemExit: If anything is wrong.
    """
    worst = 0.0
    for exact in (True, False):
        if exact:  # products and sums of small integers are exact in float32
            a = torch.randint(-2, 3, (rows, k), device="cuda").to(kernel.dtype)
            b = torch.randint(-2, 3, (n, k), device="cuda").to(kernel.dtype)
        else:
            a = torch.randn(rows, k, device="cuda").to(kernel.dtype)
            b = torch.randn(n, k, device="cuda").to(kernel.dtype)
        whole = torch.empty(2 * GUARD_ELEMS + rows * n, dtype=kernel.dtype, device="cuda")
        c = whole[GUARD_ELEMS : GUARD_ELEMS + rows * n].view(rows, n)
        results = []
        for _ in range(2):
            whole.view(torch.uint8).fill_(POISON)
            checked(kernel.bind(a, b, c)(), kernel)
            torch.cuda.synchronize()
            bands = torch.cat([whole[:GUARD_ELEMS], whole[-GUARD_ELEMS:]]).view(torch.uint8)
            if not bool((bands == POISON).all()):
                raise SystemExit(f"{kernel.name}: wrote outside of its output at {rows} x {n} x {k}")
            if bool(kernel.counters.any()):
                raise SystemExit(f"{kernel.name}: left counters behind at {rows} x {n} x {k}")
            results.append(c.clone())
        if not torch.equal(*results):
            raise SystemExit(f"{kernel.name}: gave other bits the second time at {rows} x {n} x {k}")
        expected = a.double() @ b.double().T
        if exact and not torch.equal(results[0], expected.to(kernel.dtype)):
            wrong = int((results[0] != expected.to(kernel.dtype)).sum())
            raise SystemExit(f"{kernel.name}: {wrong} of {rows * n} exact sums are wrong at {rows} x {n} x {k}")
        if not exact:
            spacing = expected.abs().clamp_min(math.sqrt(k)) * torch.finfo(kernel.dtype).eps
            worst = float(((results[0].double() - expected).abs() / spacing).max())
            if worst > 1.0:
                raise SystemExit(f"{kernel.name}: off by {worst:.2f} at {rows} x {n} x {k}")
    return worst


def check_graph(kernel: Kernel, rows: int, n: int, k: int) -> None:
    """Capture three launches and replay them twice."""
    a = torch.randint(-2, 3, (rows, k), device="cuda").to(kernel.dtype)
    b = torch.randint(-2, 3, (n, k), device="cuda").to(kernel.dtype)
    outputs = [torch.empty(rows, n, dtype=kernel.dtype, device="cuda") for _ in range(3)]
    launches = [kernel.bind(a, b, c) for c in outputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            checked(launch(), kernel)
    for _ in range(2):
        for c in outputs:
            c.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for c in outputs:
            if not torch.equal(c, (a.double() @ b.double().T).to(kernel.dtype)):
                raise SystemExit(f"{kernel.name}: a replayed graph gave wrong sums at {rows} x {n} x {k}")


def graph_of(launches: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Return a graph of ``LAUNCHES_PER_GRAPH`` launches, taken in turn."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(LAUNCHES_PER_GRAPH):
            launches[index % len(launches)]()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Return microseconds of one launch in ``graph``, the device kept busy before."""
    begin, end = (gpu.Event(enable_timing=True) for _ in range(2))
    gpu._sleep(200_000)  # the host is ahead when the first event is reached
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / LAUNCHES_PER_GRAPH


def time_key(kernels: Sequence[Kernel], key: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    """Return the median microseconds of torch.mm and of each kernel at ``key``, weights cold."""
    m, n, k = key
    copies = min(LAUNCHES_PER_GRAPH, 2 + 3 * L2_BYTES // (n * k * dtype.itemsize))
    a = torch.randn(m, k, device="cuda").to(dtype)
    weights = [torch.randn(n, k, device="cuda").to(dtype) for _ in range(copies)]
    c = torch.empty(m, n, dtype=dtype, device="cuda")

    def native(b: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.mm(a, b.T, out=c)

    graphs = {"native": graph_of([native(b) for b in weights])}
    for kernel in kernels:
        graphs[kernel.name] = graph_of([kernel.bind(a, b, c) for b in weights])
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPEATS):
        for name, graph in graphs.items():
            samples[name].append(replay_us(graph))
    return {name: round(statistics.median(values), 3) for name, values in samples.items()}


def host_us(launch: Callable[[], object]) -> float:
    """Return microseconds of the host for a call, the queue never full."""
    best = math.inf
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            launch()
        best = min(best, (time.perf_counter() - begin) / 200)
    torch.cuda.synchronize()
    return best * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit-s", type=float, default=540.0, help="stop timing new keys after this time")
    parser.add_argument("--check-only", action="store_true")
    options = parser.parse_args()
    begun = time.monotonic()
    torch.manual_seed(0)
    kernels = [Kernel(entry, options.folder) for entry in json.loads((options.folder / "manifest.json").read_text())]
    gpu.init()
    checks: dict[str, float] = {}
    for kernel in kernels:
        checked(kernel.prepare(0), kernel)
        shapes = {(n, k) for _, n, k in kernel.keys[:4]} or {(4096, 4096)}
        worst = max(check(kernel, rows, n, k) for n, k in sorted(shapes) for rows in CHECKED_ROWS)
        check_graph(kernel, 33, *min(shapes))
        checks[kernel.name] = worst
        print(f"{worst:.3f} {kernel.name}", flush=True)
    times: dict[str, Any] = {}
    if not options.check_only:
        for key in sorted({key for kernel in kernels for key in kernel.keys}):
            if time.monotonic() - begun > options.limit_s:
                print(f"out of time before {key}", flush=True)
                break
            own = [kernel for kernel in kernels if key in kernel.keys]
            found = time_key(own, key, own[0].dtype)
            times["x".join(map(str, key))] = found
            best = min((us, name) for name, us in found.items() if name != "native")
            ratio = found["native"] / best[0]
            print(f"{key}: native {found['native']} us, {ratio:.3f} by {best[1]} {best[0]} us", flush=True)
    a = torch.randn(16, 4096, device="cuda").to(kernels[0].dtype)
    b = torch.randn(4096, 4096, device="cuda").to(kernels[0].dtype)
    c = torch.empty(16, 4096, dtype=kernels[0].dtype, device="cuda")
    host = {kernel.name: round(host_us(kernel.bind(a, b, c)), 3) for kernel in kernels[:8]}
    host["native"] = round(host_us(lambda: torch.mm(a, b.T, out=c)), 3)
    for name, us in host.items():
        print(f"host {us} us, ctypes included: {name}", flush=True)
    if options.out:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        options.out.write_text(json.dumps({**facts, "checks": checks, "us": times, "host_us": host}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

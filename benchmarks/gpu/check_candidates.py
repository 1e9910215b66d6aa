"""Checks and times prebuilt candidates on a GPU: needs torch and the folder that precompile_candidates.py made.

    python benchmarks/gpu/check_candidates.py build/triton-kit --out results.jsonl

Every library is checked against float64 at several numbers of rows: with inputs of a few bits, whose sums in float32
are exact, so that the output must be the rounded product bit for bit, and with random ones; into an output between
guard bands; twice, with equal bits and with counters that are zero again; and from a captured graph. Those that passed
are timed at each of their keys (M, N, K) beside ``torch.mm``: graphs over copies of the weights that together exceed
L2, replayed in turn. Where Triton is installed, so is a kernel that only reads the weights: the limit. Last comes what
a call costs the host.

Each fact is a line of ``--out``, written at once. Candidates run in a worker: one that crashes or hangs costs itself
and a start of the next worker, which goes on behind it. The same command goes on where an earlier one ended.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from candidate_calls import Kernel, WrongError, checked

gpu: Any = torch.cuda
"""For its functions without types."""

CHECKED_ROWS = (1, 3, 16, 33, 64, 256, 1000)
"""Of candidates that serve every size."""

GUARD_ELEMS = 4096
POISON = 0x7F
L2_BYTES = 60 << 20
LAUNCHES_PER_GRAPH = 20
REPEATS = 15
PATIENCE_S = 40.0
"""A worker that says nothing for longer hangs."""

READS = ((1024, 4, 0), (2048, 8, 0), (4096, 8, 0), (1024, 4, 8))
"""Words a block, warps, programs for each multiprocessor (0: all at once) of the kernel that only reads."""

Key = tuple[int, int, int]
Launch = Callable[[], object]


# Checking -------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def _weight(n: int, k: int, dtype: torch.dtype, exact: bool) -> torch.Tensor:
    """Return random weights; exact ones are small integers, whose products and sums are exact in float32."""
    if exact:
        return torch.randint(-2, 3, (n, k), device="cuda").to(dtype)
    return torch.randn(n, k, device="cuda").to(dtype)


@functools.lru_cache(maxsize=16)
def _problem(
    rows: int, n: int, k: int, dtype: torch.dtype, exact: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return A, B and their product in float64; several candidates in a row are checked on one."""
    b = _weight(n, k, dtype, exact)
    values = torch.randint(-2, 3, (rows, k), device="cuda") if exact else torch.randn(rows, k, device="cuda")
    a = values.to(dtype)
    return a, b, a.double() @ b.double().T


def check(kernel: Kernel, rows: int, n: int, k: int) -> float:
    """Return the largest error of random inputs against float64, in units of the output's last place.

    Raises:
        WrongError: If anything is wrong.
    """
    worst = 0.0
    where = f"at {rows} x {n} x {k}"
    for exact in (True, False):
        a, b, expected = _problem(rows, n, k, kernel.dtype, exact)
        whole = torch.empty(2 * GUARD_ELEMS + rows * n, dtype=kernel.dtype, device="cuda")
        c = whole[GUARD_ELEMS : GUARD_ELEMS + rows * n].view(rows, n)
        results = []
        for _ in range(2):
            whole.view(torch.uint8).fill_(POISON)
            checked(kernel.bind(a, b, c)())
            torch.cuda.synchronize()
            bands = torch.cat([whole[:GUARD_ELEMS], whole[-GUARD_ELEMS:]]).view(torch.uint8)
            if not bool((bands == POISON).all()):
                raise WrongError(f"wrote outside of its output {where}")
            if bool(kernel.counters.any()):
                raise WrongError(f"left counters behind {where}")
            results.append(c.clone())
        if not torch.equal(*results):
            raise WrongError(f"gave other bits the second time {where}")
        if exact and not torch.equal(results[0], expected.to(kernel.dtype)):
            wrong = int((results[0] != expected.to(kernel.dtype)).sum())
            raise WrongError(f"{wrong} of {rows * n} exact sums are wrong {where}")
        if not exact:
            spacing = expected.abs().clamp_min(math.sqrt(k)) * torch.finfo(kernel.dtype).eps
            worst = float(((results[0].double() - expected).abs() / spacing).max())
            if not worst <= 1.0:
                raise WrongError(f"off by {worst:.2f} {where}")
    return worst


def check_graph(kernel: Kernel, rows: int, n: int, k: int) -> None:
    """Capture three launches and replay them twice.

    Raises:
        WrongError: If an output is wrong.
    """
    a, b, expected = _problem(rows, n, k, kernel.dtype, True)
    outputs = [torch.empty(rows, n, dtype=kernel.dtype, device="cuda") for _ in range(3)]
    launches = [kernel.bind(a, b, c) for c in outputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            checked(launch())
    for _ in range(2):
        for c in outputs:
            c.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        if not all(torch.equal(c, expected.to(kernel.dtype)) for c in outputs):
            raise WrongError(f"a replayed graph gave wrong sums at {rows} x {n} x {k}")


def checks_of(kernel: Kernel) -> list[Key]:
    """Return the sizes at which ``kernel`` is checked, all of a shape together."""
    if kernel.any_shape:
        shapes = {(n, k) for _, n, k in kernel.keys[:4]} or {(4096, 4096)}
        return [(rows, n, k) for n, k in sorted(shapes) for rows in CHECKED_ROWS]
    sizes = {(rows, n, k) for m, n, k in kernel.keys for rows in (m, max(1, m - 3))}
    return sorted(sizes, key=lambda size: size[1:] + size[:1])


# Timing ---------------------------------------------------------------------------------------------------------------


def graph_of(launches: Sequence[Launch]) -> tuple[torch.cuda.CUDAGraph, int]:
    """Return a graph of the launches, taken in turn, each at least once, and how many they are."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    num_launches = max(LAUNCHES_PER_GRAPH, len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_launches):
            launches[index % len(launches)]()
    return graph, num_launches


def replay_us(graph: torch.cuda.CUDAGraph, num_launches: int) -> float:
    """Return microseconds of one launch in ``graph``, the device kept busy before."""
    begin, end = (gpu.Event(enable_timing=True) for _ in range(2))
    gpu._sleep(200_000)  # the host is ahead when the first event is reached
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / num_launches


def time_key(kernels: Sequence[Kernel], key: Key, dtype: torch.dtype) -> dict[str, float]:
    """Return median microseconds at ``key``, weights cold, of torch.mm, the reading kernels and each candidate."""
    m, n, k = key
    copies = 2 + 3 * L2_BYTES // (n * k * dtype.itemsize)
    a = torch.randn(m, k, device="cuda").to(dtype)
    weights = [torch.randn(n, k, device="cuda").to(dtype) for _ in range(copies)]
    c = torch.empty(m, n, dtype=dtype, device="cuda")

    def native(b: torch.Tensor) -> Launch:
        return lambda: torch.mm(a, b.T, out=c)

    graphs = {"native": graph_of([native(b) for b in weights])}
    graphs |= {name: graph_of([functools.partial(read, b) for b in weights]) for name, read in _reads().items()}
    graphs |= {kernel.name: graph_of([kernel.bind(a, b, c) for b in weights]) for kernel in kernels}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPEATS):
        for name, graph in graphs.items():
            samples[name].append(replay_us(*graph))
    return {name: round(statistics.median(values), 3) for name, values in samples.items()}


@functools.cache
def _reads() -> Mapping[str, Callable[[torch.Tensor], object]]:
    """Return kernels that only read, by name; none without Triton."""
    try:
        read = importlib.import_module("gpu_kernels").read
    except ImportError:
        return {}
    names = ("block", "num_warps", "programs_per_sm")
    return {f"read {values}": functools.partial(read, **dict(zip(names, values, strict=True))) for values in READS}


def summary(key: Key, found: Mapping[str, float]) -> list[str]:
    """Return a line for ``key``, and one for each of its three fastest candidates."""
    native = found["native"]
    reads = [us for name, us in found.items() if name.startswith("read ")]
    limit = f", a read {min(reads):.2f} us" if reads else ""
    own = sorted((us, name) for name, us in found.items() if name != "native" and not name.startswith("read "))
    lines = [f"M={key[0]} {key[1]}x{key[2]}: native {native:.2f} us{limit}, {len(own)} candidates"]
    return lines + [f"  {native / us:.3f} {us:.2f} us {name}" for us, name in own[:3]]


def host_us(launch: Launch) -> float:
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


# Worker and parent ----------------------------------------------------------------------------------------------------


class Log:
    """Lines of facts, and what earlier lines say."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def add(self, **fact: object) -> None:
        self.lines.append(fact)
        with self.path.open("a") as file:
            file.write(json.dumps(fact) + "\n")

    def of(self, kind: str) -> dict[str, Any]:
        """Return the values of a kind of line by the candidate or key that they are about."""
        return {line["about"]: line["value"] for line in self.lines if line["kind"] == kind}

    def open(self) -> tuple[str, str] | None:
        """Return the kind and subject of a beginning without an end."""
        last = self.lines[-1] if self.lines else {"kind": ""}
        return (last["value"], last["about"]) if last["kind"] == "begin" else None


def work(options: argparse.Namespace) -> int:
    """Check and time what the log does not have yet."""
    begun = time.monotonic()
    torch.manual_seed(0)
    log = Log(options.out)
    gpu.init()
    if not log.of("machine"):
        facts = {"device": gpu.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        log.add(kind="machine", about="machine", value=facts)
    entries = json.loads((options.folder / "manifest.json").read_text())
    names = [entry["name"] for entry in entries if options.only in entry["name"]]
    kernels = [Kernel(entry, options.folder) for entry in entries if entry["name"] in names]
    failed, passed = log.of("failed"), log.of("passed")
    pending = [kernel for kernel in kernels if kernel.name not in failed and kernel.name not in passed]
    for kernel in sorted(pending, key=lambda kernel: checks_of(kernel)[0][1:]):
        _check(kernel, log)
    passed = log.of("passed")
    good = [kernel for kernel in kernels if kernel.name in passed]
    keys = [] if options.check_only else sorted({key for kernel in good for key in kernel.keys})
    for key in keys:
        about = "x".join(map(str, key))
        if about in log.of("us") or about in log.of("failed"):
            continue
        if time.monotonic() - begun > options.limit_s:
            print(f"out of time before {about}", flush=True)
            break
        log.add(kind="begin", about=about, value="timing")
        own = [kernel for kernel in good if key in kernel.keys]
        found = time_key(own, key, own[0].dtype)
        log.add(kind="us", about=about, value=found)
        print("\n".join(summary(key, found)), flush=True)
    if good and not log.of("host_us"):
        _time_host(good, log)
    return 0


def _check(kernel: Kernel, log: Log) -> None:
    log.add(kind="begin", about=kernel.name, value="check")
    try:
        checked(kernel.prepare(0))
        sizes = checks_of(kernel)
        worst = max(check(kernel, *size) for size in sizes)
        check_graph(kernel, *sizes[-1])
    except WrongError as error:
        print(f"WRONG {kernel.name}: {error}", flush=True)
        log.add(kind="failed", about=kernel.name, value=str(error))
    else:
        log.add(kind="passed", about=kernel.name, value=worst)


def _time_host(kernels: Sequence[Kernel], log: Log) -> None:
    """Time some calls of the kernels' first keys, beside torch.mm's."""
    for kernel in kernels[:6]:
        m, n, k = kernel.keys[0] if kernel.keys else (16, 4096, 4096)
        a = torch.randn(m, k, device="cuda").to(kernel.dtype)
        b = torch.randn(n, k, device="cuda").to(kernel.dtype)
        c = torch.empty(m, n, dtype=kernel.dtype, device="cuda")
        own, native = host_us(kernel.bind(a, b, c)), host_us(functools.partial(torch.mm, a, b.T, out=c))
        print(f"host {own:.2f} us (ctypes included), torch.mm {native:.2f} us: {kernel.name}", flush=True)
        log.add(kind="host_us", about=kernel.name, value={"own": round(own, 3), "native": round(native, 3)})


def watch(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run workers until one ends by itself; what a worker died of is marked and not tried again."""
    begun = time.monotonic()
    while True:
        remaining = options.limit_s - (time.monotonic() - begun)
        worker = subprocess.Popen([sys.executable, __file__, *arguments, "--worker", "--limit-s", f"{remaining:.0f}"])
        started = time.time()
        hangs = False
        while worker.poll() is None and not hangs:
            time.sleep(0.2)
            spoke = options.out.stat().st_mtime if options.out.exists() else started
            hangs = time.time() - max(started, spoke) > PATIENCE_S
        if hangs:
            worker.kill()
        status = worker.wait()
        if status == 0:
            return 0
        log = Log(options.out)
        beginning = log.open()
        if beginning is None or remaining < 0:
            print(f"a worker ended with {status} outside of every candidate", flush=True)
            return 1
        stage, about = beginning
        why = f"hung in {stage}" if hangs else f"died in {stage} with {status}"
        print(f"WRONG {about}: {why}", flush=True)
        log.add(kind="failed", about=about, value=why)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="candidates with this in their name")
    parser.add_argument("--limit-s", type=float, default=540.0, help="stop timing new keys after this time")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    if options.worker:
        return work(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return watch(options, given)


if __name__ == "__main__":
    sys.exit(main())

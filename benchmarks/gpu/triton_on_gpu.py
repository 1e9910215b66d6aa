"""Triton templates on a GPU: configs checked against float64 and timed beside native, so that facts cut the spaces.

::

    python benchmarks/gpu/triton_on_gpu.py --shapes 4096x4096,6144x4096 --sizes 1,16,128 --limit 40 --out trim.jsonl
    python benchmarks/gpu/triton_on_gpu.py --norm 4096 --in-place --sizes 1,64,1024,8192 --out trim.jsonl

Each line of ``--out`` is one config: its template and values, resources, error in units of the bound, and microseconds
of a call: ``cold_us`` (weights rotate over copies larger than L2; for norms the rows do) in a CUDA graph, beside
``native_us``. A config that crashes or hangs costs itself: configs run in a worker that is started again behind it. For
cutting spaces, and no evidence: nothing here is paired, repeated over sessions or bounded.

Needs a GPU, torch, Triton, g++ and what fibc.schema imports. All of a shape's configs are compiled first, on all cores.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import random
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kernel_abi as abi
import torch

from fibc.backends.base import BuildFailure
from fibc.backends.triton import TritonBackend
from fibc.cache import Cache
from fibc.schema.candidate import ConfigValue
from fibc.schema.definition import Definition
from fibc.schema.feature import Cell, FeatureKey, Point
from fibc.search.space import ConfigSpace

ROTATED_BYTES = 256 << 20
"""What copies of the weights take together: four times the L2 of an H200."""

MAX_COPIES = 512

LAUNCHES = 64
"""Launches of a graph, at least; every copy is read once."""

REPLAYS = 7

PATIENCE_S = 30.0
"""A config that takes longer hangs."""

MAX_IDLE = 5
"""Workers in a row without a result after which the fault is the machine's."""

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}

GEMM_REFERENCE = "import torch\n\ndef run(A, B):\n    return torch.matmul(A, B.T)\n"
NORM_REFERENCE = """\
import torch

EPS = 1e-5

def run(x, residual, weight):
    total = x.float() + residual.float()
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight.float()
    return normed.to(weight.dtype){more}
"""


# Problems -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A contract at one size.

    Attributes:
        family: ``gemm`` or ``norm``.
        shape: N and K, or the hidden size.
        size: Rows of A, or of the norm.
        in_place: Of a norm: written over its inputs.
    """

    family: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    in_place: bool = False

    def definition(self) -> Definition:
        rows = {"shape": ["M", "K"], "dtype": self.dtype}
        if self.family == "gemm":
            n, k = self.shape
            return Definition.model_validate(
                {
                    "name": f"gemm_{self.dtype}_n{n}_k{k}",
                    "op_type": "gemm",
                    "axes": {
                        "M": {"type": "var"},
                        "N": {"type": "const", "value": n},
                        "K": {"type": "const", "value": k},
                    },
                    "inputs": {"A": rows, "B": {"shape": ["N", "K"], "dtype": self.dtype}},
                    "outputs": {"C": {"shape": ["M", "N"], "dtype": self.dtype}},
                    "reference": GEMM_REFERENCE,
                }
            )
        outputs = (
            {"y": {**rows, "param": "x"}, "total": {**rows, "param": "residual"}} if self.in_place else {"y": rows}
        )
        return Definition.model_validate(
            {
                "name": f"fused_add_rmsnorm_{self.dtype}_h{self.shape[0]}",
                "op_type": "rmsnorm",
                "axes": {"M": {"type": "var"}, "K": {"type": "const", "value": self.shape[0]}},
                "inputs": {"x": rows, "residual": rows, "weight": {"shape": ["K"], "dtype": self.dtype}},
                "outputs": outputs,
                "reference": NORM_REFERENCE.format(more=", total.to(weight.dtype)" if self.in_place else ""),
            }
        )

    def inputs(self, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        kind = getattr(torch, self.dtype)

        def random_tensor(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(kind)

        if self.family == "gemm":
            return [random_tensor(self.size, self.shape[1]), random_tensor(*self.shape)]
        rows = (self.size, self.shape[0])
        return [random_tensor(*rows), random_tensor(*rows), random_tensor(self.shape[0])]

    def outputs(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return poisoned outputs, or the inputs that are written."""
        if self.in_place:
            return list(inputs[:2])
        width = self.shape[0]
        return [torch.full((self.size, width), torch.nan, dtype=inputs[0].dtype, device="cuda")]

    def exact(self, inputs: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each output's float64 value with the bound of its error."""
        rounding = 1.01 * UNIT_ROUNDOFF[self.dtype]
        wide = [tensor.double() for tensor in inputs]
        if self.family == "gemm":
            a, b = wide
            value = a @ b.T
            magnitude = a.abs() @ b.abs().T
            return [(value, (self.shape[1] + 2) * 2.0**-24 * magnitude + rounding * value.abs() + 1e-30)]
        x, residual, weight = wide
        total = x + residual
        value = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight
        relative = 1.01 * (self.shape[0] / 4 + 5) * 2.0**-24 + rounding
        slack = 2.0**-24 * math.sqrt(self.shape[0]) * weight.abs() + 1e-30
        normed = (value, relative * value.abs() + slack)
        return [normed, (total, (rounding + 2.0**-23) * total.abs() + 1e-30)] if self.in_place else [normed]

    def native(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Callable[[], object]:
        if self.family == "gemm":
            a, b = inputs
            return lambda: torch.mm(a, b.T, out=outputs[0])
        x, residual, weight = inputs
        try:
            from flashinfer.norm import fused_add_rmsnorm  # type: ignore[import-not-found]
        except ImportError:
            return lambda: torch.nn.functional.rms_norm(x + residual, weight.shape, weight, 1e-5)
        return lambda: fused_add_rmsnorm(x, residual, weight, 1e-5)

    def rotated(self, inputs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return inputs that together exceed the L2 cache, the weights of a GEMM or the rows of a norm being copies."""
        cold = [1] if self.family == "gemm" else [0, 1]
        each = sum(inputs[index].nbytes for index in cold)
        copies = max(2, min(MAX_COPIES, math.ceil(ROTATED_BYTES / each)))
        return [[t.clone() if i in cold else t for i, t in enumerate(inputs)] for _ in range(copies)]

    def key(self) -> FeatureKey:
        point = Point((("M", self.size),), "end")
        return FeatureKey(Cell(((self.size, self.size),)), (point,), 0, True)


# Calls through the C interface ----------------------------------------------------------------------------------------


class Kernel:
    """A built candidate of one problem, callable on tensors; its workspace is shared by its calls."""

    def __init__(self, library: str, symbol: str, problem: Problem) -> None:
        self._entries = abi.entries(library, symbol)
        self._axes = abi.int64s((problem.size, *problem.shape))
        self.counters = torch.zeros(abi.COUNTER_BYTES, dtype=torch.uint8, device="cuda")
        status = self._entries.prepare(torch.cuda.current_device())
        if status != abi.OK:
            raise RuntimeError(f"prepare: status {status}")
        needed = self._entries.workspace(ctypes.byref(abi.Call(None, None, None, self._axes)))
        self._scratch = torch.empty(max(256, needed), dtype=torch.uint8, device="cuda")

    def bind(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Return a call on the current stream of its time."""
        cuda = abi.Cuda(None, torch.cuda.current_device(), 0, self.counters.data_ptr(), self._scratch.data_ptr())
        call = abi.Call(abi.views(inputs), abi.views(outputs), None, self._axes, None, 1, ctypes.pointer(cuda))
        call.kept = (tuple(inputs), tuple(outputs))  # else a capture, which empties torch's cache, unmaps them

        def launch() -> None:
            cuda.stream = torch.cuda.current_stream().cuda_stream
            status = self._entries.call(ctypes.byref(call))
            if status != abi.OK:
                raise RuntimeError(f"launch: status {status}")

        return launch


# Measures -------------------------------------------------------------------------------------------------------------


def error_in_bounds(kernel: Kernel, problem: Problem, repeats: int = 3) -> float:
    """Return the largest error over repeats, in units of its bound; infinite where counters are left behind."""
    inputs = problem.inputs(seed=0)
    exact = problem.exact(inputs)
    worst = 0.0
    for _ in range(repeats):
        fresh = [tensor.clone() for tensor in inputs]
        outputs = problem.outputs(fresh)
        kernel.bind(fresh, outputs)()
        for output, (value, bound) in zip(outputs, exact, strict=True):
            ratio = float(((output.double() - value).abs() / bound).nan_to_num(nan=math.inf).max())
            worst = max(worst, ratio)
    return math.inf if bool(kernel.counters.any()) else worst


def graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median over replays of microseconds a call, of a graph that makes each call at least once."""
    num_rounds = math.ceil(LAUNCHES / len(calls))
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_rounds):
            for call in calls:
                call()
    times = []
    for _ in range(REPLAYS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * float(begin.elapsed_time(end)) / (num_rounds * len(calls)))
    return statistics.median(times[1:])


def cold_us(problem: Problem, bind: Callable[[list[torch.Tensor], list[torch.Tensor]], Callable[[], object]]) -> float:
    """Return the microseconds of a call whose weights are in no cache."""
    inputs = problem.inputs(seed=1)
    outputs = problem.outputs(inputs)
    rotated = problem.rotated(inputs)
    return graph_us([bind(copy, copy[:2] if problem.in_place else outputs) for copy in rotated])


# The worker and its parent --------------------------------------------------------------------------------------------


def work(job: Path, first: int) -> None:
    """Measure the entries of ``job`` from ``first`` on, one line of JSON each."""
    data = json.loads(job.read_text())
    problem = Problem(**{**data["problem"], "shape": tuple(data["problem"]["shape"])})
    native_us = cold_us(problem, problem.native)
    for index, entry in enumerate(data["entries"][first:], first):
        result = {"index": index, **entry["told"], "native_us": round(native_us, 3)}
        try:
            kernel = Kernel(entry["library"], entry["symbol"], problem)
            result["error"] = round(error_in_bounds(kernel, problem), 4)
            result["cold_us"] = round(cold_us(problem, kernel.bind), 3)
        except RuntimeError as failure:
            result["failed"] = str(failure)[-300:]
        print(json.dumps(result), flush=True)


def supervise(job: Path, num_entries: int) -> Iterator[dict[str, Any]]:
    """Run workers until every entry has a result; one that dies or hangs costs the entry it was at."""
    done, idle = 0, 0
    while done < num_entries:
        command = [sys.executable, __file__, "--worker", str(job), "--first", str(done)]
        before = done
        with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            pending = b""
            while select.select([worker.stdout], [], [], PATIENCE_S)[0]:
                chunk = os.read(worker.stdout.fileno(), 1 << 16)
                if not chunk:
                    break
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    yield json.loads(line)
                    done += 1
            else:
                worker.kill()
        idle = idle + 1 if done == before else 0
        if idle == MAX_IDLE:
            raise SystemExit(f"{MAX_IDLE} workers in a row ended without a result: look at what they said above")
        if done < num_entries:
            yield {"index": done, "failed": f"the worker ended with status {worker.returncode}"}
            done += 1


def choose(backend: TritonBackend, problem: Problem, limit: int, seed: int) -> list[tuple[str, dict[str, ConfigValue]]]:
    """Return at most ``limit`` configs of each template: the default, then others at random."""
    chosen: list[tuple[str, dict[str, ConfigValue]]] = []
    for space in backend.spaces(problem.definition(), problem.key())[0]:
        configs = list(ConfigSpace(space).configs())
        others = random.Random(seed).sample(configs[1:], min(limit - 1, len(configs) - 1)) if len(configs) > 1 else []
        chosen += [(space.template, dict(config)) for config in (*configs[:1], *others)]
    return chosen


def measure(backend: TritonBackend, problem: Problem, limit: int, seed: int, jobs: int, out: Path) -> None:
    """Measure a problem's configs, print the best of each template, and append all to ``out``."""
    definition = problem.definition()
    candidates = [backend.candidate(definition, *choice) for choice in choose(backend, problem, limit, seed)]
    began = time.monotonic()
    built = backend.build(definition, candidates, timeout_s=120, jobs=jobs)
    print(
        f"{definition.name} at {problem.size}: {len(candidates)} built in {time.monotonic() - began:.1f} s", flush=True
    )
    entries = []
    for candidate in candidates:
        artifact = built[candidate.digest]
        told: Mapping[str, Any] = {"template": candidate.template, "config": dict(candidate.config)}
        if isinstance(artifact, BuildFailure):
            _append(out, {**asdict(problem), **told, "failed": artifact.log[-300:]})
            continue
        told = {**told, "resources": artifact.resources}
        entries.append({"told": told, "library": artifact.library_path, "symbol": artifact.symbol})
    job = out.with_suffix(".job")
    job.write_text(json.dumps({"problem": asdict(problem), "entries": entries}))
    results = []
    for result in supervise(job, len(entries)):
        told = entries[result["index"]]["told"]
        results.append({**asdict(problem), **told, **result})
        _append(out, results[-1])
    _print_best(results)


def _append(out: Path, line: Mapping[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _print_best(results: Sequence[Mapping[str, Any]]) -> None:
    wrong = [result for result in results if result.get("failed") or result.get("error", 0.0) > 1.0]
    for result in wrong:
        print(f"  WRONG {result['template']} {result['config']}: {result.get('failed') or result['error']}")
    right = [result for result in results if result not in wrong]
    for template in sorted({result["template"] for result in right}):
        mine = sorted((r for r in right if r["template"] == template), key=lambda r: r["cold_us"])
        for result in mine[:3]:
            values = " ".join(f"{name}={value}" for name, value in result["config"].items())
            ratio = result["native_us"] / result["cold_us"]
            print(f"  {ratio:5.3f}x {result['cold_us']:8.2f} us of {result['native_us']:8.2f}  {template}: {values}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="", help="NxK of weights, separated by commas")
    parser.add_argument("--norm", default="", help="hidden sizes of norms, separated by commas")
    parser.add_argument("--in-place", action="store_true", help="norms in place")
    parser.add_argument("--sizes", default="1,8,16,64,128,256", help="rows, separated by commas")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(UNIT_ROUNDOFF))
    parser.add_argument("--limit", type=int, default=24, help="configs of each template")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path("trim.jsonl"))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker, options.first)
        return
    properties = torch.cuda.get_device_properties(0)
    backend = TritonBackend(Cache(), num_sms=properties.multi_processor_count, l2_bytes=properties.L2_cache_size)
    sizes = [int(size) for size in options.sizes.split(",")]
    shapes = [("gemm", tuple(map(int, text.split("x")))) for text in options.shapes.split(",") if text]
    shapes += [("norm", (int(text),)) for text in options.norm.split(",") if text]
    for family, shape in shapes:
        for size in sizes:
            problem = Problem(family, options.dtype, shape, size, options.in_place and family == "norm")
            measure(backend, problem, options.limit, options.seed, options.jobs, options.out)


if __name__ == "__main__":
    main()

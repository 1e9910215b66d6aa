"""What dispatch adds to a call, around a kernel that does nothing.

    python benchmarks/dispatch_overhead.py

builds a package of a norm's arguments (three inputs, one output, bfloat16) around a stub kernel and times it from one C
loop, side by side with the same call without dispatch: a builtin that takes the same arguments and returns None. A hit
writes into a given output, so that no allocation is counted; by value it is compared with ``torch.empty``, which every
kernel that returns a tensor pays. Prints a table, writes it with raw samples to
``benchmarks/results/<cpu>/dispatch_overhead.json``, and exits with 1 where a promise is broken.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import toys

from fibc import environment
from fibc.cache import Cache
from fibc.codegen import harness
from fibc.paths import safe_name
from fibc.runtime import load

HIT_NS = 300.0
NATIVE_NS = 300.0
NATIVE_GRAD_NS = 420.0
"""Promises of the README: what a call costs beyond the kernel that serves it, in nanoseconds."""

ROWS, HIDDEN = 16, 64


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: What people read.
        dispatched: The call through the module.
        plain: The call without it.
        arguments: Of ``dispatched``.
        plain_arguments: Of ``plain``.
        served: What must have been counted: ``hit`` or a reason.
        bound_ns: The promise, or None where there is none.
        mode: Entered around both.
    """

    name: str
    dispatched: Callable[..., Any]
    plain: Callable[..., Any]
    arguments: tuple[Any, ...]
    plain_arguments: tuple[Any, ...]
    served: str
    bound_ns: float | None
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Result:
    """A case's timings.

    Attributes:
        added_ns: Median over rounds of dispatched - plain.
        samples_ns: Every round's (dispatched, plain).
    """

    name: str
    dispatched_ns: float
    plain_ns: float
    added_ns: float
    bound_ns: float | None
    samples_ns: list[tuple[float, float]]

    @property
    def holds(self) -> bool:
        return self.bound_ns is None or self.added_ns <= self.bound_ns


def cases(module: ModuleType, timing: ModuleType) -> list[Case]:
    """Return every way through the module that has a promise, and by value for comparison."""

    def tensors(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, residual = torch.randn(2, rows, HIDDEN).bfloat16()
        return x, residual, torch.randn(HIDDEN).bfloat16()

    def out(rows: int = ROWS) -> torch.Tensor:
        return torch.empty(rows, HIDDEN, dtype=torch.bfloat16)

    x, residual, weight = tensors()
    parameters = (x, residual, torch.nn.Parameter(weight))
    transposed = (x.t().contiguous().t(), residual, weight)
    nothing = timing.nothing

    def into(name: str, inputs: tuple[Any, ...], served: str, bound: float, mode: Any = nullcontext) -> Case:
        arguments = (*inputs, out(inputs[0].shape[0]))
        return Case(name, module.run_out, nothing, arguments, arguments, served, bound, mode)

    def native(name: str, inputs: tuple[Any, ...], served: str, bound: float, mode: Any = nullcontext) -> Case:
        return Case(name, module.run, nothing, inputs, inputs, served, bound, mode)

    return [
        into("hit, 4 tensors, grad mode on", (x, residual, weight), "hit", HIT_NS),
        into("hit, 4 tensors, a Parameter, no_grad", parameters, "hit", HIT_NS, torch.no_grad),
        into("hit, 4 tensors, a Parameter, inference_mode", parameters, "hit", HIT_NS, torch.inference_mode),
        native("native: no region, 3 tensors", tensors(100), "region", NATIVE_NS),
        native("native: strides, 3 tensors", transposed, "layout", NATIVE_NS),
        into("native: no region, 4 tensors", tensors(100), "region", NATIVE_NS),
        native("native: gradient, 3 tensors", parameters, "grad", NATIVE_GRAD_NS),
        Case(
            "by value: hit against torch.empty",
            module.run,
            torch.empty,
            (x, residual, weight),
            (ROWS, HIDDEN),
            "hit",
            HIT_NS,
        ),
    ]


def measure(case: Case, timing: ModuleType, module: ModuleType, rounds: int, inner: int) -> Result:
    """Time both sides in adjacent blocks, half of the rounds in either order.

    Raises:
        RuntimeError: If the call went another way than the case is about.
    """
    sides = [(case.dispatched, [case.arguments]), (case.plain, [case.plain_arguments])]
    samples: list[tuple[float, float]] = []
    order = [first for first in (0, 1) for _ in range(rounds // 2)]
    random.Random(0).shuffle(order)
    with case.mode():
        before = module.stats()
        for function, calls in sides:
            timing.time_calls(function, calls, 0, inner)  # warm
        after = module.stats()
        changed = dict(after["native"].items() - before["native"].items())
        went = "hit" if after["hits"] != before["hits"] else next(iter(changed), "nowhere")
        if went != case.served:
            raise RuntimeError(f"{case.name}: went {went}, expected {case.served}")
        for first in order:
            pair = [0.0, 0.0]
            for index in (first, 1 - first):
                pair[index] = timing.time_calls(*sides[index], 0, inner) * 1e9
            samples.append((round(pair[0], 1), round(pair[1], 1)))
    dispatched, plain = (statistics.median(side) for side in zip(*samples, strict=True))
    added = statistics.median(pair[0] - pair[1] for pair in samples)
    return Result(case.name, dispatched, plain, added, case.bound_ns, samples)


def load_harness(cache: Cache) -> ModuleType:
    spec = importlib.util.spec_from_file_location(harness.MODULE, harness.build(cache))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400, help="pairs of blocks per case (default: %(default)s)")
    parser.add_argument("--inner", type=int, default=2000, help="calls in a block (default: %(default)s)")
    parser.add_argument("--dlpack", action="store_true", help="ask torch through DLPack and Python only")
    options = parser.parse_args()
    here = environment.detect()
    load_before = os.getloadavg()[
        0
    ]  # of the last minute: beyond an idle machine's, the numbers are other programs' as well
    cache = Cache()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        package = toys.publish(toys.stub_table(), root, cache, toys.compile_kernels(root))
        module = load(package)
        timing = load_harness(cache)
        module.set_native(timing.nothing, timing.nothing)
        module._generation._native.use_torch_abi(not options.dlpack)
        results = [measure(case, timing, module, options.rounds, options.inner) for case in cases(module, timing)]
    print(f"load of the machine when it began: {load_before:.2f}")
    print(f"{'':46}{'dispatched':>11}{'plain':>8}{'added':>8}{'promise':>9}  (ns per call)")
    for result in results:
        bound = "" if result.bound_ns is None else f"{result.bound_ns:9.0f}"
        verdict = "" if result.holds else "  broken"
        print(
            f"{result.name:46}{result.dispatched_ns:11.0f}{result.plain_ns:8.0f}{result.added_ns:8.0f}{bound}{verdict}"
        )
    name = "dispatch_overhead_dlpack" if options.dlpack else "dispatch_overhead"
    target = Path(__file__).parent / "results" / safe_name(here.model) / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "command": " ".join(["python", "benchmarks/dispatch_overhead.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": here.facts() | {"cpus": str(os.cpu_count()), "load": f"{load_before:.2f}"},
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()]
    listed = ",\n  ".join(json.dumps(asdict(result)) for result in results)
    target.write_text("{\n " + ",\n ".join([*lines, f'"results": [\n  {listed}\n ]']) + "\n}\n")
    return 0 if all(result.holds for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())

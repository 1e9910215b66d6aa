"""The child of an isolated evaluation: validates candidates and times them beside native, on request.

A worker is a session (exec'd, has every arm of a bench) or a child of the zygote (fibc.zygote), for one candidate. Both
serve the same requests over a socket, one at a time:

    request  {"op": name, ...}
    reply    {"ok": value} | {"failed": [status, log]} (the candidate's fault) | {"broken": log} (anybody else's)

A worker that dies says nothing: its parent sees the socket close, and reads the wait status and the log.
"""

from __future__ import annotations

import faulthandler
import importlib.abc
import importlib.util
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

from fibc import inputs, supervisor
from fibc.check import Value
from fibc.errors import BrokenError
from fibc.rpc import Channel, ChannelClosedError
from fibc.schema import codec
from fibc.schema.candidate import Artifact
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Status
from fibc.schema.feature import Point
from fibc.schema.workload import read_workload
from fibc.timing import Harness, Side, Timer
from fibc.validation import Case, Judge, Kernel, filled_allocations

MALLOC_TUNABLES = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592"
"""GLIBC_TUNABLES of every worker. By default glibc gives a large temporary back to the kernel on every free, and the
page faults of the next allocation are timed instead of the kernel. No mapping at all is the raised threshold that every
glibc accepts: before 2.35 mmap_threshold itself stops at 32 MiB, half of an arena's heap."""

LOG_BYTES = 64 << 20
"""A worker that writes more into its log is killed (SIGXFSZ)."""


@dataclass(frozen=True)
class Setup:
    """What a worker is told first.

    Attributes:
        definition: ``Definition.to_json``.
        native_source: Module text with ``call(*inputs)``.
        harness_path: The extension, or a Python file with the same functions.
        workloads: uuid -> the workload's JSON and the root of its stored tensors.
        num_copies: Copies of the weights.
        keep_bytes: Memory for points' own tensors.
        data_bytes: What a process may allocate beyond what it holds when it starts: weights and points of a session,
            and a candidate's own.
        device: ``cpu`` or ``cuda``.
        mode: ``eager``; on a GPU also ``graph`` or ``device``.
        gpu: The ``schema.silicon.Gpu``, plain; None on a CPU.
        run_pid: The process that every process of the run descends from.
    """

    definition: dict[str, Any]
    native_source: str
    harness_path: str
    workloads: dict[str, tuple[dict[str, Any], str]]
    num_threads: int
    num_copies: int
    keep_bytes: int
    data_bytes: int
    seed: int
    device: str = "cpu"
    mode: str = "eager"
    gpu: dict[str, Any] | None = None
    run_pid: int = 0


class _TextLoader(importlib.abc.InspectLoader):
    """Loads a module from text, so that tracebacks show its lines."""

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        return self._text

    def is_package(self, fullname: str) -> bool:
        return False


def load_text(name: str, text: str) -> ModuleType:
    """Return the module that ``text`` is, a definition's reference or a native; it runs here, as any import does."""
    spec = importlib.util.spec_from_loader(name, _TextLoader(text))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_harness(path: Path) -> Harness:
    """Return the extension module at ``path``."""
    spec = importlib.util.spec_from_file_location("_harness", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(Harness, module)


class Worker:
    """State and requests of one process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._cases: dict[str, tuple[Case, ...]] = {}
        self._sides: dict[int, Side] = {}
        self._artifacts: dict[int, Artifact] = {}

    def serve(self) -> None:
        """Answer requests until the parent closes the channel."""
        while True:
            try:
                request = self._channel.receive()
                self._channel.send(self._answer(request))
            except ChannelClosedError:
                return

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        handler: Callable[..., Any] = getattr(self, f"do_{request.pop('op')}")
        try:
            return {"ok": handler(**request)}
        except FailedError as error:
            return {"failed": [error.status, error.log]}
        except BrokenError:
            return {"broken": traceback.format_exc()}
        except MemoryError:
            return {"failed": [Status.RESOURCE, traceback.format_exc()]}
        except Exception as error:  # noqa: BLE001  candidates, natives and references raise what they like
            if "can't allocate memory" in str(error):  # torch's allocator raises RuntimeError
                return {"failed": [Status.RESOURCE, traceback.format_exc()]}
            return {"failed": [Status.RUNTIME_ERROR, traceback.format_exc()]}

    def do_setup(self, setup: dict[str, Any]) -> None:
        """Take in the definition."""
        self._setup = chosen = codec.from_plain(Setup, setup)
        torch.set_num_threads(1)  # until candidates may run: nothing before needs more
        torch.set_grad_enabled(False)
        self._definition = Definition.model_validate(chosen.definition)
        self._spec = self._definition.call_spec()
        self._workloads = {
            uuid: read_workload(document, self._definition, Path(root))
            for uuid, (document, root) in chosen.workloads.items()
        }
        self._native: Callable[..., Any] = load_text("fibc_native", chosen.native_source).call
        self._timer = self.make_timer()

    def make_timer(self) -> Timer:
        """Return what times pairs on this device."""
        return Timer(
            self._definition,
            self._spec,
            self._native,
            self._make,
            num_copies=self._setup.num_copies,
            keep_bytes=self._setup.keep_bytes,
            seed=self._setup.seed,
        )

    def _reference(self) -> Callable[..., object]:
        """Load the definition's reference, a user's code."""
        module = load_text("fibc_reference", self._definition.reference)
        reference: Callable[..., object] = getattr(module, self._definition.entry_point)
        return reference

    def do_start(self) -> None:
        """Before anything of a candidate runs: limits, threads, the harness."""
        faulthandler.enable()
        resource.setrlimit(resource.RLIMIT_FSIZE, (LOG_BYTES, LOG_BYTES))
        supervisor.limit_resources(_data_bytes() + self._setup.data_bytes, address_space=False)
        torch.set_num_threads(self._setup.num_threads)
        self._harness = load_harness(Path(self._setup.harness_path))  # after a fork, so that it may use all threads
        self._harness.set_num_threads(self._setup.num_threads)

    def do_bind(self, arm: int, point: dict[str, Any], artifact: dict[str, Any] | None, deterministic: bool) -> None:
        """Load the candidate of arm ``arm``; None is native itself."""
        if artifact is None:
            call = load_text("fibc_native_again", self._setup.native_source).call
        else:
            self._artifacts[arm] = built = codec.from_plain(Artifact, artifact)
            call = self._bound(built)
        self._sides[arm] = Side(codec.from_plain(Point, point), call, deterministic)

    def _bound(self, artifact: Artifact) -> Callable[..., Any]:
        if artifact.is_python:
            call: Callable[..., Any] = load_text("fibc_candidate", artifact.source).call
            return call
        encoded = codec.encode(self._spec)
        bound: Callable[..., Any] = self._harness.bind(
            artifact.library_path, artifact.symbol, encoded, self._setup.device
        )
        return bound

    def do_validate(self, arm: int, cases: str) -> dict[str, Any]:
        """Judge arm ``arm`` on the cases ``cases``."""
        kernel = cast(Kernel, self._sides[arm].call)
        judge = Judge(self._definition, self._spec, kernel, self._artifacts[arm].guards, self._filled_allocations)
        failures = (judge.judge(case) for case in self._cases[cases])
        first = next((failure for failure in failures if failure is not None), None)
        outcome: dict[str, Any] = codec.to_plain(first or judge.finish())
        return outcome

    @contextmanager
    def _filled_allocations(self) -> Iterator[None]:
        self._harness.fill_allocations(True)
        try:
            with filled_allocations():
                yield
        finally:
            self._harness.fill_allocations(False)

    def do_pair(self, arm: int, native_first: bool, inner: int | None) -> tuple[float, float, int]:
        """Time one pair; where ``inner`` is None it is found first, from native."""
        if inner is None:
            inner = self._timer.inner(self._harness, self._sides[arm].point)
        times = self._timer.pair(self._harness, arm, self._sides, native_first=native_first, inner=inner)
        return (*times, inner)

    def do_block(self, arm: int, native: bool, inner: int, seconds: float) -> float:
        """Return seconds per call of one side of a pair over about ``seconds`` without a pause."""
        return self._timer.block(self._harness, arm, self._sides, native=native, inner=inner, seconds=seconds)

    def do_check_outputs(self, arm: int) -> str | None:
        """Return what is wrong with the arm's output after timing, or None."""
        return self._timer.check_outputs(arm, self._sides)

    def do_reseed(self, seed: int) -> None:
        """From here on make inputs from ``seed``; weights that exist stay."""
        self._setup = replace(self._setup, seed=seed)
        self._timer.forget()

    def _make(self, point: Point, made: Mapping[str, Value] | None = None) -> dict[str, Value]:
        workload = self._workloads.get(point.workload)
        return dict(inputs.make(self._definition, dict(point.axes), self._setup.seed, workload, made))


class FailedError(Exception):
    """The candidate, or what else a request ran, failed with a status."""

    def __init__(self, status: Status, log: str) -> None:
        super().__init__(log)
        self.status = status
        self.log = log


def _data_bytes() -> int:
    """Return what RLIMIT_DATA counts of this process now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def main(worker: type[Worker], arguments: Sequence[str]) -> None:
    """Serve on the socket whose file descriptor is the one argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt ends
    worker(Channel(socket.socket(fileno=int(arguments[0])))).serve()


if __name__ == "__main__":
    main(Worker, sys.argv[1:])

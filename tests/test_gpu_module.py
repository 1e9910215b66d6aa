"""A generated module, and the harness, on a real GPU: every way to call, streams, graphs, errors, host cost.

pytest -m gpu tests/test_gpu_module.py -s
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import toys
from gpu_image import compile_toys
from module_calls import host_us, reason_of
from torch import Tensor

from fibc import toolchain
from fibc.cache import Cache
from fibc.codegen import harness
from fibc.runtime import load
from fibc.schema.codec import encode
from fibc.schema.silicon import CudaValidity
from fibc.worker import load_harness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MARKS = {name: mark for name, _, _, mark in toys.ROWS_CELLS}
H = 1000


def validity() -> CudaValidity:
    here = torch.cuda.get_device_properties(0)
    capability = 10 * here.major + here.minor
    return CudaValidity(
        f"sm_{capability}", capability, here.multi_processor_count, here.L2_cache_size, here.total_memory
    )


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kernels")
    return toys.compile_cuda_launchers(directory, compile_toys(directory, validity().arch))


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory, kernels: Path) -> Path:
    """Packages for float32, for bfloat16, and for a GPU with one SM more."""
    root = tmp_path_factory.mktemp("packages")
    cache = Cache(root / "cache")
    for dtype in ("float32", "bfloat16"):
        toys.publish(toys.rows_table(validity(), dtype), root, cache, kernels)
    other = replace(validity(), num_sms=validity().num_sms + 1)
    toys.publish(toys.rows_table(other), root / "other", cache, kernels)
    return root


@pytest.fixture(params=["torch_abi", "dlpack"])
def op(request: pytest.FixtureRequest, out: Path) -> Iterator[ModuleType]:
    """The row sums, asking torch through its C interface, and through DLPack and Python."""
    module = load(out / "fibc_toy_rows")
    native = module._generation._native
    native.use_torch_abi(request.param == "torch_abi")
    yield module
    native.use_torch_abi(True)
    module.enable()
    module.set_native(None)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_harness(harness.build(Cache(tmp_path_factory.mktemp("harness"))))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory, kernels: Path) -> Path:
    path = tmp_path_factory.mktemp("library") / "toys.so"
    command: list[str | Path] = [
        toolchain.find().cxx,
        "-shared",
        "-nostartfiles",
        "-Wl,-z,defs",
        kernels,
        "-o",
        path,
        "-lc",
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return path


def matrix(rows: int, hidden: int = H, dtype: torch.dtype = torch.float32, device: str = "cuda") -> Tensor:
    """Return small integers: their sums are exact in any order."""
    return torch.randint(-8, 9, (rows, hidden), device=device).to(dtype)


def new_stream() -> Any:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def new_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def python(script: str, *arguments: object, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "name"),
    [(1, "rows"), (4, "rows"), (5, "split"), (64, "split"), (66, "cluster"), (128, "cluster")],
)
def test_each_kind_of_kernel_serves_by_value_and_into_outputs(op: ModuleType, rows: int, name: str) -> None:
    x = matrix(rows)
    expected = x.sum(-1) + MARKS[name]
    y, reason = reason_of(op, lambda: op.run(x))
    assert reason == "hit"
    assert op.explain(x)["served"] == f"fibc_toy_{name}"
    assert (y.device, y.dtype) == (x.device, torch.float32)
    assert torch.equal(y, expected)
    into = torch.full((rows,), torch.nan, device="cuda")
    _, reason = reason_of(op, lambda: op.run_out(x, into))
    assert reason == "hit"
    assert torch.equal(into, expected)
    padded = torch.empty(rows, H + 24, device="cuda")[:, :H].copy_(x)
    assert torch.equal(op.run(padded), expected)


def test_another_dtype_has_its_own_kernel(out: Path) -> None:
    module = load(out / "fibc_toy_rows_bf16")
    x = matrix(7, dtype=torch.bfloat16)
    y, reason = reason_of(module, lambda: module.run(x))
    assert reason == "hit"
    assert torch.equal(y, x.float().sum(-1) + 1)
    _, reason = reason_of(module, lambda: module.run(x.float()))
    assert reason == "dtype"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: matrix(130), "kernel"),
        (lambda: matrix(1000), "region"),
        (lambda: matrix(4, device="cpu"), "device"),
        (lambda: matrix(4, dtype=torch.float16), "dtype"),
        (lambda: matrix(H).t()[:4], "layout"),
        (lambda: matrix(4).requires_grad_(), "grad"),
    ],
)
def test_everything_else_is_native_for_its_reason(op: ModuleType, make: Callable[[], Tensor], reason: str) -> None:
    x = make()
    y, found = reason_of(op, lambda: op.run(x))
    assert found == reason
    assert torch.equal(y, x.float().sum(-1))
    assert op.explain(x)["reason"] in (reason, "hit")  # only the kernel itself knows that it declines


def test_no_rows_are_an_empty_tensor_without_a_launch(op: ModuleType) -> None:
    before = op.stats()
    y = op.run(torch.empty(0, H, device="cuda"))
    assert (y.shape, y.device.type) == ((0,), "cuda")
    assert op.stats()["empty"] == before["empty"] + 1


def test_many_calls_leave_counters_zero(op: ModuleType) -> None:
    inputs = [matrix(rows) for rows in (5, 64, 17, 33)]
    for x in inputs * 50:
        assert torch.equal(op.run(x), x.sum(-1) + MARKS["split"])


def test_an_output_is_of_torchs_own_allocator(op: ModuleType) -> None:
    x = matrix(4)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    y = op.run(x)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1
    assert y.untyped_storage().nbytes() == 16


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.script(_method)?` is deprecated:DeprecationWarning")
def test_the_operator_serves_gpu_tensors(op: ModuleType) -> None:
    x = matrix(4)
    assert torch.equal(torch.ops.fibc.toy_rows(x), x.sum(-1) + 1)
    compiled = torch.compile(lambda x: torch.ops.fibc.toy_rows(x.relu()) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), (x.relu().sum(-1) + 1) * 2)


# ---- streams and threads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [4, 64, 128])
def test_a_call_runs_on_the_current_stream(op: ModuleType, rows: int) -> None:
    """Behind a long copy on a side stream a call on that stream waits; on the default one it would read too early."""
    large = torch.randn(1 << 28, device="cuda")
    x, y = torch.zeros(rows, H, device="cuda"), torch.empty(rows, device="cuda")
    values = matrix(rows)
    op.run_out(x, y)
    torch.cuda.synchronize()
    with torch.cuda.stream(new_stream()):
        for _ in range(5):
            large.copy_(large.flip(0))
        x.copy_(values)
        op.run_out(x, y)
        mark = MARKS["rows" if rows == 4 else "split" if rows == 64 else "cluster"]
        assert torch.equal(y, values.sum(-1) + mark)


def test_streams_at_work_together_do_not_share_a_workspace(op: ModuleType) -> None:
    streams = [new_stream() for _ in range(8)]
    inputs = [matrix(64, 20000) for _ in streams]
    expected = [x.sum(-1) + MARKS["split"] for x in inputs]
    torch.cuda.synchronize()
    for _ in range(30):
        results = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(op.run(x))
        torch.cuda.synchronize()
        assert all(torch.equal(y, want) for y, want in zip(results, expected, strict=True))


def test_a_thread_without_a_context_can_call(op: ModuleType) -> None:
    x, results = matrix(64), []
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: results.append(reason_of(op, lambda: op.run(x))))
    thread.start()
    thread.join()
    y, reason = results[0]
    torch.cuda.synchronize()
    assert reason == "hit"
    assert torch.equal(y, x.sum(-1) + MARKS["split"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_is_served_whichever_is_current(op: ModuleType) -> None:
    for current in (0, 1):
        for index in (0, 1):
            with torch.cuda.device(current):
                x = matrix(64, device=f"cuda:{index}")
                y, reason = reason_of(op, lambda: op.run(x))  # noqa: B023  called at once
                assert torch.cuda.current_device() == current
            assert (reason, y.device.index) == ("hit", index)
            assert torch.equal(y, x.sum(-1) + MARKS["split"])
    into = torch.empty(64, device="cuda:1")
    _, reason = reason_of(op, lambda: op.run_out(matrix(64, device="cuda:0"), into))
    assert reason == "devices"
    assert set(op.environment["devices"]) == {"cuda:0", "cuda:1"}


# ---- graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [4, 64, 128])
def test_a_captured_call_replays_with_new_values(op: ModuleType, rows: int) -> None:
    mark = MARKS["rows" if rows == 4 else "split" if rows == 64 else "cluster"]
    x = matrix(rows)
    assert op.prepare() is True
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (y, reason), (again, _) = reason_of(op, lambda: op.run(x)), reason_of(op, lambda: op.run(x))
    assert reason == "hit"
    for _ in range(3):
        x.copy_(matrix(rows))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, x.sum(-1) + mark)
        assert torch.equal(again, y)


def test_graphs_replay_together_and_their_counters_come_back(op: ModuleType) -> None:
    op.prepare()
    for _ in range(3):
        captured = []
        for _ in range(40):  # more than a block of counters holds
            graph, x = torch.cuda.CUDAGraph(), matrix(64)
            with torch.cuda.graph(graph):
                y = op.run(x)
            captured.append((graph, x, y))
        streams = [new_stream() for _ in range(8)]
        torch.cuda.synchronize()
        for index, (graph, _, _) in enumerate(captured * 3):
            with torch.cuda.stream(streams[index % 40 % 8]):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, x.sum(-1) + MARKS["split"]) for _, x, y in captured)
        captured.clear()


def test_a_graph_of_many_calls_has_no_memset_between_them(op: ModuleType) -> None:
    """A call with a workspace adds one node to a graph, as one without does; a memset would be a second one."""
    op.prepare()

    def seconds(rows: int) -> float:
        x, y = matrix(rows, 64), torch.empty(rows, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(200):
                op.run_out(x, y)
        begin, end = new_event(), new_event()
        best = float("inf")
        for _ in range(10):
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            best = min(best, begin.elapsed_time(end) / 200)
        return best * 1000

    plain, split = seconds(4), seconds(5)
    print(f"\nin a graph of 200: plain {plain:.2f} us, with counters and scratch {split:.2f} us a call")
    assert split < plain + 3


def test_a_first_call_under_capture_is_native_and_the_next_call_loads(out: Path) -> None:
    said = python(CAPTURE_FIRST, out)
    assert json.loads(said.splitlines()[-1]) == [{"unprepared": 1}, True, "hit", True]


CAPTURE_FIRST = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, fibc_toy_rows as op
x = torch.ones(4, 10, device="cuda")
x.sum(-1)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = op.run(x)
native = op.stats()["native"]
graph.replay()
torch.cuda.synchronize()
served = torch.equal(y, torch.full((4,), 10.0, device="cuda"))
z = op.run(x)
print(json.dumps([native, served, op.environment["devices"]["cuda:0"]["reason"], bool((z == 11).all())]))
"""


# ---- where no variant serves ----------------------------------------------------------------------------------------


def test_import_creates_no_context_and_prepare_does(out: Path) -> None:
    said = python(NO_CONTEXT, out)
    assert said.splitlines()[-1] == "False False True True"


NO_CONTEXT = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import torch, fibc_toy_rows as op
driver = ctypes.CDLL("libcuda.so.1")

def is_active():
    flags, active = ctypes.c_uint(), ctypes.c_int()
    device = ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(device), 0) != 0:  # not even initialised
        return False
    driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    return bool(active.value)

before = is_active(), torch.cuda.is_initialized()
prepared = op.prepare(0)
print(*before, prepared, is_active())
"""


def test_other_silicon_is_native_and_told_once(out: Path) -> None:
    module = load(out / "other" / "fibc_toy_rows")
    x = matrix(4)
    assert module.explain(x)["reason"] == "silicon"  # without a warning: nothing was called
    with pytest.warns(RuntimeWarning, match=r"cuda:0: was tuned on \d+ SMs.*FIBC_ACCEPT_GPU=1"):
        y, reason = reason_of(module, lambda: module.run(x))
    assert reason == "silicon"
    assert torch.equal(y, x.sum(-1))
    assert module.environment["devices"]["cuda:0"]["reason"] == "silicon"
    assert module.prepare() is False


def test_an_asynchronous_error_is_raised_with_the_variant_and_never_tried_again(out: Path) -> None:
    said = json.loads(python(FAULT, out).splitlines()[-1])
    assert "fault" in str(said["variant"])
    assert said["message"].startswith("toy_rows: fibc_toy_")
    assert "CUDA_ERROR_" in said["message"]
    assert said["state"] == "broken"
    assert said["raised"] == 1
    assert said["after"] == "broken"


FAULT = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import torch, fibc_toy_rows as op
fault, plain = torch.ones(133, 10, device="cuda"), torch.ones(4, 10, device="cuda")
op.run(plain)
variant = op.explain(fault)["variant"]
message = ""
try:
    op.run(fault)
    ends = time.monotonic() + 20
    while time.monotonic() < ends:  # the error comes up at a later launch, milliseconds after
        op.run(plain)
        time.sleep(0.01)
except RuntimeError as error:
    message = str(error)
try:
    op.run(plain)
    after = "served"
except RuntimeError:
    after = next(reason for reason in op.stats()["native"])
state = op.environment["devices"]["cuda:0"]["reason"]
said = {"variant": variant, "message": message, "state": state, "after": after, "raised": op.stats()["raised"]}
print(json.dumps(said), flush=True)
os._exit(0)  # tensors cannot be freed any more
"""


def test_a_forked_child_is_native_and_its_error_is_torchs(out: Path) -> None:
    said = python(FORK, out)
    assert "forked" in said
    assert "RuntimeError" in said


FORK = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch, fibc_toy_rows as op
x = torch.ones(4, 10, device="cuda")
op.run(x)
if os.fork() == 0:
    print(op.explain(x)["reason"], flush=True)
    try:
        op.run(x)
    except Exception as error:
        print(type(error).__mro__, flush=True)
    os._exit(0)
os.wait()
"""


# ---- the harness ----------------------------------------------------------------------------------------------------


def test_the_harness_calls_candidates_as_a_module_does(built: Any, library: Path) -> None:
    x = matrix(33)
    for name in ("rows", "split", "cluster"):
        if name == "cluster":
            x = matrix(34)
        candidate = built.bind(str(library), f"fibc_toy_{name}", encode(toys.ROWS_SPEC), "cuda")
        assert torch.equal(candidate(x), x.sum(-1) + MARKS[name])
        y = torch.empty(len(x), device="cuda")
        candidate.run_out(x, y)
        assert torch.equal(y, x.sum(-1) + MARKS[name])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            built.call_many(candidate.run_out, [(x, y)], 0, 10)
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, x.sum(-1) + MARKS[name])
    with pytest.raises(RuntimeError, match="toy_rows: run: a tensor is on another kind of device"):
        candidate(x.cpu())
    refuses = built.bind(str(library), "fibc_toy_refuses", encode(toys.ROWS_SPEC), "cuda:0")
    with pytest.raises(RuntimeError, match="toy_rows: run: the variant declined the call"):
        refuses(x)


# ---- host cost ------------------------------------------------------------------------------------------------------


def test_the_host_cost_of_a_call_is_that_of_its_launch(op: ModuleType, built: Any, library: Path) -> None:
    idle, y = matrix(140, 8), torch.empty(140, device="cuda")
    split, z = matrix(5, 8), torch.empty(5, device="cuda")
    candidate = built.bind(str(library), "fibc_toy_idle", encode(toys.ROWS_SPEC), "cuda").run_out
    costs = {
        "run_out, no workspace": host_us(lambda: op.run_out(idle, y)),
        "run_out, workspace": host_us(lambda: op.run_out(split, z)),
        "run": host_us(lambda: op.run(idle)),
        "harness run_out": host_us(lambda: candidate(idle, y)),
        "torch.empty": host_us(lambda: torch.empty(140, device="cuda")),
        "torch.add(out=)": host_us(lambda: torch.add(y, 1, out=y)),
        "a Python lambda": host_us(lambda: None),
    }
    native = op._generation._native
    print(f"\nhost us a call ({'torch_abi' if native.uses_torch_abi() else 'dlpack'}): {costs}")
    if native.uses_torch_abi():
        assert costs["run_out, no workspace"] < costs["torch.add(out=)"]

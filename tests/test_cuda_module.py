"""A generated module for GPUs where there is none: it imports, is all native and says why; and over a fake driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
import toys

from fibc import toolchain
from fibc.codegen import harness
from fibc.explain import CallExplained, explain
from fibc.paths import INCLUDE
from fibc.runtime import load, oracle, read_table
from fibc.schema.codec import encode
from fibc.schema.silicon import CudaValidity

H200 = CudaValidity("sm_90a", 90, 132, 60 << 20, 150 * 10**9)
FAKE_H200 = "90,132,62914560,150000000000"


@pytest.fixture(scope="session")
def package(toy_packages: toys.Packages) -> Path:
    """The row sums, with an image that nobody can load."""
    root = toy_packages.out.parent
    with filelock.FileLock(root / "cuda.lock"):
        if not (toy_packages.out / "fibc_toy_rows").exists():
            kernels = toys.compile_cuda_launchers(root, b"no device code")
            toys.publish(toys.rows_table(H200), toy_packages.out, toy_packages.cache, kernels)
    return toy_packages.out / "fibc_toy_rows"


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a libcuda.so.1."""
    if torch.version.cuda is not None:
        pytest.skip("torch with CUDA asks the driver for its own needs, and the fake one answers fibc alone")
    directory = tmp_path_factory.mktemp("driver")
    source = Path(__file__).parent / "cpp" / "fake_cuda.cpp"
    command: list[str | Path] = [
        toolchain.find().cxx,
        "-std=c++17",
        f"-I{INCLUDE}",
        "-shared",
        "-fPIC",
        source,
        "-o",
        directory / "libcuda.so.1",
    ]
    subprocess.run(command, check=True)
    return directory


def ask(
    package: Path, fake_driver: Path, script: str, *, gpus: str = FAKE_H200, ordered: bool = False, **variables: str
) -> tuple[list[str], Any]:
    """Run ``script`` where ``op`` is the module; return what the driver was asked, and ``said`` with the warnings."""
    text = f"""
import json, os, sys, warnings
sys.path[:0] = [{str(package.parent)!r}, {str(Path(__file__).parent)!r}]
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import fibc_toy_rows as op
    sys.stdout.flush()
    said = None
{_indented(script)}
print(json.dumps([said, [str(warning.message) for warning in caught]]))
"""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(fake_driver), "FAKE_GPUS": gpus, **variables}
    done = subprocess.run(
        [sys.executable, "-u", "-c", text], capture_output=True, text=True, check=False, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    *asked, last = done.stdout.splitlines()
    return asked if ordered else sorted(asked), json.loads(last)


def _indented(script: str) -> str:
    return "\n".join(f"    {line}" for line in script.strip().splitlines())


def test_without_a_driver_everything_is_native_and_says_why(package: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA driver")
    with pytest.warns(RuntimeWarning, match=r"fibc_toy_rows: needs a CUDA driver, found no usable libcuda\.so\.1"):
        module = load(package)
    x = torch.randn(4, 33)
    torch.testing.assert_close(module.run(x), x.sum(-1))
    out = torch.empty(4)
    module.run_out(x, out)
    torch.testing.assert_close(out, x.sum(-1))
    assert module.stats()["native"] == {"driver": 2}
    environment = module.environment
    assert (environment["reason"], environment["accepted"], environment["devices"]) == ("driver", False, {})
    assert environment["why"] == "no CUDA driver in this process (libcuda.so.1)"
    assert environment["here"]["cuda_driver"] is None
    assert environment["recorded"]["num_sms"] == 132
    assert module.explain(x)["reason"] == "driver"
    assert (module.prepare(), module.prepare("cpu"), module.prepare(0)) == (False, False, False)
    assert module.table()["validity"]["arch"] == "sm_90a"


def test_the_table_is_read_back_with_its_silicon(package: Path) -> None:
    table = read_table(package)
    assert table.validity == H200
    assert table == toys.rows_table(H200)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch would meet the fake driver as well")
def test_prepare_loads_every_variant_on_that_gpu_once(package: Path, fake_driver: Path) -> None:
    asked, (said, warned) = ask(
        package,
        fake_driver,
        """
before = dict(op.environment["devices"])
said = [before, op.prepare(1), op.prepare("cuda:1"), op.prepare(torch.device("cuda", 1)), op.prepare("cpu"),
        op.prepare(), op.environment["devices"], op.environment["reason"], op.environment["here"]["cuda_driver"]]
""",
        gpus=f"{FAKE_H200};{FAKE_H200}",
    )
    assert not warned
    before, *answers, devices, reason, driver = said
    assert before == {}
    assert answers == [True, True, True, False, False]  # this torch knows no current GPU
    assert (reason, driver) == ("hit", "12.8")
    assert list(devices) == ["cuda:1"]
    assert devices["cuda:1"]["reason"] == "hit"
    assert devices["cuda:1"]["num_sms"] == 132
    assert devices["cuda:1"]["memory_bytes"] == 150000000000
    # one load per kernel (five: "refuses" shares that of "rows"), one context, 100 KiB of shared memory asked for
    assert asked == ["attribute 8 102400", "init", *["load on 1"] * 5, "retain 1"]


def test_import_touches_nothing_of_the_driver(package: Path, fake_driver: Path) -> None:
    asked, (said, warned) = ask(package, fake_driver, "said = op.environment['reason']")
    assert (asked, said, warned) == ([], "hit", [])


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("gpu", "reason", "message"),
    [
        ("100,148,132644864,190000000000", "arch", "needs compute capability 9.0, found 10.0 (tune on this GPU)"),
        (
            "90,16,8388608,18000000000",  # a MIG slice
            "silicon",
            "was tuned on 132 SMs, 60 MiB of L2 and 139.7 GiB, found 16 SMs, 8 MiB of L2 and 16.8 GiB "
            "(tune on this GPU, or accept another one of the same compute capability with FIBC_ACCEPT_GPU=1)",
        ),
    ],
)
def test_another_gpu_is_native_and_is_told_once(
    package: Path, fake_driver: Path, gpu: str, reason: str, message: str
) -> None:
    script = "said = [op.prepare(0), op.prepare(0), op.environment['devices']['cuda:0']]"
    asked, (said, warned) = ask(package, fake_driver, script, gpus=gpu)
    assert said[:2] == [False, False]
    assert (said[2]["reason"], said[2]["compute_capability"]) == (reason, int(gpu.partition(",")[0]))
    assert warned == [f"fibc_toy_rows: cuda:0: {message}; every call goes to the native kernel, x.float().sum(-1)"]
    assert asked == ["init"]  # no context, no code
    _, (accepted, _) = ask(package, fake_driver, script, gpus=gpu, FIBC_ACCEPT_GPU="1")
    assert accepted[0] is (reason == "silicon")


@pytest.mark.e2e
def test_code_that_does_not_load_is_told_with_the_variant(package: Path, fake_driver: Path) -> None:
    script = "said = [op.prepare(0), op.environment['devices']['cuda:0']]"
    _, (said, warned) = ask(package, fake_driver, script, FAKE_LOAD="209")
    assert (said[0], said[1]["reason"], said[1]["variant"]) == (False, "load", "fibc_toy_cluster")
    assert "cuda:0: loads no code there: fibc_toy_cluster" in warned[0]
    _, (said, warned) = ask(package, fake_driver, "said = [op.prepare(5), op.environment['devices']['cuda:5']]")
    assert (said[0], said[1]["reason"], said[1]["error"]) == (False, "load", "CUDA_ERROR_101")
    assert "cuda:5: loads no code there: CUDA_ERROR_101" in warned[0]


@pytest.mark.e2e
def test_an_error_while_loading_is_raised_and_opens_the_breaker(package: Path, fake_driver: Path) -> None:
    _, (said, warned) = ask(
        package,
        fake_driver,
        """
try:
    op.prepare(0)
except RuntimeError as error:
    said = [str(error), op.prepare(0), op.environment["devices"]["cuda:0"]["reason"]]
""",
        FAKE_LOAD="700",
    )
    assert said[0].startswith("toy_rows: fibc_toy_cluster on cuda:0: the GPU reported an error")
    assert said[1:] == [False, "broken"]
    assert not warned


@pytest.mark.e2e
def test_a_tensor_elsewhere_is_native_and_counted(package: Path, fake_driver: Path) -> None:
    asked, (said, _) = ask(
        package,
        fake_driver,
        """
x = torch.randn(4, 8)
said = [torch.equal(op.run(x), x.sum(-1)), op.explain(x)["reason"], op.stats()["native"]]
said += [op.run(torch.empty(0, 8)).shape, torch.equal(torch.ops.fibc.toy_rows(x), x.sum(-1))]
""",
    )
    assert said == [True, "device", {"device": 1}, [0], True]
    assert asked == []


@pytest.mark.e2e
def test_a_forked_child_does_not_use_its_parents_driver(package: Path, fake_driver: Path) -> None:
    _, (said, _) = ask(
        package,
        fake_driver,
        """
op.prepare(0)
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, json.dumps([op.prepare(0), op.prepare(1)]).encode())
    os._exit(0)
said = json.loads(os.read(reader, 100))
said.append(op.prepare(0))
""",
        gpus=f"{FAKE_H200};{FAKE_H200}",
    )
    assert said == [False, False, True]


@pytest.mark.e2e
def test_a_child_forked_before_may_use_the_driver(package: Path, fake_driver: Path) -> None:
    _, (said, _) = ask(
        package,
        fake_driver,
        """
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, json.dumps(op.prepare(0)).encode())
    os._exit(0)
said = json.loads(os.read(reader, 100))
""",
    )
    assert said is True


def test_the_oracle_knows_a_table_for_gpus(package: Path) -> None:
    table = read_table(package)
    x = oracle.TensorFacts((4, 8), (8, 1), "float32", "cuda:0")
    around = oracle.Surroundings(isa=())
    assert oracle.choose(table, [x], around).reason == "hit"
    assert oracle.choose(table, [replace(x, device="cpu")], around).reason == "device"
    assert oracle.choose(table, [x], replace(around, devices={"cuda:0": "silicon"})).reason == "silicon"


def test_a_call_of_a_gpu_table_is_explained_on_any_machine(package: Path) -> None:
    said = explain(package, {"M": 4, "H": 10})
    assert isinstance(said, CallExplained)
    assert (said.serves, said.reason) == ("toy/fibc_toy_rows(block_m=4)", "shown")


# ---- tensors on a GPU that does not exist: nothing is computed, everything else is as on a real one ------------------

FAKE_TENSORS = """
import ctypes
from fake_gpu import FakeGpu
driver = ctypes.CDLL("libcuda.so.1")
def set_driver(name, value, kind=ctypes.c_int):
    kind.in_dll(driver, name).value = value
gpu = FakeGpu()
native = op._generation._native
op.set_native(lambda x: "native", lambda x, y: None)
def say(*words):
    print(*words, flush=True)
def counted():
    stats = op.stats()
    return {**{name: n for name, n in stats["hits"].items() if n}, **stats["native"], "raised": stats["raised"]}
"""


def drive(package: Path, fake_driver: Path, script: str, *, gpus: str = FAKE_H200) -> tuple[list[str], Any, list[str]]:
    """Run ``script`` with fake tensors; return what was printed, in order, then ``said`` and the warnings."""
    asked, (said, warned) = ask(package, fake_driver, FAKE_TENSORS + script, gpus=gpus, ordered=True)
    return asked, said, warned


def test_a_call_on_a_gpu_is_launched_as_its_variant_says(package: Path, fake_driver: Path) -> None:
    asked, said, warned = drive(
        package,
        fake_driver,
        """
for rows in (4, 66, 130, 1000):
    say("rows", rows)
    op.run_out(gpu.tensor(rows, 10), gpu.tensor(rows))
op.run_out(gpu.tensor(4, 10), gpu.tensor(4, index=1))
said = [counted(), list(op.environment["devices"]), op.explain(gpu.tensor(4, 10))["served"]]
""",
    )
    assert not warned
    assert said == [
        {"fibc_toy_rows": 1, "fibc_toy_cluster": 1, "kernel": 1, "region": 1, "devices": 1, "raised": 0},
        ["cuda:0"],
        "fibc_toy_rows",
    ]
    loading = [line for line in asked if line.startswith(("init", "retain", "load", "attribute"))]
    assert loading == asked[1 : 1 + len(loading)]  # all of it at the first call
    assert [line for line in asked if line not in loading] == [
        "rows 4",
        "launch 4 1 1 x 128, shared 512, stream 7, gpu 0",
        "rows 66",
        "launch 66 1 1 x 128, shared 102400, stream 7, gpu 0, attribute 4, attribute 6",
        "rows 130",
        "rows 1000",
    ]


@pytest.mark.e2e
def test_each_gpu_is_prepared_and_its_context_current(package: Path, fake_driver: Path) -> None:
    asked, said, _ = drive(
        package,
        fake_driver,
        """
for index in (0, 1, 1, 0):
    op.run_out(gpu.tensor(4, 10, index=index), gpu.tensor(4, index=index))
said = [counted(), list(op.environment["devices"])]
""",
        gpus=f"{FAKE_H200};{FAKE_H200}",
    )
    assert said == [{"fibc_toy_rows": 4, "raised": 0}, ["cuda:0", "cuda:1"]]
    assert [line[-5:] for line in asked if line.startswith("launch")] == ["gpu 0", "gpu 1", "gpu 1", "gpu 0"]
    assert [line for line in asked if line.startswith("retain")] == ["retain 0", "retain 1"]


@pytest.mark.e2e
def test_a_first_call_under_capture_is_native_and_the_next_one_loads(package: Path, fake_driver: Path) -> None:
    asked, said, _ = drive(
        package,
        fake_driver,
        """
driver.fake_make_current(0)
set_driver("fake_capture", 5, ctypes.c_ulonglong)
op.run_out(gpu.tensor(4, 10), gpu.tensor(4))
said = [counted()]
set_driver("fake_capture", 0, ctypes.c_ulonglong)
op.run_out(gpu.tensor(4, 10), gpu.tensor(4))
set_driver("fake_capture", 6, ctypes.c_ulonglong)
op.run_out(gpu.tensor(4, 10), gpu.tensor(4))
said += [counted(), op.explain(gpu.tensor(4, 10))["reason"]]
""",
    )
    assert said == [{"unprepared": 1, "raised": 0}, {"fibc_toy_rows": 2, "unprepared": 1, "raised": 0}, "hit"]
    assert sum(line.startswith("launch") for line in asked) == 2


def test_outputs_and_workspaces_come_from_torch(package: Path, fake_driver: Path) -> None:
    """Through DLPack alone, whose allocator can be replaced."""
    asked, said, _ = drive(
        package,
        fake_driver,
        """
native.use_torch_abi(False)
y = op.run(gpu.tensor(8, 10))
said = [[list(y.shape), str(y.device), y.data_ptr() > 0], list(gpu.allocated)]
op.run(gpu.tensor(16, 10))
gpu.stream = 9
op.run(gpu.tensor(8, 10))
said += [gpu.allocated[2:], gpu.num_freed]
say("capture")
set_driver("fake_capture", 5, ctypes.c_ulonglong)
z = op.run(gpu.tensor(8, 10))
op.run(gpu.tensor(8, 10))
said += [gpu.allocated[5:], gpu.num_freed, counted()]
""",
    )
    first, allocated, more, freed, captured, freed_later, counts = said
    workspace = 65536 + (1 << 19)
    assert first == [[8], "cuda:0", True]
    assert allocated == [32, workspace]
    assert more == [64, 32, workspace]  # the same stream's workspace serves again, another stream has its own
    assert freed == 2  # the two outputs that were dropped
    assert captured == [32, 8 * 4 * 4, 32, 8 * 4 * 4]  # scratch alone: counters are the graph's own
    assert freed_later == freed + 3
    assert counts == {"fibc_toy_split": 5, "raised": 0}
    eager, graph = asked[: asked.index("capture")], asked[asked.index("capture") :]
    assert [line for line in eager if line.startswith("memset")] == ["memset 65536"] * 2
    assert graph[1:] == [
        f"allocate {32 * 65536}",
        f"memset {32 * 65536}",  # beside the capture, on a stream of its own
        "retain counters",
        "launch 8 4 1 x 128, shared 512, stream 9, gpu 0",
        "launch 8 4 1 x 128, shared 512, stream 9, gpu 0",
    ]


@pytest.mark.e2e
def test_no_memory_for_an_output_or_a_workspace_is_native(package: Path, fake_driver: Path) -> None:
    _, said, _ = drive(
        package,
        fake_driver,
        """
said = [op.run(gpu.tensor(4, 10))]  # torch's own allocator has no GPU
op.run_out(gpu.tensor(8, 10), gpu.tensor(8))
said.append(counted())
""",
    )
    assert said == ["native", {"allocation": 1, "workspace": 1, "raised": 0}]


def test_a_device_error_is_raised_once_and_no_variant_is_tried_again(package: Path, fake_driver: Path) -> None:
    asked, said, warned = drive(
        package,
        fake_driver,
        """
x, y = gpu.tensor(4, 10), gpu.tensor(4)
op.run_out(x, y)
set_driver("fake_launch_result", 700)
set_driver("fake_query_result", 700)
try:
    op.run_out(x, y)
except RuntimeError as error:
    said = [str(error)]
set_driver("fake_launch_result", 0)
op.run_out(x, y)
said += [counted(), op.environment["devices"]["cuda:0"], op.explain(x)["why"], op.prepare(0)]
""",
    )
    message, counts, device, why, prepared = said
    assert message == (
        "toy_rows: fibc_toy_rows on cuda:0: the GPU reported CUDA_ERROR_700 (CUDA_ERROR_700) at this launch, of this "
        "kernel or of one before it; nothing runs on it in this process any more (start another one; "
        "CUDA_LAUNCH_BLOCKING=1 names the kernel)"
    )
    assert counts == {"fibc_toy_rows": 1, "broken": 1, "raised": 1}
    assert (device["reason"], device["error"], device["variant"]) == ("broken", "CUDA_ERROR_700", "fibc_toy_rows")
    assert why == "the GPU reported an error before: no variant is tried again"
    assert prepared is False
    assert not warned
    assert sum(line.startswith("launch") for line in asked) == 2


@pytest.mark.e2e
def test_a_refused_launch_is_native(package: Path, fake_driver: Path) -> None:
    _, said, _ = drive(
        package,
        fake_driver,
        """
set_driver("fake_launch_result", 701)
op.run_out(gpu.tensor(4, 10), gpu.tensor(4))
said = counted()
""",
    )
    assert said == {"kernel": 1, "raised": 0}


@pytest.mark.e2e
def test_other_silicon_is_warned_of_at_the_first_call(package: Path, fake_driver: Path) -> None:
    asked, said, warned = drive(
        package,
        fake_driver,
        """
x, y = gpu.tensor(4, 10), gpu.tensor(4)
said = [op.explain(x)["reason"], dict(op.environment["devices"])]
op.run_out(x, y)
op.run_out(x, y)
said += [counted(), list(op.environment["devices"])]
""",
        gpus="90,66,62914560,150000000000",
    )
    assert said == ["silicon", {}, {"silicon": 2, "raised": 0}, ["cuda:0"]]  # to explain is not to call
    assert len(warned) == 1
    assert "was tuned on 132 SMs" in warned[0]
    assert not [line for line in asked if line.startswith(("retain", "load", "launch"))]


@pytest.mark.e2e
def test_the_harness_calls_on_a_gpu_as_a_module_does(
    package: Path, fake_driver: Path, toy_packages: toys.Packages, tmp_path: Path
) -> None:
    library = tmp_path / "rows.so"
    kernels = toys.compile_cuda_launchers(tmp_path, b"no device code")
    link = ["-shared", "-nostartfiles", "-Wl,-z,defs"]
    subprocess.run([toolchain.find().cxx, *link, kernels, "-o", library, "-lc", "-ldl"], check=True)
    built = harness.build(toy_packages.cache)
    asked, said, _ = drive(
        package,
        fake_driver,
        f"""
import importlib.util
from pathlib import Path
spec = importlib.util.spec_from_file_location("_harness", {str(built)!r})
harness = importlib.util.module_from_spec(spec)
spec.loader.exec_module(harness)
def bind(name, device="cuda:0"):
    return harness.bind({str(library)!r}, name, {encode(toys.ROWS_SPEC)!r}, device)
x, y = gpu.tensor(4, 10), gpu.tensor(4)
rows = bind("fibc_toy_rows")
rows.run_out(x, y)
harness.call_many(rows.run_out, [(x, y)], 0, 2)
said = []
def fails(call):
    try:
        call()
    except Exception as error:
        said.append(f"{{type(error).__name__}}: {{error}}")
fails(lambda: bind("fibc_toy_refuses").run_out(x, y))
fails(lambda: rows(torch.ones(4, 10)))
fails(lambda: bind("fibc_toy_rows", "cuda:1"))
set_driver("fake_launch_result", 719)
fails(lambda: rows.run_out(x, y))
fails(lambda: rows.run_out(x, y))
""",
    )
    assert said[:3] == [
        "RuntimeError: toy_rows: run_out: the variant declined the call",
        "RuntimeError: toy_rows: run: a tensor is on another kind of device",
        "RuntimeError: toy_rows: bind: the variant's code does not load on the GPU, or calls another version of a "
        "library",
    ]
    assert said[3].startswith("RuntimeError: toy_rows: fibc_toy_rows on cuda:0: the GPU reported an error")
    assert said[4] == "RuntimeError: toy_rows: run_out: the GPU reported an error before: no variant is tried again"
    assert [line for line in asked if line.startswith("launch")] == [
        "launch 4 1 1 x 128, shared 512, stream 7, gpu 0"
    ] * 4

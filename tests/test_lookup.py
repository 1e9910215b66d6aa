"""The C++ dispatch and its Python oracle decide alike: over made-up tables, and over real tensors and a real module."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import toys
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from fibc import toolchain
from fibc.paths import INCLUDE
from fibc.runtime import oracle, read_table
from fibc.runtime.oracle import Choice, Surroundings, TensorFacts
from fibc.schema.callspec import Argument, Axis, CallSpec
from fibc.schema.candidate import Guards, TensorGuard
from fibc.schema.feature import Cell, Feature
from fibc.schema.silicon import CudaValidity
from fibc.schema.table import CpuValidity, DispatchTable, Region

DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
"""In the order of ``fibc/dtype.h``."""

ISA = ("avx2", "avx512", "avx512_bf16", "amx_bf16", "avx999")
KINDS = ("tensor", "scalar", "scalar_tensor")
LAYOUTS = ("contiguous", "rows", "any")
DEVICES = {"cpu": (1, 0), "cuda:0": (2, 0), "cuda:1": (2, 1), "cuda:2": (2, 2), "xpu:0": (0, 0)}
"""Type and index, as ``fibc/call.h`` has them."""

GPU = CudaValidity("sm_90a", 90, 132, 60 << 20, 139 << 30)
BASE = toys.gemm_table()
HERE = Surroundings(isa=("avx2", "avx512"))

Probe = Callable[[DispatchTable, Sequence[TensorFacts]], Choice]


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    path = tmp_path_factory.mktemp("probe") / "probe.so"
    source = Path(__file__).parent / "cpp" / "probe.cpp"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-I{INCLUDE}"]
    subprocess.run([toolchain.find().cxx, *flags, source, "-o", path], check=True)
    library = ctypes.CDLL(str(path))
    library.fibc_probe_word.restype = ctypes.c_char_p

    def choose(table: DispatchTable, inputs: Sequence[TensorFacts]) -> Choice:
        words = encode(table, inputs)
        axes = (ctypes.c_int64 * max(1, len(table.spec.axes)))()
        region = ctypes.c_int32()
        reason = library.fibc_probe((ctypes.c_int64 * len(words))(*words), axes, ctypes.byref(region))
        word = library.fibc_probe_word(reason).decode()
        sizes = {axis.name: axes[i] for i, axis in enumerate(table.spec.axes)}
        unbound = word in ("device", "devices", "dtype", "rank", "shape", "no_data")
        return Choice(word, None if region.value < 0 else region.value, None if unbound else sizes)

    return choose


def encode(table: DispatchTable, inputs: Sequence[TensorFacts]) -> list[int]:
    """Return table and call as the probe reads them."""
    spec = table.spec
    index = {axis.name: i for i, axis in enumerate(spec.axes)}
    words = [len(spec.axes), *(-1 if axis.value is None else axis.value for axis in spec.axes)]
    for arguments in (spec.inputs, spec.outputs):
        words.append(len(arguments))
        for argument in arguments:
            words += [KINDS.index(argument.kind), DTYPES.index(argument.dtype), len(argument.axes), *argument.axes]
    words.append(len(table.features))
    for feature in table.features:
        words += [index[feature.numerator], -1 if feature.denominator is None else index[feature.denominator]]
    words.append(len(table.regions))
    for region in table.regions:
        words += [*(bound for pair in region.cell.bounds for bound in pair), region.variant]
    words.append(len(table.variants))
    for variant in table.variants:
        words.append(ISA.index(variant.isa))
        for guard in variant.guards.inputs:
            words += [LAYOUTS.index(guard.layout), guard.alignment_bytes]
        words.append(variant.guards.max_offset_elems)
    words.append(int(isinstance(table.validity, CudaValidity)))
    words += [int(level in HERE.isa) for level in ("avx2", "avx512")]
    for tensor in inputs:
        words += [len(tensor.shape), *tensor.shape, *tensor.strides]
        words += [DTYPES.index(tensor.dtype) if tensor.dtype else -1, *DEVICES[tensor.device], tensor.address]
    return words


# ---- made-up tables ------------------------------------------------------------------------------------------------

sizes = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 0])


@st.composite
def tables(draw: st.DrawFn) -> DispatchTable:
    """A table over two or three axes with one or two features and disjoint, sorted regions."""
    axes = (Axis("M", None), Axis("N", None), *draw(st.sampled_from([(), (Axis("K", 4),), (Axis("K", None),)])))
    axis_lists = st.lists(st.integers(0, len(axes) - 1), max_size=3).map(tuple)
    dtypes = st.sampled_from(DTYPES[:3])
    every_axis = tuple(draw(st.permutations(range(len(axes)))))  # else an axis may stay unknown
    lists = draw(st.sampled_from([[every_axis], [every_axis, draw(axis_lists)], [draw(axis_lists), draw(axis_lists)]]))
    inputs = tuple(Argument(f"i{i}", "tensor", draw(dtypes), axis_list) for i, axis_list in enumerate(lists))
    outputs = tuple(Argument(f"o{i}", "tensor", draw(dtypes), draw(axis_lists)) for i in range(draw(st.integers(1, 2))))
    names = [axis.name for axis in axes]
    features = tuple(
        Feature(draw(st.sampled_from(names)), draw(st.sampled_from([None, *names])), (9,))
        for _ in range(draw(st.integers(1, 2)))
    )
    cuts = [sorted({1} | draw(st.sets(st.integers(1, 8), max_size=3))) for _ in features]
    boxes: list[tuple[tuple[int, int], ...]] = [()]
    for edges in cuts:
        cells = [(low, high - 1) for low, high in itertools.pairwise(edges)] + [(edges[-1], 9)]
        boxes = [(*box, cell) for box in boxes for cell in cells]
    guards = st.builds(TensorGuard, st.sampled_from(LAYOUTS), st.sampled_from([1, 4, 16, 64]))
    base = BASE
    variants = tuple(
        replace(
            base.variants[0],
            isa=draw(st.sampled_from(["avx2", "avx2", "avx2", "avx512", "avx512_bf16", "avx999"])),
            guards=Guards(
                tuple(draw(guards) for _ in inputs),
                tuple(draw(guards) for _ in outputs),
                draw(st.sampled_from([5, 40, 2**40])),
            ),
        )
        for _ in range(draw(st.integers(1, 2)))
    )
    kept = sorted(box for box in boxes if draw(st.integers(0, 3)))
    regions = tuple(Region(Cell(box), draw(st.integers(0, len(variants) - 1)), False) for box in kept)
    spec = CallSpec("made_up", axes, inputs, outputs)
    validity = draw(st.sampled_from([base.validity, GPU]))
    return replace(base, spec=spec, features=features, variants=variants, rows=(), regions=regions, validity=validity)


def strides_of(draw: st.DrawFn, shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, at times padded, expanded, permuted or free."""
    strides: list[int] = []
    expected = 1
    for size in reversed(shape):
        strides.insert(0, expected)
        expected *= max(size, 1)
    kind = draw(st.sampled_from(["plain", "plain", "padded", "free"]))
    if kind == "padded" and len(shape) > 1:
        strides = [stride * 3 for stride in strides[:-1]] + strides[-1:]
    elif kind == "free":
        strides = [draw(st.sampled_from([stride, 0, 1, 7])) for stride in strides]
    return tuple(
        999 if size == 1 and draw(st.booleans()) else stride for size, stride in zip(shape, strides, strict=True)
    )


@st.composite
def calls(draw: st.DrawFn) -> tuple[DispatchTable, list[TensorFacts]]:
    """A table and inputs that mostly fit its convention, so that every reason comes up."""
    table = draw(tables())
    chosen = [axis.value if axis.value is not None else draw(sizes) for axis in table.spec.axes]
    faulty = draw(st.sampled_from([None, None, None, *range(len(table.spec.inputs))]))
    device = "cpu" if isinstance(table.validity, CpuValidity) else draw(st.sampled_from(["cuda:0", "cuda:1"]))
    inputs = []
    for index, argument in enumerate(table.spec.inputs):
        fault = (
            draw(st.sampled_from(["size", "rank", "dtype", "device", "other gpu", "unknown", "memory"]))
            if index == faulty
            else ""
        )
        shape = [chosen[axis] for axis in argument.axes]
        if fault == "size" and shape:
            shape[draw(st.integers(0, len(shape) - 1))] = draw(sizes)
        if fault == "rank":
            shape.append(1)
        inputs.append(
            TensorFacts(
                shape=tuple(shape),
                strides=strides_of(draw, shape),
                dtype={"dtype": "int8", "unknown": ""}.get(fault, argument.dtype),
                device={"device": "xpu:0", "other gpu": "cuda:2"}.get(fault, device),
                address=0 if fault == "memory" else draw(st.sampled_from([4096, 4096, 4096, 4100, 4098])),
            )
        )
    return table, inputs


@settings(max_examples=300)
@given(calls())
def test_cpp_and_oracle_decide_alike(probe: Probe, call: tuple[DispatchTable, list[TensorFacts]]) -> None:
    table, inputs = call
    assert probe(table, inputs) == oracle.choose(table, inputs, HERE)


@pytest.mark.parametrize(
    "reason",
    [
        "hit", "device", "devices", "dtype", "rank", "shape", "no_data", "empty", "empty_input", "region",
        "variant_isa", "layout", "offset", "alignment",
    ],
)  # fmt: skip
def test_the_made_up_calls_reach_every_reason(reason: str) -> None:
    quick = settings(max_examples=3000, phases=[Phase.generate], database=None, derandomize=True)  # one must be found
    found = find(calls(), lambda call: oracle.choose(call[0], call[1], HERE).reason == reason, settings=quick)
    assert oracle.choose(found[0], found[1], HERE).reason == reason


@pytest.mark.parametrize(
    ("rows", "region"), [(1, 0), (4, 0), (5, 1), (64, 1), (65, 2), (128, 2), (129, None), (2**40, None)]
)
def test_both_ends_of_a_region_belong_to_it(probe: Probe, rows: int, region: int | None) -> None:
    table = toys.gemm_table()
    a = TensorFacts((rows, toys.GEMM_K), (toys.GEMM_K, 1), "float32")
    b = TensorFacts((toys.GEMM_N, toys.GEMM_K), (toys.GEMM_K, 1), "float32")
    assert probe(table, [a, b]).region == region
    assert oracle.find_region(table, {"M": rows, "N": toys.GEMM_N, "K": toys.GEMM_K}) == region


@pytest.mark.parametrize(("last", "reason"), [(2**31 - 1, "hit"), (2**31, "offset")])
def test_offsets_are_bounded_where_the_variant_computes_in_int32(probe: Probe, last: int, reason: str) -> None:
    table = toys.gemm_table()
    variants = tuple(replace(v, guards=replace(v.guards, max_offset_elems=2**31 - 1)) for v in table.variants)
    table = replace(table, variants=variants)
    a = TensorFacts((6, toys.GEMM_K), ((last - toys.GEMM_K + 1) // 5, 1), "float32")
    top = 5 * a.strides[0] + toys.GEMM_K - 1
    b = TensorFacts((toys.GEMM_N, toys.GEMM_K), (toys.GEMM_K, 1), "float32")
    if reason == "hit":
        assert top <= last
    else:
        a = replace(a, strides=(a.strides[0] + 1, 1))
    assert probe(table, [a, b]).reason == oracle.choose(table, [a, b], HERE).reason == reason


# ---- a real module and real tensors --------------------------------------------------------------------------------

TORCH_NAMES = {getattr(torch, name): name for name in DTYPES}


def facts_of(tensor: torch.Tensor) -> TensorFacts:
    return TensorFacts(
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        dtype=TORCH_NAMES.get(tensor.dtype, ""),
        device=tensor.device.type,
        address=tensor.data_ptr(),
        requires_grad=tensor.requires_grad,
        negative=tensor.is_neg(),
    )


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """A view into a large buffer: any size, offset and row stride, some transposed, some of another dtype."""
    rows, columns = draw(st.sampled_from([0, 1, 2, 4, 5, 64, 65, 129])), draw(st.sampled_from([toys.GEMM_K] * 6 + [7]))
    dtype = draw(st.sampled_from([torch.float32] * 6 + [torch.float64, torch.int32]))
    stride = draw(st.sampled_from([columns, columns, columns + 3, 0, 1]))
    view = torch.empty(4096, dtype=dtype).as_strided((rows, columns), (stride, 1), draw(st.sampled_from([0, 0, 1, 4])))
    if draw(st.integers(0, 9)) == 0:
        view = view.t()
    if dtype.is_floating_point and draw(st.integers(0, 9)) == 0:
        view = view.detach().requires_grad_()
    return torch._neg_view(view) if draw(st.integers(0, 9)) == 0 else view


@pytest.mark.parametrize("torch_abi", [True, False])
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(a=matrices(), grad_mode=st.booleans())
def test_module_and_oracle_decide_alike_on_real_tensors(
    gemm: ModuleType, toy_packages: toys.Packages, torch_abi: bool, a: torch.Tensor, grad_mode: bool
) -> None:
    native = gemm._generation._native
    native.use_torch_abi(torch_abi)
    table = read_table(toy_packages.path("toy_gemm"))
    b = torch.empty(toys.GEMM_N, toys.GEMM_K)
    around = Surroundings(isa=tuple(native.host()["isa"]), grad_mode=grad_mode)
    with torch.set_grad_enabled(grad_mode):
        said = gemm.explain(a, b)
    native.use_torch_abi(True)
    expected = oracle.choose(table, [facts_of(a), facts_of(b)], around)
    region = None if expected.region is None else str(table.regions[expected.region].cell)
    assert (said["reason"], said["region"], said["axes"]) == (expected.reason, region, expected.axes)


def test_module_and_tuner_see_the_same_machine(gemm: ModuleType, toy_packages: toys.Packages) -> None:
    host = gemm._generation._native.host()
    recorded = toys.validity()
    assert (host["model"], tuple(host["isa"])) == (recorded.model, recorded.isa)
    assert (host["l2_bytes"], host["l3_bytes"]) == (recorded.l2_bytes, recorded.l3_bytes)
    table = read_table(toy_packages.path("toy_gemm"))
    assert oracle.check_host(table, host) == "hit"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "other"}, "cpu_model"),
        ({"isa": ()}, "isa"),
        ({"l3_bytes": 1}, "caches"),
    ],
)
def test_the_oracle_knows_what_speaks_against_a_machine(change: dict[str, object], reason: str) -> None:
    table = toys.gemm_table()
    recorded = table.validity
    assert isinstance(recorded, CpuValidity)
    host: dict[str, object] = {
        "model": recorded.model,
        "isa": recorded.isa,
        "l2_bytes": recorded.l2_bytes,
        "l3_bytes": recorded.l3_bytes,
    }
    assert oracle.check_host(table, host | change) == reason
    assert oracle.check_host(table, host | change, accept_cpu=True) == ("isa" if reason == "isa" else "hit")


@pytest.mark.parametrize(
    ("around", "reason"),
    [
        (replace(HERE, enabled=False), "disabled"),
        (replace(HERE, standing="cpu_model"), "cpu_model"),
        (replace(HERE, num_threads=77), "num_threads"),
        (replace(HERE, watched=True), "mode"),
    ],
)
def test_the_oracle_looks_at_the_surroundings_first(around: Surroundings, reason: str) -> None:
    assert oracle.choose(toys.gemm_table(), [None, None], around).reason == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "hit"),
        ({"compute_capability": 100}, "arch"),
        ({"num_sms": 66}, "silicon"),
        ({"l2_bytes": 50 << 20}, "silicon"),
        ({"memory_bytes": (139 << 30) - (4 << 30)}, "hit"),
        ({"memory_bytes": (139 << 30) - (5 << 30)}, "silicon"),
        ({"memory_bytes": (139 << 30) + (5 << 30)}, "silicon"),
    ],
)
def test_a_gpu_is_held_to_the_silicon_that_was_tuned_on(change: dict[str, int], reason: str) -> None:
    here = {"compute_capability": 90, "num_sms": 132, "l2_bytes": 60 << 20, "memory_bytes": 139 << 30}
    assert oracle.check_silicon(GPU, here | change) == reason
    assert oracle.check_silicon(GPU, here | change, accept_gpu=True) == ("arch" if reason == "arch" else "hit")


@pytest.mark.parametrize("reason", ["unprepared", "arch", "broken", "hit"])
def test_the_oracle_looks_at_the_gpu_last(reason: str) -> None:
    table = replace(toys.gemm_table(), validity=GPU)
    a = TensorFacts((4, toys.GEMM_K), (toys.GEMM_K, 1), "float32", "cuda:1")
    b = TensorFacts((toys.GEMM_N, toys.GEMM_K), (toys.GEMM_K, 1), "float32", "cuda:1")
    around = Surroundings(isa=(), devices={"cuda:1": reason})
    assert oracle.choose(table, [a, b], around).reason == reason
    assert oracle.choose(table, [a, replace(b, device="cuda:0")], around).reason == "devices"
    symbol = table.variants[table.regions[0].variant].symbol
    declined = replace(around, declined={"cuda:1": (symbol,)})
    assert oracle.choose(table, [a, b], declined).reason == ("load" if reason == "hit" else reason)
    elsewhere = replace(around, declined={"cuda:0": (symbol,), "cuda:1": ("fibc_another",)})
    assert oracle.choose(table, [a, b], elsewhere).reason == reason

"""A generated module beside everything else that torch does: each case hits, or goes native for its reason."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
import toys
from module_calls import reason_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad as forward_mode
from torch.utils.flop_counter import FlopCounterMode

M, N, K = 4, toys.GEMM_N, toys.GEMM_K

IMPORTS_OF_TORCH = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.script(_method)?` is deprecated:DeprecationWarning")
"""What torch imports when it is first asked for forward mode or a compiled graph: some of its modules still use
TorchScript (torch.utils.mkldnn in 2.10 and 2.11), and warn of it."""


@pytest.fixture(params=["torch_abi", "dlpack"])
def op(request: pytest.FixtureRequest, gemm: ModuleType) -> Iterator[ModuleType]:
    """The toy GEMM, asking torch through its C interface and, as with a torch without one, DLPack and Python."""
    native = gemm._generation._native
    native.use_torch_abi(request.param == "torch_abi")
    assert native.uses_torch_abi() == (request.param == "torch_abi")
    yield gemm
    native.use_torch_abi(True)


class Tagged(Tensor):
    """A subclass."""


def negative(tensor: Tensor) -> Tensor:
    view: Tensor = torch._neg_view(tensor)
    assert view.is_neg()
    return view


def unallocated(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def offset_view(tensor: Tensor) -> Tensor:
    """Return the values at an address that is a multiple of 4 bytes and of no more."""
    moved = torch.empty(tensor.numel() + 1).as_strided(tensor.shape, (tensor.shape[1], 1), 1)
    return moved.copy_(tensor)


A_CASES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "plain": (lambda a: a, "hit"),
    "parameter": (lambda a: torch.nn.Parameter(a, requires_grad=False), "hit"),
    "detached": (lambda a: a.clone().requires_grad_().detach(), "hit"),
    "offset view": (offset_view, "hit"),
    "slice of rows": (lambda a: torch.cat([a, a])[M:], "hit"),
    "strides of a size-1 axis": (lambda a: a[:1].as_strided((1, K), (0, 1)), "hit"),
    "huge stride of a size-1 axis": (lambda a: a[:1].as_strided((1, K), (2**40, 1)), "hit"),
    "requires grad": (lambda a: a.clone().requires_grad_(), "grad"),
    "trainable parameter": (torch.nn.Parameter, "grad"),
    "neg view": (negative, "negative"),
    "neg view through imag": (lambda a: torch.complex(a, -a).conj().imag, "negative"),
    "subclass": (lambda a: a.as_subclass(Tagged), "type"),
    "list": (lambda a: a.tolist(), "type"),
    "none": (lambda a: None, "missing"),
    "sparse": (lambda a: a.to_sparse(), "view"),
    "sparse csr": (lambda a: a.to_sparse_csr(), "view"),
    "nested": (lambda a: torch.nested.nested_tensor([a, a]), "view"),
    "meta": (lambda a: a.to("meta"), "view"),
    "mkldnn": (lambda a: a.to_mkldnn(), "view"),
    "zero tensor": (lambda a: torch._efficientzerotensor((M, K)), "no_data"),
    "storage of no bytes": (lambda a: unallocated(a.clone()), "no_data"),
    "float64": (lambda a: a.double(), "dtype"),
    "bfloat16": (lambda a: a.bfloat16(), "dtype"),
    "complex": (lambda a: a.to(torch.complex64), "dtype"),
    "rank": (lambda a: a[0], "rank"),
    "constant axis": (lambda a: a[:, :-1], "shape"),
    "transposed": (lambda a: a.t().contiguous().t(), "layout"),
    "expanded": (lambda a: a[:1].expand(M, K), "layout"),
    "every other column": (lambda a: torch.cat([a, a], 1)[:, ::2], "layout"),
}
"""How A is made from a plain matrix, and what it comes to. The plain variant takes contiguous memory."""


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support:UserWarning",
    "ignore:Sparse invariant checks:UserWarning",
    "ignore:The PyTorch API of nested tensors:UserWarning",
)
@pytest.mark.parametrize("case", A_CASES)
def test_every_kind_of_tensor_hits_or_goes_native_for_its_reason(op: ModuleType, case: str) -> None:
    make, expected = A_CASES[case]
    a, b = torch.randn(M, K), torch.randn(N, K)
    value = make(a)
    op.set_native(lambda *arguments: arguments)
    result, reason = reason_of(op, lambda: op.run(value, b))
    assert reason == expected
    if expected == "hit":
        torch.testing.assert_close(result, value @ b.T + 1)
    else:
        assert result[0] is value
        assert result[1] is b
    assert op.explain(value, b)["reason"] == expected


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantised_tensor_goes_native(op: ModuleType) -> None:
    op.set_native(lambda a, b: "native")
    quantised = torch.quantize_per_tensor(torch.randn(M, K), 0.1, 0, torch.qint8)
    _, reason = reason_of(op, lambda: op.run(quantised, torch.randn(N, K)))
    assert reason in ("view", "dtype")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_hit_where_no_gradient_is_recorded(op: ModuleType, mode: Callable[[], Any]) -> None:
    a, b = torch.nn.Parameter(torch.randn(M, K)), torch.nn.Parameter(torch.randn(N, K))
    with mode():
        out, reason = reason_of(op, lambda: op.run(a, b))
        assert reason == "hit"
        torch.testing.assert_close(out, a @ b.T + 1)
        assert not out.requires_grad
        assert out.is_inference() == (mode is torch.inference_mode)


def test_a_gradient_flows_through_native(op: ModuleType) -> None:
    a, b = torch.randn(M, K, requires_grad=True), torch.randn(N, K)
    out, reason = reason_of(op, lambda: op.run(a, b))
    assert reason == "grad"
    out.sum().backward()
    torch.testing.assert_close(a.grad, b.sum(0).expand(M, K))


def test_a_tensor_made_in_inference_mode_hits_outside_of_it(op: ModuleType) -> None:
    with torch.inference_mode():
        a, b = torch.randn(M, K), torch.randn(N, K)
    _, reason = reason_of(op, lambda: op.run(a, b))
    assert reason == "hit"


def test_vmap_goes_native_and_is_right(op: ModuleType) -> None:
    a, b = torch.randn(3, M, K), torch.randn(N, K)
    out, reason = reason_of(op, lambda: torch.vmap(lambda one: op.run(one, b))(a))
    assert reason == "view"
    torch.testing.assert_close(out, a @ b.T)


def test_functional_gradients_go_native_and_are_right(op: ModuleType) -> None:
    a, b = torch.randn(M, K), torch.randn(N, K)
    gradient, reason = reason_of(op, lambda: torch.func.grad(lambda one: op.run(one, b).sum())(a))
    assert reason in ("view", "grad", "no_data")
    torch.testing.assert_close(gradient, b.sum(0).expand(M, K))


@IMPORTS_OF_TORCH
def test_forward_mode_goes_native_and_keeps_the_tangent(op: ModuleType) -> None:
    a, b, tangent = torch.randn(M, K), torch.randn(N, K), torch.randn(M, K)
    forward_ad: Any = forward_mode  # untyped in torch
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, tangent)
        out, reason = reason_of(op, lambda: op.run(dual, b))
        assert reason == "mode"
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, tangent @ b.T)


def test_a_fake_tensor_goes_native_as_a_fake_tensor(op: ModuleType) -> None:
    with FakeTensorMode() as mode:
        a, b = torch.randn(M, K), torch.randn(N, K)
        out, reason = reason_of(op, lambda: op.run(a, b))
        assert reason == "mode"
        assert out.shape == (M, N)
    out, reason = reason_of(op, lambda: op.run(a, b))
    assert reason == "type"
    assert out.fake_mode is mode


def test_a_dispatch_mode_sees_native(op: ModuleType) -> None:
    a, b = torch.randn(M, K), torch.randn(N, K)
    with FlopCounterMode(display=False) as counter:
        out, reason = reason_of(op, lambda: op.run(a, b))
    assert reason == "mode"
    assert counter.get_total_flops() == 2 * M * N * K
    torch.testing.assert_close(out, a @ b.T)


def test_a_default_device_does_not_matter(op: ModuleType) -> None:
    a, b = torch.randn(M, K), torch.randn(N, K)
    with torch.device("meta"):
        out, reason = reason_of(op, lambda: op.run(a, b))
    assert reason == "hit"
    assert out.device.type == "cpu"


def test_another_thread_count_goes_native(op: ModuleType) -> None:
    a, b = torch.randn(M, K), torch.randn(N, K)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        _, reason = reason_of(op, lambda: op.run(a, b))
        assert reason == "num_threads"
    finally:
        torch.set_num_threads(threads)
    _, reason = reason_of(op, lambda: op.run(a, b))
    assert reason == "hit"


# ---- outputs of the caller ------------------------------------------------------------------------------------------


def outputs_of(kind: str, a: Tensor, b: Tensor) -> Tensor:
    """Return an output for rows 5 to 64, where the parallel variant takes rows with any stride."""
    rows = a.shape[0]
    if kind == "overlaps an input":
        return torch.as_strided(a, (rows, N), (N, 1))
    if kind == "overlaps itself":
        return torch.empty(1, N).expand(rows, N)
    if kind == "overlaps itself in part":
        return torch.empty(rows * N).as_strided((rows, N), (N - 1, 1))
    return {
        "plain": torch.empty(rows, N),
        "padded rows": torch.empty(rows, N + 3)[:, :N],
        "transposed": torch.empty(N, rows).t(),
        "dtype": torch.empty(rows, N, dtype=torch.float64),
        "shape": torch.empty(rows, N + 1),
        "rank": torch.empty(rows * N),
        "requires grad": torch.empty(rows, N).requires_grad_(),
        "neg view": negative(torch.empty(rows, N)),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("plain", "hit"),
        ("padded rows", "hit"),
        ("transposed", "layout"),
        ("overlaps an input", "overlap"),
        ("overlaps itself", "layout"),
        ("overlaps itself in part", "layout"),
        ("dtype", "dtype"),
        ("shape", "shape"),
        ("rank", "rank"),
        ("requires grad", "grad"),
        ("neg view", "negative"),
    ],
)
def test_an_output_hits_or_goes_native_for_its_reason(op: ModuleType, kind: str, expected: str) -> None:
    storage = torch.randn(64 * N)
    a, b = storage.as_strided((20, K), (K, 1)), torch.randn(N, K)
    out = outputs_of(kind, a, b)
    op.set_native(lambda *_: None, lambda *arguments: None)
    expected_values = a @ b.T + 2
    _, reason = reason_of(op, lambda: op.run_out(a, b, out))
    assert reason == expected
    if expected == "hit":
        torch.testing.assert_close(out, expected_values)


def test_an_inference_tensor_is_written_in_inference_mode_only(op: ModuleType) -> None:
    with torch.inference_mode():
        a, b, out = torch.randn(M, K), torch.randn(N, K), torch.empty(M, N)
        _, reason = reason_of(op, lambda: op.run_out(a, b, out))
        assert reason == "hit"
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        reason_of(op, lambda: op.run_out(a, b, out))
    assert op.stats()["native"]["inference"] >= 1


def test_a_graph_that_saved_a_written_tensor_says_so(op: ModuleType) -> None:
    a, b, out = torch.randn(M, K), torch.randn(N, K), torch.ones(M, N)
    weight = torch.ones(M, N, requires_grad=True)
    loss = (weight * out).sum()
    _, reason = reason_of(op, lambda: op.run_out(a, b, out))
    assert reason == "hit"
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        torch.autograd.backward(loss)


def test_an_output_in_place_must_be_the_input_that_it_is_written_to(update: ModuleType) -> None:
    x, state, other = torch.randn(3, 5), torch.randn(3, 5), torch.randn(3, 5)
    mask, bias, out = torch.ones(3, 5, dtype=torch.bool), torch.tensor(0.5), torch.empty(3, 5)
    before = state.clone()
    _, reason = reason_of(update, lambda: update.run_out(x, state, 1.0, bias, mask, out, other))
    assert reason == "alias"
    torch.testing.assert_close(other, before + x + 0.5)
    _, reason = reason_of(update, lambda: update.run(x, x, 1.0, bias, mask))
    assert reason == "overlap"


# ---- threads and compilers ------------------------------------------------------------------------------------------


def test_threads_share_a_module(gemm: ModuleType) -> None:
    num_threads, num_calls = 4, 200
    rows = (1, 4, 5, 40, 200)
    b = torch.randn(N, K)
    inputs = {m: torch.randn(m, K) for m in rows}
    expected = {m: a @ b.T + {1: 1, 4: 1, 5: 2, 40: 2, 200: 0}[m] for m, a in inputs.items()}
    failures: list[int] = []
    stop = threading.Event()

    def call() -> None:
        for m in itertools.islice(itertools.cycle(rows), num_calls):
            if not torch.allclose(gemm.run(inputs[m], b), expected[m], atol=1e-5):
                failures.append(m)

    def toggle() -> None:
        while not stop.wait(0.001):
            gemm.set_native(lambda a, b: a @ b.T)

    before = gemm.stats()
    toggler = threading.Thread(target=toggle)
    toggler.start()
    callers = [threading.Thread(target=call) for _ in range(num_threads)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    stop.set()
    toggler.join()
    after = gemm.stats()
    assert not failures
    assert after["calls"] - before["calls"] == num_threads * num_calls
    assert after["native"]["region"] - before["native"].get("region", 0) == num_threads * num_calls // len(rows)


@IMPORTS_OF_TORCH
@pytest.mark.usefixtures("gemm")
def test_a_compiled_graph_calls_the_operator() -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = torch.ops.fibc.toy_gemm(a.relu(), b) * 2
        return out

    for m, marked in ((4, 1), (5, 2), (7, 2), (200, 0)):
        a, b = torch.randn(m, K), torch.randn(N, K)
        torch.testing.assert_close(layer(a, b), (a.relu() @ b.T + marked) * 2)


@IMPORTS_OF_TORCH
@pytest.mark.usefixtures("update")
def test_a_compiled_graph_keeps_the_write_in_place() -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x: Tensor, state: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = torch.ops.fibc.toy_update(x, state, 0.5, bias, mask)
        return out + state

    x, state, bias, mask = torch.randn(3, 5), torch.randn(3, 5), torch.tensor(0.25), torch.ones(3, 5, dtype=torch.bool)
    expected_out = x * 0.5 + 0.25 + 1
    expected_state = state + expected_out
    torch.testing.assert_close(layer(x, state, bias, mask), expected_out + expected_state)
    torch.testing.assert_close(state, expected_state)


@IMPORTS_OF_TORCH
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.usefixtures("gemm")
def test_a_compiled_graph_differentiates_through_native(grad: bool) -> None:
    torch._dynamo.reset()
    layer = torch.compile(torch.ops.fibc.toy_gemm, fullgraph=True, backend="aot_eager")
    a, b = torch.randn(M, K, requires_grad=True), torch.randn(N, K)
    with nullcontext() if grad else torch.no_grad():
        out = layer(a, b)
    assert out.requires_grad == grad
    if grad:
        out.sum().backward()
        torch.testing.assert_close(a.grad, b.sum(0).expand(M, K))

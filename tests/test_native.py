"""The native kernel: which one, and what its source computes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm

from fibc.backends.native import resolve
from fibc.errors import InputError
from fibc.schema.constants import epsilon
from fibc.schema.definition import Definition
from fibc.schema.digest import digest_text
from fibc.schema.table import NativeSource

GEMM_REFERENCE = "import torch\n\n\ndef run(A, B):\n    return torch.matmul(A, B.T)\n"
NORM_REFERENCE = """import torch

EPS = 1e-5


def run(x, weight):
    values = x.float()
    return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + EPS) * weight.float()).to(x.dtype)
"""
ADD_NORM_REFERENCE = """import torch


def run(x, residual, weight):
    values = x.float() + residual.float()
    return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)
"""


def document(
    op_type: str, inputs: dict[str, list[str]], outputs: dict[str, list[str]], reference: str, *tags: str
) -> dict[str, Any]:
    axes = {axis for shape in (*inputs.values(), *outputs.values()) for axis in shape}
    return {
        "name": "op",
        "op_type": op_type,
        "axes": {a: {"type": "var"} if a in "MR" else {"type": "const", "value": 8} for a in sorted(axes)},
        "inputs": {name: {"shape": shape, "dtype": "float32"} for name, shape in inputs.items()},
        "outputs": {name: {"shape": shape, "dtype": "float32"} for name, shape in outputs.items()},
        "reference": reference,
        "tags": list(tags),
    }


def gemm(*tags: str) -> Definition:
    shapes = {"A": ["M", "K"], "B": ["N", "K"]}
    return Definition.model_validate(document("gemm", shapes, {"C": ["M", "N"]}, GEMM_REFERENCE, *tags))


def norm(*tags: str, reference: str = NORM_REFERENCE) -> Definition:
    shapes = {"x": ["R", "H"], "weight": ["H"]}
    return Definition.model_validate(document("rmsnorm", shapes, {"y": ["R", "H"]}, reference, *tags))


def add_norm(*tags: str) -> Definition:
    shapes = {"x": ["R", "H"], "residual": ["R", "H"], "weight": ["H"]}
    return Definition.model_validate(document("rmsnorm", shapes, {"y": ["R", "H"]}, ADD_NORM_REFERENCE, *tags))


def functions_of(native: NativeSource) -> dict[str, Callable[..., Any]]:
    """The callables of the source, run as a module runs it: in a namespace of its own."""
    namespace: dict[str, Any] = {"__name__": "native"}
    exec(compile(native.source, "<native>", "exec"), namespace)  # noqa: S102  it is Python source by contract
    return {name: namespace[name] for name in ("call", "call_out") if name in namespace}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Makes an importable module with a text, and forgets it afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(name: str, text: str) -> None:
        path = tmp_path.joinpath(*name.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text)
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


FLASHINFER_NORM = """
import torch
from torch.nn.functional import rms_norm


def rmsnorm(input, weight, eps=1e-6, out=None):
    result = rms_norm(input, weight.shape, weight, eps)
    return result if out is None else out.copy_(result)


def fused_add_rmsnorm(input, residual, weight, eps=1e-6):
    residual.add_(input)
    input.copy_(rms_norm(residual, weight.shape, weight, eps))
"""


# The table of builtins


def test_a_gemm_is_torch_matmul_with_and_without_an_output() -> None:
    native = resolve(gemm())
    assert (native.name, native.origin, native.note) == ("torch.matmul(A, B.T)", "builtin", "")
    a, b, c = torch.randn(3, 8), torch.randn(8, 8), torch.empty(3, 8)
    functions = functions_of(native)
    assert torch.equal(functions["call"](a, b), torch.matmul(a, b.T))
    assert functions["call_out"](a, b, c) is None
    assert torch.equal(c, torch.matmul(a, b.T))


def test_a_norm_is_torch_rms_norm_with_the_epsilon_of_the_reference() -> None:
    native = resolve(norm())
    assert (native.name, native.origin) == ("F.rms_norm(x, weight=weight)", "builtin")
    x, weight = torch.randn(3, 8) * 1e-3, torch.randn(8)  # so small that epsilon counts
    functions = functions_of(native)
    assert torch.equal(functions["call"](x, weight), rms_norm(x, (8,), weight, 1e-5))
    assert not torch.allclose(functions["call"](x, weight), rms_norm(x, (8,), weight, 1e-6))
    assert "call_out" not in functions


def test_a_fused_add_returns_the_one_output_of_the_contract_and_changes_no_input() -> None:
    native = resolve(add_norm())
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    kept = x.clone(), residual.clone()
    result = functions_of(native)["call"](x, residual, weight)
    assert torch.equal(result, rms_norm(x + residual, (8,), weight, 1e-6))
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])


def test_a_norm_without_an_epsilon_has_its_reference_as_native() -> None:
    native = resolve(norm(reference=NORM_REFERENCE.replace("EPS = 1e-5", "EPS = sum([1e-5])")))
    assert native.origin == "reference"
    assert (
        native.note
        == "F.rms_norm(x, weight=weight) needs the one epsilon that the reference states, and none was found"
    )


@pytest.mark.parametrize(
    ("op_type", "inputs", "outputs"),
    [
        ("gemm", {"A": ["M", "K"], "B": ["K", "N"]}, {"C": ["M", "N"]}),
        ("gemm", {"A": ["M", "K"], "B": ["N", "K"], "bias": ["N"]}, {"C": ["M", "N"]}),
        ("gemm", {"A": ["M", "K"], "B": ["K", "K"]}, {"C": ["M", "K"]}),
        ("matmul", {"A": ["M", "K"], "B": ["N", "K"]}, {"C": ["M", "N"]}),
    ],
)
def test_another_form_has_its_reference_as_native(
    op_type: str, inputs: dict[str, list[str]], outputs: dict[str, list[str]]
) -> None:
    reference = "def run(*inputs):\n    return inputs[0]\n"
    native = resolve(Definition.model_validate(document(op_type, inputs, outputs, reference)))
    assert (native.name, native.origin) == ("reference", "reference")


def test_mixed_dtypes_have_their_reference_as_native() -> None:
    mixed = gemm().to_json()
    mixed["outputs"]["C"]["dtype"] = "bfloat16"
    assert resolve(Definition.model_validate(mixed)).origin == "reference"


def in_place_add_norm(*tags: str) -> Definition:
    """The norm is written over ``x``, the sum over ``residual``."""
    shapes = {"x": ["R", "H"], "residual": ["R", "H"], "weight": ["H"]}
    outputs = {"normed": ["R", "H"], "total": ["R", "H"]}
    text = ADD_NORM_REFERENCE.rstrip("\n") + ", values.to(residual.dtype)\n"
    contract = document("rmsnorm", shapes, outputs, text, *tags)
    contract["outputs"]["normed"]["param"], contract["outputs"]["total"]["param"] = "x", "residual"
    return Definition.model_validate(contract)


@pytest.mark.parametrize("origin", ["builtin", "fi_api"])
def test_a_contract_in_place_has_a_native_in_place_that_allocates_nothing_it_returns(
    package: Callable[[str, str], None], origin: str
) -> None:
    package("flashinfer.norm", FLASHINFER_NORM)
    tags = ("fi_api:flashinfer.norm.fused_add_rmsnorm",) if origin == "fi_api" else ()
    native = resolve(in_place_add_norm(*tags), target_kind="cuda")
    assert native.origin == origin
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    total = x + residual
    results = functions_of(native)["call"](x, residual, weight)
    assert results[0] is x and results[1] is residual
    assert torch.equal(residual, total)
    assert torch.equal(x, rms_norm(total, (8,), weight, 1e-6))


def test_a_contract_in_place_of_another_form_has_its_reference_written_into_its_inputs() -> None:
    in_place = add_norm().to_json()
    in_place["outputs"]["y"]["param"] = "x"
    native = resolve(Definition.model_validate(in_place))
    assert native.origin == "reference"
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    expected = rms_norm(x + residual, (8,), weight, 1e-6)
    result = functions_of(native)["call"](x, residual, weight)
    assert result is x
    assert torch.allclose(x, expected, atol=1e-6)


def test_of_several_outputs_only_those_in_place_are_written_into_inputs() -> None:
    reference = "def call(x):\n    return x + 1, x + 2"
    contract = document("other", {"x": ["R", "H"]}, {"y": ["R", "H"], "z": ["R", "H"]}, reference)
    contract["outputs"]["z"]["param"] = "x"
    x = torch.zeros(2, 8)
    y, z = functions_of(resolve(Definition.model_validate(contract)))["call"](x)
    assert z is x
    assert y.unique().tolist() == [1.0]
    assert x.unique().tolist() == [2.0]


def test_a_tag_s_function_that_does_not_import_is_noted(package: Callable[[str, str], None]) -> None:
    package("flashinfer.norm", "raise OSError('libcudart.so.13: cannot open shared object file')\n")
    native = resolve(norm("fi_api:flashinfer.norm.rmsnorm"), target_kind="cuda")
    assert native.origin == "builtin"
    assert native.note == (
        "flashinfer.norm.rmsnorm does not import here: got OSError: libcudart.so.13: cannot open shared object file"
    )


def test_names_that_would_hide_those_of_the_source_are_replaced() -> None:
    hiding = document("gemm", {"torch": ["M", "K"], "call": ["N", "K"]}, {"C": ["M", "N"]}, GEMM_REFERENCE)
    hiding["reference"] = "def run(*inputs):\n    return inputs[0]\n"
    native = resolve(Definition.model_validate(hiding))
    a, b = torch.randn(3, 8), torch.randn(8, 8)
    assert torch.equal(functions_of(native)["call"](a, b), a @ b.T)


# The reference


def test_a_reference_is_embedded_and_called_by_its_entry_point() -> None:
    shapes = {"x": ["R", "H"]}
    reference = "def helper(x):\n    return x + 1\n\n\ndef double(x):\n    return 2 * helper(x)"
    native = resolve(Definition.model_validate(document("other", shapes, {"y": ["R", "H"]}, reference)))
    assert (native.origin, native.note) == ("reference", "")
    assert functions_of(native)["call"](torch.ones(2)).tolist() == [4.0, 4.0]


def test_the_digest_is_that_of_the_source() -> None:
    assert resolve(gemm()).digest == digest_text(resolve(gemm()).source)
    assert resolve(norm()).digest != resolve(add_norm()).digest


# The contract's tag


@pytest.mark.parametrize("path", ["no_such_package.norm.rmsnorm", "", "../x", "a b.c"])
def test_a_tag_that_names_nothing_installed_is_noted(path: str) -> None:
    native = resolve(norm(f"fi_api:{path}"))
    assert (native.origin, native.note) == ("builtin", f"{path} is not installed")


def test_a_gpu_function_is_not_chosen_for_a_cpu(package: Callable[[str, str], None]) -> None:
    package("flashinfer.norm", FLASHINFER_NORM)
    native = resolve(norm("fi_api:flashinfer.norm.rmsnorm"))
    assert (native.origin, native.note) == ("builtin", "flashinfer.norm.rmsnorm needs a GPU")


def test_the_tag_s_function_is_called_as_its_adapter_knows(package: Callable[[str, str], None]) -> None:
    package("flashinfer.norm", FLASHINFER_NORM)
    native = resolve(norm("fi_api:flashinfer.norm.rmsnorm"), target_kind="cuda")
    assert (native.name, native.origin) == ("flashinfer.norm.rmsnorm", "fi_api")
    x, weight, y = torch.randn(3, 8), torch.randn(8), torch.empty(3, 8)
    functions = functions_of(native)
    functions["call_out"](x, weight, y)
    assert torch.equal(functions["call"](x, weight), rms_norm(x, (8,), weight, 1e-5))
    assert torch.equal(y, rms_norm(x, (8,), weight, 1e-5))


def test_an_in_place_function_works_on_copies(package: Callable[[str, str], None]) -> None:
    package("flashinfer.norm", FLASHINFER_NORM)
    native = resolve(add_norm("fi_api:flashinfer.norm.fused_add_rmsnorm"), target_kind="cuda")
    x, residual, weight, y = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), torch.empty(3, 8)
    kept = x.clone(), residual.clone()
    expected = rms_norm(x + residual, (8,), weight, 1e-6)
    functions = functions_of(native)
    functions["call_out"](x, residual, weight, y)
    assert torch.equal(functions["call"](x, residual, weight), expected) and torch.equal(y, expected)
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])


@pytest.mark.parametrize("path", ["flashinfer.norm.gemma_rmsnorm", "flashinfer.norm.fused_add_rmsnorm"])
def test_an_unknown_calling_convention_is_an_error_with_a_remedy(
    package: Callable[[str, str], None], path: str
) -> None:
    package("flashinfer.norm", FLASHINFER_NORM)
    with pytest.raises(InputError, match=rf"op: tags: fi_api:{path}: .* --native"):
        resolve(norm(f"fi_api:{path}"), target_kind="cuda")


# --native


def test_a_dotted_path_is_imported_by_the_source() -> None:
    native = resolve(gemm(), "torch.nn.functional.linear")
    assert (native.name, native.origin) == ("torch.nn.functional.linear", "option")
    assert native.source == "from torch.nn.functional import linear as call\n"
    assert functions_of(native)["call"] is torch.nn.functional.linear


def test_a_module_on_the_path_of_the_caller_is_found(package: Callable[[str, str], None]) -> None:
    package("my_kernels", "def multiply(A, B):\n    return A @ B.T\n")
    assert resolve(gemm(), "my_kernels.multiply").name == "my_kernels.multiply"


def test_the_text_of_a_file_is_embedded(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        '"""Mine."""\nfrom __future__ import annotations\nSCALE = 2.0\n'
        "def multiply(A, B):\n    return SCALE * (A @ B.T)\n"
        "def call_out(A, B, C):\n    C.copy_(multiply(A, B))"
    )
    native = resolve(gemm(), f"{file}::multiply")
    assert (native.name, native.origin) == ("mine.py::multiply", "option")
    assert str(tmp_path) not in native.source
    file.unlink()
    a, b, c = torch.randn(3, 8), torch.randn(8, 8), torch.empty(3, 8)
    functions = functions_of(native)
    functions["call_out"](a, b, c)
    assert torch.equal(functions["call"](a, b), 2 * (a @ b.T)) and torch.equal(c, 2 * (a @ b.T))


def test_an_option_wins_over_the_tag(package: Callable[[str, str], None]) -> None:
    package("flashinfer.norm", FLASHINFER_NORM)
    native = resolve(norm("fi_api:flashinfer.norm.gemma_rmsnorm"), "math.hypot", target_kind="cuda")
    assert native.origin == "option"


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("matmul", r"must name a function"),
        ("json.no_such_function", r"must import and be callable, got ImportError: .*no_such_function"),
        ("no_such_package.matmul", r"got ModuleNotFoundError: .*no_such_package"),
        ("math.pi", r"it is not callable"),
        ("os;system.x", r"must name a function"),
        ("no_such_file.py::run", r"must be a readable Python file"),
        ("{dir}/broken.py::run", r"must be a readable Python file"),
        ("{dir}/binary.py::run", r"must be a readable Python file"),
        ("{dir}/good.py::missing", r"must name a function of the file, got missing \(accepted: call, run\)"),
        ("{dir}/good.py::run", r"`call` is the name that a module calls"),
        ("{dir}/sibling.py::run", r"got ModuleNotFoundError: .*beside"),
        ("{dir}/raises.py::run", r"got RuntimeError: not today"),
        ("{dir}/dies.py::run", r"the process ended with status -6"),
    ],
)
def test_an_option_that_cannot_serve_is_refused(tmp_path: Path, option: str, problem: str) -> None:
    (tmp_path / "broken.py").write_text("def run(:\n")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "good.py").write_text("def run(A):\n    return A\ndef call(A):\n    return A\n")
    (tmp_path / "beside.py").write_text("X = 1\n")
    (tmp_path / "sibling.py").write_text("from beside import X\ndef run(A):\n    return A\n")
    (tmp_path / "raises.py").write_text("raise RuntimeError('not today')\ndef run(A):\n    return A\n")
    (tmp_path / "dies.py").write_text("import os\nos.abort()\ndef run(A):\n    return A\n")
    spelled = option.replace("{dir}", str(tmp_path))
    with pytest.raises(InputError, match=problem) as caught:
        resolve(gemm(), spelled)
    assert f"--native {spelled}: " in str(caught.value)


# Epsilon


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["EPS = 1e-5", "def run(x, w):", "    return torch.rsqrt(x + EPS)"], 1e-5),
        (["def run(x, w):", "    return torch.rsqrt(x.mean() + 1e-6)"], 1e-6),
        (["def run(x, w, eps=2e-6):", "    return x + eps"], 2e-6),
        (["def run(x, w, *, eps: float = 2e-6):", "    return x + eps"], 2e-6),
        (["def run(x, w):", "    return F.rms_norm(x, (8,), w, eps=3e-6)"], 3e-6),
        (["def run(x, w):", "    epsilon: float = 1e-12", "    return x + epsilon + 0.001"], 1e-12),
        (["def run(x, w):", "    return x + 1e-5 + 1e-6"], None),
        (["def run(x, w):", "    return x * 1e-6 + 1.0"], None),
        (["def run(x, w):", "    return x"], None),
    ],
)
def test_the_epsilon_is_the_one_that_the_reference_states(lines: Sequence[str], expected: float | None) -> None:
    assert epsilon(norm(reference="\n".join(lines))) == expected

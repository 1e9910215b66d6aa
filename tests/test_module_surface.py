"""What a generated package exports: run, run_out, explain, table, stats, enable, set_native, prepare, the operator."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

from fibc.runtime import load


def matrices(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, toys.GEMM_K), torch.randn(toys.GEMM_N, toys.GEMM_K)


def update_inputs(rows: int = 3, hidden: int = 5) -> tuple[Tensor, Tensor, float, Tensor]:
    return torch.randn(rows, hidden), torch.randn(rows, hidden), 0.5, torch.tensor(0.25)


def counted(module: ModuleType, before: dict[str, Any]) -> dict[str, int]:
    """Return what was counted since ``before``: hits by symbol and native calls by reason."""
    now = module.stats()
    merged = {**now["hits"], **now["native"], "empty": now["empty"]}
    old = {**before["hits"], **before["native"], "empty": before["empty"]}
    return {name: count - old.get(name, 0) for name, count in merged.items() if count != old.get(name, 0)}


@pytest.mark.parametrize(
    ("rows", "marked", "symbol"), [(1, 1, "plain"), (4, 1, "plain"), (5, 2, "parallel"), (64, 2, "parallel")]
)
def test_a_call_inside_a_region_is_served_by_its_variant(gemm: ModuleType, rows: int, marked: int, symbol: str) -> None:
    a, b = matrices(rows)
    before = gemm.stats()
    out = gemm.run(a, b)
    torch.testing.assert_close(out, a @ b.T + marked)
    assert counted(gemm, before) == {f"fibc_toy_{symbol}": 1}


@pytest.mark.parametrize(("rows", "reason"), [(65, "kernel"), (128, "kernel"), (129, "region"), (1000, "region")])
def test_a_call_outside_the_regions_or_declined_is_served_by_native(gemm: ModuleType, rows: int, reason: str) -> None:
    a, b = matrices(rows)
    before = gemm.stats()
    torch.testing.assert_close(gemm.run(a, b), a @ b.T)
    assert counted(gemm, before) == {reason: 1}


def test_outputs_are_tensors_of_torchs_own_allocator(gemm: ModuleType) -> None:
    out = gemm.run(*matrices(4))
    assert type(out) is Tensor
    assert out.shape == (4, toys.GEMM_N)
    assert out.dtype == torch.float32
    assert out.untyped_storage().resizable()
    assert out.data_ptr() % 64 == 0


def test_run_out_writes_into_the_given_output(gemm: ModuleType) -> None:
    a, b = matrices(4)
    out = torch.full((4, toys.GEMM_N), torch.nan)
    before = gemm.stats()
    assert gemm.run_out(a, b, out) is None
    torch.testing.assert_close(out, a @ b.T + 1)
    assert counted(gemm, before) == {"fibc_toy_plain": 1}


def test_run_out_uses_natives_own_out_and_copies_where_it_has_none(gemm: ModuleType, update: ModuleType) -> None:
    a, b = matrices(200)
    out = torch.full((200, toys.GEMM_N), torch.nan)
    gemm.run_out(a, b, out)
    torch.testing.assert_close(out, a @ b.T)
    gemm.set_native(lambda a, b: a @ b.T + 7)
    gemm.run_out(a, b, out)
    torch.testing.assert_close(out, a @ b.T + 7)

    x, state, scale, bias = update_inputs(100)
    expected = state + x * scale + bias
    out = torch.full_like(x, torch.nan)
    update.run_out(x, state, scale, bias, None, out, state)
    torch.testing.assert_close(out, x * scale + bias)
    torch.testing.assert_close(state, expected)


def test_arguments_may_be_given_by_keyword(gemm: ModuleType, update: ModuleType) -> None:
    a, b = matrices(3)
    torch.testing.assert_close(gemm.run(B=b, A=a), a @ b.T + 1)
    torch.testing.assert_close(gemm.run(a, B=b), a @ b.T + 1)
    out = torch.empty(3, toys.GEMM_N)
    gemm.run_out(a, C=out, B=b)
    torch.testing.assert_close(out, a @ b.T + 1)
    x, state, scale, bias = update_inputs()
    out = torch.empty_like(x)
    before = update.stats()
    update.run_out(
        x=x, state=state, scale=scale, bias=bias, mask=torch.ones(3, 5, dtype=torch.bool), out=out, state_out=state
    )
    torch.testing.assert_close(out, x * scale + bias + 1)
    assert counted(update, before) == {"fibc_toy_update": 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, a, b: m.run(a), r"toy_gemm: run\(\) misses argument 'B'"),
        (lambda m, a, b: m.run(a, b, b), r"toy_gemm: run\(\) takes 2 arguments, got 3"),
        (lambda m, a, b: m.run(a, b, D=b), r"toy_gemm: run\(\) has no argument 'D'"),
        (lambda m, a, b: m.run(a, b, A=a), r"toy_gemm: run\(\) got argument 'A' twice"),
        (lambda m, a, b: m.run_out(a, b), r"toy_gemm: run_out\(\) misses argument 'C'"),
        (lambda m, a, b: m.explain(a), r"toy_gemm: explain\(\) misses argument 'B'"),
        (lambda m, a, b: m.run(a, b, **{"\udc80": b}), r"has no argument"),
    ],
)
def test_a_call_that_does_not_fit_the_signature_raises_a_type_error(gemm: ModuleType, call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(gemm, *matrices(2))


def test_shapes_that_native_rejects_raise_natives_own_error(gemm: ModuleType) -> None:
    a, b = matrices(2)
    before = gemm.stats()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        gemm.run(a[:, :3], b)
    assert counted(gemm, before) == {"shape": 1}


def test_an_output_in_place_is_the_input_itself_and_results_are_a_tuple(update: ModuleType) -> None:
    x, state, scale, bias = update_inputs()
    expected_out = x * scale + bias + 1
    expected_state = state + expected_out
    mask = torch.ones(3, 5, dtype=torch.bool)
    before = update.stats()
    results = update.run(x, state, scale, bias, mask)
    assert isinstance(results, tuple)
    assert results[1] is state
    torch.testing.assert_close(results[0], expected_out)
    torch.testing.assert_close(state, expected_state)
    assert counted(update, before) == {"fibc_toy_update": 1}


@pytest.mark.parametrize("scale", [2, 2.0, -3])
def test_python_numbers_reach_the_variant(update: ModuleType, scale: float) -> None:
    x, state, _, bias = update_inputs()
    out, _ = update.run(x, state, scale, bias, torch.ones(3, 5, dtype=torch.bool))
    torch.testing.assert_close(out, x * scale + bias + 1)


@pytest.mark.parametrize("scale", [True, torch.tensor(2.0), 2**53 + 1])
def test_what_is_no_exact_number_goes_native(update: ModuleType, scale: Any) -> None:
    x, state, _, bias = update_inputs()
    before = update.stats()
    out, _ = update.run(x, state, scale, bias, torch.ones(3, 5, dtype=torch.bool))
    torch.testing.assert_close(out, x * scale + bias)
    assert counted(update, before) == {"type": 1}


def test_an_optional_argument_that_is_left_out_goes_native(update: ModuleType) -> None:
    x, state, scale, bias = update_inputs()
    before = update.stats()
    out, _ = update.run(x, state, scale, bias)
    torch.testing.assert_close(out, x * scale + bias)
    assert counted(update, before) == {"missing": 1}


@pytest.mark.parametrize("rows", [0])
def test_empty_outputs_come_back_without_a_launch(gemm: ModuleType, update: ModuleType, rows: int) -> None:
    def native(*_: Any) -> None:
        raise AssertionError("nothing has to be computed")

    gemm.set_native(native)
    before = gemm.stats()
    out = gemm.run(torch.empty(rows, toys.GEMM_K), torch.randn(toys.GEMM_N, toys.GEMM_K))
    assert out.shape == (rows, toys.GEMM_N)
    gemm.run_out(torch.empty(rows, toys.GEMM_K), torch.randn(toys.GEMM_N, toys.GEMM_K), out)
    assert counted(gemm, before) == {"empty": 2}
    x, state, scale, bias = update_inputs(rows)
    results = update.run(x, state, scale, bias, torch.ones(rows, 5, dtype=torch.bool))
    assert results[1] is state


def test_explain_says_what_run_does_and_counts_nothing(gemm: ModuleType) -> None:
    a, b = matrices(7)
    before = gemm.stats()
    said = gemm.explain(a, B=b)
    assert gemm.stats() == before
    assert said["served"] == "fibc_toy_parallel"
    assert said["variant"] == "toy/fibc_toy_parallel(block_m=4)"
    assert said["reason"] == "hit"
    assert said["axes"] == {"M": 7, "N": toys.GEMM_N, "K": toys.GEMM_K}
    assert said["features"] == [7]
    assert said["region"] == said["cell"] == "5..64"
    assert said["verdict"] == "replace"
    assert [(e["speedup"], e["ci_low"], e["ci_high"], e["n_sessions"]) for e in said["evidence"]] == [
        (2.0, 1.9, 2.1, 8)
    ]


def test_explain_says_why_native_serves(gemm: ModuleType) -> None:
    a, b = matrices(200)
    said = gemm.explain(a, b)
    assert (said["served"], said["native"], said["reason"]) == ("native", "torch.matmul(A, B.T)", "region")
    assert said["why"] == "no region with evidence holds the sizes"
    assert (said["cell"], said["verdict"], said["verdict_reason"]) == ("129..256", "keep_native", "slower than native")
    above = gemm.explain(*matrices(1000))
    assert (above["cell"], above["verdict"], above["evidence"]) == (None, None, [])
    wrong = gemm.explain(a.double(), b)
    assert (wrong["reason"], wrong["axes"], wrong["region"]) == ("dtype", None, None)
    assert gemm.explain(torch.empty(0, toys.GEMM_K), b)["served"] == "nothing"


def test_disable_sends_every_call_to_native_until_enable(gemm: ModuleType) -> None:
    a, b = matrices(2)
    before = gemm.stats()
    gemm.disable()
    torch.testing.assert_close(gemm.run(a, b), a @ b.T)
    assert gemm.explain(a, b)["reason"] == "disabled"
    gemm.enable()
    torch.testing.assert_close(gemm.run(a, b), a @ b.T + 1)
    assert counted(gemm, before) == {"disabled": 1, "fibc_toy_plain": 1}


def test_set_native_replaces_native_and_none_restores_it(gemm: ModuleType) -> None:
    a, b = matrices(200)
    gemm.set_native(lambda a, b: "mine")
    assert gemm.run(a, b) == "mine"
    gemm.set_native(None)
    torch.testing.assert_close(gemm.run(a, b), a @ b.T)
    with pytest.raises(TypeError, match="fibc_toy_gemm: set_native: must be callable, got int"):
        gemm.set_native(3)


def test_natives_error_reaches_the_caller(gemm: ModuleType) -> None:
    def native(*_: Any) -> None:
        raise LookupError("mine")

    gemm.set_native(native)
    with pytest.raises(LookupError, match="mine"):
        gemm.run(*matrices(200))


def test_table_and_stats_are_json_and_the_callers_own(gemm: ModuleType) -> None:
    table = gemm.table()
    assert json.loads(json.dumps(table)) == table
    assert [row["verdict"] for row in table["rows"]] == ["replace"] * 3 + ["keep_native"]
    table["rows"].clear()
    assert len(gemm.table()["rows"]) == 4
    assert json.loads(json.dumps(gemm.stats()))["calls"] == gemm.stats()["calls"]


def test_the_environment_says_what_differs(gemm: ModuleType) -> None:
    environment = gemm.environment
    assert environment["accepted"] is True
    assert environment["reason"] == "hit"
    assert environment["differs"] == ["torch"]  # the toy table was recorded with torch "any"
    assert environment["here"]["num_threads"] == torch.get_num_threads()


@pytest.mark.parametrize("stored", ["serve", "native"])
def test_another_torch_serves_on_or_goes_native_as_the_table_says_and_the_user_overrides(
    toy_packages: toys.Packages,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stored: str,
) -> None:
    table = replace(toys.gemm_table(), environment={"torch": "2.9.0"}, on_change=stored)
    package = toys.publish(table, tmp_path, toy_packages.cache, toy_packages.kernels)
    a, b = matrices(3)
    for policy in (stored, "native" if stored == "serve" else "serve"):
        monkeypatch.setenv("FIBC_ON_CHANGE", "" if policy == stored else policy)
        caplog.clear()
        shutil.copytree(package, tmp_path / policy / package.name, symlinks=True)
        module = load(tmp_path / policy / package.name)
        (said,) = [record.getMessage() for record in caplog.records]
        assert f"was tuned with torch 2.9.0, found {torch.__version__}" in said
        assert module.environment["policy"] == policy
        assert module.environment["accepted"] is (policy == "serve")
        torch.testing.assert_close(module.run(a, b), a @ b.T + (policy == "serve"))
        assert module.explain(a, b)["reason"] == ("hit" if policy == "serve" else "changed")
        assert len(caplog.records) == 1, "it is said once, not for every call"
    monkeypatch.setenv("FIBC_ON_CHANGE", "refuse")
    shutil.copytree(package, tmp_path / "refused" / package.name, symlinks=True)
    with pytest.raises(ImportError, match=r"tuned with torch 2\.9\.0.*fibc retune"):
        load(tmp_path / "refused" / package.name)
    monkeypatch.setenv("FIBC_ON_CHANGE", "ignore")
    with pytest.raises(ImportError, match="accepted: serve, native, refuse"):
        load(tmp_path / "refused" / package.name)


def test_a_local_part_of_a_version_that_one_side_lacks_is_no_difference(
    toy_packages: toys.Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = torch.__version__.partition("+")[0]
    table = replace(toys.gemm_table(), environment={"torch": recorded if "+" in torch.__version__ else f"{recorded}+x"})
    monkeypatch.setenv("FIBC_ON_CHANGE", "refuse")
    module = load(toys.publish(table, tmp_path, toy_packages.cache, toy_packages.kernels))
    assert module.environment["differs"] == []


def test_prepare_says_whether_variants_can_serve_there(gemm: ModuleType) -> None:
    assert gemm.prepare("cpu") is True
    assert gemm.prepare(torch.device("cuda", 0)) is False


def test_the_operator_serves_and_passes_torchs_own_checks(gemm: ModuleType, update: ModuleType) -> None:
    a, b = matrices(3)
    torch.testing.assert_close(torch.ops.fibc.toy_gemm(a, b), a @ b.T + 1)
    torch.library.opcheck(torch.ops.fibc.toy_gemm.default, (a, b))
    x, state, scale, bias = update_inputs()
    expected = state + x * scale + bias + 1
    mask = torch.ones(3, 5, dtype=torch.bool)
    torch.testing.assert_close(torch.ops.fibc.toy_update(x, state, scale, bias, mask), x * scale + bias + 1)
    torch.testing.assert_close(state, expected)
    torch.library.opcheck(torch.ops.fibc.toy_update.default, (x, state, scale, bias, mask))


def test_the_operators_derivative_is_natives(gemm: ModuleType) -> None:
    a, b = (matrix.requires_grad_() for matrix in matrices(200))
    ours = torch.autograd.grad(torch.ops.fibc.toy_gemm(a, b).square().sum(), [a, b])
    natives = torch.autograd.grad((a @ b.T).square().sum(), [a, b])
    torch.testing.assert_close(ours, natives)


def test_the_stub_declares_the_convention(gemm: ModuleType, update: ModuleType) -> None:
    assert update.__file__ is not None
    text = Path(update.__file__).with_suffix(".pyi").read_text()
    parameters = (
        "x: torch.Tensor, state: torch.Tensor, scale: float, bias: torch.Tensor, mask: torch.Tensor | None = None"
    )
    assert f"def run({parameters}) -> tuple[torch.Tensor, torch.Tensor]:" in text
    assert f"def run_out({parameters}, out: torch.Tensor = ..., state_out: torch.Tensor = ...) -> None:" in text
    assert all(f"def {name}(" in text or f"{name}: " in text for name in gemm.__all__)


def test_the_operator_belongs_to_the_package_that_was_imported_last(
    toy_packages: toys.Packages, tmp_path: Path
) -> None:
    a, b = matrices(3)
    operator = torch.ops.fibc.toy_gemm
    for number in range(2):
        package = tmp_path / str(number) / "fibc_toy_gemm"
        shutil.copytree(toy_packages.path("toy_gemm"), package, symlinks=True)
        module = load(package)
        torch.testing.assert_close(operator(a, b), a @ b.T + 1)
        assert module.stats()["hits"]["fibc_toy_plain"] == 1


def test_another_definition_of_the_same_name_leaves_the_operator_alone(
    toy_packages: toys.Packages, gemm: ModuleType, tmp_path: Path
) -> None:
    table = replace(toys.update_table(), definition="toy_gemm", spec=replace(toys.UPDATE_SPEC, definition="toy_gemm"))
    package = toys.publish(table, tmp_path, toy_packages.cache, toy_packages.kernels)
    with pytest.warns(RuntimeWarning, match=r"torch\.ops\.fibc\.toy_gemm: another definition of this name"):
        load(package)
    a, b = matrices(3)
    torch.testing.assert_close(torch.ops.fibc.toy_gemm(a, b), gemm.run(a, b))

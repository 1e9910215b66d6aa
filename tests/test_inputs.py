"""Inputs from a seed."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fibc.calls import Value, torch_dtype
from fibc.errors import InputError
from fibc.inputs import BLOCK_ELEMS, MAX_COPIES, adversarial, cold_copies, make, num_copies, residency
from fibc.schema.definition import Definition
from fibc.schema.workload import InputSpec, RandomInput, SafetensorsInput, ScalarInput, Workload
from fibc.structure import skewed_lengths, synthesise

Shapes = Mapping[str, tuple[list[str] | None, str]]


def definition(
    axes: Mapping[str, int | None], inputs: Shapes, outputs: Shapes, constraints: tuple[str, ...] = ()
) -> Definition:
    """A contract; None marks a var axis, and a Python scalar's shape."""
    document: dict[str, Any] = {
        "name": "op",
        "op_type": "op",
        "axes": {n: {"type": "var"} if v is None else {"type": "const", "value": v} for n, v in axes.items()},
        "inputs": {name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in inputs.items()},
        "outputs": {name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in outputs.items()},
        "reference": "def run(*inputs):\n    return inputs[0]\n",
        "constraints": constraints,
    }
    return Definition.model_validate(document)


def gemm(n: int = 96, k: int = 256, dtype: str = "bfloat16") -> Definition:
    return definition(
        {"M": None, "N": n, "K": k},
        {"A": (["M", "K"], dtype), "B": (["N", "K"], dtype)},
        {"C": (["M", "N"], dtype)},
    )


def fused_add(hidden: int = 128, dtype: str = "bfloat16") -> Definition:
    return definition(
        {"rows": None, "hidden": hidden},
        {"x": (["rows", "hidden"], dtype), "residual": (["rows", "hidden"], dtype), "weight": (["hidden"], dtype)},
        {"y": (["rows", "hidden"], dtype)},
    )


PREFILL = definition(
    {"heads": 4, "dim": 8, "page_size": 2, "batch": None, "len_indptr": None, "total_q": None}
    | {"num_kv_indices": None, "num_pages": None},
    {
        "q": (["total_q", "heads", "dim"], "bfloat16"),
        "k_cache": (["num_pages", "page_size", "heads", "dim"], "bfloat16"),
        "qo_indptr": (["len_indptr"], "int32"),
        "kv_indptr": (["len_indptr"], "int32"),
        "kv_indices": (["num_kv_indices"], "int32"),
        "kv_last_page_len": (["batch"], "int32"),
        "sm_scale": (None, "float32"),
    },
    {"output": (["total_q", "heads", "dim"], "bfloat16")},
    ("len_indptr == batch + 1", "total_q == qo_indptr[-1].item()", "num_kv_indices == kv_indptr[-1].item()"),
)


def tensor(values: Mapping[str, Value], name: str) -> torch.Tensor:
    value = values[name]
    assert isinstance(value, torch.Tensor)
    return value


def num_distinct(values: torch.Tensor) -> int:
    return len(set(values.flatten().tolist()))


def same(first: Mapping[str, Value], second: Mapping[str, Value]) -> bool:
    return all(
        torch.equal(value, tensor(second, name)) if isinstance(value, torch.Tensor) else value == second[name]
        for name, value in first.items()
    )


# Dense values


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_output_of_a_gemm_has_a_deviation_of_one(dtype: str) -> None:
    values = make(gemm(192, 1024, dtype), {"M": 64}, seed=1)
    a, b = tensor(values, "A"), tensor(values, "B")
    assert a.dtype == b.dtype == torch_dtype(dtype)
    assert a.float().std().item() == pytest.approx(1.0, rel=0.02)
    assert b.float().std().item() == pytest.approx(1 / 32, rel=0.02)
    assert (a.double() @ b.double().T).std().item() == pytest.approx(1.0, rel=0.05)


def test_a_weight_that_is_stored_transposed_is_scaled_by_its_contracted_axis() -> None:
    contract = definition(
        {"M": None, "N": 512, "K": 64},
        {"A": (["M", "K"], "float32"), "B": (["K", "N"], "float32")},
        {"C": (["M", "N"], "float32")},
    )
    assert tensor(make(contract, {"M": 2}, 0), "B").std().item() == pytest.approx(1 / 8, rel=0.02)


def test_the_second_factor_of_a_product_of_activations_is_scaled() -> None:
    contract = definition(
        {"batch": None, "M": None, "N": None, "K": 256},
        {"A": (["batch", "M", "K"], "float32"), "B": (["batch", "K", "N"], "float32")},
        {"C": (["batch", "M", "N"], "float32")},
    )
    values = make(contract, {"batch": 2, "M": 32, "N": 48}, 0)
    assert torch.bmm(tensor(values, "A"), tensor(values, "B")).std().item() == pytest.approx(1.0, rel=0.05)


def test_weights_of_norms_lie_around_one_and_activations_around_zero() -> None:
    values = make(fused_add(4096), {"rows": 16}, seed=2)
    weight = tensor(values, "weight").float()
    assert weight.mean().item() == pytest.approx(1.0, abs=0.01)
    assert weight.std().item() == pytest.approx(0.1, rel=0.05)
    for name in ("x", "residual"):
        activation = tensor(values, name).float()
        assert activation.mean().item() == pytest.approx(0.0, abs=0.02)
        assert activation.std().item() == pytest.approx(1.0, rel=0.02)


def test_no_input_correlates_with_another() -> None:
    values = make(fused_add(4096), {"rows": 16}, seed=2)
    both = torch.stack([tensor(values, name).float().flatten() for name in ("x", "residual")])
    assert abs(torch.corrcoef(both)[0, 1].item()) < 0.02


def test_a_tensor_larger_than_the_block_has_no_two_equal_rows() -> None:
    values = make(gemm(1024, 2048), {"M": 1}, 0)
    b = tensor(values, "B").float()
    assert b.numel() > BLOCK_ELEMS
    assert len(torch.unique(b[:, :8], dim=0)) == 1024
    assert b.std().item() == pytest.approx(1 / math.sqrt(2048), rel=0.02)


@given(st.integers(0, 2**32), st.integers(1, 9))
@settings(max_examples=20)
def test_equal_arguments_give_equal_bits_and_another_seed_does_not(seed: int, rows: int) -> None:
    contract = fused_add()
    first = make(contract, {"rows": rows}, seed)
    assert same(first, make(contract, {"rows": rows}, seed))
    assert not torch.equal(tensor(first, "x"), tensor(make(contract, {"rows": rows}, seed + 1), "x"))


def test_inputs_do_not_depend_on_the_hash_seed_or_the_process() -> None:
    axes = {"batch": 5, "len_indptr": 6, "total_q": 40, "num_kv_indices": 60, "num_pages": 80}
    program = (
        "import torch\n"
        "from fibc.inputs import make\n"
        "from fibc.schema.definition import Definition\n"
        f"values = make(Definition.model_validate({PREFILL.to_json()!r}), {axes!r}, 3).values()\n"
        "print([v.double().tolist() if isinstance(v, torch.Tensor) else v for v in values])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONHASHSEED": "1"}, capture_output=True, text=True, check=True
    )
    here = [v.double().tolist() if isinstance(v, torch.Tensor) else v for v in make(PREFILL, axes, 3).values()]
    assert done.stdout == f"{here}\n"


def test_one_thread_makes_and_copies_inputs_without_a_parallel_region() -> None:
    program = (
        "import os, torch\n"
        "torch.set_num_threads(1)\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "from fibc.inputs import adversarial, cold_copies, make\n"
        "from fibc.schema.definition import Definition\n"
        f"contract = Definition.model_validate({gemm(1024, 2048).to_json()!r})\n"
        "values = make(contract, {'M': 64}, 0)\n"
        "cold_copies(contract, values, 2)\n"
        "list(adversarial(contract, {'M': 64}, 0))\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def test_eight_bit_floats_and_their_scales_multiply_to_deviations_of_gemm_inputs() -> None:
    contract = definition(
        {"M": None, "N": 128, "K": 512, "blocks": 4},
        {
            "A": (["M", "K"], "float8_e4m3fn"),
            "A_scale": (["blocks", "M"], "float32"),
            "B": (["N", "K"], "float8_e4m3fn"),
            "B_scale": (["N", "blocks"], "float32"),
        },
        {"C": (["M", "N"], "bfloat16")},
    )
    values = make(contract, {"M": 16}, 0)
    b = tensor(values, "B").float() * tensor(values, "B_scale").repeat_interleave(128, dim=1)
    assert tensor(values, "A").float().std().item() == pytest.approx(1.0, rel=0.05)
    assert b.std().item() == pytest.approx(1 / math.sqrt(512), rel=0.05)
    assert bool((tensor(values, "B_scale") > 0).all())


def test_a_dtype_that_torch_does_not_compute_with_is_refused() -> None:
    contract = definition({"M": None}, {"A": (["M"], "float4_e2m1")}, {"C": (["M"], "float32")})
    with pytest.raises(InputError, match="float4_e2m1"):
        make(contract, {"M": 4}, 0)


def test_an_empty_batch_gives_empty_tensors() -> None:
    assert tensor(make(gemm(), {"M": 0}, 0), "A").shape == (0, 256)


# Recorded values


def test_scalars_and_stored_tensors_come_from_the_workload(tmp_path: Path) -> None:
    offsets = torch.tensor([0, 3, 4, 11], dtype=torch.int32)
    save_file({"qo": offsets}, tmp_path / "blob.safetensors")
    workload = Workload(
        "uuid",
        {"batch": 3, "len_indptr": 4, "total_q": 11, "num_kv_indices": 9, "num_pages": 20},
        {
            "qo_indptr": SafetensorsInput(path="blob.safetensors", tensor_key="qo"),
            "kv_indptr": SafetensorsInput(path="not_there.safetensors", tensor_key="kv"),
            "sm_scale": ScalarInput(value=0.25),
            "q": RandomInput(),
        },
        root=str(tmp_path),
    )
    values = make(PREFILL, workload.axes, 0, workload)
    assert torch.equal(tensor(values, "qo_indptr"), offsets)
    assert values["sm_scale"] == 0.25
    assert int(tensor(values, "kv_indptr")[-1]) == 9


def test_made_offsets_agree_with_stored_ones(tmp_path: Path) -> None:
    lengths = torch.tensor([40, 1, 1, 58], dtype=torch.int32)
    save_file({"qo": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()}, tmp_path / "blob.safetensors")
    axes = {"batch": 4, "len_indptr": 5, "total_q": 100, "num_kv_indices": 60, "num_pages": 60}
    recorded: dict[str, InputSpec] = {"qo_indptr": SafetensorsInput(path="blob.safetensors", tensor_key="qo")}
    values = make(PREFILL, axes, 0, Workload("uuid", axes, recorded, root=str(tmp_path)))
    assert bool((tensor(values, "kv_indptr").diff() * 2 >= lengths).all())  # pages of 2


def test_a_stored_tensor_that_breaks_a_constraint_is_refused(tmp_path: Path) -> None:
    save_file({"qo": torch.tensor([0, 3, 4, 12], dtype=torch.int32)}, tmp_path / "blob.safetensors")
    axes = {"batch": 3, "len_indptr": 4, "total_q": 11, "num_kv_indices": 9, "num_pages": 20}
    recorded: dict[str, InputSpec] = {"qo_indptr": SafetensorsInput(path="blob.safetensors", tensor_key="qo")}
    with pytest.raises(InputError, match=r"op: constraints\[1\]"):
        make(PREFILL, axes, 0, Workload("uuid", axes, recorded, root=str(tmp_path)))


def test_an_optional_input_is_none_where_the_recorded_call_left_it_out() -> None:
    document = fused_add().to_json()
    document["inputs"]["residual"]["optional"] = True
    contract = Definition.model_validate(document)
    recorded = Workload("uuid", {"rows": 2}, {"x": RandomInput(), "weight": RandomInput()})
    assert make(contract, {"rows": 2}, 0, recorded)["residual"] is None
    assert isinstance(make(contract, {"rows": 2}, 0)["residual"], torch.Tensor)


def test_scalars_without_a_recording_have_documented_values() -> None:
    contract = definition(
        {"M": None, "head_dim": 64},
        {
            "q": (["M", "head_dim"], "float32"),
            "sm_scale": (None, "float32"),
            "eps": (None, "float32"),
            "count": (None, "int32"),
            "causal": (None, "bool"),
            "shift": ([], "float32"),
        },
        {"y": (["M", "head_dim"], "float32")},
    )
    values = make(contract, {"M": 2}, 0)
    assert [values[name] for name in ("sm_scale", "eps", "count", "causal")] == [0.125, 1e-6, 1, True]
    assert isinstance(values["count"], int) and isinstance(values["sm_scale"], float)
    assert tensor(values, "shift").shape == ()


# Structure


@given(st.integers(0, 4000), st.integers(1, 70), st.integers(0, 2**32))
def test_skewed_lengths_add_up_and_leave_no_request_empty_where_there_is_enough(
    total: int, count: int, seed: int
) -> None:
    lengths = skewed_lengths(total, count, np.random.default_rng(seed))
    assert lengths.shape == (count,) and lengths.sum() == total
    assert lengths.min() >= (1 if total >= count else 0)


def test_lengths_are_skewed_as_in_serving() -> None:
    lengths = skewed_lengths(64_000, 64, np.random.default_rng(0))
    assert lengths.max() > 4 * 1000 and np.median(lengths) < 900  # the mean is 1000


@given(st.integers(1, 12), st.integers(0, 60), st.integers(0, 200), st.integers(1, 50), st.integers(0, 100))
def test_paged_prefill_inputs_agree_with_the_axes(
    batch: int, more_queries: int, more_pages: int, more_cache: int, seed: int
) -> None:
    total_q, pages = batch + more_queries, batch + more_pages
    axes = {
        "batch": batch,
        "len_indptr": batch + 1,
        "total_q": total_q,
        "num_kv_indices": pages,
        "num_pages": pages + more_cache,
    }
    values = make(PREFILL, axes, seed)
    queries, keys = tensor(values, "qo_indptr").diff(), tensor(values, "kv_indptr").diff()
    indices, last = tensor(values, "kv_indices"), tensor(values, "kv_last_page_len")
    assert tensor(values, "qo_indptr")[0] == tensor(values, "kv_indptr")[0] == 0
    assert queries.sum() == total_q and keys.sum() == pages and queries.min() >= 1 and keys.min() >= 0
    assert num_distinct(indices) == pages and indices.min() >= 0 and indices.max() < pages + more_cache
    assert last.min() >= 1 and last.max() <= 2
    if bool((keys >= (queries + 1) // 2).all()):  # every request has pages for its queries
        assert bool(((keys - 1) * 2 + last >= queries).all())


def test_queries_have_pages_where_the_totals_allow_it() -> None:
    axes = {"batch": 8, "len_indptr": 9, "total_q": 100, "num_kv_indices": 60, "num_pages": 60}
    values = make(PREFILL, axes, 5)
    queries, keys = tensor(values, "qo_indptr").diff(), tensor(values, "kv_indptr").diff()
    assert bool((keys * 2 >= queries).all())


def test_the_structure_follows_the_uuid_and_the_values_follow_the_seed() -> None:
    axes = {"batch": 8, "len_indptr": 9, "total_q": 100, "num_kv_indices": 60, "num_pages": 60}
    first, second = (make(PREFILL, axes, seed, Workload("uuid-a", axes, {})) for seed in (1, 2))
    other = make(PREFILL, axes, 1, Workload("uuid-b", axes, {}))
    assert torch.equal(tensor(first, "qo_indptr"), tensor(second, "qo_indptr"))
    assert not torch.equal(tensor(first, "q"), tensor(second, "q"))
    assert not torch.equal(tensor(first, "qo_indptr"), tensor(other, "qo_indptr"))


STRUCTURED: dict[str, tuple[list[str], dict[str, int | None]]] = {
    "topk_ids": (["tokens", "top_k_axis"], {"tokens": None, "top_k_axis": 6, "num_experts": 16}),
    "sparse_indices": (["tokens", "topk"], {"tokens": None, "topk": 32, "num_pages": 20, "page_size": 2}),
    "block_table": (["tokens", "width"], {"tokens": None, "width": 4, "num_pages": 100}),
    "state_batch_indices": (["tokens"], {"tokens": None, "state_cache_size": 30}),
    "initial_state_indices": (["tokens"], {"tokens": None, "pool_size": 30}),
    "positions": (["tokens"], {"tokens": None, "max_seq_len": 50}),
    "seq_lens": (["tokens"], {"tokens": None, "max_num_pages": 8, "page_size": 4}),
    "top_k": (["tokens"], {"tokens": None, "vocab_size": 40}),
    "mystery": (["tokens"], {"tokens": None, "width": 4}),
}
BOUNDS = {
    "topk_ids": (0, 15),
    "sparse_indices": (0, 39),
    "block_table": (0, 99),
    "state_batch_indices": (0, 29),
    "initial_state_indices": (0, 29),
    "positions": (0, 49),
    "seq_lens": (1, 32),
    "top_k": (1, 40),
    "mystery": (0, 3),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_indexes_stay_in_their_bounds_and_are_distinct_where_they_must_be(name: str) -> None:
    shape, axes = STRUCTURED[name]
    contract = definition(axes, {name: (shape, "int32")}, {"y": (["tokens"], "float32")})
    values = tensor(make(contract, {"tokens": 20}, 0), name)
    low, high = BOUNDS[name]
    assert low <= int(values.min()) and int(values.max()) <= high
    if name in ("topk_ids", "sparse_indices"):
        assert all(num_distinct(row) == row.numel() for row in values)
    if name in ("block_table", "state_batch_indices", "initial_state_indices"):
        assert num_distinct(values) == values.numel()
    assert num_distinct(values) > 1


def test_slots_that_do_not_exist_are_padded() -> None:
    axes: dict[str, int | None] = {"tokens": None, "topk": 8, "num_pages": 5}
    contract = definition(axes, {"sparse_indices": (["tokens", "topk"], "int32")}, {"y": (["tokens"], "float32")})
    rows = tensor(make(contract, {"tokens": 3}, 0), "sparse_indices")
    assert [sorted(row.tolist()) for row in rows] == [[-1, -1, -1, 0, 1, 2, 3, 4]] * 3


def test_popular_experts_get_several_times_the_mean_load() -> None:
    axes: dict[str, int | None] = {"tokens": None, "k": 2, "num_experts": 16}
    contract = definition(axes, {"topk_ids": (["tokens", "k"], "int32")}, {"y": (["tokens"], "float32")})
    load = torch.bincount(tensor(make(contract, {"tokens": 4000}, 0), "topk_ids").flatten(), minlength=16)
    assert load.sum() == 8000 and load.max() > 2 * 500 and load.min() < 250


def test_probabilities_sum_to_one() -> None:
    contract = definition(
        {"batch": None, "vocab": 1000},
        {"probs": (["batch", "vocab"], "float32"), "top_p": (["batch"], "float32")},
        {"samples": (["batch"], "int64")},
    )
    values = make(contract, {"batch": 8}, 0)
    assert tensor(values, "probs").sum(dim=-1).tolist() == pytest.approx([1.0] * 8, abs=1e-5)
    top_p = tensor(values, "top_p")
    assert bool(((top_p > 0.8) & (top_p <= 1.0)).all())


def test_narrow_integers_cover_their_range() -> None:
    contract = definition({"M": None}, {"A": (["M"], "int8")}, {"C": (["M"], "int8")})
    values = tensor(make(contract, {"M": 5000}, 0), "A")
    assert values.dtype == torch.int8 and int(values.min()) < -100 and int(values.max()) > 100


def test_floats_and_scalars_are_no_structure() -> None:
    assert synthesise(gemm(), {"M": 1, "N": 96, "K": 256}, 0) == {}


# Residency and copies


def test_weights_are_cold_and_everything_else_is_hot() -> None:
    assert residency(gemm()) == {"A": "hot", "B": "cold"}
    assert residency(fused_add()) == {"x": "hot", "residual": "hot", "weight": "hot"}


def test_copies_exceed_four_caches_and_stay_within_a_quarter_of_the_memory() -> None:
    contract = gemm(4096, 4096)  # 32 MiB
    mib = 2**20
    assert num_copies(contract, 32 * mib, 64 * 1024 * mib) == 4
    assert num_copies(contract, 33 * mib, 64 * 1024 * mib) == 5
    assert num_copies(contract, 300 * mib, 1024 * mib) == 8
    assert num_copies(contract, 32 * mib, 16 * mib) == 1
    assert num_copies(fused_add(), 32 * mib, 1024 * mib) == 1


def test_copies_exceed_four_times_the_share_of_a_cache_and_the_whole_of_it_once() -> None:
    contract, mib, memory = gemm(4096, 4096), 2**20, 1 << 40  # 32 MiB
    assert num_copies(contract, 480 * mib, memory) == 60
    assert num_copies(contract, 480 * mib, memory, 480 * mib) == 60
    assert num_copies(contract, 480 * mib, memory, 160 * mib) == 20
    assert num_copies(contract, 480 * mib, memory, 64 * mib) == 15


def test_copies_of_tiny_weights_are_limited_in_number() -> None:
    contract = gemm(64, 64)  # 8 KiB
    assert num_copies(contract, 60 << 20, 1 << 37) == MAX_COPIES


def test_inputs_are_made_on_the_device_asked_for() -> None:
    made = make(PREFILL, {"batch": 3, "len_indptr": 4, "total_q": 11, "num_kv_indices": 9, "num_pages": 20}, 0)
    again = make(
        PREFILL, {"batch": 3, "len_indptr": 4, "total_q": 11, "num_kv_indices": 9, "num_pages": 20}, 0, device="cpu"
    )
    assert same(made, again)
    assert {tensor(again, name).device.type for name in ("q", "qo_indptr", "kv_indices")} == {"cpu"}


def test_cold_copies_share_activations_and_nothing_of_the_weights() -> None:
    contract = gemm()
    values = make(contract, {"M": 3}, 0)
    copies = cold_copies(contract, values, 3)
    assert all(same(copy, values) for copy in copies)
    assert len({tensor(copy, "A").data_ptr() for copy in copies}) == 1
    assert len({tensor(copy, "B").data_ptr() for copy in copies}) == 3


# Adversarial values


def cases_of(contract: Definition, axes: Mapping[str, int]) -> dict[str, dict[str, Value]]:
    return dict(adversarial(contract, axes, seed=3))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 5])
def test_outputs_stay_finite_in_every_case_but_nan_and_inf(dtype: str, rows: int) -> None:
    limit = torch.finfo(torch_dtype(dtype)).max
    for name, values in cases_of(gemm(96, 512, dtype), {"M": rows}).items():
        product = tensor(values, "A").double() @ tensor(values, "B").double().T
        assert bool((product.abs() <= limit).all()) == (name not in ("nan", "inf")), name
    for name, values in cases_of(fused_add(512, dtype), {"rows": rows}).items():
        total = tensor(values, "x").float() + tensor(values, "residual").float()
        squares = total.square().sum(dim=-1)
        assert bool(squares.isfinite().all()) == (name not in ("nan", "inf")), name


def test_every_case_is_there_and_differs_from_the_plain_inputs() -> None:
    contract = gemm()
    cases = cases_of(contract, {"M": 4})
    assert list(cases) == ["all_equal", "huge", "tiny", "cancelling", "one_hot_row", "denormals", "nan", "inf"]
    plain = make(contract, {"M": 4}, 3)
    assert not any(torch.equal(tensor(values, "A"), tensor(plain, "A")) for values in cases.values())


def test_all_equal_has_one_value_per_tensor() -> None:
    values = cases_of(gemm(), {"M": 4})["all_equal"]
    assert set(tensor(values, "A").flatten().tolist()) == {1.0}
    assert set(tensor(values, "B").flatten().tolist()) == {1 / 16}


def test_huge_and_tiny_are_far_from_one_and_normal() -> None:
    for dtype, least, most in (("bfloat16", 1e-14, 1e14), ("float16", 4e-3, 500)):
        cases = cases_of(gemm(dtype=dtype), {"M": 64})
        assert tensor(cases["huge"], "A").float().std().item() > most
        assert tensor(cases["tiny"], "A").float().std().item() < least
        assert tensor(cases["tiny"], "A").float().std().item() > torch.finfo(torch_dtype(dtype)).tiny


def test_cancelling_sums_are_small_beside_their_terms() -> None:
    values = cases_of(gemm(96, 512, "float32"), {"M": 16})["cancelling"]
    a, b = tensor(values, "A"), tensor(values, "B")
    assert (a @ b.T).abs().mean() < 0.01 * (a.abs() @ b.abs().T).mean()
    added = cases_of(fused_add(512, "float32"), {"rows": 16})["cancelling"]
    x, residual = tensor(added, "x"), tensor(added, "residual")
    assert (x + residual).abs().mean() < 0.1 * (x.abs() + residual.abs()).mean()
    assert (x + residual).abs().max() > 0


def test_one_row_is_far_larger_than_the_others() -> None:
    rows = tensor(cases_of(gemm(), {"M": 5})["one_hot_row"], "A").float().std(dim=-1)
    assert rows.argmax() == 2 and rows[2] > 1000 * rows[torch.arange(5) != 2].max()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_denormals_are_below_the_smallest_normal_and_not_all_zero(dtype: str) -> None:
    a = tensor(cases_of(gemm(dtype=dtype), {"M": 8})["denormals"], "A").double()
    assert 0 < a.abs().max() < torch.finfo(torch_dtype(dtype)).tiny
    assert (a != 0).double().mean() > 0.9 and a.min() < 0 < a.max()


def test_nan_and_inf_stand_in_the_first_and_the_last_row_of_one_activation() -> None:
    cases = cases_of(fused_add(), {"rows": 4})
    x = tensor(cases["nan"], "x")
    assert x.isnan().nonzero().tolist() == [[0, 0], [3, 127]]
    inf = tensor(cases["inf"], "x")
    assert inf.isinf().nonzero().tolist() == [[0, 0], [3, 127]]
    assert inf[0, 0] == -math.inf and inf[3, 127] == math.inf
    assert not tensor(cases["nan"], "residual").isnan().any()
    alone = tensor(cases_of(fused_add(), {"rows": 1})["inf"], "x")
    assert alone.isinf().nonzero().tolist() == [[0, 127]]


def test_a_dtype_without_infinity_has_no_such_case() -> None:
    contract = definition(
        {"M": None, "K": 16}, {"A": (["M", "K"], "float8_e4m3fn")}, {"C": (["M", "K"], "float8_e4m3fn")}
    )
    assert "nan" in cases_of(contract, {"M": 4}) and "inf" not in cases_of(contract, {"M": 4})


def test_probabilities_and_indexes_stay_lawful_in_every_case() -> None:
    axes = {"batch": 3, "len_indptr": 4, "total_q": 11, "num_kv_indices": 9, "num_pages": 20}
    plain = make(PREFILL, axes, 3)
    cases = cases_of(PREFILL, axes)
    assert len(cases) == 8
    for values in cases.values():
        assert all(torch.equal(tensor(values, n), tensor(plain, n)) for n in ("qo_indptr", "kv_indices"))
    sampling = definition(
        {"batch": None, "vocab": 10}, {"probs": (["batch", "vocab"], "float32")}, {"s": (["batch"], "int64")}
    )
    assert cases_of(sampling, {"batch": 2}) == {}


def test_an_empty_batch_has_no_adversarial_activations() -> None:
    cases = cases_of(fused_add(), {"rows": 0})
    assert all(tensor(values, "x").numel() == 0 for values in cases.values())

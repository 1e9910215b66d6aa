"""Cases are drafted by the size of a call, share what is large, and are sealed where candidates could reach them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fibc import inputs
from fibc.buffers import LAYOUTS, Buffer
from fibc.case_book import CaseBook, checksums
from fibc.cases import Draft, Drafter
from fibc.errors import EvaluationError, InputError
from fibc.schema.candidate import Guards, TensorGuard
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Status
from fibc.schema.feature import Point
from fibc.stand_in import HEAVY
from fibc.validation import Judge
from fibc.worker import load_text

REFERENCE = "import torch\n\n\ndef run(A, B):\n    return torch.matmul(A, B.T)\n"


def gemm(n: int = 24, k: int = 511, reference: str = REFERENCE) -> Definition:
    return Definition.model_validate(
        {
            "name": "gemm",
            "op_type": "gemm",
            "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": n}, "K": {"type": "const", "value": k}},
            "inputs": {"A": {"shape": ["M", "K"], "dtype": "float32"}, "B": {"shape": ["N", "K"], "dtype": "float32"}},
            "outputs": {"C": {"shape": ["M", "N"], "dtype": "float32"}},
            "reference": reference,
        }
    )


def point(m: int) -> Point:
    return Point((("M", m),), "tune")


def drafter(definition: Definition) -> Drafter:
    return Drafter(definition, {}, 0, lambda p: inputs.make(definition, dict(p.axes), 0))


def book(definition: Definition, native: Callable[..., Any] = lambda a, b: a @ b.T) -> CaseBook:
    reference = load_text("reference", definition.reference).run
    return CaseBook(definition, reference, native, drafter(definition))


def names(drafts: list[Draft]) -> list[str]:
    return [f"{draft.name} M={dict(draft.point.axes)['M']}" for draft in drafts]


def test_a_trial_meets_dense_inputs_everywhere_and_a_few_hard_ones_at_the_smallest_point() -> None:
    drafts = [*drafter(gemm()).drafts([point(3), point(9)], point(3), "trial")]
    assert names(drafts) == [
        "dense M=3",
        "dense M=9",
        "one_hot_row M=3",
        "nan M=3",
        "dense, row-sliced M=3",
    ]
    assert [draft.independent for draft in drafts] == [True, True, False, False, True]


def test_a_finalist_meets_every_layout_and_adversarial_input() -> None:
    drafts = [*drafter(gemm()).drafts([point(3)], point(3), "adversarial")]
    assert [draft.layout for draft in drafts if draft.layout] == list(LAYOUTS)
    assert {"all_equal", "huge", "cancelling", "denormals", "nan", "inf"} <= {draft.name for draft in drafts}
    assert [*drafter(gemm()).drafts([point(3), point(9)], point(3), "points")][-1].name == "dense"


def test_a_heavy_trial_is_one_dense_call() -> None:
    m = HEAVY["cpu"].trial_terms // (1024 * 24)
    heavy = gemm(k=8)
    drafts = [*drafter(heavy).drafts([point(m + 1), point(m + 2)], point(m + 1), "trial")]
    assert names(drafts) == [f"dense M={m + 1}"]


def test_large_weights_lie_in_one_buffer_and_small_ones_in_one_each() -> None:
    for n, buffers in ((1024, 1), (24, 3)):
        drafts = [*drafter(gemm(n=n)).drafts([point(1), point(2), point(3)], point(1), "points")]
        placed = [draft.placed["B"] for draft in drafts]
        assert len({item.tensor.data_ptr() for item in placed if isinstance(item, Buffer)}) == buffers


def test_native_is_held_to_the_oracle_case_by_case() -> None:
    good = book(gemm()).prepare("trial", [point(3), point(9)], point(3), "trial")
    assert [agreement["status"] for agreement in good] == [Status.PASSED] * 5
    raising = book(gemm(), lambda a, b: a @ b).prepare("trial", [point(3)], point(3), "trial")
    assert raising[0]["status"] is Status.RUNTIME_ERROR
    assert "shapes cannot be multiplied" in raising[0]["message"]
    wrong = book(gemm(), lambda a, b: 1.01 * (a @ b.T)).prepare("trial", [point(3)], point(3), "trial")
    assert wrong[0]["status"] is Status.INCORRECT_NUMERICAL


def test_cases_are_made_once_for_the_same_points_and_anew_for_others() -> None:
    cases = book(gemm())
    cases.prepare("trial", [point(3)], point(3), "trial")
    first = cases["trial"]
    assert cases.prepare("trial", [point(3)], point(3), "trial") == []
    assert cases["trial"] is first
    assert len(cases.prepare("trial", [point(4)], point(4), "trial")) == 4
    assert cases["trial"][0].axes == {"M": 4}
    cases.forget("trial")
    with pytest.raises(KeyError):
        cases["trial"]


def test_a_reference_of_another_form_is_bad_input() -> None:
    transposed = "def run(A, B):\n    return B @ A.T\n"
    with pytest.raises(InputError, match="output C: shape must be"):
        book(gemm(reference=transposed)).prepare("trial", [point(3)], point(3), "trial")


@pytest.mark.parametrize("victim", ["input", "values", "bound", "weights"])
def test_a_candidate_that_writes_what_it_is_judged_by_is_found_out(victim: str) -> None:
    cases = book(gemm())
    cases.prepare("trial", [point(3)], point(3), "trial")
    cases.prepare("points", [point(5)], point(5), "points")
    assert cases.broken() is None
    expected = cases["trial"][0].expected[0]
    assert expected.bound is not None
    pristine = cases["trial"][0].inputs["A"]
    assert isinstance(pristine, Tensor)
    wide = next(iter(cases._weights.tensors().values()))
    tensor = {"input": pristine, "values": expected.values, "bound": expected.bound, "weights": wide}[victim]
    tensor.view(-1)[7] += 1.0
    message = cases.broken()
    assert message is not None and "memory that no call was given must stay unchanged" in message
    where = {"input": "input A", "values": "oracle of C, values", "bound": "bound", "weights": "weights: B"}
    assert where[victim] in message
    with pytest.raises(EvaluationError, match="judge in another process"):
        cases.prepare("trial", [point(4)], point(4), "trial")


def test_every_kind_of_cases_can_be_prepared_in_any_order_without_a_false_alarm() -> None:
    cases = book(gemm())
    for kind in ("adversarial", "trial", "points", "adversarial"):
        for m in (3, 4):
            cases.prepare(kind, [point(m)], point(m), kind)
            assert cases.broken() is None


def test_a_checksum_notices_any_single_change_and_nothing_else() -> None:
    for tensor in (torch.randn(7, 3).bfloat16(), torch.arange(5, dtype=torch.int32), torch.zeros(3)[1:]):
        before = checksums({"x": tensor})
        assert checksums({"x": tensor.clone()}) == before
        for index in range(tensor.numel()):
            changed = tensor.clone()
            changed.view(-1)[index] += 1
            assert checksums({"x": changed}) != before


class Gemm:
    """A candidate in Python that reads as many columns as it is told."""

    def __init__(self, extra_columns: int = 0) -> None:
        self.extra_columns = extra_columns

    def run_out(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        shape = (a.shape[0], a.shape[1] + self.extra_columns)
        read = a.as_strided(shape, a.stride(), a.storage_offset())
        weights = torch.nn.functional.pad(b, (0, self.extra_columns))  # zeros: the product would hide what was read
        c.copy_(read @ weights.T)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        c = torch.empty(a.shape[0], b.shape[0])
        self.run_out(a, b, c)
        return c


@pytest.mark.parametrize(("extra_columns", "status"), [(0, Status.PASSED), (1, Status.INCORRECT_NUMERICAL)])
def test_511_columns_read_as_512_show_although_the_512th_is_multiplied_by_zero(
    extra_columns: int, status: Status
) -> None:
    definition = gemm()
    cases = book(definition)
    cases.prepare("adversarial", [point(3)], point(3), "adversarial")
    guard = TensorGuard("rows", 4)
    judge = Judge(definition, definition.call_spec(), Gemm(extra_columns), Guards((guard, guard), (guard,)))
    failures = [failure for case in cases["adversarial"] if (failure := judge.judge(case)) is not None]
    outcome = failures[0] if failures else judge.finish()
    assert outcome.status is status, outcome.message

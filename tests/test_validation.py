"""A kernel is judged on cases through guarded buffers: values, bytes outside, inputs, repeats, and results by value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fibc import buffers, check, inputs, validation
from fibc.check import Oracle, Weights
from fibc.schema.candidate import Guards, TensorGuard
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Status
from fibc.validation import Case, Judge, Validation, filled_allocations, place, same_bits
from fibc.worker import load_text


def contract(*, in_place: bool = False) -> Definition:
    output = {"shape": ["rows", "columns"], "dtype": "float32"}
    return Definition.model_validate(
        {
            "name": "doubled",
            "op_type": "elementwise",
            "axes": {"rows": {"type": "var"}, "columns": {"type": "const", "value": 16}},
            "inputs": {"x": {"shape": ["rows", "columns"], "dtype": "float32"}},
            "outputs": {"y": {**output, "param": "x"} if in_place else output},
            "reference": "def run(x):\n    return x + x\n",
        }
    )


class Kernel:
    """A kernel in Python: ``write(x, y)``; by value it allocates, or writes in place."""

    def __init__(self, write: Callable[[Tensor, Tensor], None], *, in_place: bool = False) -> None:
        self.write = write
        self.in_place = in_place
        self.num_calls = 0

    def run_out(self, x: Tensor, y: Tensor) -> None:
        self.num_calls += 1
        self.write(x, y)

    def __call__(self, x: Tensor) -> Tensor:
        y = x if self.in_place else torch.empty_like(x, memory_format=torch.contiguous_format)
        self.run_out(x, y)
        return y


def judge(kernel: Kernel, *, layout: str = "", guard: TensorGuard | None = None, in_place: bool = False) -> Validation:
    definition = contract(in_place=in_place)
    axes = {"rows": 3}
    values = inputs.make(definition, axes, 0)
    reference = load_text("reference", definition.reference).run
    oracle = Oracle(definition, reference, check.probe(definition, reference, values), Weights(definition))
    placed = place(values, buffers.LAYOUTS.get(layout, buffers.contiguous))
    expected = oracle.expect(values, axes, independent=True)
    case = Case("dense", axes, layout, values, placed, expected)
    chosen = guard or TensorGuard()
    judged = Judge(definition, definition.call_spec(), kernel, Guards((chosen,), (chosen,)))
    return judged.judge(case) or judged.finish()


def double(x: Tensor, y: Tensor) -> None:
    y.copy_(x + x)


def test_a_right_kernel_passes_with_outputs_in_every_layout_that_its_guards_take() -> None:
    for layout in ("", *buffers.LAYOUTS):
        outcome = judge(Kernel(double), layout=layout, guard=TensorGuard("any"))
        assert outcome.status is Status.PASSED, outcome.message
        assert outcome.correctness is not None
        assert (outcome.correctness.num_cases, outcome.num_refused) == (1, 0)


def test_an_input_that_breaks_a_guard_is_never_given_to_the_kernel() -> None:
    kernel = Kernel(double)
    outcome = judge(kernel, layout="transposed")
    assert outcome.status is Status.PASSED
    assert kernel.num_calls == 0
    assert outcome.num_refused == 1


def test_an_operator_in_place_starts_from_pristine_inputs_each_time() -> None:
    outcome = judge(Kernel(double, in_place=True), in_place=True)
    assert outcome.status is Status.PASSED, outcome.message
    assert outcome.correctness is not None
    assert outcome.correctness.deterministic
    assert judge(Kernel(lambda x, y: None, in_place=True), in_place=True).status is Status.INCORRECT_NUMERICAL


def test_a_kernel_that_writes_between_rows_is_caught() -> None:
    def dense_rows(x: Tensor, y: Tensor) -> None:
        double(x, y)
        y.as_strided((1,), (1,), y.storage_offset() + y.shape[1]).fill_(1.0)

    outcome = judge(Kernel(dense_rows), layout="row-sliced", guard=TensorGuard("any"))
    assert outcome.status is Status.INCORRECT_NUMERICAL
    assert "bytes outside of the tensor" in outcome.message


@pytest.mark.parametrize("large", [False, True])
def test_a_kernel_that_changes_its_input_is_caught_also_where_that_is_compared_at_the_end(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Careless(Kernel):
        """Its outputs are right: it writes behind its last call, the one by value."""

        def __call__(self, x: Tensor) -> Tensor:
            y = super().__call__(x)
            x.view(-1)[-1] = 0.5
            return y

    monkeypatch.setattr(validation, "SMALL_BYTES", 0 if large else 1 << 20)
    assert judge(Kernel(double)).status is Status.PASSED
    outcome = judge(Careless(double))
    assert outcome.status is Status.INCORRECT_NUMERICAL
    assert outcome.message == "dense at rows=3: input x: must stay unchanged, got other values after the call"


def test_a_result_by_value_of_another_form_is_caught() -> None:
    class Wide(Kernel):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x).double()

    assert judge(Wide(double)).status is Status.INCORRECT_DTYPE


def test_a_result_by_value_that_is_left_over_memory_is_caught() -> None:
    class Lazy(Kernel):
        def __call__(self, x: Tensor) -> Tensor:
            return torch.empty_like(x)

    assert judge(Lazy(double)).status is Status.INCORRECT_NUMERICAL


def test_left_over_memory_is_caught_even_where_it_holds_the_right_answer() -> None:
    """Blocks of the answer's size are freed with the answer in them, as many as an allocator may keep."""

    class Lazy(Kernel):
        def __call__(self, x: Tensor) -> Tensor:
            answers = [x + x for _ in range(64)]
            del answers
            return torch.empty_like(x)

    assert judge(Lazy(double)).status is Status.INCORRECT_NUMERICAL


def test_what_is_allocated_is_filled_only_inside_and_as_before_after_an_error() -> None:
    settings: Any = torch.utils.deterministic  # torch declares no type
    before = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    with pytest.raises(ValueError, match="a kernel's"), filled_allocations():
        assert torch.empty(3).isnan().all()
        assert torch.empty(3, dtype=torch.int32).eq(torch.iinfo(torch.int32).max).all()
        raise ValueError("a kernel's")
    assert before == (torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory)


def test_same_bits_tells_zeros_apart_and_knows_a_nan_again() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize(("num_repeats", "found"), [(1, False), (4, True)])
def test_a_race_that_shows_rarely_needs_repeats(num_repeats: int, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sixth call loses a row; a case calls once, repeats, and calls by value."""

    class Racy(Kernel):
        def run_out(self, x: Tensor, y: Tensor) -> None:
            super().run_out(x, y)
            if self.num_calls % 6 == 5:
                y[1] = 0.0

    monkeypatch.setitem(validation.NUM_REPEATS, "cpu", num_repeats)
    outcome = judge(Racy(double))
    assert (outcome.status is Status.INCORRECT_NUMERICAL) == found


def test_a_kernel_that_rounds_differently_each_time_passes_as_not_deterministic() -> None:
    class Wavering(Kernel):
        def run_out(self, x: Tensor, y: Tensor) -> None:
            super().run_out(x, y)
            y.mul_(1 + 2.0**-23 * (self.num_calls % 2))

    outcome = judge(Wavering(double))
    assert outcome.status is Status.PASSED, outcome.message
    assert outcome.correctness is not None
    assert not outcome.correctness.deterministic

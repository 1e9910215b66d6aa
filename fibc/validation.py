"""A kernel called on cases through guarded buffers, and judged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fibc import buffers, check
from fibc.bound import Expected
from fibc.buffers import Buffer, Layout
from fibc.calls import Value, device_of
from fibc.schema.callspec import CallSpec
from fibc.schema.candidate import Guards
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Correctness, Status

REPEAT_BELOW_S = 0.05
"""A call that takes longer is not repeated for each case, only once for each validation."""

NUM_REPEATS = {"cpu": 1, "cuda": 4}
"""Further calls of each case by the kind of device, for races: on a GPU they are more likely, and calls are short."""

SMALL_BYTES = 1 << 20
"""Inputs up to this size are compared with their pristine values after every case, larger ones after the last."""


class Kernel(Protocol):
    """A candidate bound by the harness: ``run`` by value, and into given outputs. No guards are checked."""

    def __call__(self, *inputs: Any) -> Any: ...

    def run_out(self, *arguments: Any) -> Any: ...


@dataclass(frozen=True)
class Case:
    """One call with its oracle.

    Attributes:
        name: ``dense``, ``nan``, ``transposed``.
        axes: Every var axis.
        layout: One of ``buffers.LAYOUTS``, or empty for row-major.
        inputs: Pristine values, which nobody is given.
        placed: The same values in guarded buffers, which kernels are given; scalars as they are.
        expected: The oracle.
    """

    name: str
    axes: Mapping[str, int]
    layout: str
    inputs: Mapping[str, Value]
    placed: Mapping[str, Buffer | Value]
    expected: tuple[Expected, ...]

    def arguments(self) -> list[Any]:
        return [item.tensor if isinstance(item, Buffer) else item for item in self.placed.values()]


@dataclass(frozen=True)
class Validation:
    """The outcome of one kernel over all cases.

    Attributes:
        status: PASSED, or what the first failing case shows.
        message: ``case: where: law, seen, accepted``; empty where it passed.
        correctness: Over the cases up to and including a failing one; None where no outputs were compared.
        num_refused: Cases that the variant's own guards keep away from it.
    """

    status: Status
    message: str
    correctness: Correctness | None
    num_refused: int = 0


def place(inputs: Mapping[str, Value], layout: Layout = buffers.contiguous) -> dict[str, Buffer | Value]:
    """Return ``inputs`` with tensors copied into guarded buffers on their device."""
    placed: dict[str, Buffer | Value] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            buffer = layout(value.shape, value.dtype, value.device)
            buffer.tensor.copy_(value)
            placed[name] = buffer
        else:
            placed[name] = value
    return placed


class Judge:
    """Runs cases and keeps the worst that was seen."""

    def __init__(
        self,
        definition: Definition,
        spec: CallSpec,
        kernel: Kernel,
        guards: Guards,
        filled: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        """Prepare; nothing is called.

        Args:
            filled: Within it what the kernel allocates by value is filled; by default ``filled_allocations``.
        """
        self._filled = filled or filled_allocations
        self._definition = definition
        self._spec = spec
        self._kernel = kernel
        self._guards = guards
        self._absolute = self._relative = self._ratio = 0.0
        self._deterministic = True
        self._num_cases = 0
        self._num_refused = 0
        self._repeated = False
        self._large: dict[int, tuple[Case, str]] = {}

    def finish(self) -> Validation:
        """Return the outcome where every case passed; large inputs are compared with their pristine values now."""
        for case, name in self._large.values():
            failure = self._blame_write(case, name)
            if failure is not None:
                return failure
        return Validation(Status.PASSED, "", self._correctness(), self._num_refused)

    def judge(self, case: Case) -> Validation | None:
        """Run one case; None where it passed."""
        if self._refuses(case):
            self._num_refused += 1
            return None
        failure = self._run(case)
        in_place = {argument.alias for argument in self._spec.outputs}
        for index, (name, value) in enumerate(case.inputs.items()):
            if index in in_place or not isinstance(value, Tensor):
                continue
            if failure is None and value.nbytes > SMALL_BYTES:
                self._large[id(case.placed[name])] = case, name
            else:
                failure = self._blame_write(case, name) or failure
        return failure

    def _run(self, case: Case) -> Validation | None:
        outputs = self._outputs(case)
        finite_poison = any(expected.has_nan for expected in case.expected)
        began = time.monotonic()
        failure = self._run_out(case, outputs, finite_poison)
        took_s = time.monotonic() - began
        if failure is not None:
            return failure
        self._num_cases += 1
        failure = self._compare(case, [buffer.tensor for buffer in outputs])
        if failure is not None:
            return failure
        first = [buffer.tensor.clone() for buffer in outputs]
        if took_s < REPEAT_BELOW_S or not self._repeated:
            self._repeated = True
            failure = self._repeat(case, outputs, first, finite_poison)
        return failure or self._by_value(case, first)

    def _repeat(
        self, case: Case, outputs: Sequence[Buffer], first: Sequence[Tensor], finite_poison: bool
    ) -> Validation | None:
        """Call again, over another poison: bits are as in the first call, or else the outputs are judged anew."""
        for _ in range(NUM_REPEATS[device_of(first).type]):
            failure = self._run_out(case, outputs, not finite_poison)
            if failure is None and not all(same_bits(a, b.tensor) for a, b in zip(first, outputs, strict=True)):
                self._deterministic = False
                failure = self._compare(case, [buffer.tensor for buffer in outputs])
            if failure is not None:
                return failure
        return None

    def _refuses(self, case: Case) -> bool:
        reach = self._guards.max_offset_elems
        return any(
            isinstance(item, Buffer) and buffers.refused(guard, reach, item.tensor) is not None
            for guard, item in zip(self._guards.inputs, case.placed.values(), strict=True)
        )

    def _outputs(self, case: Case) -> list[Buffer]:
        """Outputs of the case's own layout where the guards take it, else row-major; in-place ones are inputs."""
        placed = list(case.placed.values())
        result = []
        for argument, expected, guard in zip(self._spec.outputs, case.expected, self._guards.outputs, strict=True):
            if argument.alias is not None:
                buffer = placed[argument.alias]
                assert isinstance(buffer, Buffer)
            else:
                shape = tuple(expected.values.shape)
                layout = buffers.LAYOUTS.get(case.layout, buffers.contiguous)
                buffer = layout(shape, expected.dtype, expected.values.device)
                if buffers.refused(guard, self._guards.max_offset_elems, buffer.tensor) is not None:
                    buffer = buffers.contiguous(shape, expected.dtype, expected.values.device)
            result.append(buffer)
        return result

    def _restore(self, case: Case) -> None:
        """Give in-place inputs their values back."""
        names = list(case.inputs)
        for argument in self._spec.outputs:
            if argument.alias is not None:
                value, buffer = case.inputs[names[argument.alias]], case.placed[names[argument.alias]]
                assert isinstance(value, Tensor)
                assert isinstance(buffer, Buffer)
                buffer.tensor.copy_(value)

    def _run_out(self, case: Case, outputs: Sequence[Buffer], finite_poison: bool) -> Validation | None:
        for argument, buffer in zip(self._spec.outputs, outputs, strict=True):
            if argument.alias is None:
                buffer.poison(finite=finite_poison)
        self._restore(case)
        self._kernel.run_out(*case.arguments(), *(buffer.tensor for buffer in outputs))
        guarded = {**dict(zip(self._definition.outputs, outputs, strict=True)), **case.placed}
        for name, item in guarded.items():
            if isinstance(item, Buffer) and not item.intact():
                return self._failure(case, f"{name}: bytes outside of the tensor must stay untouched, got written ones")
        return None

    def _by_value(self, case: Case, first: Sequence[Tensor]) -> Validation | None:
        """Call by value, into memory that shows where it was not written."""
        self._restore(case)
        with self._filled():
            result = self._kernel(*case.arguments())
        outputs = check.as_outputs(self._definition, result)
        if self._deterministic and all(same_bits(a, b) for a, b in zip(first, outputs, strict=True)):
            return None
        failure = self._compare(case, outputs)
        if failure is None:
            self._deterministic = False
        return failure

    def _blame_write(self, case: Case, name: str) -> Validation | None:
        """Return the failure of a kernel that wrote into input ``name``."""
        value, item = case.inputs[name], case.placed[name]
        assert isinstance(value, Tensor)
        assert isinstance(item, Buffer)
        if same_bits(item.tensor, value):
            return None
        return self._failure(case, f"input {name}: must stay unchanged, got other values after the call")

    def _compare(self, case: Case, outputs: Sequence[Tensor]) -> Validation | None:
        agreement = check.compare(self._definition, case.axes, outputs, case.expected)
        self._absolute = max(self._absolute, agreement.max_absolute_error)
        self._relative = max(self._relative, agreement.max_relative_error)
        self._ratio = max(self._ratio, agreement.max_bound_ratio)
        if agreement.status is Status.PASSED:
            return None
        return self._failure(case, agreement.message, agreement.status)

    def _failure(self, case: Case, message: str, status: Status = Status.INCORRECT_NUMERICAL) -> Validation:
        where = ", ".join(f"{name}={size}" for name, size in case.axes.items())
        return Validation(status, f"{case.name} at {where}: {message}", self._correctness(), self._num_refused)

    def _correctness(self) -> Correctness:
        return Correctness(self._absolute, self._relative, self._ratio, self._deterministic, self._num_cases)


@contextmanager
def filled_allocations() -> Iterator[None]:
    """Have torch fill whatever it allocates, with NaN or the largest integer.

    Memory that is handed out again may hold a right answer: of the reference, or of the kernel's earlier call. Which
    block comes is the allocator's business, so that freeing a poisoned one before is no protection.
    """
    settings: Any = torch.utils.deterministic  # torch declares no type
    mode, fills = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fills


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether shapes, dtypes and every bit are equal (NaN equals itself, -0 is not 0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(kind), b.view(kind))

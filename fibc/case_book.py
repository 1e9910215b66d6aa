"""Cases with their oracles, made and kept in one process: a GPU's memory cannot be shared with forks."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fibc.bound import Expected
from fibc.calls import Reference, as_outputs
from fibc.cases import Draft, Drafter
from fibc.check import compare
from fibc.error_model import ErrorModel, probe
from fibc.errors import EvaluationError
from fibc.oracle import Oracle
from fibc.schema.definition import Definition
from fibc.schema.evaluation import Status
from fibc.schema.feature import Point
from fibc.upcast import Weights
from fibc.validation import Case

Oracles = Mapping[tuple[Point, str], tuple[Expected, ...]]
"""By point and ``Draft.oracle``, in the order of the drafts."""

_WEIGHTS = "weights"
"""Where the seal of upcast weights stands, beside those of cases."""


class CaseBook:
    """The cases of one definition by name.

    Candidates run in the same process and may write anywhere on the device: ``broken`` says whether what they are
    judged by is still what was made. After a candidate that broke it the book is of no use.
    """

    def __init__(
        self, definition: Definition, reference: Reference, native: Callable[..., object], drafter: Drafter
    ) -> None:
        self._definition = definition
        self._reference = reference
        self._native = native
        self._drafter = drafter
        self._weights = Weights(definition)
        self._model: ErrorModel | None = None
        self._cases: dict[str, tuple[Case, ...]] = {}
        self._points: dict[str, tuple[Point, ...]] = {}
        self._seals: dict[str, dict[str, int]] = {}

    def prepare(self, name: str, points: Sequence[Point], low: Point, kind: str) -> list[dict[str, Any]]:
        """Make the cases ``name`` in place of earlier ones; return native's agreement, case by case.

        Where the book has them for the same points already, it returns an empty list.

        Args:
            points: Where dense inputs are tried.
            low: The smallest point, where adversarial inputs and layouts are tried.
            kind: One of ``cases.CASES``.

        Raises:
            InputError: If the reference returns another form.
            EvaluationError: If the book is broken.
            Exception: Whatever the reference raises.
        """
        if self._points.get(name) == tuple(points):
            return []
        if (problem := self.broken()) is not None:
            raise EvaluationError(f"{self._definition.name}: {problem} (a candidate did; judge in another process)")
        self.forget(name)
        drafts = [*self._drafter.drafts(points, low, kind)]
        self._model = self._model or find_error_model(self._definition, self._reference, drafts)
        oracles = expect_all(Oracle(self._definition, self._reference, self._model, self._weights), drafts)
        self._cases[name] = with_oracles(drafts, oracles)
        self._points[name] = tuple(points)
        self._seals[name] = checksums(dict(_tensors(self._cases[name])))
        self._seals[_WEIGHTS] = checksums(self._weights.tensors())
        return [native_agreement(self._definition, self._native, d, oracles[d.point, d.oracle]) for d in drafts]

    def __getitem__(self, name: str) -> tuple[Case, ...]:
        return self._cases[name]

    def forget(self, name: str) -> None:
        """Drop the cases ``name``."""
        self._cases.pop(name, None)
        self._points.pop(name, None)
        self._seals.pop(name, None)

    def broken(self) -> str | None:
        """Return what was written by someone who was not given it, or None."""
        for name, seal in self._seals.items():
            now = checksums(self._weights.tensors() if name == _WEIGHTS else dict(_tensors(self._cases[name])))
            changed = next((what for what, number in seal.items() if now[what] != number), None)
            if changed is not None:
                return f"{name}: {changed}: memory that no call was given must stay unchanged, got other values"
        return None


def _tensors(cases: Sequence[Case]) -> Iterator[tuple[str, Tensor]]:
    """Yield what candidates are judged by, each tensor once."""
    seen: set[int] = set()
    for index, case in enumerate(cases):
        where = f"case {index}, {case.name}"
        inputs = {f"{where}: pristine input {key}": value for key, value in case.inputs.items()}
        parts = {
            f"{where}: oracle of {expected.name}, {part}": getattr(expected, part)
            for expected in case.expected
            for part in ("values", "bound", "open")
        }
        for what, value in {**inputs, **parts}.items():
            if isinstance(value, Tensor) and id(value) not in seen:
                seen.add(id(value))
                yield what, value


def find_error_model(definition: Definition, reference: Reference, drafts: Sequence[Draft]) -> ErrorModel:
    """Return the error model that the smallest draft shows."""
    smallest = min(drafts, key=lambda draft: math.prod(size for _, size in draft.point.axes))
    return probe(definition, reference, smallest.inputs)


def expect_all(oracle: Oracle, drafts: Sequence[Draft]) -> Oracles:
    """Return what each draft must return; those that share an oracle are computed once."""
    known: dict[tuple[Point, str], tuple[Expected, ...]] = {}
    for draft in drafts:
        same = (draft.point, draft.oracle)
        if same not in known:
            known[same] = oracle.expect(draft.inputs, dict(draft.point.axes), independent=draft.independent)
    return known


def with_oracles(drafts: Sequence[Draft], oracles: Oracles) -> tuple[Case, ...]:
    """Return the drafts as cases."""
    return tuple(
        Case(d.name, dict(d.point.axes), d.layout, d.inputs, d.placed, oracles[d.point, d.oracle]) for d in drafts
    )


def native_agreement(
    definition: Definition, native: Callable[..., object], draft: Draft, expected: Sequence[Expected]
) -> dict[str, Any]:
    """Return how native by value agrees with the oracle."""
    values = [value.clone() if isinstance(value, Tensor) else value for value in draft.inputs.values()]
    result = {"case": draft.name, "point": str(draft.point), "status": Status.RUNTIME_ERROR, "message": ""}
    try:
        outputs = as_outputs(definition, native(*values))
        agreement = compare(definition, dict(draft.point.axes), outputs, expected)
    except Exception:  # noqa: BLE001  native may raise what it likes; it is reported and keeps serving
        return {**result, "message": traceback.format_exc(limit=-2)}
    return {**result, "status": agreement.status, "message": agreement.message}


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a number per tensor, equal where its bits are."""
    if not tensors:
        return {}
    sums = torch.stack([_checksum(tensor) for tensor in tensors.values()]).tolist()
    return dict(zip(tensors, sums, strict=True))


def _checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bytes, taken as int64 with wrap-around: another one if any element changes alone."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8 if flat.storage_offset() % 8 == 0 else 0
    words = flat[:whole].view(torch.int64).sum() if whole else torch.zeros((), dtype=torch.int64, device=flat.device)
    return words + flat[whole:].sum(dtype=torch.int64)

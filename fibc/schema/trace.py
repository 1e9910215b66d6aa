"""Solutions and traces: what FlashInfer-Trace files say about kernels and their evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fibc.schema.definition import Label, Name, Size
from fibc.schema.workload import RandomInput, SafetensorsInput, ScalarInput

Text = Annotated[StrictStr, Field(min_length=1)]

Language = Literal["python", "triton", "cpp", "cuda", "tilelang", "cutlass", "cutedsl", "cutile"]

TraceStatus = Literal[
    "PASSED",
    "INCORRECT_SHAPE",
    "INCORRECT_NUMERICAL",
    "INCORRECT_DTYPE",
    "RUNTIME_ERROR",
    "COMPILE_ERROR",
    "TIMEOUT",
]

_HAS_CORRECTNESS = frozenset({"PASSED", "INCORRECT_NUMERICAL"})
_HAS_PERFORMANCE = frozenset({"PASSED"})


def _inside(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or not path.isprintable():
        raise PydanticCustomError("path", "must be a relative path without ..")
    return path


class _Frozen(BaseModel):
    """A value that never changes; fields that nobody knows are kept and written again."""

    model_config = ConfigDict(frozen=True, extra="allow", ser_json_inf_nan="strings")

    def to_json(self) -> dict[str, Any]:
        """Return the format's object, without fields that were not given."""
        return _jsonable(self.model_dump(mode="json", exclude_unset=True))  # type: ignore[no-any-return]


class SourceFile(_Frozen):
    """A file of a solution.

    Attributes:
        path: Relative to the solution's own directory.
        content: Its text.
    """

    path: Annotated[Text, AfterValidator(_inside)]
    content: Text


class BuildSpec(_Frozen):
    """How a solution is built and called.

    Attributes:
        entry_point: ``file::symbol``.
        destination_passing_style: Outputs are passed as the last arguments. Always written: readers differ in what they
            take for granted.
    """

    language: Language
    target_hardware: Annotated[tuple[StrictStr, ...], Field(min_length=1)]
    entry_point: Text
    dependencies: tuple[StrictStr, ...] = ()
    destination_passing_style: StrictBool = True
    binding: Literal["tvm-ffi", "torch"] | None = None

    @field_validator("entry_point")
    @classmethod
    def _names_file_and_symbol(cls, entry_point: str) -> str:
        if entry_point.count("::") != 1 or not all(entry_point.split("::")):
            raise PydanticCustomError("entry_point", "must be file::symbol")
        return entry_point


class Solution(_Frozen):
    """One implementation of a definition, as source."""

    name: Text
    definition: Name
    author: Text
    spec: BuildSpec
    sources: Annotated[tuple[SourceFile, ...], Field(min_length=1)]
    description: StrictStr | None = None

    @model_validator(mode="after")
    def _holds_its_entry(self) -> Self:
        paths = [source.path for source in self.sources]
        if len(set(paths)) != len(paths):
            raise PydanticCustomError("sources", "sources: paths must be unique")
        entry = self.spec.entry_point.split("::")[0]
        if entry not in paths:
            raise PydanticCustomError("entry", "spec.entry_point: must name one of the sources")
        return self

    def to_json(self) -> dict[str, Any]:
        plain = super().to_json()
        plain["spec"]["destination_passing_style"] = self.spec.destination_passing_style
        return plain


def _error_size(value: float) -> float:
    if value < 0:
        raise PydanticCustomError("error", "must be >= 0 or NaN")
    return value


ErrorSize = Annotated[float, AfterValidator(_error_size)]
"""NaN and Infinity are written as strings, as FlashInfer-Bench does."""

Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TraceCorrectness(_Frozen):
    """How far outputs were from the reference; ``extra`` is the one place that FlashInfer-Bench keeps for others."""

    max_relative_error: ErrorSize = 0.0
    max_absolute_error: ErrorSize = 0.0
    extra: dict[str, Any] | None = None


class TracePerformance(_Frozen):
    """Latencies of one call, in milliseconds."""

    latency_ms: Milliseconds = 0.0
    reference_latency_ms: Milliseconds = 0.0
    speedup_factor: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class TraceEnvironment(_Frozen):
    """Where it ran: the device's name, and versions of libraries by name."""

    hardware: Text
    libs: dict[str, StrictStr] = Field(default_factory=dict)


class TraceEvaluation(_Frozen):
    """One outcome. PASSED has correctness and performance, INCORRECT_NUMERICAL correctness only, others neither."""

    status: TraceStatus
    environment: TraceEnvironment
    timestamp: Text
    log: StrictStr = ""
    correctness: TraceCorrectness | None = None
    performance: TracePerformance | None = None

    @model_validator(mode="after")
    def _holds_what_its_status_asks(self) -> Self:
        for field, statuses in (("correctness", _HAS_CORRECTNESS), ("performance", _HAS_PERFORMANCE)):
            if (getattr(self, field) is not None) != (self.status in statuses):
                law = "must be present" if self.status in statuses else "must be null"
                raise PydanticCustomError(
                    "status",
                    "{field}: {law} where status is {status}",
                    {"field": field, "law": law, "status": self.status},
                )
        return self


class TraceWorkload(_Frozen):
    """The workload of a trace, without its definition at hand; ``fibc.schema.workload`` checks it against one."""

    uuid: Label
    axes: dict[str, Size]
    inputs: dict[str, Annotated[RandomInput | ScalarInput | SafetensorsInput, Field(discriminator="type")]]


class Trace(_Frozen):
    """A workload, or the evaluation of a solution on one."""

    definition: Name
    workload: TraceWorkload
    solution: Text | None = None
    evaluation: TraceEvaluation | None = None

    @model_validator(mode="after")
    def _is_one_or_the_other(self) -> Self:
        if (self.solution is None) != (self.evaluation is None):
            raise PydanticCustomError("trace", "solution and evaluation: must both be present, or both be null")
        return self

    @property
    def is_workload(self) -> bool:
        """Whether it only records a workload."""
        return self.evaluation is None


def _jsonable(value: Any) -> Any:
    """Return ``value`` with NaN and infinities as the strings that FlashInfer-Bench writes."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _jsonable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    return value

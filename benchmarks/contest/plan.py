"""What is contested, how often and by which constants; the defaults for a CPU and for a GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fibc import settings
from fibc.schema.definition import Definition
from fibc.schema.digest import digest_json
from fibc.schema.feature import Cell, FeatureKey, Point
from fibc.schema.policy import Policy

Weight = tuple[int, int]
"""N and K of a weight, ``B[N, K]``."""


@dataclass(frozen=True)
class Plan:
    """One contest.

    Attributes:
        target: ``cpu`` or ``cuda``.
        weights: One definition each.
        sizes: M of the keys of every weight; a key is one size.
        num_candidates: Of a key, where its templates have so many that build.
        num_repeats: Every picker picks so often, each time from new timings.
        num_parts: Processes of the referee for each definition, one after another.
        part_sessions: Sessions in each of them.
        num_hidden: Names under which native hides in its control.
        num_control_repeats: Repeats of the two controls that are timed.
        planted: True speedup of the planted winner.
        planted_place: Its weight and size: on a GPU a delay is a kernel of its own, which takes over a microsecond, so
            that native has to take fifty.
        policy: fibc's.
        seed: Of orders, inputs and sessions.
    """

    target: str
    weights: tuple[Weight, ...]
    sizes: tuple[int, ...]
    num_candidates: int
    num_repeats: int
    num_parts: int
    part_sessions: int
    num_hidden: int
    num_control_repeats: int
    planted: float
    planted_place: tuple[Weight, int]
    policy: Policy
    seed: int = 0

    @property
    def digest(self) -> str:
        """Identity of what results depend on: those of plans that differ in how many units they have go together."""
        extent = ("weights", "sizes", "num_repeats", "num_parts", "num_control_repeats")
        return digest_json({name: value for name, value in asdict(self).items() if name not in extent})

    @property
    def num_sessions(self) -> int:
        """Sessions of the referee."""
        return self.num_parts * self.part_sessions

    @property
    def definitions(self) -> tuple[Definition, ...]:
        """One per weight."""
        return tuple(map(gemm, self.weights))

    @property
    def keys(self) -> tuple[FeatureKey, ...]:
        """The keys of every definition."""
        return tuple(map(key_at, self.sizes))


PLANS = {
    # Weights of 0.5 MB: calls of 35 us and more, and an exec'd session that has its copies ready in half a second.
    "cpu": Plan(
        target="cpu",
        weights=((128, 2048),),
        sizes=(1, 8, 64, 256),
        num_candidates=12,
        num_repeats=3,
        num_parts=4,
        part_sessions=4,
        num_hidden=40,
        num_control_repeats=1,
        planted=1.05,  # fibc's margin is 1.02 here: it would refuse 2 %, as it should
        planted_place=((128, 2048), 64),
        policy=Policy(min_speedup=settings.DEFAULT_MIN_SPEEDUP_CPU),
    ),
    # Where prototypes and native are near each other, native leads, and native is far from the limit.
    "cuda": Plan(
        target="cuda",
        weights=((4096, 4096), (6144, 4096), (256, 7168)),
        sizes=(1, 16, 64, 256),
        num_candidates=20,
        num_repeats=5,
        num_parts=2,
        part_sessions=16,
        num_hidden=300,
        num_control_repeats=2,
        planted=1.02,
        planted_place=((28672, 4096), 256),
        policy=Policy(min_speedup=settings.DEFAULT_MIN_SPEEDUP_GPU),
    ),
}


REFERENCE = """\
import torch


def run(A, B):
    return torch.matmul(A.float(), B.float().T).to(A.dtype)
"""


def gemm(weight: Weight) -> Definition:
    """Return C[M, N] = A[M, K] B[N, K]^T in bfloat16 for ``B[N, K]``."""
    n, k = weight
    tensor = {"dtype": "bfloat16"}
    return Definition.model_validate(
        {
            "name": f"gemm_bf16_n{n}_k{k}",
            "op_type": "gemm",
            "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": n}, "K": {"type": "const", "value": k}},
            "inputs": {"A": {"shape": ["M", "K"], **tensor}, "B": {"shape": ["N", "K"], **tensor}},
            "outputs": {"C": {"shape": ["M", "N"], **tensor}},
            "reference": REFERENCE,
        }
    )


def key_at(size: int) -> FeatureKey:
    """Return the key of one size of M; its text is the size."""
    return FeatureKey(Cell(((size, size),)), (Point((("M", size),), "end"),), screen_point=0, synthetic=True)

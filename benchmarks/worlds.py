"""Simulated machines: a Bench whose true speedups are known, with the noise of real GPUs and shared CPUs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from fibc.schema.evaluation import Arm

DRIFT_SAMPLES = 800
"""Correlation length of the clock's drift."""

RAMP_SAMPLES = 200
"""A session begins slow, by the world's drift amplitude, and warms up with this time constant."""

STATE_STEP = 0.06
STATE_SAMPLES = 400
"""Two clock states, their distance, and how long one lasts on average."""

BURST_FACTOR = 1.5
BURST_SHARE = 0.06
BURST_SAMPLES = 15
"""A neighbour on a shared CPU: how much slower, in which share of all samples, and for how many samples in a row."""

OUTLIER_RANGE = (0.1, 2.0)

CHUNK_SAMPLES = 4096


@dataclass(frozen=True)
class World:
    """The noise of one kind of machine, in log units where no other is said.

    Attributes:
        jitter: Standard deviation of independent noise of a sample.
        drift: Amplitude of the clock's drift: twice its standard deviation, and the height of the warm-up ramp.
        outliers: Share of samples that take 10 to 200 % longer.
        two_states: The clock jumps between two states.
        bursts: Other work on the machine makes runs of samples slow.
        layout: Standard deviation of the offset that each kernel draws in each session.
        process: The same of one that it draws in each process, where a process has several sessions.
    """

    name: str
    jitter: float
    drift: float
    outliers: float
    two_states: bool = False
    bursts: bool = False
    layout: float = 0.0
    process: float = 0.0


MACHINES: tuple[World, ...] = (
    World("quiet", jitter=0.003, drift=0.01, outliers=0.01),
    World("typical", jitter=0.01, drift=0.03, outliers=0.01),
    World("hostile", jitter=0.03, drift=0.05, outliers=0.01, two_states=True),
    World("shared CPU", jitter=0.04, drift=0.05, outliers=0.03, bursts=True),
)

LAYOUTS = (0.0, 0.005, 0.01)

WORLDS: tuple[World, ...] = tuple(replace(machine, layout=layout) for machine in MACHINES for layout in LAYOUTS)


class SimulatedBench:
    """A Bench of arms with known true speedups. Its noise goes on from session to session, as a machine's does."""

    def __init__(
        self,
        world: World,
        arms: Sequence[Arm],
        speedups: Sequence[float],
        seed: int,
        native_s: float = 50e-6,
        process_of: Callable[[int], int] = lambda session: session,
    ) -> None:
        """Make a machine.

        Args:
            arms: What it times.
            speedups: True native latency / candidate latency of each arm.
            seed: Of all noise but the layout offsets, which follow from it and the session's seed.
            native_s: True latency of native, everywhere.
            process_of: The process of the n-th session, counted from 0; by default each has its own.
        """
        self.num_pairs = 0
        self._world = world
        self._seed = seed
        self._native_s = native_s
        self._candidate_s = [native_s / speedup for speedup in speedups]
        self._kernels = [(arm.key, arm.point) for arm in arms]
        self._process_of = process_of
        self._num_sessions = 0
        self._rng = np.random.default_rng(seed)
        self._noise: list[float] = []
        self._next = 0
        self._ramp = [math.exp(world.drift * math.exp(-i / RAMP_SAMPLES)) for i in range(8 * RAMP_SAMPLES)]

    @contextmanager
    def session(self, seed: int) -> Iterator[SimulatedSession]:
        """Open a session with layout offsets of its own, in the next process of ``process_of``."""
        process, self._num_sessions = self._process_of(self._num_sessions), self._num_sessions + 1
        yield SimulatedSession(self, random.Random(self._seed * 2**32 + seed), process)

    def draw(self) -> tuple[float, float]:
        """Return the noise factors of the next two samples."""
        if self._next + 2 > len(self._noise):
            self._noise = np.exp(_log_noise(self._world, self._rng, CHUNK_SAMPLES)).tolist()
            self._next = 0
        begin = self._next
        self._next = begin + 2
        self.num_pairs += 1
        return self._noise[begin], self._noise[begin + 1]


class SimulatedSession:
    """One session of a SimulatedBench."""

    def __init__(self, bench: SimulatedBench, rng: random.Random, process: int) -> None:
        self._bench = bench
        self._rng = rng
        self._process = process
        self._sample = 0
        self._native: dict[tuple[str, int], float] = {}
        self._candidates: dict[int, float] = {}

    def pair(self, candidate: int, native_first: bool) -> tuple[float, float]:
        """Return the simulated seconds of (native, candidate)."""
        bench = self._bench
        first, second = bench.draw()
        at = self._sample
        if at < len(bench._ramp):
            first *= bench._ramp[at]
            second *= bench._ramp[at + 1]
            self._sample = at + 2
        native_s, candidate_s = self._latencies(candidate)
        return (native_s * first, candidate_s * second) if native_first else (native_s * second, candidate_s * first)

    def _latencies(self, candidate: int) -> tuple[float, float]:
        """Return both sides' latencies in this session, layout included; native is one kernel for all candidates."""
        bench = self._bench
        kernel = bench._kernels[candidate]
        if kernel not in self._native:
            self._native[kernel] = bench._native_s * self._offset(kernel)
        if candidate not in self._candidates:
            self._candidates[candidate] = bench._candidate_s[candidate] * self._offset(candidate)
        return self._native[kernel], self._candidates[candidate]

    def _offset(self, kernel: object) -> float:
        world = self._bench._world
        offset = self._rng.gauss(0.0, world.layout)
        if world.process:
            offset += random.Random(f"{self._bench._seed} {self._process} {kernel}").gauss(0.0, world.process)
        return math.exp(offset)


def _log_noise(world: World, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Return the log noise of ``count`` samples in a row."""
    noise = rng.normal(0.0, world.jitter, count) + _drift(world.drift / 2, rng, count)
    outliers = rng.random(count) < world.outliers
    noise[outliers] += np.log1p(rng.uniform(*OUTLIER_RANGE, int(outliers.sum())))
    if world.two_states:
        jumps = rng.random(count) < 1 / STATE_SAMPLES
        noise += STATE_STEP * ((np.cumsum(jumps) + rng.integers(2)) % 2)
    if world.bursts:
        noise += math.log(BURST_FACTOR) * _bursts(rng, count)
    return noise


def _drift(sd: float, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Return a stationary first-order autoregression with a correlation of DRIFT_SAMPLES."""
    keep = math.exp(-1 / DRIFT_SAMPLES)
    steps = rng.normal(0.0, sd * math.sqrt(1 - keep * keep), count)
    steps[0] = rng.normal(0.0, sd)
    drift: NDArray[np.float64] = lfilter([1.0], [1.0, -keep], steps)
    return drift


def _bursts(rng: np.random.Generator, count: int) -> NDArray[np.bool_]:
    """Return which samples fall into a burst: dwell times are geometric, quiet ones as long as BURST_SHARE asks."""
    quiet_samples = BURST_SAMPLES * (1 - BURST_SHARE) / BURST_SHARE
    phases = 2 * (16 + count // 64)  # about five times as long a stretch as is cut out of it
    lengths = np.empty(phases, dtype=np.int64)
    lengths[0::2] = rng.geometric(1 / quiet_samples, phases // 2)
    lengths[1::2] = rng.geometric(1 / BURST_SAMPLES, phases // 2)
    flags = np.zeros(phases, dtype=np.bool_)
    flags[1::2] = True
    stretch = np.repeat(flags, lengths)
    begin = int(rng.integers(len(stretch) - count))
    return stretch[begin : begin + count]

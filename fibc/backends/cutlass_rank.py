"""Which CUTLASS configs to try first: a static model of a GEMM's time, and NVIDIA's heuristics where installed.

Neither decides anything: a search starts from the first, and only what was built in advance can be measured.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fibc.schema.candidate import ConfigValue

Config = tuple[tuple[str, ConfigValue], ...]
"""Tunables in the template's order with their values, as in ``Candidate.config``."""

SWAPPED_SUFFIX = "_swapped"
"""End of the names of templates whose kernels compute C^T = B A^T."""

# An H200, fitted to what 63 kernels took at 60 keys (benchmarks/results/h200/candidates_cutlass.json, 2026-11-30).
START_US = 2.3
"""Launch, first loads and last stores."""
SCHEDULE_US = {"warp_specialized": 0.0, "pingpong": 1.2, "cooperative": 1.9}
"""What a persistent block does before its first tile; nothing shows of it where DRAM is what a kernel waits for."""
WAVE_US = {"warp_specialized": 0.9, "pingpong": 0.27, "cooperative": 0.45}
"""Of a further wave of blocks, or of further tiles of those that are persistent."""
DRAM_BYTES_PER_US = 4.3e6
L2_BYTES_PER_US = 1.9e7
SM_WEIGHT_BYTES_PER_US = 2.2e5
SM_ROW_BYTES_PER_US = 1.35e5
"""What one multiprocessor takes in of weights, and of rows of A, which all of them want at the same time."""
SM_EMPTY_BYTES_PER_US = 4e4
"""Of rows beyond the last one, which a tile's load fills with zeros: 33 rows in a tile of 64 take longer than 64."""
LATENCY_US = 0.66
"""Of a load, while all stages of the pipeline wait."""
STEP_US = 0.018
"""Of a step along K, beside its products."""
SM_FLOPS_PER_US = {"warp_specialized": 6.0e6, "pingpong": 6.1e6, "cooperative": 5.9e6}
SMALL_TILE, LARGE_TILE = 0.8, 0.9
"""Parts of that, of tiles below and above 128 x 128."""
FULL_COLUMNS = 18
"""Columns of a tile from which products run at full speed."""
SHARED_WEIGHTS = 1.085
"""Gain of blocks that share weights, where many rows make products the bound."""
FEW_STAGES = 1.1
"""Factor of a pipeline of fewer than four stages."""
APART = 1.3
"""Factor of weights that come from DRAM for several tiles of rows that do not run side by side."""
FEW_ROWS = 128
SPLIT_US = 1.1
"""A divided sum, beside the bytes of its parts that the last block adds up."""
STREAM_US = 3.3
"""Stream-K, whose blocks add one after the other."""
PARTS_BYTES_PER_US = 6.8e4

SHARED_BYTES = 232_448
EPILOGUE_BYTES = 16_384

_MOST_HEURISTICS = 16


@dataclass(frozen=True)
class Shape:
    """A GEMM, C[m, n] = A[m, k] B[n, k]^T, on a GPU of ``num_sms`` multiprocessors."""

    m: int
    n: int
    k: int
    dtype: str
    elem_bytes: int
    num_sms: int


def by_estimate(shape: Shape, configs: Iterable[tuple[str, Config]]) -> list[tuple[str, Config]]:
    """Return configs with their templates, the fastest by the model in front; what it has no model of comes last."""
    listed = list(configs)
    known = [(template, config) for template, config in listed if "schedule" in dict(config)]
    known.sort(key=lambda item: estimate_us(dict(item[1]), shape, swapped=item[0].endswith(SWAPPED_SUFFIX)))
    return known + [item for item in listed if "schedule" not in dict(item[1])]


def rank(shape: Shape, configs: Iterable[tuple[str, Config]]) -> list[tuple[str, Config]]:
    """Return configs with their templates, those to try first in front; equal ones stay in their order.

    What this module has no model of comes last.
    """
    by_template: dict[str, list[Config]] = {}
    for template, config in configs:
        by_template.setdefault(template, []).append(config)
    heads: list[tuple[float, int, str, Config]] = []
    rest: list[tuple[str, Config]] = []
    for template, own in by_template.items():
        if "schedule" not in dict(own[0]):
            rest += [(template, config) for config in own]
            continue
        slowest = 0.0
        swapped = template.endswith(SWAPPED_SUFFIX)
        for turn, config in enumerate(_rank_one(shape, own, swapped=swapped)):
            slowest = max(slowest, estimate_us(dict(config), shape, swapped=swapped))
            heads.append((slowest, turn, template, config))  # behind all that comes before it in its own list
    return [(template, config) for _, _, template, config in sorted(heads, key=lambda head: head[:2])] + rest


def _rank_one(shape: Shape, configs: Iterable[Config], *, swapped: bool) -> list[Config]:
    """Return the configs of one template with those to try first in front.

    The best of each kind comes first, the second of each after them all: the model tells what a kind does best, and
    knows less well which kind is faster. Where nvidia-matmul-heuristics is installed, every second place goes to its
    choices in its order.
    """
    modelled = sorted(configs, key=lambda config: estimate_us(dict(config), shape, swapped=swapped))
    seen: dict[tuple[ConfigValue, ...], int] = {}
    turns: list[tuple[int, Config]] = []
    for config in modelled:
        kind = _kind(dict(config))
        turns.append((seen.get(kind, 0), config))
        seen[kind] = seen.get(kind, 0) + 1
    spread = [config for _, config in sorted(turns, key=lambda item: item[0])]
    chosen: list[Config] = []
    for tiling in _heuristics(shape, swapped):
        chosen += [config for config in modelled if _tiling(dict(config)) == tiling and config not in chosen][:1]
    return list(dict.fromkeys(_interleaved(spread, chosen)))


def estimate_us(config: Mapping[str, ConfigValue], shape: Shape, *, swapped: bool) -> float:
    """Return about how many microseconds a kernel takes with cold weights: bytes, waves and tile quantisation.

    Off by a tenth near the best of a key, and more for what is far slower; configs that it cannot tell apart differ by
    less than a percent for what else speaks for one of them.
    """
    tile_m, tile_n, tile_k = (int(config[name]) for name in ("tile_m", "tile_n", "tile_k"))
    cluster_m, cluster_n, splits = (int(config[name]) for name in ("cluster_m", "cluster_n", "splits"))
    schedule = str(config["schedule"])
    rows, columns = (shape.n, shape.m) if swapped else (shape.m, shape.n)
    tiles = _cdiv(rows, tile_m * cluster_m) * cluster_m * _cdiv(columns, tile_n * cluster_n) * cluster_n
    stage_bytes = (tile_m + tile_n) * tile_k * shape.elem_bytes
    stages = int(config["stages"]) or (SHARED_BYTES - EPILOGUE_BYTES) // stage_bytes
    persistent = schedule != "warp_specialized"
    blocks_per_sm = 1 if persistent else max(1, SHARED_BYTES // (stages * stage_bytes + EPILOGUE_BYTES))
    slots = shape.num_sms * blocks_per_sm

    parts = splits if splits > 0 else max(1.0, min(slots, 2 * slots - tiles) / tiles)  # stream-K fills the last wave
    units = tiles * parts
    waves = units / slots if splits == 0 and units > slots else math.ceil(units / slots)
    running = min(blocks_per_sm, max(1.0, units / shape.num_sms))  # on one multiprocessor

    weights, others = (tile_m, tile_n) if swapped else (tile_n, tile_m)
    weight_share, other_share = (cluster_n, cluster_m) if swapped else (cluster_m, cluster_n)
    row_tiles = _cdiv(shape.m, others)
    line_bytes = shape.k / parts * shape.elem_bytes  # of one row of a block's tiles
    weight_bytes, row_bytes = weights * line_bytes, min(others, shape.m) * line_bytes
    empty_bytes = (others - shape.m / row_tiles) * line_bytes  # of a tile of rows, on average
    load_us = running * (
        weight_bytes / SM_WEIGHT_BYTES_PER_US + row_bytes / SM_ROW_BYTES_PER_US + empty_bytes / SM_EMPTY_BYTES_PER_US
    )
    steps = shape.k / parts / tile_k
    speed = SM_FLOPS_PER_US[schedule] * min(1.0, tile_n / FULL_COLUMNS)
    speed *= SMALL_TILE if tile_m * tile_n < 128 * 128 else LARGE_TILE if tile_m * tile_n > 128 * 128 else 1.0
    speed *= SHARED_WEIGHTS if weight_share > 1 and shape.m > FEW_ROWS else 1.0
    product_us = running * 2 * tile_m * tile_n * shape.k / parts / speed + steps * STEP_US
    unit_us = _together(4, load_us, product_us, steps * LATENCY_US / stages) * (FEW_STAGES if stages < 4 else 1.0)

    # A grid has the weights of one tile of rows after the other where operands are swapped.
    far = (swapped and not persistent) or (waves > 1 and shape.m <= FEW_ROWS)
    again = APART if far and row_tiles > 1 and weight_share == 1 else 1.0
    dram_bytes = (shape.m * shape.k + again * shape.n * shape.k + shape.m * shape.n) * shape.elem_bytes
    l2_bytes = units * (weight_bytes / weight_share + row_bytes / other_share)
    total = (
        START_US
        + (waves - 1) * WAVE_US[schedule]
        + _together(
            5, waves * unit_us + SCHEDULE_US[schedule], dram_bytes / DRAM_BYTES_PER_US, l2_bytes / L2_BYTES_PER_US
        )
    )
    if splits != 1:
        total += (SPLIT_US if splits > 1 else STREAM_US) + parts * tile_m * tile_n * 4 / PARTS_BYTES_PER_US
    return total * (1.0 + _preference(config))


def _together(power: int, *times_us: float) -> float:
    """Return what things take that run at the same time and are in each other's way: a little more than the longest."""
    return float(sum(time_us**power for time_us in times_us) ** (1 / power))


def _preference(config: Mapping[str, ConfigValue]) -> float:
    """Return a fraction of a percent for each thing that seldom helps: what the model does not tell apart."""
    return (
        0.003 * (config["epilogue"] != "tma")
        + 0.003 * (config["raster"] != "heuristic")
        + 0.003 * (config["swizzle"] != 1)
        + 0.004 * bool(config["dependent"])
    )


def _kind(config: Mapping[str, ConfigValue]) -> tuple[ConfigValue, ...]:
    divided = min(int(config["splits"]), 2)
    return (config["schedule"], divided, config["tile_m"], config["tile_n"])


def _tiling(config: Mapping[str, ConfigValue]) -> tuple[int, ...]:
    names = ("tile_m", "tile_n", "tile_k", "cluster_m", "cluster_n", "splits")
    return tuple(int(config[name]) for name in names)


def _interleaved(first: Sequence[Config], second: Sequence[Config]) -> Iterator[Config]:
    for index, config in enumerate(first):
        yield config
        if index < len(second):
            yield second[index]


def _cdiv(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _heuristics(shape: Shape, swapped: bool) -> list[tuple[int, ...]]:
    """Return what nvidia-matmul-heuristics would choose, best first; nothing where it is not installed."""
    if importlib.util.find_spec("nvMatmulHeuristics") is None:
        return []
    module, interface, backend = _interface()
    rows, columns = (shape.n, shape.m) if swapped else (shape.m, shape.n)
    layout = module.NvMatmulHeuristicsMatmulLayout["TN_COL_MAJOR" if swapped else "TN_ROW_MAJOR"]
    problem = interface.makeNvMatmulHeuristicsProblem(rows, columns, shape.k, layout, 1)
    precision = {"bfloat16": "TST", "float16": "HSH"}[shape.dtype]  # inputs, sums, output
    found = []
    for answer in interface.getEx(problem, _MOST_HEURISTICS, backend, precision=precision):
        kernel = answer["kernel"]
        tile = (kernel.cta_tile_m, kernel.cta_tile_n, kernel.cta_tile_k)
        found.append((*tile, kernel.cluster_m, kernel.cluster_n, kernel.split_k))
    return list(dict.fromkeys(found))


@functools.cache
def _interface() -> tuple[Any, Any, Any]:
    module: Any = importlib.import_module("nvMatmulHeuristics")
    interface = module.NvMatmulHeuristicsInterfaceEx(
        backend=module.NvMatmulHeuristicsTarget.CUTLASS3,
        flags=module.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
        load_discovery_implicitly=True,
        gpu=module.NvMatmulHeuristicsNvidiaGpu.H200_SXM,
    )
    return module, interface, interface.createBackend(module.NvMatmulHeuristicsTarget.CUTLASS3)

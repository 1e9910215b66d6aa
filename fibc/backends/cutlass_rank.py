"""Which CUTLASS configs to try first: a static model of a GEMM's time, and NVIDIA's heuristics where installed.

Neither decides anything: a search starts from the first, and only what was built in advance can be measured.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fibc.schema.candidate import ConfigValue

Config = tuple[tuple[str, ConfigValue], ...]
"""Tunables in the template's order with their values, as in ``Candidate.config``."""

SWAPPED_SUFFIX = "_swapped"
"""End of the names of templates whose kernels compute C^T = B A^T."""

# An H200, fitted to what the kernels of benchmarks/results/h200 take and to reads of 0.5 to 235 MB (2026-11-29).
START_US = 4.6
"""Launch, first loads and last stores."""
DRAM_BYTES_PER_US = 4.03e6
SM_DRAM_BYTES_PER_US = 5.4e4
SM_L2_BYTES_PER_US = 1.1e5
"""What one multiprocessor takes in, from DRAM and from L2."""
FEW_ROWS = 128
"""Up to so many rows weights come from DRAM; beyond, several tiles of rows share them in L2."""
SM_FLOPS_PER_US = 6.6e6
WAVE_US = 1.0
"""Of a further wave of blocks that are not persistent; half as much where they are."""
SPLIT_US = 1.5
"""A divided sum, beside the bytes of its parts that the last block adds up."""
STREAM_US = 4.0
"""Stream-K, whose blocks add one after the other."""

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

    Within a factor of two, which is enough to order; configs that it cannot tell apart differ by less than a percent
    for what else speaks for one of them.
    """
    tile_m, tile_n, tile_k = (int(config[name]) for name in ("tile_m", "tile_n", "tile_k"))
    rows, columns = (shape.n, shape.m) if swapped else (shape.m, shape.n)
    tiles = _cdiv(rows, tile_m * int(config["cluster_m"])) * int(config["cluster_m"])
    tiles *= _cdiv(columns, tile_n * int(config["cluster_n"])) * int(config["cluster_n"])
    persistent = config["schedule"] != "warp_specialized"
    stage_bytes = (tile_m + tile_n) * tile_k * shape.elem_bytes
    stages = int(config["stages"]) or (SHARED_BYTES - EPILOGUE_BYTES) // stage_bytes
    blocks_per_sm = 1 if persistent else max(1, SHARED_BYTES // (stages * stage_bytes + EPILOGUE_BYTES))
    slots = shape.num_sms * blocks_per_sm

    splits = int(config["splits"])
    parts = splits if splits > 0 else max(1.0, min(slots, 2 * slots - tiles) / tiles)  # stream-K fills the last wave
    units = tiles * parts
    waves = units / slots if splits == 0 and units > slots else _cdiv(int(units), slots)
    running = min(units, slots)

    flops_per_us = SM_FLOPS_PER_US * min(1.0, tile_n / 32) * (1.0 if tile_m * tile_n >= 128 * 128 else 0.85)
    weights, others = (tile_m, tile_n) if swapped else (tile_n, tile_m)
    weight_bytes_per_us = SM_DRAM_BYTES_PER_US if shape.m <= FEW_ROWS else SM_L2_BYTES_PER_US
    unit_us = weights / weight_bytes_per_us + others / SM_L2_BYTES_PER_US
    unit_us *= shape.k / parts * shape.elem_bytes
    unit_flops = 2 * tile_m * tile_n * shape.k / parts
    per_sm = running / min(running, shape.num_sms)
    wave_us = max(unit_us * per_sm, unit_flops * per_sm / flops_per_us)
    dram_us = (shape.m * shape.k + shape.n * shape.k + shape.m * shape.n) * shape.elem_bytes / DRAM_BYTES_PER_US

    total = START_US + max(waves * wave_us, dram_us) + (waves - 1) * (WAVE_US / 2 if persistent else WAVE_US)
    if splits != 1:
        total += (SPLIT_US if splits > 1 else STREAM_US) + parts * tile_m * tile_n * 4 / SM_L2_BYTES_PER_US
    return total * (1.0 + _preference(config))


def _preference(config: Mapping[str, ConfigValue]) -> float:
    """Return a fraction of a percent for each thing that seldom helps: what the model does not tell apart."""
    shared = int(config["cluster_m"]) * int(config["cluster_n"])
    tile = int(config["tile_m"]) * int(config["tile_n"])
    return (
        0.002 * (shared > 1) * (1 if tile < 128 * 128 else -1)
        + 0.001 * (config["schedule"] == "cooperative" and tile < 128 * 128)
        + 0.003 * (config["epilogue"] != "tma")
        + 0.001 * (config["tile_k"] == 64 and tile < 128 * 128)
        + 0.002 * (config["stages"] != 0)
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

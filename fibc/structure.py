"""Structured inputs where a workload recorded none: offsets, indexes, lengths and routing, skewed as in serving."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fibc.schema.definition import Definition

Integers = NDArray[np.int64]

LENGTH_SIGMA = 1.0
"""Spread of the lengths of requests: log-normal, so that of four one is often several times as long as the mean."""

_TOTAL = re.compile(r"\s*(\w+)\s*==\s*(\w+)\[-1\]\.item\(\)\s*")
"""``num_kv_indices == kv_indptr[-1].item()``: the axis that an offset array ends with."""

_DEFAULT_TOTALS = {
    "qo_indptr": ("total_q",),
    "kv_indptr": ("num_kv_indices", "total_kv"),
    "cu_seqlens": ("total_seq_len",),
}


@dataclass(frozen=True)
class Structure:
    """What a generator of one input may look at.

    Attributes:
        name: The input.
        shape: In elements.
        sizes: Every axis of the definition, const and var.
        totals: The last value of each offset array.
        made: Structured inputs that are there already: recorded ones, and those that come earlier in the definition.
        rng: Seeded for this workload and this input.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sizes: Mapping[str, int]
    totals: Mapping[str, int]
    made: Mapping[str, Integers]
    rng: np.random.Generator

    @property
    def num_elems(self) -> int:
        return math.prod(self.shape)


def synthesise(
    definition: Definition, sizes: Mapping[str, int], seed: int, recorded: Mapping[str, Integers] | None = None
) -> dict[str, Integers]:
    """Return the integer inputs of ``definition`` that consist of offsets, indexes, lengths or counts.

    They agree with the axes and with the constraints that public definitions have. An integer input of an unknown name
    gets values that are safe as an index into any axis of the definition (8 and 16 bit: values over the whole range).

    Args:
        sizes: Every axis of the definition.
        seed: Of the structure: the same seed, the same lengths and pages.
        recorded: Inputs that a workload has stored; they are returned as they are, and the others agree with them.
    """
    totals = _totals(definition, sizes)
    made = dict(recorded or {})
    for position, (name, spec) in enumerate(definition.inputs.items()):
        if name in made or spec.shape is None or not spec.dtype.startswith(("int", "uint")):
            continue
        shape = tuple(sizes[axis] for axis in spec.shape)
        rng = np.random.default_rng([seed, position])
        structure = Structure(name, spec.dtype, shape, sizes, totals, made, rng)
        generator = GENERATORS.get(name, _narrow if spec.dtype in ("int8", "uint8", "int16") else _index)
        made[name] = generator(structure).astype(np.int64).reshape(shape)
    return made


def _totals(definition: Definition, sizes: Mapping[str, int]) -> dict[str, int]:
    totals = {}
    for name in definition.inputs:
        for axis in _DEFAULT_TOTALS.get(name, ()):
            if axis in sizes:
                totals[name] = sizes[axis]
    for constraint in definition.constraints:
        match = _TOTAL.fullmatch(constraint)
        if match and match[1] in sizes:
            totals[match[2]] = sizes[match[1]]
    return totals


def skewed_lengths(total: int, count: int, rng: np.random.Generator) -> Integers:
    """Return ``count`` lengths that add up to ``total``, log-normal, each at least 1 where there is enough for all."""
    least = 1 if total >= count else 0
    weights = rng.lognormal(0.0, LENGTH_SIGMA, count)
    shares = np.cumsum(weights) / weights.sum() if count else weights
    ends = np.rint(shares * (total - least * count)).astype(np.int64)
    lengths: Integers = np.diff(ends, prepend=0) + least
    return lengths


def _offsets(structure: Structure) -> Integers:
    """Ragged offsets. Keys cover queries where their totals allow it, as a causal operator needs."""
    count = structure.num_elems - 1
    total = structure.totals.get(structure.name, max(count, 0))
    queries = structure.made.get("qo_indptr")
    if structure.name == "kv_indptr" and queries is not None and queries.size == structure.num_elems:
        page_size = structure.sizes.get("page_size", 1)
        needed = -(-np.diff(queries) // page_size)
        spare = total - int(needed.sum())
        if spare >= 0:
            return _from_lengths(needed + _spread(spare, count, structure.rng))
    return _from_lengths(skewed_lengths(total, count, structure.rng))


def _spread(total: int, count: int, rng: np.random.Generator) -> Integers:
    """Return ``count`` skewed lengths from 0 on that add up to ``total``."""
    return skewed_lengths(total + count, count, rng) - 1


def _from_lengths(lengths: Integers) -> Integers:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _distinct(num: int, bound: int, rng: np.random.Generator) -> Integers:
    """Return ``num`` values below ``bound`` in random order, distinct where ``bound`` allows it."""
    if num <= bound:
        chosen: Integers = rng.permutation(bound)[:num]
        return chosen
    return rng.integers(0, max(bound, 1), num)


def _pages(structure: Structure) -> Integers:
    return _distinct(structure.num_elems, structure.sizes["num_pages"], structure.rng)


def _last_page_lengths(structure: Structure) -> Integers:
    """Tokens in the last page of each request: 1 .. page_size, and enough for its queries."""
    page_size = structure.sizes.get("page_size", 1)
    lengths = structure.rng.integers(1, page_size + 1, structure.num_elems)
    if "qo_indptr" in structure.made and "kv_indptr" in structure.made:
        queries, pages = np.diff(structure.made["qo_indptr"]), np.diff(structure.made["kv_indptr"])
        count = min(lengths.size, queries.size, pages.size)
        missing = queries[:count] - (pages[:count] - 1) * page_size
        lengths[:count] = np.clip(missing, lengths[:count], page_size)
    return lengths


def _sequence_lengths(structure: Structure) -> Integers:
    longest = structure.sizes.get("max_num_pages", 1) * structure.sizes.get("page_size", 1)
    lengths = structure.rng.lognormal(math.log(max(longest / 4, 1)), LENGTH_SIGMA, structure.num_elems)
    return np.clip(lengths.astype(np.int64), 1, longest)


def _sparse_slots(structure: Structure) -> Integers:
    """Distinct slots of the cache for each token; -1 pads where there are fewer slots than asked for."""
    rows, width = structure.shape
    slots = structure.sizes["num_pages"] * structure.sizes.get("page_size", 1)
    start = structure.rng.integers(0, slots, (rows, 1))
    stride = max(slots // width, 1)
    chosen = (start + np.arange(width) * stride) % slots
    return np.where(np.arange(width) < slots, chosen, -1)


def _routing(structure: Structure) -> Integers:
    """Distinct experts for each token; a few experts are far more popular than others."""
    rows, width = structure.shape
    num_experts = structure.sizes.get("num_experts", structure.sizes.get("num_local_experts", width))
    popularity = structure.rng.normal(0.0, LENGTH_SIGMA, num_experts)
    scores = popularity + structure.rng.gumbel(size=(rows, num_experts))
    order: Integers = np.argsort(-scores, axis=1)[:, :width]
    return order


def _cache_slots(structure: Structure) -> Integers:
    bound = structure.sizes.get("state_cache_size", structure.sizes.get("pool_size", structure.num_elems))
    return _distinct(structure.num_elems, bound, structure.rng)


def _positions(structure: Structure) -> Integers:
    return structure.rng.integers(0, structure.sizes["max_seq_len"], structure.num_elems)


def _top_k(structure: Structure) -> Integers:
    return structure.rng.integers(1, min(64, structure.sizes.get("vocab_size", 64)) + 1, structure.num_elems)


def _quantised_keys(structure: Structure) -> Integers:
    """Bytes that are finite and positive both as float8_e4m3fn and as parts of a float32 scale."""
    return structure.rng.integers(16, 64, structure.num_elems)


def _narrow(structure: Structure) -> Integers:
    return structure.rng.integers(0 if structure.dtype == "uint8" else -127, 128, structure.num_elems)


def _index(structure: Structure) -> Integers:
    return structure.rng.integers(0, max(min(structure.sizes.values(), default=1), 1), structure.num_elems)


GENERATORS: dict[str, Callable[[Structure], Integers]] = {
    "qo_indptr": _offsets,
    "kv_indptr": _offsets,
    "cu_seqlens": _offsets,
    "kv_indices": _pages,
    "block_table": _pages,
    "kv_last_page_len": _last_page_lengths,
    "seq_lens": _sequence_lengths,
    "sparse_indices": _sparse_slots,
    "topk_ids": _routing,
    "state_batch_indices": _cache_slots,
    "initial_state_indices": _cache_slots,
    "positions": _positions,
    "top_k": _top_k,
    "k_index_cache_fp8": _quantised_keys,
}
"""Generators by the name of the input, as public definitions have them."""

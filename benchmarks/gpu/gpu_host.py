"""Host cost: what a call costs the thread that makes it, and what the first use of a module costs."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gpu_context import Context
from gpu_rows import Shape, write_gemm

from fibc import stats, toolchain
from fibc.backends.base import Backend
from fibc.clock import now
from fibc.codegen import harness
from fibc.codegen.build import build
from fibc.codegen.compile import EXTENSION_SUFFIX, entry_includes
from fibc.paths import OutLayout
from fibc.runtime import load
from fibc.schema.candidate import Artifact, Candidate
from fibc.schema.decision import Decision, Verdict
from fibc.schema.feature import Cell, Feature, FeatureKey, Point
from fibc.schema.policy import PUBLISHED_LEVEL
from fibc.schema.space import Config, Space
from fibc.schema.table import DispatchTable, Region, Variant
from fibc.search.space import ConfigSpace
from fibc.settings import compile_timeout_s
from fibc.task import Task
from fibc.worker import load_harness

HERE = Path(__file__).parent

SHAPE = Shape(4096, 4096)
ROWS = 16

BLOCKS = 8
ROUNDS = 24
"""Every way is timed once a round, in random order; a block of rounds is what a session is elsewhere."""

INNER = 50
"""Calls in a sample: at 20 us of device time each they take a millisecond there, and no launch waits for the queue."""

FIRST_USES = 3


@dataclass(frozen=True)
class Kind:
    """A kind of variant that a call may hit.

    Attributes:
        rows: The size that its region holds.
        workspace: Whether it splits K and so needs a workspace.
    """

    name: str
    rows: int
    workspace: bool
    candidate: Candidate
    artifact: Artifact


def definitions(directory: Path) -> list[Path]:
    """Write the definitions of the part, for those who compile first."""
    return [write_gemm(directory, SHAPE)]


def run(context: Context) -> None:
    """Run what is left of the part."""
    (definition,) = definitions(context.work / "defs")
    task = context.task(definition)
    context.note_environment(task)
    kinds = make_kinds(task)
    context.say(f"kinds of variants: {', '.join(kind.name for kind in kinds)}")
    forced = OutLayout(context.work.absolute() / "forced")  # apart: no other part may take it for a tuned one
    package = forced.package(task.definition.name)
    table = table_of(task, kinds)
    build(table, {kind.artifact.symbol: Path(kind.artifact.object_path) for kind in kinds}, package, context.cache)
    if not context.log.has("first use"):
        uses = {flag or "prepared": _first_use(package, flag) for flag in ("", "--unprepared")}
        context.add("first use", "first_use", variants=len(kinds), uses=uses)
    samples = _calls(context, kinds, package)
    for name, blocks in samples.items():
        context.add(name, "host", **summary(blocks))
        context.say(f"{name}: {summary(blocks)['us']:.2f} us")


def summary(blocks: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the cost in microseconds with its 95 % interval over the blocks, and the samples in nanoseconds."""
    effects = [stats.hodges_lehmann(block) * 1e6 for block in blocks]
    low, high = stats.interval(effects, PUBLISHED_LEVEL)
    rounded = [[round(sample * 1e9) for sample in block] for block in blocks]
    return {"us": stats.mean(effects), "ci_low": low, "ci_high": high, "samples_ns": rounded}


def make_kinds(task: Task) -> list[Kind]:
    """Return a variant of each template: its first config without a split of K, and its first one with one."""
    (axis,) = task.definition.var_axes
    key = FeatureKey(Cell(((1, ROWS),)), (Point(((axis, ROWS),), "end"),), 0, synthetic=False)
    wanted: list[tuple[Backend, Space, Config, bool]] = []
    for backend in task.backends:
        for space in backend.spaces(task.definition, key)[0]:
            for splits in (False, True):
                if (config := _first(space, splits=splits)) is not None:
                    wanted.append((backend, space, config, splits))
    kinds: list[Kind] = []
    for backend, space, config, splits in wanted:
        candidate = backend.candidate(task.definition, space.template, dict(config))
        timeout_s = compile_timeout_s(backend.name, task.options.timeout_s)
        built = backend.build(task.definition, [candidate], timeout_s=timeout_s, jobs=1)[candidate.digest]
        if isinstance(built, Artifact):
            name = f"{space.template}{', split K' if splits else ''}"
            kinds.append(Kind(name, len(kinds) + 1, splits, candidate, built))
    return kinds


def _first(space: Space, *, splits: bool) -> Config | None:
    configs = ConfigSpace(space).configs()
    return next((config for config in configs if (int(dict(config).get("split_k", 1)) > 1) == splits), None)


def table_of(task: Task, kinds: Sequence[Kind]) -> DispatchTable:
    """Return a table that serves every kind at its own number of rows, on no evidence: for timing calls alone."""
    definition = task.definition
    variants = sorted(
        (
            Variant(
                symbol=kind.artifact.symbol,
                candidate=kind.candidate,
                artifact=kind.artifact.digest,
                isa=kind.candidate.target.arch,
                guards=kind.artifact.guards,
                deterministic=False,
                release_gil=False,
            )
            for kind in kinds
        ),
        key=lambda variant: variant.symbol,
    )
    index = {variant.symbol: position for position, variant in enumerate(variants)}
    cells = [Cell(((kind.rows, kind.rows),)) for kind in kinds]
    (axis,) = definition.var_axes
    return DispatchTable(
        definition=definition.name,
        definition_digest=definition.digest,
        op_type=definition.op_type,
        spec=definition.call_spec(),
        native=task.native,
        reference_source=definition.reference,
        reference_entry=definition.entry_point,
        features=(Feature(axis, None, tuple(kind.rows for kind in kinds)),),
        variants=tuple(variants),
        rows=tuple(
            Decision(cell, Verdict.REPLACE, kind.candidate.digest, (), (), "forced, to time calls")
            for cell, kind in zip(cells, kinds, strict=True)
        ),
        regions=tuple(
            Region(cell, index[kind.artifact.symbol], False) for cell, kind in zip(cells, kinds, strict=True)
        ),
        validity=task.environment.validity(),
        target=str(task.backends[0].target),
        environment=task.environment.facts(),
        alpha=task.policy.key_alpha,
        min_speedup=task.policy.min_speedup,
        expected_false_replacements=0.0,
        partial=True,
        num_boundary_rejected=0,
        created=now(),
        fibc_version="benchmark",
    )


def _calls(context: Context, kinds: Sequence[Kind], package: Path) -> dict[str, list[list[float]]]:
    """Time every way to make a call."""
    import torch

    torch.set_grad_enabled(False)
    timing: Any = load_harness(harness.build(context.cache))
    module = load(package)
    module.prepare()
    weight = torch.randn(SHAPE.n, SHAPE.k, device="cuda").bfloat16()

    def tensors(rows: int) -> tuple[Any, Any, Any]:
        a = torch.randn(rows, SHAPE.k, device="cuda").bfloat16()
        return a, weight, torch.empty(rows, SHAPE.n, dtype=torch.bfloat16, device="cuda")

    ways: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {"a call that does nothing": (timing.nothing, ())}
    for kind in kinds:
        a, b, c = tensors(kind.rows)
        ways[f"run_out, {kind.name}"] = module.run_out, (a, b, c)
        ways[f"run, {kind.name}"] = module.run, (a, b)
    a, b, c = tensors(ROWS)
    ways["run, no region: native"] = module.run, (a, b)
    ways["torch.mm(out=)"] = _torch_mm, (a, b.T, c)
    ways["torch.matmul(A, B.T)"] = _torch_matmul, (a, b)
    ways["torch.empty"] = _torch_empty, (c,)
    ways |= _triton_ways(context, kinds, tensors)
    alone = build_launch_alone(Path(tempfile.mkdtemp(prefix="fibc-launch-")))
    alone.prepare(torch.cuda.current_stream().cuda_stream)
    ways["cuLaunchKernel alone"] = alone.launch, (a, b, c)
    before = {name: sum(module.stats()["hits"].values()) for name in ways}
    for name, (call, arguments) in ways.items():
        before[name] = sum(module.stats()["hits"].values())
        for _ in range(3):
            call(*arguments)
        served = sum(module.stats()["hits"].values()) - before[name]
        if name.startswith(("run, gemm", "run_out")) and served != 3:
            raise RuntimeError(f"{name}: must hit, went {module.stats()['native']}")
    torch.cuda.synchronize()
    return time_host(ways, timing, torch.cuda.synchronize)


def time_host(
    ways: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]],
    timing: Any,
    wait: Callable[[], object],
    *,
    blocks: int = BLOCKS,
    rounds: int = ROUNDS,
    inner: int = INNER,
) -> dict[str, list[list[float]]]:
    """Return seconds per call of the host, by way, block and round.

    The device has nothing queued when a sample begins.
    """
    rng = random.Random(0)
    samples: dict[str, list[list[float]]] = {name: [[] for _ in range(blocks)] for name in ways}
    for block in range(blocks):
        for _ in range(rounds):
            for name in rng.sample(list(ways), len(ways)):
                call, arguments = ways[name]
                wait()
                samples[name][block].append(timing.time_calls(call, [arguments], 0, inner))
    wait()
    return samples


def _torch_mm(a: Any, b: Any, c: Any) -> None:
    import torch

    torch.mm(a, b, out=c)


def _torch_matmul(a: Any, b: Any) -> Any:
    import torch

    return torch.matmul(a, b.T)


def _torch_empty(like: Any) -> Any:
    import torch

    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _triton_ways(
    context: Context, kinds: Sequence[Kind], tensors: Callable[[int], tuple[Any, Any, Any]]
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return the plain tile kernel through Triton's own launcher, as ``kernel[grid](...)``."""
    kind = next((kind for kind in kinds if kind.name == "gemm/triton_tile"), None)
    if kind is None or importlib.util.find_spec("triton") is None:
        context.say("Triton's launcher: no Triton here, or no gemm/triton_tile among the candidates; left out")
        return {}
    path = context.work / "triton_tile_kernel.py"
    path.write_text(kind.artifact.source)
    kernel = _import_file(path).gemm
    config = dict(kind.candidate.config)
    tiles = [-(-size // int(config[name])) for size, name in ((kind.rows, "block_m"), (SHAPE.n, "block_n"))]
    grid = (tiles[0] * tiles[1],)
    options = {"num_warps": int(config["num_warps"]), "num_stages": int(config["num_stages"])}
    a, b, c = tensors(kind.rows)
    values = {"a": a, "b": b, "c": c, "num_rows": kind.rows}
    arguments = tuple(values.get(name, c) for name in kernel.arg_names)  # a workspace that is not used is any pointer

    def launch(*passed: Any) -> None:
        kernel[grid](*passed, **options)

    return {"kernel[grid](...), Triton's launcher": (launch, arguments)}


def build_launch_alone(directory: Path) -> Any:
    """Build and import the extension of ``launch_alone.cpp``.

    Raises:
        CalledProcessError: If it does not build.
    """
    target = directory / f"launch_alone{EXTENSION_SUFFIX}"
    include = entry_includes()[0]
    command: list[str | Path] = [toolchain.find().cxx, "-std=c++17", "-O2", "-fPIC", "-shared", f"-I{include}"]
    subprocess.run([*command, HERE / "launch_alone.cpp", "-ldl", "-o", target], check=True)
    return _import_file(target, "launch_alone")


def _import_file(path: Path, name: str = "") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _first_use(package: Path, flag: str) -> list[dict[str, Any]]:
    """Return the costs of first uses, each in a process of its own."""
    sizes = ["1", str(SHAPE.n), str(SHAPE.k)]
    command: list[str | Path] = [sys.executable, HERE / "first_use.py", package, *sizes, *filter(None, [flag])]
    found: list[dict[str, Any]] = []
    for _ in range(FIRST_USES):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found

"""Peers beside native and the served module: torch.compile with max-autotune, triton.autotune over fibc's template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpu_autotune import Lifted, Tunable, autotuned_text, lift
from gpu_context import Context, served_digest
from gpu_measure import TIMEOUT_S, Call, against, measure_rows
from gpu_rows import PEER_SHAPES, PEER_SIZES, Shape, write_gemm
from gpu_suite import serves

from fibc.evaluators import evaluator_of
from fibc.runtime.package import read_table
from fibc.schema.candidate import Artifact, Candidate, ConfigValue
from fibc.schema.feature import Cell, FeatureKey, Point
from fibc.search.spread import plan
from fibc.task import Task

TEMPLATE = "gemm/triton_tile"
"""The template that ``triton.autotune`` is given: plain tiles, right for any size."""

NUM_CONFIGS = 12
"""Configs for it: each is compiled, and timed for 125 ms, at every size."""

PLANNED = 24
"""Configs that are planned for them: those that differ in more than constants are another kernel."""

GRID = "(triton.cdiv(num_rows, meta['BLOCK_M']) * triton.cdiv(num_cols, meta['BLOCK_N']), meta['SPLIT_K'])"
"""The template's ``launch.grid``."""

ROW_S = 60.0
"""One row takes so long: a max-autotune, a dozen configs, and 8 sessions."""

LEFT_FOR_LATER = "cuBLASLt best-of-heuristic is left for later: no part times its algorithms as a peer yet."


def definitions(directory: Path) -> list[Path]:
    """Write the definitions of the part, for those who compile first."""
    return [write_gemm(directory, shape) for shape in PEER_SHAPES]


def run(context: Context, shapes: Sequence[Shape] = PEER_SHAPES, sizes: Sequence[int] = PEER_SIZES) -> None:
    """Run what is left of the part."""
    context.say(LEFT_FOR_LATER)
    for shape in shapes:
        _measure(context, shape, sizes)


def _measure(context: Context, shape: Shape, sizes: Sequence[int]) -> None:
    definition = write_gemm(context.work / "defs", shape)
    task = context.task(definition)
    context.note_environment(task)
    package = context.package(task.definition.name)
    if package is None:
        context.say(f"{shape.name}: no module: run its suite first, or pass --records")
    digest = "" if package is None else served_digest(read_table(package))
    left = [m for m in sizes if not context.log.has(f"{shape.name} M={m}", table=digest)]
    if not left:
        return
    with evaluator_of(task, context.cache, timeout_s=TIMEOUT_S) as evaluator:
        for m in left:  # one row at a time: compiling takes longer than measuring, and a part that ends keeps its rows
            if context.left_s() < ROW_S:
                context.say(f"{shape.name}: no time left for M={m}")
                return
            calls = [Call("torch.compile", "gpu_calls.gemm_compiled()")]
            if (kernel := autotuned(context, task, m)) is not None:
                calls.append(Call("triton.autotune", f"gpu_calls.autotuned({str(kernel)!r})"))
            if package is not None:
                calls.append(Call("served", f"gpu_calls.served({str(package)!r})"))
            measured = measure_rows(evaluator, task, [m], {m: calls}, f"peers {shape.name}")
            numbers = {call.name: measured[m, call.name] for call in calls}
            served = numbers.get("served", {})
            context.add(
                f"{shape.name} M={m}",
                "peer",
                table=digest,
                m=m,
                n=shape.n,
                k=shape.k,
                serves="" if package is None else serves(read_table(package), task, m),
                calls=numbers,
                against={
                    name: against(served, other)
                    for name, other in numbers.items()
                    if name != "served" and "effects" in other and "effects" in served
                },
            )
            shown = (
                f"{name} {row['speedup']:.3f}" if "speedup" in row else f"{name} failed"
                for name, row in numbers.items()
            )
            context.say(f"{shape.name} M={m}: {', '.join(shown)}")


def autotuned(context: Context, task: Task, m: int) -> Path | None:
    """Write the module of an autotuned kernel for a size; None where the template is not there."""
    key = FeatureKey(Cell(((m, m),)), (Point((("M", m),), "benchmark"),), 0, synthetic=False)
    for backend in task.backends:
        spaces = [space for space in backend.spaces(task.definition, key)[0] if space.template == TEMPLATE]
        planned = plan([spaces], seed=task.options.seed, per_template=PLANNED) if spaces else ()
        chosen = [item for item in planned if _is_alone(dict(item.config))]
        candidates = [backend.candidate(task.definition, TEMPLATE, dict(item.config)) for item in chosen]
        if not candidates:
            continue
        built = backend.build(task.definition, candidates, timeout_s=task.options.timeout_s, jobs=task.options.jobs)
        kernels = [
            _tunable(candidate, made)
            for candidate in candidates
            if isinstance(made := built[candidate.digest], Artifact)
        ]
        if not kernels:
            continue
        text, num = autotuned_text(kernels, GRID, _arguments(kernels[0].lifted), most=NUM_CONFIGS)
        path = context.work / f"autotuned_{task.definition.name}_m{m}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        context.say(f"{task.definition.name} M={m}: triton.autotune over {num} configs of {TEMPLATE}")
        return path
    context.say(f"{task.definition.name}: {TEMPLATE} is not searched here, triton.autotune is left out")
    return None


def _is_alone(config: dict[str, ConfigValue]) -> bool:
    """Whether Triton's own launcher starts a config as fibc's does, given num_warps and num_stages alone."""
    return config.get("maxnreg", 0) == 0 and not config.get("pdl", False)


def _tunable(candidate: Candidate, artifact: Artifact) -> Tunable:
    config = dict(candidate.config)
    return Tunable(lift(artifact.source), int(config["num_warps"]), int(config["num_stages"]))


def _arguments(lifted: Lifted) -> str:
    """Return the kernel's arguments in a call, by their names in the template."""
    return ", ".join(lifted.parameters)

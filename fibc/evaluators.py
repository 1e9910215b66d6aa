"""The evaluators that everything is measured with, made here alone: two that forgot an argument measured otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fibc import cache_share
from fibc.cache import Cache
from fibc.codegen import harness
from fibc.environment import Environment
from fibc.evaluate import Evaluator
from fibc.schema.definition import Definition
from fibc.schema.silicon import Gpu
from fibc.schema.table import NativeSource
from fibc.schema.workload import Workload
from fibc.task import Task

GPU_TIMEOUT_S = 15.0
"""For a validation and for a pair on a GPU, where both take milliseconds: a kernel that hangs costs no more."""


def evaluator_of(
    task: Task,
    cache: Cache,
    *,
    native: NativeSource | None = None,
    gpu: Gpu | None = None,
    timeout_s: float | None = None,
) -> Evaluator:
    """Return an evaluator that measures as a tune of ``task`` does; nothing is started.

    Args:
        native: Another baseline than the task's.
        gpu: Another GPU than the environment's, of the same silicon.
        timeout_s: For one validation or pair of kernels that compile themselves first, on a GPU too; None is the
            task's, for kernels that are compiled.

    Raises:
        BuildError: If the harness does not build.
    """
    return evaluator_on(
        task.environment if gpu is None else replace(task.environment, gpu=gpu),
        task.definition,
        native or task.native,
        cache,
        seed=task.options.seed,
        mode=task.mode,
        workloads=task.workloads,
        timeout_s=task.options.timeout_s if timeout_s is None else timeout_s,
        gpu_timeout_s=GPU_TIMEOUT_S if timeout_s is None else timeout_s,
    )


def evaluator_on(
    environment: Environment,
    definition: Definition,
    native: NativeSource,
    cache: Cache,
    *,
    seed: int,
    mode: str,
    timeout_s: float,
    gpu_timeout_s: float = GPU_TIMEOUT_S,
    workloads: Iterable[Workload] = (),
) -> Evaluator:
    """Return an evaluator of a definition on this machine, where there is no task; nothing is started.

    Args:
        environment: This machine's; its GPU is measured on, where it has one.
        mode: How calls are timed, see ``Evaluator``.
        timeout_s: For one validation or pair.
        gpu_timeout_s: The same on a GPU, where it is the shorter one.

    Raises:
        BuildError: If the harness does not build.
    """
    on_cpu = environment.gpu is None
    return Evaluator(
        definition,
        native,
        environment.gpu or environment.cpu_validity(),
        harness.build(cache),
        timeout_s=timeout_s if on_cpu else min(timeout_s, gpu_timeout_s),
        seed=seed,
        workloads=workloads,
        num_threads=environment.num_threads,
        mode=mode,
        cache_share_bytes=cache_share.find(environment, cache) if on_cpu else None,
    )

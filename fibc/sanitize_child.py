"""Calls a candidate once and does nothing else on the device: what runs under a sanitizer.

Its argument is a file with a request in JSON: ``setup`` (``worker.Setup``), ``point`` and ``artifact``. Inputs are made
on the CPU and copied, so that no kernel but the candidate's runs. ``STARTED`` is printed before it is called.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fibc import inputs
from fibc.calls import torch_dtype
from fibc.schema import codec
from fibc.schema.candidate import Artifact
from fibc.schema.definition import Definition
from fibc.schema.feature import Point
from fibc.schema.workload import read_workload
from fibc.worker import Setup, load_harness

STARTED = "fibc: the candidate is called"


def call_once(setup: Setup, point: Point, artifact: Artifact) -> None:
    """Call a candidate into outputs that nothing has written."""
    definition = Definition.model_validate(setup.definition)
    spec = definition.call_spec()
    recorded = setup.workloads.get(point.workload)
    workload = None if recorded is None else read_workload(recorded[0], definition, Path(recorded[1]))
    made = inputs.make(definition, dict(point.axes), setup.seed, workload)
    given: list[Any] = [v.to(setup.device) if isinstance(v, Tensor) else v for v in made.values()]
    sizes = [axis.value or dict(point.axes)[axis.name] for axis in spec.axes]
    outputs = [
        torch.empty([sizes[axis] for axis in output.axes], dtype=torch_dtype(output.dtype), device=setup.device)
        if output.alias is None
        else given[output.alias]
        for output in spec.outputs
    ]
    harness = load_harness(Path(setup.harness_path))
    harness.set_num_threads(setup.num_threads)
    kernel = harness.bind(artifact.library_path, artifact.symbol, codec.encode(spec), setup.device)
    print(STARTED, flush=True)
    kernel.run_out(*given, *outputs)
    if setup.device == "cuda":
        torch.cuda.synchronize()


def main(path: str) -> None:
    """Serve the request in the file ``path``."""
    request = json.loads(Path(path).read_bytes())
    torch.set_grad_enabled(False)
    call_once(
        codec.from_plain(Setup, request["setup"]),
        codec.from_plain(Point, request["point"]),
        codec.from_plain(Artifact, request["artifact"]),
    )


if __name__ == "__main__":
    main(sys.argv[1])

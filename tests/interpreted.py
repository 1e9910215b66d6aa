"""Triton kernels through Triton's interpreter, in a child process, because the interpreter is chosen at import.

As a script it takes the path of a file that ``torch.save`` wrote: a list of runs, each with the kernel's source, its
function, its grids and its arguments. It writes the tensors of each run after it back to the file.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fibc.backends.triton import TritonBackend
from fibc.schema.candidate import Candidate
from fibc.schema.definition import Definition
from fibc.schema.expression import parse

COUNTERS = 16384


class Run:
    """A candidate with its inputs, to be called ``repeats`` times on one workspace."""

    def __init__(
        self,
        backend: TritonBackend,
        definition: Definition,
        candidate: Candidate,
        axes: Mapping[str, int],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        repeats: int = 1,
    ) -> None:
        rendered = backend.render(definition, candidate)
        bound, self.source = rendered.bound, rendered.kernel.text
        self.function, self.repeats = bound.table.function, repeats
        sizes = {**definition.const_axes, **axes}
        values = {**bound.values, **{name: sizes[bound.found.axes[name]] for name in bound.axes}}

        def evaluate(text: int | str) -> int:
            return int(parse(str(text), values).evaluate(values))  # type: ignore[call-overload,no-any-return]

        assert all(evaluate(law) for law in bound.table.requires)
        self.grid = [evaluate(blocks) for blocks in (*bound.table.grid, 1, 1)[:3]]
        scratch = torch.full((max(1, evaluate(bound.table.scratch_bytes) // 4),), torch.nan)
        self.tensors = {
            "counters": torch.zeros(COUNTERS, dtype=torch.int32),
            "scratch": scratch,
            **{name: inputs[index] for name, index in bound.found.inputs.items()},
            **{name: outputs[index] for name, index in bound.found.outputs.items()},
        }
        self.arguments: list[tuple[str, Any]] = []
        for argument in bound.arguments:
            if argument.value is not None:
                self.arguments.append(("value", evaluate(argument.value)))
            elif argument.descriptor is not None:
                self.arguments.append((argument.descriptor, [evaluate(size) for size in argument.block]))
            else:
                self.arguments.append((argument.tensor or argument.workspace or "", None))


def run(runs: Sequence[Run], tmp_path: Path) -> list[dict[str, torch.Tensor]]:
    """Return every run's tensors by role after its calls, ``counters`` among them."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        path = Path(name) / "runs.pt"
        work = [vars(item) for item in runs]
        torch.save(work, path)
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(
            [sys.executable, __file__, str(path)], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results: list[dict[str, torch.Tensor]] = torch.load(path, weights_only=False)
        return results


def _repair_interpreter() -> None:
    """Let tensors of one element be bounds of a range: NumPy 2.4 makes no scalar of them any more."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _main(path: Path) -> None:
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    _repair_interpreter()
    results = []
    for index, work in enumerate(torch.load(path, weights_only=False)):
        source = path.with_name(f"kernel_{index}.py")
        source.write_text(work["source"])
        spec = importlib.util.spec_from_file_location(source.stem, source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.language.constexpr):  # an int of Python's range has no operator with one
                setattr(module, name, value.value)
        tensors = work["tensors"]
        arguments: list[Any] = []
        for kind, detail in work["arguments"]:
            if kind == "value":
                arguments.append(detail)
            else:
                tensor = tensors[kind]
                arguments.append(tensor if detail is None else TensorDescriptor.from_tensor(tensor, detail))
        for _ in range(work["repeats"]):
            getattr(module, work["function"])[tuple(work["grid"])](*arguments)
        results.append(tensors)
    torch.save(results, path)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))

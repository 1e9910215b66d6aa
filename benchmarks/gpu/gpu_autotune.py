"""A template of fibc under ``triton.autotune``: constants that configs differ in become parameters of one kernel."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_CONSTANT = re.compile(r"^(?P<name>[A-Z][A-Z0-9_]*) = tl\.constexpr\((?P<value>.*?)\)(?:  #.*)?$", re.MULTILINE)
_SIGNATURE = re.compile(r"(?<=^def )(?P<name>\w+)\((?P<arguments>[^)]*)\):", re.MULTILINE)


@dataclass(frozen=True)
class Lifted:
    """A rendered kernel without its constants.

    Attributes:
        text: Equal for configs that one kernel can serve.
        constants: Their values as Python text, by name.
    """

    text: str
    constants: Mapping[str, str]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the kernel's parameters.

        Raises:
            ValueError: If the kernel's definition is not in the text.
        """
        return tuple(name.strip() for name in _signature(self.text)["arguments"].split(","))


def lift(rendered: str, fixed: Iterable[str] = ("N", "K")) -> Lifted:
    """Return a rendered kernel with its module constants, all but ``fixed``, taken out."""
    constants: dict[str, str] = {}
    kept = set(fixed)

    def take(found: re.Match[str]) -> str:
        if found["name"] in kept:
            return found[0]
        constants[found["name"]] = found["value"]
        return ""

    body = "\n".join(line for line in rendered.splitlines() if not line.startswith("#"))
    return Lifted(_CONSTANT.sub(take, body), constants)


def _signature(text: str) -> re.Match[str]:
    found = _SIGNATURE.search(text)
    if found is None:
        raise ValueError("autotune: the kernel's definition was not found in its text")
    return found


@dataclass(frozen=True)
class Tunable:
    """A lifted kernel, and Triton's options for it."""

    lifted: Lifted
    num_warps: int
    num_stages: int


def autotuned_text(kernels: Sequence[Tunable], grid: str, arguments: str, *, most: int) -> tuple[str, int]:
    """Return a Python module with one autotuned kernel and ``call(a, b)``, and the number of its configs.

    Args:
        kernels: Of texts that differ the most frequent one counts, of equally frequent ones the first.
        grid: Expression of the grid in ``meta``, ``num_rows`` and ``num_cols``.
        arguments: Of the kernel, in the names ``a``, ``b``, ``c``, ``counters``, ``scratch`` and ``num_rows``.
        most: Configs at most; the first ones.

    Raises:
        ValueError: If there is no kernel, or none whose definition is found.
    """
    if not kernels:
        raise ValueError("autotune: needs at least one kernel")
    text, _ = Counter(kernel.lifted.text for kernel in kernels).most_common(1)[0]
    mine = [kernel for kernel in kernels if kernel.lifted.text == text]
    found = _signature(text)
    names = sorted(mine[0].lifted.constants)
    parameters = ", ".join([found["arguments"], *(f"{name}: tl.constexpr" for name in names)])
    lifted = f"{text[: found.start()]}{found['name']}({parameters}):{text[found.end() :]}"
    configs = list(dict.fromkeys(_config(names, kernel) for kernel in mine))[:most]
    head, _, body = lifted.partition("@triton.jit\n")
    module = "".join(
        (
            head,
            "CONFIGS = [\n",
            *(f"    {config},\n" for config in configs),
            "]\n\n\n",
            '@triton.autotune(configs=CONFIGS, key=["num_rows"])\n',
            '@triton.jit(do_not_specialize=["num_rows"])\n',
            body,
            _CALL.format(kernel=found["name"], grid=grid, arguments=arguments),
        )
    )
    return module, len(configs)


def _config(names: Iterable[str], kernel: Tunable) -> str:
    values = ", ".join(f'"{name}": {kernel.lifted.constants[name]}' for name in names)
    return f"triton.Config({{{values}}}, num_warps={kernel.num_warps}, num_stages={kernel.num_stages})"


_CALL = """

_WORKSPACES = {{}}


def _workspace(num_rows, num_cols, device):
    # As fibc's: counters that are zero, and that every kernel leaves zero; room for what the splits of K leave.
    if (num_rows, num_cols) not in _WORKSPACES:
        import torch

        sizes = [
            triton.cdiv(num_rows, c.kwargs["BLOCK_M"]) * c.kwargs["BLOCK_M"]
            * triton.cdiv(num_cols, c.kwargs["BLOCK_N"]) * c.kwargs["BLOCK_N"]
            * c.kwargs["SPLIT_K"]
            for c in CONFIGS
        ]
        _WORKSPACES[num_rows, num_cols] = (
            torch.zeros(16384, dtype=torch.int32, device=device),
            torch.empty(max(sizes), dtype=torch.float32, device=device),
        )
    return _WORKSPACES[num_rows, num_cols]


def call(a, b):
    import torch

    num_rows, num_cols = a.shape[0], b.shape[0]
    c = torch.empty(num_rows, num_cols, dtype=a.dtype, device=a.device)
    counters, scratch = _workspace(num_rows, num_cols, a.device)
    {kernel}[lambda meta: {grid}]({arguments})
    return c
"""

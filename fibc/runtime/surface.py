"""What a package exports beside ``run`` and ``run_out``. A copy lies in every package: it imports no fibc."""

from __future__ import annotations

import json
import linecache
import logging
import os
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .custom_op import register

Kernel = Callable[..., Any]

_log = logging.getLogger("fibc")

CONDITIONS = ("torch", "driver", "cublas")
"""What native and launches run in: where one is not as recorded, the same binaries are to be measured again."""

POLICIES = ("serve", "native", "refuse")

DRIVER_VERSION = Path("/sys/module/nvidia/version")


class Surface:
    """The functions of one package, made when it is imported.

    Attributes:
        run: ``run(*inputs)``, by position or keyword: the outputs, one or a tuple.
        run_out: ``run_out(*inputs, *outputs)``: None.
        environment: What was tuned on, what is here, and what differs. For a table for GPUs also ``devices``: each GPU
            that was prepared or called on, with what it is and why it is not served, if it is not.
    """

    def __init__(self, native_module: Any) -> None:
        """Bring up a module: hold the process to its table, find its native kernel, register its operator.

        Args:
            native_module: The extension that lies beside this file.

        Raises:
            ImportError: If what is here is not what was tuned with, and the policy is to refuse.
        """
        self._module = native_module
        self._table: dict[str, Any] = json.loads(native_module.table_json())
        self._definition: str = self._table["definition"]
        self._rows = [([tuple(bound) for bound in row["cell"]["bounds"]], row) for row in self._table["rows"]]
        self._kind: str = self._table["target"].partition(":")[0]
        native_module.start(
            torch,
            accept_cpu=os.environ.get("FIBC_ACCEPT_CPU", "") == "1",
            accept_gpu=os.environ.get("FIBC_ACCEPT_GPU", "") == "1",
            enabled=not _is_disabled(self._definition),
            on_device=self._on_device,
        )
        self.run: Kernel = native_module.run
        self.run_out: Kernel = native_module.run_out
        self.native_name, self._own_call, self._own_call_out = self._load_native()
        self.set_native(None)
        self.environment = self._environment()
        self._follow_policy()
        self._say_what_stands_against_it()
        if native_module.standing() != "torch":  # an older torch may know no operators of this kind
            register(self._table["spec"], self.run, self._call_native)

    def explain(self, *inputs: Any, **named: Any) -> dict[str, Any]:
        """Say what would serve this call and on what evidence, or why native would. Runs nothing, counts nothing.

        Returns:
            ``served``: the variant's symbol, ``native``, or ``nothing`` where every output is empty; ``reason`` and
            ``why``; ``axes``; ``features``; ``region``; ``variant`` and, where it calls one, its ``library``; and of
            the row that holds the sizes its ``cell``, ``verdict``, ``verdict_reason`` and ``evidence`` (a list of
            comparisons). None where not known.
        """
        reason, region_index, axes = self._module.choose(*inputs, **named)
        features = None if axes is None else [_feature(feature, axes) for feature in self._table["features"]]
        row = self._row(features)
        region = self._table["regions"][region_index] if region_index >= 0 else None
        variant = self._table["variants"][region["variant"]] if region is not None else None
        served = {"hit": variant["symbol"] if variant else "native", "empty": "nothing"}.get(reason, "native")
        return {
            "served": served,
            "native": self.native_name,
            "reason": reason,
            "why": self._module.reasons()[reason],
            "axes": axes,
            "features": features,
            "region": None if region is None else _cell(region["cell"]),
            "variant": None if variant is None else _candidate(variant["candidate"]),
            "library": None if variant is None else variant["library"] or None,
            "cell": None if row is None else _cell(row["cell"]),
            "verdict": None if row is None else row["verdict"],
            "verdict_reason": None if row is None else row["reason"],
            "evidence": [] if row is None else row["reconfirm"] or row["confirm"],
        }

    def table(self) -> dict[str, Any]:
        """Return the dispatch table with its evidence (JSON-able); the caller's own copy."""
        copy: dict[str, Any] = json.loads(self._module.table_json())
        return copy

    def stats(self) -> dict[str, Any]:
        """Return how many calls each variant served, and how many went native for each reason (JSON-able)."""
        counts: dict[str, Any] = self._module.stats()
        return counts

    def enable(self) -> None:
        """Serve variants again after ``disable`` or ``FIBC_DISABLE``."""
        self._module.set_enabled(True)

    def disable(self) -> None:
        """Send every call to native."""
        self._module.set_enabled(False)

    def set_native(self, native: Kernel | None, native_out: Kernel | None = None) -> None:
        """Replace the native kernel.

        Args:
            native: ``native(*inputs)``, by position; None sets the table's own again.
            native_out: ``native_out(*inputs, *outputs)``; without one, results of ``native`` are copied.
        """
        if native is None:
            native, native_out = self._own_call, self._own_call_out
        for kernel in (native, native_out):
            if kernel is not None and not callable(kernel):
                raise TypeError(f"fibc_{self._definition}: set_native: must be callable, got {type(kernel).__name__}")
        self._native = native
        self._module.set_native(native, native_out or self._copying(native))

    def prepare(self, device: torch.device | str | int | None = None) -> bool:
        """Load what the first call on ``device`` would load; return whether variants can serve there.

        On a GPU this reads its silicon and loads every variant's code, once. Before a CUDA graph is captured without a
        call first, it has to be called.

        Args:
            device: A number is a GPU's; None is the current device of the kind that the table is for.
        """
        chosen = torch.device(self._kind if device is None else "cuda" if isinstance(device, int) else device)
        if chosen.type != self._kind or not self._stands:
            return False
        if self._kind == "cpu":
            return True
        index = device if isinstance(device, int) else chosen.index
        if index is None:
            if not torch.cuda.is_available():  # a torch for CPUs beside a driver
                return False
            index = torch.cuda.current_device()
        return bool(self._module.prepare(index) == "hit")

    def _call_native(self, *inputs: Any) -> Any:
        """Call the native kernel that is set now."""
        return self._native(*inputs)

    @property
    def _stands(self) -> bool:
        return bool(self._module.standing() == "hit")

    def _copying(self, native: Kernel) -> Kernel:
        """Return ``native`` as a function that writes into outputs."""
        num_outputs = len(self._table["spec"]["outputs"])

        def native_out(*arguments: Any) -> None:
            split = len(arguments) - num_outputs
            results = native(*arguments[:split])
            for output, result in zip(arguments[split:], results if num_outputs != 1 else (results,), strict=True):
                if output is not result:
                    output.copy_(result)

        return native_out

    def _load_native(self) -> tuple[str, Kernel, Kernel | None]:
        """Return name, ``call`` and ``call_out`` of the native kernel, or the reference where it cannot be imported."""
        native = self._table["native"]
        try:
            names = _compile(native["source"], f"<native kernel of fibc_{self._definition}>")
            return native["name"], names["call"], names.get("call_out")
        except Exception as error:  # noqa: BLE001  the source is a user's: it may raise anything
            warnings.warn(
                f"fibc_{self._definition}: native kernel {native['name']} cannot be imported "
                f"({type(error).__name__}: {error}); the reference answers in its place (set_native() sets another)",
                RuntimeWarning,
                stacklevel=2,
            )
        names = _compile(self._table["reference_source"], f"<reference of fibc_{self._definition}>")
        return "reference", names[self._table["reference_entry"]], None

    def _row(self, features: list[int] | None) -> dict[str, Any] | None:
        if features is None:
            return None
        row: dict[str, Any]
        for bounds, row in self._rows:
            if all(first <= value <= last for (first, last), value in zip(bounds, features, strict=True)):
                return row
        return None

    def _environment(self) -> dict[str, Any]:
        recorded = {**self._table["environment"], **self._table["validity"]}
        here = {**self._module.host(), "torch": torch.__version__}
        if self._kind == "cuda":
            here["driver"] = _driver_version()
        if self._module.standing() != "torch" and self._kind == "cpu":
            here["num_threads"] = self._module.num_threads()
        return {
            **({"devices": {}} if self._kind == "cuda" else {}),
            "recorded": recorded,
            "here": here,
            "differs": sorted(name for name in here if not _is_same(recorded.get(name), here[name])),
            "policy": os.environ.get("FIBC_ON_CHANGE") or self._table["on_change"],
            "accepted": self._stands,
            "reason": self._module.standing(),
            "why": self._module.reasons()[self._module.standing()],
            "openmp": self._module.has_openmp(),
            "torch_abi": self._module.uses_torch_abi(),
        }

    def _follow_policy(self) -> None:
        """Serve, send to native or refuse where driver, torch or a library is not the one tuned with."""
        found, policy = self.environment, self.environment["policy"]
        if policy not in POLICIES:
            raise ImportError(
                f"fibc_{self._definition}: FIBC_ON_CHANGE: must be a policy, got {policy!r} "
                f"(accepted: {', '.join(POLICIES)})"
            )
        changed = ", ".join(
            f"{name} {found['recorded'][name]}, found {found['here'][name]}"
            for name in CONDITIONS
            if name in found["differs"]
        )
        if policy == "refuse" and self._table["variants"] and (changed or not self._stands):
            raise ImportError(
                f"fibc_{self._definition}: was tuned with {changed or found['why']}, and refuses to serve elsewhere "
                "(run `fibc retune`, or set FIBC_ON_CHANGE to serve or native)"
            )
        if not changed or not self._stands or not self._table["variants"]:
            return
        if policy == "native":
            self._module.stand_down()
            found |= {"accepted": False, "reason": "changed", "why": self._module.reasons()["changed"]}
        _log.warning(
            "fibc_%s: was tuned with %s; %s (run `fibc retune`)",
            self._definition,
            changed,
            "the same kernels serve on" if policy == "serve" else "every call goes to the native kernel",
        )

    def _on_device(self, index: int) -> None:
        """Take note of a GPU whose state has become known; warn once where variants cannot serve on it."""
        found: dict[str, Any] = self._module.device(index)
        reason = found["reason"]
        self.environment["devices"][f"cuda:{index}"] = {**found, "why": self._module.reasons()[reason]}
        if reason == "broken" or (reason == "hit" and not found["declined"]):  # an error is raised, which says more
            return
        recorded = self._table["validity"]
        if reason == "arch":
            needs = f"needs compute capability {_capability(recorded)}, found {_capability(found)} (tune on this GPU)"
        elif reason == "silicon":
            needs = (
                f"was tuned on {_silicon(recorded)}, found {_silicon(found)} (tune on this GPU, or accept another one "
                "of the same compute capability with FIBC_ACCEPT_GPU=1)"
            )
        else:
            needs = self._needs_of(found)
        which = "their calls go" if reason == "hit" else "every call goes"
        warnings.warn(
            f"fibc_{self._definition}: cuda:{index}: {needs}; {which} to the native kernel, {self.native_name}",
            RuntimeWarning,
            stacklevel=2,
        )

    def _needs_of(self, found: dict[str, Any]) -> str:
        """Return what keeps a GPU, or some variants on it, from serving."""
        symbols = ", ".join(found["declined"])
        libraries = {variant["symbol"]: variant["library"] for variant in self._table["variants"]}
        needed = sorted({libraries[symbol] for symbol in found["declined"]} - {""})
        if needed and found["error"] is None:
            here = self.environment["here"]["cublas"] or "none"
            return f"needs {', '.join(needed)}, torch has loaded {here} (tune again): {symbols}"
        arch = self._table["validity"]["arch"]
        return f"loads no code there: {found['error'] or symbols} (driver and GPU must run {arch})"

    def _say_what_stands_against_it(self) -> None:
        """Warn once where every call will go native, with what differs and the remedy."""
        reason = self._module.standing()
        if reason in ("hit", "changed") or not self._table["variants"]:
            return
        recorded, here = self.environment["recorded"], self.environment["here"]
        needs = {
            "torch": f"needs the DLPack exchange interface of torch 2.10, found torch {torch.__version__} "
            "(accepted: 2.10 and newer; upgrade torch)",
            **(_cpu_needs(recorded, here) if self._kind == "cpu" else {}),
            "driver": "needs a CUDA driver, found no usable libcuda.so.1 (accepted: NVIDIA's driver from 12.0)",
        }[reason]
        warnings.warn(
            f"fibc_{self._definition}: {needs}; every call goes to the native kernel, {self.native_name}",
            RuntimeWarning,
            stacklevel=2,
        )


def _cpu_needs(recorded: dict[str, Any], here: dict[str, Any]) -> dict[str, str]:
    """Return what speaks against this CPU, by reason."""
    return {
        "isa": f"needs {' '.join(recorded['isa'])}, found {' '.join(here['isa']) or 'less than avx2'} "
        "(tune on this machine)",
        "cpu_model": f"was tuned on {recorded['model']}, found {here['model']} "
        "(tune on this machine, or accept another model of the same ISA with FIBC_ACCEPT_CPU=1)",
        "caches": f"was tuned with {recorded['l2_bytes']} bytes of L2 and {recorded['l3_bytes']} of L3, found "
        f"{here['l2_bytes']} and {here['l3_bytes']} (tune on this machine, or accept with FIBC_ACCEPT_CPU=1)",
    }


def _driver_version() -> str | None:
    try:
        return DRIVER_VERSION.read_text().strip()
    except OSError:
        return None


def _is_same(recorded: Any, here: Any) -> bool:
    """Compare two facts. What is not known is the same, and so is a version whose local part one side leaves out."""
    if not recorded or not here or recorded == here:
        return True
    texts = [value.partition("+") for value in (recorded, here) if isinstance(value, str)]
    return len(texts) == 2 and texts[0][0] == texts[1][0] and "" in (texts[0][2], texts[1][2])


def _capability(silicon: dict[str, Any]) -> str:
    return f"{silicon['compute_capability'] // 10}.{silicon['compute_capability'] % 10}"


def _silicon(silicon: dict[str, Any]) -> str:
    return (
        f"{silicon['num_sms']} SMs, {silicon['l2_bytes'] >> 20} MiB of L2 and {silicon['memory_bytes'] / 2**30:.1f} GiB"
    )


def _is_disabled(definition: str) -> bool:
    """Read FIBC_DISABLE: ``1`` for all, or definitions separated by commas."""
    names = [name.strip() for name in os.environ.get("FIBC_DISABLE", "").split(",")]
    return "1" in names or definition in names


def _compile(source: str, filename: str) -> dict[str, Any]:
    """Run ``source`` as a module's text and return its names; tracebacks show its lines."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(filename)
    exec(compile(source, filename, "exec"), module.__dict__)  # noqa: S102  the package's own code, as an import runs it
    return module.__dict__


def _feature(feature: dict[str, Any], axes: dict[str, int]) -> int:
    top = axes[feature["numerator"]]
    if feature["denominator"] is None:
        return top
    bottom = axes[feature["denominator"]]
    return -(-top // bottom) if bottom > 0 else 0


def _cell(cell: dict[str, Any]) -> str:
    return " x ".join(f"{first}" if first == last else f"{first}..{last}" for first, last in cell["bounds"])


def _candidate(candidate: dict[str, Any]) -> str:
    values = ", ".join(f"{name}={value}" for name, value in candidate["config"])
    return f"{candidate['template']}({values})"

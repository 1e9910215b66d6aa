"""A fake cuBLASLt under a fake libtorch_cuda.so, and calls of a built launcher over it in a process of their own.

As a script it reads a session from standard input and writes what came of it, see ``call``: the process that tests run
in must not have the fake loaded, or others would take it for torch's.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernel_abi as abi

LIBRARY = "libcublasLt.so.13"
SOURCE = Path(__file__).with_suffix(".c")


@dataclass(frozen=True)
class Fake:
    """A directory with both libraries."""

    directory: Path

    @property
    def library(self) -> Path:
        """cuBLASLt, and a driver as well."""
        return self.directory / LIBRARY

    @property
    def torch(self) -> Path:
        return self.directory / "libtorch_cuda.so"


def compile_fake(directory: Path, cxx: Path) -> Fake:
    """Return the fake, compiled into ``directory``."""
    fake = Fake(directory)
    common: list[str | Path] = [cxx, "-x", "c", "-shared", "-fPIC", "-O1"]
    subprocess.run([*common, f"-Wl,-soname,{LIBRARY}", SOURCE, "-o", fake.library], check=True)
    needs = ["-Wl,--no-as-needed", f"-L{directory}", f"-l:{LIBRARY}", "-Wl,-rpath,$ORIGIN"]
    named = [*common, f"-Wl,-soname,{fake.torch.name}", "/dev/null"]
    subprocess.run([*named, *needs, "-o", fake.torch], check=True)
    return fake


@dataclass(frozen=True)
class Session:
    """What came of a session.

    Attributes:
        returned: By each step, in order.
        log: What the library was asked, a line a call.
    """

    returned: list[int]
    log: list[str]

    def lines(self, name: str) -> list[dict[str, str]]:
        """Return the fields of every call ``name``."""
        found = [line.split() for line in self.log if line.split()[0] == name]
        return [dict(field.split("=", 1) for field in line[1:]) for line in found]


def call(fake: Fake | None, launcher: str, symbol: str, steps: Sequence[Sequence[Any]], **settings: int) -> Session:
    """Run ``steps`` over a launcher in a process of their own.

    Args:
        fake: What torch has loaded; None for a torch without CUDA.
        launcher: Path of its library.
        steps: ``("prepare", device)``; ``("workspace", call)`` and ``("launch", call)``, calls as ``_bind`` takes them;
            ``("thread", steps)`` runs others in a thread and returns the last one's value.
        settings: Of the fake, ``FAKE_MATMUL=13``.
    """
    session = {
        "libraries": [] if fake is None else [str(fake.torch), str(fake.library)],
        "launcher": launcher,
        "symbol": symbol,
        "steps": list(steps),
    }
    done = subprocess.run(
        [sys.executable, "-S", __file__],
        input=json.dumps(session),
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(abi.__file__).parent),
            **{name: str(value) for name, value in settings.items()},
        },
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return Session(**json.loads(done.stdout))


STREAM, SCRATCH = 0x70, 0x5000
A, B, C = 0x1000, 0x2000, 0x3000
"""Addresses; nothing reads them."""


def _bind(sizes: Mapping[str, int]) -> abi.Call:
    """Return a call of M, N, K.

    Args:
        sizes: ``m``, ``n``, ``k``; strides of rows ``a``, ``b``, ``c`` where there are gaps between them; ``device``, 0
            where none is given, -1 for a call without one.
    """
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    a, b = abi.tensor(A, (m, k), (sizes.get("a", k), 1)), abi.tensor(B, (n, k), (sizes.get("b", k), 1))
    outputs = abi.array([abi.tensor(C, (m, n), (sizes.get("c", n), 1))])
    device = sizes.get("device", 0)
    gpu = None if device < 0 else ctypes.pointer(abi.Cuda(STREAM, device, 0, None, SCRATCH))
    return abi.Call(abi.array([a, b]), outputs, None, abi.int64s((m, n, k)), None, 1, gpu)


def _main() -> None:
    session = json.load(sys.stdin)
    fakes = [ctypes.CDLL(path) for path in session["libraries"]]
    kernel = abi.entries(session["launcher"], session["symbol"])

    def run(step: Sequence[Any]) -> int:
        kind, argument = step
        if kind == "prepare":
            return int(kernel.prepare(argument))
        if kind == "thread":
            returned: list[int] = []
            thread = threading.Thread(target=lambda: returned.extend(map(run, argument)))
            thread.start()
            thread.join()
            return returned[-1]
        return int((kernel.call if kind == "launch" else kernel.workspace)(ctypes.byref(_bind(argument))))

    returned = [run(step) for step in session["steps"]]
    log = ""
    if fakes:
        fakes[1].fake_log.restype = ctypes.c_char_p
        log = fakes[1].fake_log().decode()
    print(json.dumps({"returned": returned, "log": log.splitlines()}))


if __name__ == "__main__":
    _main()

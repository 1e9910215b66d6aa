"""The structures that Python calls kernels with, against the header."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import kernel_abi as abi
import pytest

from fibc import toolchain
from fibc.paths import INCLUDE

STRUCTURES = {"fibc_tensor": abi.Tensor, "fibc_cuda": abi.Cuda, "fibc_call": abi.Call}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that prints the header's sizes and offsets."""
    directory = tmp_path_factory.mktemp("abi")
    lines = [f'printf("{name} %zu\\n", sizeof({name}));' for name in STRUCTURES]
    for name, structure in STRUCTURES.items():
        for field, *_ in structure._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
    lines.append('printf("counters %d\\nok %d\\n", FIBC_COUNTER_BYTES, FIBC_OK);')
    source = directory / "abi.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <fibc/kernel_abi.h>\n"
        f"int main(void) {{ {' '.join(lines)} return 0; }}\n"
    )
    subprocess.run([toolchain.find().cxx, "-x", "c", f"-I{INCLUDE}", source, "-o", directory / "abi"], check=True)
    return directory / "abi"


def test_every_field_lies_where_the_header_has_it(program: Path) -> None:
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    said = dict(line.split() for line in done.stdout.splitlines())
    assert {name: int(number) for name, number in said.items()} == {
        **{name: ctypes.sizeof(structure) for name, structure in STRUCTURES.items()},
        **{
            f"{name}.{field}": getattr(structure, field).offset
            for name, structure in STRUCTURES.items()
            for field, *_ in structure._fields_
        },
        "counters": abi.COUNTER_BYTES,
        "ok": abi.OK,
    }

"""The generated text: golden files, the same bytes every time, hostile texts kept inside their literals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import toys

from fibc import toolchain
from fibc.codegen.emit import MAX_INPUTS, SURFACE, Sources, emit
from fibc.errors import SchemaError
from fibc.paths import INCLUDE
from fibc.schema.callspec import Argument, Axis
from fibc.schema.codec import to_plain
from fibc.schema.silicon import CudaValidity
from fibc.schema.table import CpuValidity, DispatchTable

GOLDEN = Path(__file__).parent / "golden"

VALIDITY = CpuValidity("Intel(R) Xeon(R) Example", ("avx2", "avx512"), 2 << 20, 32 << 20, 2)

H200 = CudaValidity("sm_90a", 90, 132, 60 << 20, 150 * 10**9)

HOSTILE = '"; } // \\ ??/ \n */ """ \' {{ x }} \u2028 \x00 é )marker"'


def tables() -> dict[str, DispatchTable]:
    return {
        "toy_gemm": toys.gemm_table(VALIDITY),
        "toy_update": toys.update_table(VALIDITY),
        "toy_rows": toys.rows_table(H200),
    }


def files(sources: Sources) -> dict[str, str]:
    return {
        "module.cpp": sources.module_cpp,
        "package.py": sources.package_py,
        "package.pyi": sources.package_pyi,
        "generation.py": sources.generation_py,
    }


def compiles(text: str, tmp_path: Path) -> None:
    source = tmp_path / "module.cpp"
    source.write_text(text)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror", f"-I{INCLUDE}", "-fsyntax-only"]
    done = subprocess.run([toolchain.find().cxx, *flags, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["toy_gemm", "toy_update", "toy_rows"])
def test_generated_text_is_the_golden_text(name: str, update_golden: bool) -> None:
    for file, text in files(emit(tables()[name])).items():
        golden = GOLDEN / name / file
        if update_golden:
            golden.parent.mkdir(parents=True, exist_ok=True)
            golden.write_text(text)
        assert text == golden.read_text(), f"{golden}: differs (look at it, then pytest --update-golden)"


@pytest.mark.parametrize("name", ["toy_gemm", "toy_update", "toy_rows"])
def test_generated_text_compiles_without_a_warning(name: str, tmp_path: Path) -> None:
    sources = emit(tables()[name])
    compiles(sources.module_cpp, tmp_path)
    for text in (sources.package_py, sources.package_pyi, sources.generation_py):
        compile(text, name, "exec")


def test_the_same_table_gives_the_same_bytes_under_any_hash_seed() -> None:
    script = """
import sys
sys.path.insert(0, sys.argv[1])
import test_emit
print([sorted(test_emit.files(test_emit.emit(table)).items()) for table in test_emit.tables().values()])
"""
    paths = [str(Path(__file__).parent), str(toys.SOURCE.parent)]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {paths[1]!r})\n{script}", paths[0]],
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_another_table_has_another_digest() -> None:
    table = tables()["toy_gemm"]
    assert emit(table).digest != emit(replace(table, alpha=0.04)).digest


def test_the_module_carries_the_whole_table() -> None:
    table = tables()["toy_gemm"]
    found = re.search(r'kJson\[\] = R"(\w{16})\((.*)\)\1";', emit(table).module_cpp, re.DOTALL)
    assert found is not None
    assert json.loads(found.group(2)) == to_plain(table)


def test_the_package_exports_the_surface() -> None:
    text = emit(tables()["toy_gemm"]).package_py
    assert all(f"\n{name} = _generation.exports.{name}\n" in text for name in SURFACE)


def test_hostile_texts_stay_inside_their_literals(tmp_path: Path) -> None:
    table = tables()["toy_update"]
    variant = replace(table.variants[0], candidate=replace(table.variants[0].candidate, template=HOSTILE))
    hostile = replace(
        table,
        variants=(variant,),
        native=replace(table.native, name=HOSTILE, source=HOSTILE),
        reference_source=HOSTILE,
        validity=replace(VALIDITY, model=HOSTILE),
        target=HOSTILE,
        fibc_version=HOSTILE,
        environment={HOSTILE: HOSTILE},
    )
    sources = emit(hostile)
    compiles(sources.module_cpp, tmp_path)
    for text in (sources.package_py, sources.package_pyi, sources.generation_py):
        compile(text, "generated", "exec")
    assert "{{ x }}" in sources.package_py


@pytest.mark.parametrize("name", ["a;b", "../x", "a b", "1a", "", "a" * 300, "é", "a\nb"])
def test_a_name_that_is_no_identifier_is_refused(name: str) -> None:
    table = tables()["toy_gemm"]
    spec = replace(table.spec, inputs=(replace(table.spec.inputs[0], name=name), table.spec.inputs[1]))
    with pytest.raises(SchemaError, match="toy_gemm: name: must be an identifier"):
        emit(replace(table, spec=spec))
    with pytest.raises(SchemaError, match="name: must be an identifier"):
        emit(replace(table, definition=name))
    with pytest.raises(SchemaError, match="must be an identifier"):
        emit(replace(table, variants=(replace(table.variants[0], symbol=name), *table.variants[1:])))


def test_a_definition_beyond_the_bounds_of_a_call_is_refused_with_every_problem() -> None:
    table = tables()["toy_gemm"]
    inputs = tuple(Argument(f"i{i}", "tensor", "float32", (0,) * 17) for i in range(MAX_INPUTS + 1))
    axes = tuple(Axis(f"a{i}", None) for i in range(65))
    with pytest.raises(SchemaError) as raised:
        emit(replace(table, variants=(), spec=replace(table.spec, inputs=inputs, axes=axes)))
    assert [problem.partition(", got")[0] for problem in raised.value.problems] == [
        "toy_gemm: inputs: too many for one call",
        "toy_gemm: axes: too many for one call",
        "toy_gemm: rank: too many for one call",
    ]


def test_guards_must_match_the_arguments() -> None:
    table = tables()["toy_gemm"]
    guards = replace(table.variants[0].guards, inputs=())
    variants = (replace(table.variants[0], guards=guards), *table.variants[1:])
    with pytest.raises(SchemaError, match="must be one per argument, got 0 for inputs and 1 for outputs"):
        emit(replace(table, variants=variants))


def test_the_validity_must_be_that_of_the_target() -> None:
    with pytest.raises(SchemaError, match="toy_gemm: validity: must be that of target cpu:avx2, got CudaValidity"):
        emit(replace(tables()["toy_gemm"], validity=H200))
    with pytest.raises(SchemaError, match="toy_rows: validity: must be that of target cuda:sm_90a, got CpuValidity"):
        emit(replace(tables()["toy_rows"], validity=VALIDITY))

"""A dispatch table and the objects of its variants to a published package."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fibc.cache import Cache
from fibc.codegen import compile as cxx
from fibc.codegen import harness, package
from fibc.codegen.emit import Sources, emit
from fibc.codegen.generations import collect
from fibc.errors import BuildError
from fibc.paths import PACKAGE
from fibc.schema import codec
from fibc.schema.digest import digest_text
from fibc.schema.manifest import NAME as MANIFEST
from fibc.schema.table import DispatchTable

CARRIED = tuple(PACKAGE / "runtime" / name for name in ("surface.py", "custom_op.py"))
"""Modules of fibc that every package carries a copy of."""


KEPT_GENERATIONS = 8
"""A week of nights and the one that serves; a generation takes about 1 MB. ``fibc gc`` keeps fewer."""


def prepare(cache: Cache) -> Path:
    """Compile what every module needs, whatever its table, while the harness is built; return the harness.

    Raises:
        BuildError: If something does not compile.
        ToolchainError: If the compiler or Python's headers are missing.
    """
    with ThreadPoolExecutor(1) as pool:
        entry = pool.submit(cxx.compile_entry, "module", cache)
        built = harness.build(cache)
        entry.result()
    return built


def build(
    table: DispatchTable,
    objects: Mapping[str, Path],
    target: Path,
    cache: Cache,
    manifest: Mapping[str, Any] | None = None,
) -> Path:
    """Build the module of ``table`` and publish it as package ``target``.

    Args:
        objects: The relocatable object of each variant, by symbol.
        target: ``<out>/fibc_<definition>``.
        manifest: What it is made of, plain (``fibc.schema.manifest``), to be written with digests of the files.

    Returns:
        The directory of the published generation.

    Raises:
        SchemaError: If the table cannot be emitted.
        BuildError: If an object is missing, or something does not compile or link.
        ToolchainError: If the compiler or Python's headers are missing.
        RecordError: If the package cannot be written; one that was there still works.
    """
    sources = emit(table)
    missing = [variant.symbol for variant in table.variants if not _is_file(objects.get(variant.symbol))]
    if missing:
        raise BuildError(f"fibc_{table.definition}: no object for {', '.join(missing)} (build the variants again)")
    with ThreadPoolExecutor(2) as pool:
        entry = pool.submit(cxx.compile_entry, "module", cache)
        constants = pool.submit(cxx.compile_table, sources.module_cpp, cache)
        variants = dict.fromkeys(objects[variant.symbol] for variant in table.variants)  # one object may hold several
        linked = [entry.result(), constants.result(), *variants]
    files = (*CARRIED, cxx.EXPORTS, *linked)
    origin = json.dumps(manifest, sort_keys=True)
    digest = digest_text(sources.digest, sources.generation_py, origin, *(path.read_bytes() for path in files))

    def write(directory: Path) -> None:
        _write_generation(directory, table, sources)
        cxx.link(linked, directory / f"_native{cxx.EXTENSION_SUFFIX}")
        if manifest is not None:
            _write_manifest(directory, manifest)

    outer = {"__init__.py": sources.package_py, "__init__.pyi": sources.package_pyi, "py.typed": ""}
    generation = package.publish(target, digest, write, outer)
    collect(target, KEPT_GENERATIONS)
    return generation


def _write_generation(directory: Path, table: DispatchTable, sources: Sources) -> None:
    (directory / "__init__.py").write_text(sources.generation_py)
    (directory / "module.cpp").write_text(sources.module_cpp)
    (directory / package.TABLE).write_bytes(codec.encode(table))
    for path in CARRIED:
        shutil.copyfile(path, directory / path.name)


def _write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest with the SHA-256 of every file beside it."""
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}
    text = json.dumps({**manifest, "files": files}, sort_keys=True, indent=1)
    (directory / MANIFEST).write_text(f"{text}\n")


def _is_file(path: Path | None) -> bool:
    return path is not None and Path(path).is_file()

"""A module made again from its records, on any machine: nothing is measured, and nothing has to be."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

from fibc import isolation, toolchain
from fibc.backends.base import BuildFailure
from fibc.backends.build import ENTRY_SUFFIXES
from fibc.backends.compiled_store import CompiledStore
from fibc.backends.registry import make_backends
from fibc.cache import Cache
from fibc.codegen.build import build
from fibc.environment import Environment
from fibc.errors import BuildError, InputError
from fibc.gpus import stand_in
from fibc.paths import OutLayout
from fibc.published import Kernel, Published, write_sources
from fibc.runtime.package import load
from fibc.schema.candidate import Artifact, Candidate
from fibc.schema.digest import digest_text
from fibc.schema.result import BuildResult
from fibc.schema.silicon import CudaValidity
from fibc.schema.table import DispatchTable, Variant
from fibc.settings import DEFAULT_TIMEOUT_S, compile_timeout_s

RECORDED, STORED, COMPILED = "recorded", "compiled before", "compiled now"
"""Where a variant's object comes from, in the order in which it is looked for."""


def rebuild(published: Published, layout: OutLayout, cache: Cache, stores: tuple[CompiledStore, ...]) -> BuildResult:
    """Write the module of ``published`` as it was: the same bytes of generated text from the same records.

    Args:
        stores: Where candidates may lie that were compiled before.

    Raises:
        BuildError: If a kernel is neither recorded nor stored and cannot be compiled as it was measured, or the module
            does not build.
        ToolchainError: If a compiler is missing.
        RecordError: If the package cannot be written.
    """
    table = published.table
    kernels: dict[str, Kernel] = {}
    origins: dict[str, str] = {}
    for variant in table.variants:
        kernels[variant.symbol], origins[variant.symbol] = _kernel(variant, published, cache, stores)
    objects = {
        symbol: cache.put_bytes("recorded", digest_text(symbol, kernel.object_code), ".o", kernel.object_code)
        for symbol, kernel in kernels.items()
    }
    package = layout.package(table.definition)
    build(table, objects, package, cache, published.manifest)
    write_sources(layout, table, {symbol: kernel.source for symbol, kernel in kernels.items()})
    return BuildResult(
        definition=table.definition,
        module=package.name,
        package=str(package),
        target=table.target,
        table=table,
        kernels=tuple(sorted(origins.items())),
        notes=_import(package),
    )


def _kernel(
    variant: Variant, published: Published, cache: Cache, stores: tuple[CompiledStore, ...]
) -> tuple[Kernel, str]:
    """Return a variant's kernel, and where it comes from."""
    if (recorded := published.kernels.get(variant.symbol)) is not None:
        return recorded, RECORDED
    for store in stores:
        if (artifact := store.get(variant.candidate, cache)) is not None:
            return _named(artifact, variant.symbol), STORED
    return _named(_compile(variant, published, cache), variant.symbol), COMPILED


def _compile(variant: Variant, published: Published, cache: Cache) -> Artifact:
    """Compile a variant, where templates and compilers still give the candidate that was measured.

    Raises:
        BuildError: If they give another one, or it does not compile.
    """
    definition, wanted = published.definition, variant.candidate
    backend = make_backends([wanted.backend], environment_of(published.table), cache)[0]
    try:
        candidate: Candidate | None = backend.candidate(definition, wanted.template, dict(wanted.config))
    except (KeyError, InputError):  # the template is gone, lacks a tunable, or serves the definition no more
        candidate = None
    if candidate != wanted:
        raise BuildError(
            f"{definition.name}: {wanted}: must be compiled as it was measured, and its template or the compiler of "
            f"{backend.name} has changed since (accepted: records with their kernels, the directory that "
            "--compile-only filled, or the versions that it was tuned with; else tune again)"
        )
    made = backend.build(definition, [wanted], timeout_s=compile_timeout_s(backend.name), jobs=1)[wanted.digest]
    if isinstance(made, BuildFailure):
        raise BuildError(f"{definition.name}: {wanted}: does not compile: {made.log}")
    return made


def environment_of(table: DispatchTable) -> Environment:
    """Return the environment that a table was tuned in, as far as compilers ask."""
    held = table.validity
    if isinstance(held, CudaValidity):
        return Environment("", (), 0, 0, 1, gpu=replace(stand_in(held.arch), validity=held))
    return Environment(held.model, held.isa, held.l2_bytes, held.l3_bytes, held.num_threads)


def _named(artifact: Artifact, symbol: str) -> Kernel:
    """Return an artifact's kernel with its entries named as the table has them.

    Raises:
        BuildError: If they cannot be renamed.
    """
    path = Path(artifact.object_path)
    if artifact.symbol == symbol:
        return Kernel(path.read_bytes(), artifact.source)
    renames = [f"--redefine-sym={artifact.symbol}{suffix}={symbol}{suffix}" for suffix in ENTRY_SUFFIXES]
    with tempfile.TemporaryDirectory(prefix="fibc-rename-") as name:
        renamed = Path(name) / "renamed.o"
        done = isolation.run([toolchain.find().objcopy, *renames, path, renamed], timeout_s=DEFAULT_TIMEOUT_S)
        if not done.ok:
            raise BuildError(f"{path}: cannot be renamed: {done.stderr_tail.strip()}")
        return Kernel(renamed.read_bytes(), artifact.source)


def _import(package: Path) -> tuple[str, ...]:
    """Import the package; return what it says stands against it here.

    Raises:
        BuildError: If it does not import.
    """
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            load(package)
        except ImportError as error:
            raise BuildError(f"{package}: was built and does not import: {error}") from error
    return tuple(dict.fromkeys(str(item.message) for item in seen))

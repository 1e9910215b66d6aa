"""Kernels as they were published, to be measured again: the unchanged object, linked as workers load it."""

from __future__ import annotations

from pathlib import Path

from fibc import isolation, toolchain
from fibc.backends.build import LINK_WORDS
from fibc.cache import Cache
from fibc.errors import BuildError
from fibc.paths import temporary_sibling
from fibc.published import Kernel
from fibc.schema.candidate import Artifact, ConfigValue
from fibc.schema.digest import digest_text
from fibc.schema.table import Variant
from fibc.settings import DEFAULT_TIMEOUT_S

_KIND = "recorded"


def restore(variant: Variant, kernel: Kernel, cache: Cache) -> Artifact:
    """Return the artifact of a published variant; nothing is compiled.

    Raises:
        BuildError: If its object does not link.
        ToolchainError: If there is no linker.
    """
    digest = digest_text(variant.symbol, kernel.object_code)
    object_path = cache.put_bytes(_KIND, digest, ".o", kernel.object_code)
    library_path = cache.get(_KIND, digest, ".so") or _link(object_path, digest, cache)
    resources: dict[str, ConfigValue] = {"isa": variant.isa}
    if variant.library:
        resources["library"] = variant.library
    return Artifact(
        digest=variant.artifact,
        object_path=str(object_path),
        library_path=str(library_path),
        symbol=variant.symbol,
        size_bytes=len(kernel.object_code),
        source=kernel.source,
        guards=variant.guards,
        resources=resources,
    )


def _link(object_path: Path, digest: str, cache: Cache) -> Path:
    with temporary_sibling(cache.path(_KIND, digest, ".so")) as temporary:
        command: list[str | Path] = [toolchain.find().cxx, *LINK_WORDS, "-o", temporary, object_path, "-lc"]
        done = isolation.run(command, timeout_s=DEFAULT_TIMEOUT_S)
        if not done.ok:
            raise BuildError(f"{object_path}: a published kernel does not link: {done.stderr_tail.strip()}")
        return cache.put_file(_KIND, digest, ".so", temporary)

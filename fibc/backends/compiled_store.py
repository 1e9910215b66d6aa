"""Compiled candidates to take to another machine: a directory of files named by content, without a path in any."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack
import zstandard

from fibc.backends.base import BuildFailure
from fibc.cache import Cache
from fibc.errors import RecordError
from fibc.schema import codec
from fibc.schema.candidate import Artifact, Candidate
from fibc.schema.definition import Definition
from fibc.schema.digest import digest_json
from fibc.schema.space import Config

LEVEL = 9
"""Of zstandard: an object and its library hold the same kernel, and leave a sixth of their bytes (Triton, sm_90a)."""

LOG_CHARS = 400
"""What an index keeps of the reason of a failure."""

_PATH = re.compile(r"(?:/[^\s/:'\"(),]+)+/([^\s/:'\"(),]*)")
"""An absolute path, with its last part."""

_KIND = "candidates"
_INDEXES = "indexes"
_UNPACKED = "unpacked"


@dataclass(frozen=True)
class Failed:
    """A candidate that does not compile, so that nobody tries again."""

    candidate: Candidate
    timed_out: bool
    log: str
    resource: bool


@dataclass(frozen=True)
class Index:
    """What was compiled of one backend for one definition and target.

    Attributes:
        definition: Its name, for people; the file is found by its digest.
        compiled: In the order in which they were planned.
        failed: Those that do not compile.
        source_digests: Of each template, as ``Space.source_digest`` had it.
    """

    definition: str
    backend: str
    target: str
    compiled: tuple[Candidate, ...] = ()
    failed: tuple[Failed, ...] = ()
    source_digests: Mapping[str, str] = field(default_factory=dict)

    def configs(self, template: str) -> tuple[Config, ...]:
        """Return the configs of ``template`` that were compiled."""
        return tuple(c.config for c in self.compiled if c.template == template)


class CompiledStore:
    """Candidates at ``<root>/candidates/<digest>.zst``, an index for each definition, backend and target.

    ::

        candidates/<digest of the candidate>.zst   identity, facts, source, object and library, zstd-compressed msgpack
        indexes/<digest>.zst                       an ``Index``, alike

    Files are those of a ``Cache``: written whole, each with a sum; a damaged one is absent. Names and contents follow
    from what was compiled and with what, and hold neither a path nor a version of Python: directories may be moved,
    copied over each other, and read by another Python. An index names only candidates whose file was written before.
    """

    def __init__(self, root: Path) -> None:
        """Open the store at ``root``; touches no disk."""
        self.root = root
        self._files = Cache(root)

    def index(self, definition: Definition, backend: str, target: str) -> Index | None:
        """Return what was compiled, or None where nothing was (or by another version of fibc)."""
        packed = self._files.get_bytes(_INDEXES, _index_digest(definition, backend, target), ".zst")
        return None if packed is None else _read_index(packed)

    def put_index(self, definition: Definition, index: Index) -> None:
        """Replace an index.

        Raises:
            RecordError: If it cannot be written.
        """
        self._check_writable()
        packed = _compress(codec.encode(index))
        self._files.put_bytes(_INDEXES, _index_digest(definition, index.backend, index.target), ".zst", packed)

    def prune(self) -> int:
        """Remove the files of candidates that no index names any more; return how many."""
        named: set[str] = set()
        for path in (self.root / _INDEXES).glob("*.zst"):
            index = _read_index(path.read_bytes())
            if index is None:
                return 0  # of another version of fibc: what it names is not known
            named.update(candidate.digest for candidate in index.compiled)
        stale = [path for path in (self.root / _KIND).glob("*.zst") if path.stem not in named]
        for path in stale:
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}.sum").unlink(missing_ok=True)
        return len(stale)

    def size_bytes(self, candidate: Candidate) -> int:
        """Return what a candidate takes on the disk; 0 where it is not there."""
        path = self._files.get(_KIND, candidate.digest, ".zst")
        return path.stat().st_size if path is not None else 0

    def put(self, candidate: Candidate, packed: bytes) -> None:
        """Store a candidate as ``pack`` made it.

        Raises:
            RecordError: If it cannot be written.
        """
        self._check_writable()
        self._files.put_bytes(_KIND, candidate.digest, ".zst", packed)

    def get(self, candidate: Candidate, cache: Cache) -> Artifact | None:
        """Return a candidate's artifact, its files unpacked into ``cache``; None where it is not in the store."""
        packed = self._files.get_bytes(_KIND, candidate.digest, ".zst")
        if packed is None:
            return None
        try:
            plain = msgpack.unpackb(zstandard.ZstdDecompressor().decompress(packed), raw=False)
            return unpack(plain, cache)
        except (zstandard.ZstdError, msgpack.UnpackException, ValueError, KeyError, TypeError):
            return None  # another version of fibc wrote it

    def _check_writable(self) -> None:
        """Hold the cache to its directory: what goes to a temporary one does not travel."""
        if self._files.private:
            raise RecordError(f"{self.root}: cannot be written (make it writable, or choose another --out)")


def pack(artifact: Artifact) -> bytes:
    """Return an artifact with its files, the same bytes for the same artifact.

    Raises:
        OSError: If a file is not there.
    """
    return _compress(msgpack.packb(plain_files(artifact), use_bin_type=True))


def plain_files(artifact: Artifact) -> dict[str, Any]:
    """Return an artifact with the content of its files in place of their paths."""
    return {
        "artifact": codec.to_plain(replace(artifact, object_path="", library_path="")),
        "object": Path(artifact.object_path).read_bytes(),
        "library": Path(artifact.library_path).read_bytes(),
    }


def unpack(plain: Mapping[str, Any], cache: Cache) -> Artifact:
    """Return the artifact that ``plain_files`` described, its files in ``cache``.

    Raises:
        ValueError: If it is none.
        KeyError: If a part is missing.
    """
    artifact = codec.from_plain(Artifact, plain["artifact"])
    paths = {}
    for name, suffix in (("object", ".o"), ("library", ".so")):
        # The symbol is the digest of all that the files follow from, so it can be their key.
        known = cache.get(_UNPACKED, artifact.symbol, suffix)
        paths[name] = known or cache.put_bytes(_UNPACKED, artifact.symbol, suffix, plain[name])
    return replace(artifact, object_path=str(paths["object"]), library_path=str(paths["library"]))


def failed(candidate: Candidate, failure: BuildFailure) -> Failed:
    """Return a build failure as an index keeps it: the last line that was said, without this machine's paths."""
    lines = [line.strip() for line in failure.log.splitlines() if line.strip()]
    said = _PATH.sub(lambda found: found[1], lines[-1]) if lines else "the compiler said nothing"
    return Failed(candidate, failure.timed_out, said[:LOG_CHARS], failure.resource)


def as_failure(item: Failed) -> BuildFailure:
    """Return what ``failed`` was made of."""
    return BuildFailure(item.timed_out, item.log, item.resource)


def _compress(data: bytes) -> bytes:
    return bytes(zstandard.ZstdCompressor(level=LEVEL).compress(data))


def _read_index(packed: bytes) -> Index | None:
    try:
        return codec.decode(Index, zstandard.ZstdDecompressor().decompress(packed))
    except (zstandard.ZstdError, ValueError):
        return None


def _index_digest(definition: Definition, backend: str, target: str) -> str:
    return digest_json([definition.digest, backend, target])

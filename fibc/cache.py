"""The content-addressed cache: files found by kind and digest, which outlive a run and are shared by all of them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import threading
import weakref
import zlib
from pathlib import Path
from typing import Any

from fibc import settings
from fibc.errors import RecordError
from fibc.paths import safe_name, temporary_sibling

_log = logging.getLogger("fibc.cache")

_ATTEMPTS = 5
"""Tries of a write whose directory another process removes in between."""


class Cache:
    """Files at ``<root>/<kind>/<digest><suffix>``, each with a ``.sum`` beside it that tells a damaged one.

    The law of a key: what is stored under it is a function of the key. So writers never conflict: each writes to a
    name of its own and renames, the last one wins, and readers see one whole file. Anything else is a miss: an entry
    that is absent, empty, damaged or unreadable. Where ``root`` cannot be written, what it holds is still read, and new
    files go to a private temporary directory that goes with the process. Every kind of trouble is said once. Threads
    may share a cache. Nothing is synced: after a power failure the sum tells a file whose bytes never reached the disk.
    """

    def __init__(self, root: Path | None = None) -> None:
        """Open the cache at ``root``, by default ``settings.cache_dir()``. Touches no disk, and never fails."""
        self._shared = root if root is not None else settings.cache_dir()
        self._private: Path | None = None
        self._probed = False
        self._said: set[str] = set()
        self._choosing = threading.Lock()

    @property
    def root(self) -> Path:
        """Where new files go: a directory that can be written."""
        with self._choosing:  # one private directory, whichever thread finds that it is needed
            if not self._probed:
                self._probed = True
                if self._shared is None:
                    self._retreat("no home directory is known (set FIBC_CACHE_DIR)")
                elif trouble := _trouble(self._shared):
                    self._retreat(f"{self._shared}: {trouble} (set FIBC_CACHE_DIR to a directory that can be written)")
        root = self._private or self._shared
        assert root is not None
        return root

    @property
    def private(self) -> bool:
        """True where new files go to a temporary directory that this process removes."""
        return self.root == self._private

    def path(self, kind: str, digest: str, suffix: str = "") -> Path:
        """Return where a new file of this key goes; it need not exist."""
        return self.root / safe_name(kind) / safe_name(digest, suffix)

    def get(self, kind: str, digest: str, suffix: str = "") -> Path | None:
        """Return the whole, undamaged file of this key, or None."""
        found = self._find(kind, digest, suffix)
        return found[0] if found else None

    def get_bytes(self, kind: str, digest: str, suffix: str = "") -> bytes | None:
        """Return the content of this key, or None."""
        found = self._find(kind, digest, suffix)
        return found[1] if found else None

    def get_json(self, kind: str, digest: str) -> Any | None:
        """Return the JSON value of this key, or None (also where it does not parse)."""
        data = self.get_bytes(kind, digest, ".json")
        if data is None:
            return None
        try:
            return json.loads(data)
        except ValueError as error:
            self._say_once("damaged", f"{self.path(kind, digest, '.json')}: not JSON, ignored ({error})")
            return None

    def put_bytes(self, kind: str, digest: str, suffix: str, data: bytes) -> Path:
        """Store ``data`` under this key and return its file.

        Raises:
            RecordError: If not even the private directory takes it.
        """
        target = self.path(kind, digest, suffix)
        try:
            _publish(target, data)
        except OSError as error:
            with self._choosing:
                if self._private is not None and target.is_relative_to(self._private):
                    raise RecordError(f"{target}: cannot be written: {error.strerror or error}") from error
                if self._private is None:
                    self._retreat(f"{target}: {error.strerror or error}")
            return self.put_bytes(kind, digest, suffix, data)
        return target

    def put_file(self, kind: str, digest: str, suffix: str, source: Path) -> Path:
        """Store a copy of ``source`` under this key and return the copy.

        Raises:
            OSError: If ``source`` cannot be read.
            RecordError: If not even the private directory takes the copy.
        """
        return self.put_bytes(kind, digest, suffix, source.read_bytes())

    def put_json(self, kind: str, digest: str, value: Any) -> Path:
        """Store JSON-able ``value`` under this key and return its file."""
        return self.put_bytes(kind, digest, ".json", json.dumps(value, sort_keys=True, indent=1).encode())

    def _find(self, kind: str, digest: str, suffix: str) -> tuple[Path, bytes] | None:
        for root in (self._private, self._shared):
            if root is not None:
                path = root / safe_name(kind) / safe_name(digest, suffix)
                data = self._intact(path)
                if data is not None:
                    return path, data
        return None

    def _intact(self, path: Path) -> bytes | None:
        """Return the bytes of ``path`` where they agree with the sum beside it."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say_once("unreadable", f"{path}: cannot be read, ignored ({error.strerror or error})")
            return None
        try:
            expected = _sum_path(path).read_text()
        except OSError:
            expected = ""
        if expected != _sum(data):
            self._say_once("damaged", f"{path}: damaged or torn, ignored and made anew")
            return None
        return data

    def _retreat(self, why: str) -> None:
        self._private = Path(tempfile.mkdtemp(prefix="fibc-cache-"))
        weakref.finalize(self, _remove_in, os.getpid(), self._private)
        self._say_once("private", f"{why}: this run keeps its cache in {self._private}, which goes when it ends")

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            _log.warning(text)


def _publish(target: Path, data: bytes) -> None:
    """Write ``data`` and its sum to temporary files, and rename them into place."""
    for attempt in range(_ATTEMPTS):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary_sibling(target) as temporary, temporary_sibling(target) as temporary_sum:
                temporary.write_bytes(data)
                temporary_sum.write_text(_sum(data))
                temporary_sum.replace(_sum_path(target))  # the sum first: a reader never meets a file without one
                temporary.replace(target)
                return
        except FileNotFoundError:  # a cleaner removed the directory under us
            if attempt == _ATTEMPTS - 1:
                raise


def _sum_path(path: Path) -> Path:
    return path.with_name(safe_name(path.name, ".sum"))


def _sum(data: bytes) -> str:
    return f"{len(data)} {zlib.crc32(data):08x}\n"


def _trouble(root: Path) -> str | None:
    """Return why files cannot be made in ``root``, or None."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with temporary_sibling(root / "probe"):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _remove_in(pid: int, path: Path) -> None:
    """Remove ``path``, but not in a forked child, whose parent still uses it."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            shutil.rmtree(path)

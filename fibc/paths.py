"""Paths: the layout of ``--out``, safe file names, and files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from fibc.errors import InputError, RecordError

PACKAGE = Path(__file__).parent
INCLUDE = PACKAGE / "include"
"""fibc's C++, as compilers find it."""
TEMPLATES = PACKAGE / "templates"

NAME_MAX_BYTES = 255
"""Longest file name of the common Linux file systems, in bytes."""

TEMPORARY_PREFIX = ".fibc-"
"""Every unfinished file or link begins with it. Short and fixed, so that a target of 255 bytes has a temporary too."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]")


def safe_name(name: str, suffix: str = "") -> str:
    """Return ``name + suffix`` as one file name: printable ASCII, at most NAME_MAX_BYTES, no hidden file, no ``/``.

    A name that is already all this is returned unchanged. Any other is shortened or spelled with ``_``, and carries 16
    hex digits of its hash, so that different names stay different.
    """
    plain = _UNSAFE.sub("_", name)
    if plain == name and name and not name.startswith(".") and len(name) + len(suffix) <= NAME_MAX_BYTES:
        return name + suffix
    digest = sha256(name.encode(errors="surrogatepass")).hexdigest()[:16]
    room = NAME_MAX_BYTES - len(suffix) - len(digest) - 1
    return f"{plain.lstrip('.')[:room]}-{digest}{suffix}"


@contextlib.contextmanager
def temporary_sibling(path: Path) -> Iterator[Path]:
    """Yield a fresh empty file in the directory of ``path``; on exit it is gone unless it was renamed away."""
    handle, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=path.parent)
    try:
        os.fchmod(handle, 0o666 & ~_umask())
    finally:
        os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``: readers see the old bytes or the new ones, also after a crash. Makes directories.

    Raises:
        RecordError: If it cannot be written; ``path`` is as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_sibling(path) as temporary:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # else a power loss after the rename can leave an empty file
            temporary.replace(path)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror or error}") from error


def swap_symlink(link: Path, target: str) -> None:
    """Point ``link`` at ``target`` (relative to the link's directory) in one step; a link that is there is replaced.

    Raises:
        RecordError: If it cannot be written; ``link`` is as it was.
    """
    try:
        with temporary_sibling(link) as temporary:
            temporary.unlink()  # symlink() needs a free name, and this one was ours alone
            temporary.symlink_to(target)
            temporary.replace(link)
    except OSError as error:
        raise RecordError(f"{link}: cannot be pointed at {target}: {error.strerror or error}") from error


def check_out_writable(out: Path) -> None:
    """Make the directory ``out``, and try that files can be made and renamed in it. For before any work.

    Raises:
        InputError: If not; directories that did not exist before are removed again.
    """
    made: list[Path] = []
    try:
        for directory in [*reversed(out.absolute().parents), out.absolute()]:
            if not directory.exists():
                directory.mkdir()
                made.append(directory)
        with temporary_sibling(out / "probe") as first, temporary_sibling(out / "probe") as second:
            first.replace(second)
    except OSError as error:
        for directory in reversed(made):
            with contextlib.suppress(OSError):  # the first error is the one to report
                directory.rmdir()
        raise InputError(
            f"--out: {out} must be a directory that can be written, got: {error.strerror or error} "
            "(choose another directory, or make this one writable)"
        ) from error


@dataclass(frozen=True)
class OutLayout:
    """Where everything lies in an ``--out`` directory that any number of definitions share.

    ::

        fibc_<definition>/                  the package that people import; its generations are inside
        fibc-dataset/                       FlashInfer-Trace: definitions/ workloads/ solutions/ traces/
        fibc-records/<definition>.records   append-only evidence: evaluations, raw samples, decisions
        fibc-sources/<definition>/          generated sources, for people
        fibc-compiled/                      candidates compiled without measuring them (--compile-only); may be moved
        fibc-studies.db                     Optuna studies (SQLite)
        fibc.lock                           held while a run works here

    Only packages have names that Python can import: ``--out`` stands on ``sys.path``.
    """

    root: Path

    def package(self, definition: str) -> Path:
        return self.root / safe_name(f"fibc_{definition}")

    @property
    def dataset(self) -> Path:
        return self.root / "fibc-dataset"

    def records(self, definition: str) -> Path:
        return self._records / safe_name(definition, ".records")

    def sources(self, definition: str) -> Path:
        return self._sources / safe_name(definition)

    @property
    def compiled(self) -> Path:
        return self.root / "fibc-compiled"

    @property
    def studies(self) -> Path:
        return self.root / "fibc-studies.db"

    @property
    def lock(self) -> Path:
        return self.root / "fibc.lock"

    def remove_unfinished(self) -> None:
        """Remove what killed runs left half-written. For the holder of the lock: to anyone else it may be in use."""
        pattern = f"{TEMPORARY_PREFIX}*"
        directories = (self.dataset, self._records, self._sources, self.compiled, *self.root.glob("fibc_*"))
        nested = (path for directory in directories for path in directory.rglob(pattern))
        for path in list({*self.root.glob(pattern), *nested}):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)  # a generation that was never published
            elif path.is_symlink() or path.is_file():
                with contextlib.suppress(OSError):  # it is in nobody's way
                    path.unlink()

    @property
    def _records(self) -> Path:
        return self.root / "fibc-records"

    @property
    def _sources(self) -> Path:
        return self.root / "fibc-sources"


def _umask() -> int:
    """Return the process's umask from /proc: reading it with ``os.umask`` would set it, for other threads as well."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0o022
    found = re.search(r"^Umask:\s*([0-7]+)$", status, re.MULTILINE)
    return int(found.group(1), 8) if found else 0o022

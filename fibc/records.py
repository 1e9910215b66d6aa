"""The append-only log of evidence: every evaluation, raw sample, gate and decision of one definition."""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgpack
import zstandard

from fibc.errors import RecordError
from fibc.paths import atomic_write
from fibc.schema.candidate import Candidate
from fibc.schema.codec import from_plain, to_plain
from fibc.schema.decision import Decision
from fibc.schema.evaluation import Evaluation, SessionSamples

T = TypeVar("T")

_log = logging.getLogger("fibc.records")

MAGIC = b"fRC1"
"""Begins every frame; the digit is the format's version. A reader that lost its place looks for the next one."""

_HEADER = struct.Struct("<4sII")
"""Magic, length of the payload in bytes, CRC-32 of length and payload."""

_MAX_PAYLOAD_BYTES = 1 << 28
"""Bound of one unpacked record: a session's samples take kilobytes, and a hostile file shall not take the memory."""

DURABLE_KINDS = frozenset({"gate", "decision"})
"""Kinds that are synced to the disk at once. The others survive the death of the process, and lose at most the tail to
a power failure: an fsync costs more than many a trial, and a lost trial only costs its repetition."""


ENVIRONMENT = "environment"
"""Kind of the record that says what an environment key stands for: identity and facts. It precedes its evidence."""


@dataclass(frozen=True)
class Record:
    """One fact.

    Attributes:
        kind: ``candidate``, ``environment``, ``evaluation``, ``samples``, ``decision``, ``finalists``, ``gate``,
            ``observed``, ``published``, ``run``, or one of another version.
        definition: Digest of the definition that it is about.
        environment: Digest of the environment that it was seen in.
        value: Plain data, as ``fibc.schema.codec.to_plain`` gives it.
    """

    kind: str
    definition: str
    environment: str
    value: Any


class RecordLog:
    """The records of one definition, in one file that only grows.

    A frame is MAGIC, length, CRC-32 and zstd-compressed msgpack, written with one ``write`` to a file opened for
    appending. So a killed run leaves at most one torn frame at the end. Reading skips what is torn or damaged with one
    warning, and finds everything behind it. Records of another digest of the definition are evidence of something else:
    they stay in the file, and no typed lookup returns them.

    One process at a time appends (``fibc.lock``); any number may read meanwhile.
    """

    def __init__(self, path: Path, *, definition: str, environment: str, identity: str = "") -> None:
        """Open the log; touches no disk.

        Args:
            path: The file; made with its directory by the first append.
            definition: Digest of the definition that is tuned now.
            environment: Key of the environment of this run: what evidence of equal keys can stand beside.
            identity: Digest of its silicon alone, which environments share that differ in a driver or a library.
        """
        self.path = path
        self.identity = identity
        self.definition = definition
        self.environment = environment
        self._handle: int | None = None

    def append(self, kind: str, value: Any) -> None:
        """Add a record of this definition and environment; ``value`` is a dataclass of the schema, or plain data.

        Raises:
            RecordError: If it cannot be written whole; every record before it is kept.
        """
        plain = value if isinstance(value, dict | list | str | int | float | bool | None) else to_plain(value)
        frame = _frame(Record(kind, self.definition, self.environment, plain))
        try:
            if self._handle is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            _write_whole(self._handle, frame)
            if kind in DURABLE_KINDS:
                os.fsync(self._handle)
        except OSError as error:
            raise RecordError(
                f"{self.path}: a record of {len(frame)} bytes cannot be written: {error.strerror or error} "
                "(earlier records are kept; make room, then run the same command again)"
            ) from error

    def sync(self) -> None:
        """Wait until every record is on the disk.

        Raises:
            RecordError: If the disk refuses.
        """
        if self._handle is not None:
            try:
                os.fsync(self._handle)
            except OSError as error:
                raise RecordError(f"{self.path}: cannot be synced: {error.strerror or error}") from error

    def close(self) -> None:
        """Sync and close; the log may be read, and appended to, again."""
        if self._handle is not None:
            try:
                self.sync()
            finally:
                os.close(self._handle)
                self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self) -> Iterator[Record]:
        """Yield every whole record in the order of writing, of every kind, definition and environment.

        Raises:
            RecordError: If the file is there and cannot be read.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise RecordError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        lost_bytes = 0
        offset = 0
        while offset < len(data):
            record, end = _parse(data, offset)
            if record is None:
                end = data.find(MAGIC, offset + 1)
                end = len(data) if end < 0 else end
                lost_bytes += end - offset
            else:
                yield record
            offset = end
        if lost_bytes:
            _warn_once(
                f"{self.path}: {lost_bytes} of {len(data)} bytes are torn or damaged, every other record is kept"
            )

    def own(self, kind: str) -> Iterator[Any]:
        """Yield the plain values of ``kind`` that hold for this definition and environment."""
        for record in self.read():
            if (record.kind, record.definition, record.environment) == (kind, self.definition, self.environment):
                yield record.value

    def candidates(self) -> dict[str, Candidate]:
        """Return the recorded candidates by digest."""
        return {candidate.digest: candidate for candidate in self._typed("candidate", Candidate)}

    def every_candidate(self) -> dict[str, Candidate]:
        """Return the candidates of this definition by digest, whatever environment they were recorded in."""
        values = (r.value for r in self.read() if r.kind == "candidate" and r.definition == self.definition)
        return {
            candidate.digest: candidate for value in values for candidate in self._parsed("candidate", Candidate, value)
        }

    def every_evaluation(self) -> tuple[Evaluation, ...]:
        """Return the evaluations of this definition in every environment, in the order of writing."""
        values = (r.value for r in self.read() if r.kind == "evaluation" and r.definition == self.definition)
        return tuple(item for value in values for item in self._parsed("evaluation", Evaluation, value))

    def every_sample(self) -> tuple[SessionSamples, ...]:
        """Return the raw samples of this definition in every environment, in the order of writing."""
        values = (r.value for r in self.read() if r.kind == "samples" and r.definition == self.definition)
        return tuple(item for value in values for item in self._parsed("samples", SessionSamples, value))

    def evaluations(self) -> dict[tuple[str, str], Evaluation]:
        """Return the last evaluation of each (key, candidate digest)."""
        return {(item.key, item.candidate): item for item in self._typed("evaluation", Evaluation)}

    def note_environment(self, facts: Mapping[str, str]) -> None:
        """Record once what this environment is, so that evidence in it is found again after an upgrade."""
        value = {"identity": self.identity, "facts": dict(facts)}
        if value not in self.own(ENVIRONMENT):
            self.append(ENVIRONMENT, value)

    def earlier_evaluations(self) -> tuple[Evaluation, ...]:
        """Return what other environments of the same silicon showed of this definition, in the order of writing.

        Their timings are history: something that timings depend on has changed since. That a candidate does not build,
        or computes something else than the reference, is a fact about its binary.
        """
        kept: list[Evaluation] = []
        alike: set[str] = set()
        for record in self.read():
            if record.definition != self.definition or record.environment == self.environment:
                continue
            if record.kind == ENVIRONMENT and self.identity and record.value.get("identity") == self.identity:
                alike.add(record.environment)
            elif record.kind == "evaluation" and record.environment in alike:
                kept += self._parsed("evaluation", Evaluation, record.value)
        return tuple(kept)

    def samples(self, stage: str | None = None) -> tuple[SessionSamples, ...]:
        """Return the raw samples, of one stage or of all, in the order of writing."""
        return tuple(item for item in self._typed("samples", SessionSamples) if stage is None or item.stage == stage)

    def decisions(self) -> tuple[Decision, ...]:
        """Return the last decision of each cell, sorted by cell."""
        last = {item.cell: item for item in self._typed("decision", Decision)}
        return tuple(last[cell] for cell in sorted(last))

    def void(self) -> tuple[str, ...]:
        """Return a sentence where the log holds evidence of another digest of the definition: it does not count."""
        num = sum(record.definition != self.definition for record in self.read())
        if not num:
            return ()
        return (f"the definition has changed: {num} records of its earlier digest are void and not used ({self.path})",)

    def compact(self, keep: Callable[[Record], bool]) -> None:
        """Rewrite the log, in one step, with the whole records for which ``keep`` holds.

        No other RecordLog may have the file open for appending: it would go on in the old one.

        Raises:
            RecordError: If the new log cannot be written; the old one is as it was.
        """
        frames = b"".join(_frame(record) for record in self.read() if keep(record))
        self.close()
        atomic_write(self.path, frames)

    def _typed(self, kind: str, schema: type[T]) -> Iterator[T]:
        for value in self.own(kind):
            yield from self._parsed(kind, schema, value)

    def _parsed(self, kind: str, schema: type[T], value: Any) -> Iterator[T]:
        try:
            yield from_plain(schema, value)
        except ValueError as error:  # written by a version with another schema
            _warn_once(f"{self.path}: a record of another version of fibc, {kind}, is ignored: {error}")


def _frame(record: Record) -> bytes:
    plain = [record.kind, record.definition, record.environment, record.value]
    payload = zstandard.ZstdCompressor(level=3).compress(msgpack.packb(plain, use_bin_type=True))
    length = struct.pack("<I", len(payload))
    return _HEADER.pack(MAGIC, len(payload), zlib.crc32(length + payload)) + payload


def _parse(data: bytes, offset: int) -> tuple[Record | None, int]:
    """Return the record that begins at ``offset`` and where it ends; None where none does."""
    start = offset + _HEADER.size
    if len(data) < start or not data.startswith(MAGIC, offset):
        return None, offset
    _, length, crc = _HEADER.unpack_from(data, offset)
    payload = data[start : start + length]
    if len(payload) != length or zlib.crc32(struct.pack("<I", length) + payload) != crc:
        return None, offset
    try:
        if zstandard.get_frame_parameters(payload).content_size > _MAX_PAYLOAD_BYTES:
            return None, offset
        plain = zstandard.ZstdDecompressor().decompress(payload)
        kind, definition, environment, value = msgpack.unpackb(plain, raw=False, strict_map_key=False)
    except (zstandard.ZstdError, msgpack.UnpackException, ValueError):
        return None, offset
    return Record(kind, definition, environment, value), start + length


@cache
def _warn_once(text: str) -> None:
    """Log ``text``, once for all logs and readings of a process."""
    _log.warning(text)


def _write_whole(handle: int, frame: bytes) -> None:
    """Write ``frame`` with one write; a short one (disk full, file size limit) is completed or raises."""
    rest = memoryview(frame)
    while rest:
        rest = rest[os.write(handle, rest) :]

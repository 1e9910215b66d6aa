"""msgpack bytes of frozen dataclasses, checked when they are read back."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgpack
from pydantic import TypeAdapter

T = TypeVar("T")


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def to_plain(value: Any) -> Any:
    """Return ``value`` (a dataclass of this package) as JSON-able dicts, lists and scalars."""
    return _adapter(type(value)).dump_python(value, mode="json")


def from_plain(kind: type[T], plain: Any) -> T:
    """Return the ``kind`` that ``plain`` describes.

    Raises:
        pydantic.ValidationError: If ``plain`` is not such a value.
    """
    result: T = _adapter(kind).validate_python(plain)
    return result


def encode(value: Any) -> bytes:
    """Return ``value`` (a dataclass of this package) as msgpack bytes; equal values give equal bytes."""
    return bytes(msgpack.packb(to_plain(value), use_bin_type=True))


def decode(kind: type[T], data: bytes) -> T:
    """Return the ``kind`` encoded in ``data``.

    Raises:
        ValueError: If ``data`` is torn or not such a value (pydantic's ValidationError is a ValueError).
    """
    try:
        plain = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (msgpack.UnpackException, ValueError) as error:
        raise ValueError(f"torn msgpack record: {error}") from error
    return from_plain(kind, plain)

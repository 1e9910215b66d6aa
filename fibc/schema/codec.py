"""msgpack bytes of frozen dataclasses, checked when they are read back."""

from __future__ import annotations

from typing import Any, TypeVar

import msgpack
from pydantic import TypeAdapter

T = TypeVar("T")


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}
"""Building one takes up to 50 ms for the largest tree, ``DispatchTable``."""


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


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
    """Return ``value`` (a dataclass of this package) as msgpack bytes, which keep the order of mappings."""
    return bytes(msgpack.packb(to_plain(value), use_bin_type=True))


def decode(kind: type[T], data: bytes) -> T:
    """Return the ``kind`` encoded in ``data``.

    Raises:
        ValueError: If ``data`` is torn or not such a value (pydantic's ValidationError is a ValueError).
    """
    try:
        plain = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (msgpack.UnpackException, ValueError, TypeError) as error:  # TypeError: a list as a key
        raise ValueError(f"torn msgpack record: {error}") from error
    return from_plain(kind, plain)

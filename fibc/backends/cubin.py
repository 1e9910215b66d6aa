"""What a cubin says of its kernel: registers, stack and parameters, read from its ELF sections."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from fibc.errors import BuildError

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_INFO = ".nv.info"

# The attributes of .nv.info sections, as `cuobjdump -elf` of CUDA 12 and 13 prints them.
_REGCOUNT = 0x2F
_FRAME_SIZE = 0x11
_KPARAM_INFO = 0x17

_SIZED_VALUE = 0x04
"""Format of an attribute whose value follows; in the others the value stands in place of the size."""


_WORDS_A_LINE = 8


@dataclass(frozen=True)
class KernelFacts:
    """A kernel in a cubin.

    Attributes:
        registers: Of a thread, of 32 bits.
        stack_bytes: Of a thread, where registers are spilled; 0 where nothing is.
        parameters: Sizes of the parameters in bytes, in their order.
    """

    registers: int
    stack_bytes: int
    parameters: tuple[int, ...]


def read_kernel(cubin: bytes, function: str) -> KernelFacts:
    """Return the facts of kernel ``function``, the only one in ``cubin``.

    Raises:
        BuildError: If this is no cubin of a layout that is known here.
    """
    try:
        found = dict(sections(cubin))
        common = list(_attributes(found[_INFO]))
        sizes = {}
        for attribute, value in _attributes(found[f"{_INFO}.{function}"]):
            if attribute == _KPARAM_INFO:
                _, ordinal, _, flags = struct.unpack("<IHHI", value)
                sizes[ordinal] = flags >> 18
        return KernelFacts(
            registers=_largest(common, _REGCOUNT),
            stack_bytes=_largest(common, _FRAME_SIZE),
            parameters=tuple(sizes[ordinal] for ordinal in range(len(sizes))),
        )
    except (struct.error, LookupError, ValueError) as error:
        raise BuildError(f"cubin of {function}: cannot be read: {type(error).__name__} {error}") from error


def _largest(attributes: list[tuple[int, bytes]], attribute: int) -> int:
    """Return the largest value of an attribute that the kernel and each function it calls have."""
    return max(int(struct.unpack("<II", value)[1]) for kind, value in attributes if kind == attribute)


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield every section's name and content."""
    header = _HEADER.unpack_from(elf)
    if header[0][:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    start, entry_size, count, names_index = header[6], header[11], header[12], header[13]
    entries = [_SECTION.unpack_from(elf, start + index * entry_size) for index in range(count)]
    names = entries[names_index]
    strings = elf[names[4] : names[4] + names[5]]
    for entry in entries:
        name = strings[entry[0] : strings.index(b"\0", entry[0])].decode()
        yield name, elf[entry[4] : entry[4] + entry[5]]


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield every attribute of a .nv.info section with its value's bytes."""
    position = 0
    while position < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, position)
        position += 4
        length = size if kind == _SIZED_VALUE else 0
        yield attribute, info[position : position + length]
        position += length


def word_lines(cubin: bytes) -> list[str]:
    """Return ``cubin`` as C++ source: lines of 8-byte words, of which the last is filled up with zeros."""
    padded = cubin + bytes(-len(cubin) % 8)
    words = struct.unpack(f"<{len(padded) // 8}Q", padded)
    return [
        ", ".join(f"0x{word:x}" for word in words[start : start + _WORDS_A_LINE])
        for start in range(0, len(words), _WORDS_A_LINE)
    ]

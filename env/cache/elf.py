"""ELF files as far as baking needs them: cubins and the CPU's shared objects, their sections and their time stamps."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = b"\x7fELF"
NOBITS = 8
"""The type of a section that takes no room in the file."""

DEBUGGING = re.compile(
    r"\.(nv\.merc\.)?(rela?\.)?(debug_|nv_debug)|\.note\.gnu\.build-id$|\.(nv\.merc\.)?(sym|str|shstr)tab$|\.comment$"
)
"""Sections that only debuggers and linkers read. They hold paths; the build id is a digest that covers them.

Cubins for sm_100 and later have some of them twice: `.nv.merc.` stands before the second one's name.
"""

LINES = (".debug_line", ".nv.merc.debug_line")
"""Sections with the line tables in which time stamps stand."""


@dataclass(frozen=True, slots=True)
class Section:
    """One section."""

    name: str
    kind: int
    start: int
    """Where it begins in the file."""
    size: int


def sections(data: bytes) -> list[Section]:
    """The sections of a 64-bit little-endian ELF file; raises ValueError when it is not one or is cut off."""
    if len(data) < 64 or data[:6] != MAGIC + b"\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    table, size, count, names = struct.unpack_from("<Q10xHHH", data, 40)
    if size != 64 or table + size * count > len(data) or names >= count:
        raise ValueError("the table of sections is cut off")
    headers = [struct.unpack_from("<IIQQQQ", data, table + index * size) for index in range(count)]
    _, _, _, _, names_start, names_size = headers[names]
    texts = data[names_start : names_start + names_size]
    found = []
    for name, kind, _, _, start, length in headers:
        if kind != NOBITS and start + length > len(data):
            raise ValueError("a section is cut off")
        found.append(Section(texts[name : texts.find(b"\0", name)].decode("latin-1"), kind, start, length))
    return found


def without_stamps(data: bytes) -> bytes:
    """The file with the time stamps in its line tables zero; nothing moves, so every offset stays right.

    ptxas writes there when each kernel's source file was last changed. What cannot be read is returned as it is.
    """
    result = bytearray(data)
    try:
        for section in sections(data):
            if section.name in LINES:
                for start, end in _stamps(data, section.start, section.start + section.size):
                    result[start:end] = b"\x80" * (end - start - 1) + b"\0"  # a zero as long as what it replaces
    except (ValueError, IndexError, struct.error):
        return data
    return bytes(result)


def decisive(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each section that decides what the machine does; raises ValueError as `sections` does."""
    for section in sections(data):
        if section.kind != NOBITS and not DEBUGGING.match(section.name):
            yield section.name, data[section.start : section.start + section.size]


def _stamps(data: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where time stamps stand in line tables of DWARF 2 to 4, the format of which has a field for them."""
    while start + 10 <= end:
        length, version, header = struct.unpack_from("<IHI", data, start)
        program, following = start + 10 + header, start + 4 + length
        if length >= 0xFFFFFFF0 or program > following or following > end:
            raise ValueError("a line table is cut off")
        if 2 <= version <= 4:
            place = start + 10 + (5 if version < 4 else 6)
            place += data[place - 1]  # lengths of the standard opcodes: one fewer than the number that stands before
            while data[place]:  # folders
                place = data.index(0, place) + 1
            place += 1
            while place < program and data[place]:  # files: name, folder, time stamp, size
                place = data.index(0, place) + 1
                stamp = _after_number(data, place)
                place = _after_number(data, stamp)
                yield stamp, place
                place = _after_number(data, place)
        start = following


def _after_number(data: bytes, place: int) -> int:
    """Where the variable-length number that begins at a place ends."""
    while data[place] & 0x80:
        place += 1
    return place + 1

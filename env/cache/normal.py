"""What differs between two bakes of the same thing although nothing that matters does, and how it is made equal.

Read off torch 2.10 to 2.15 by baking twice and comparing: elapsed times and memory addresses inside the pickled
entries, and in each cubin the time stamp of its source file. With those made zero, two bakes at the same path seal to
the same bytes. The path itself stands in debugging information, comments and assertions: it stays in the bytes, and is
left out of the digest, so two bakes at different paths have the same digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Callable, Iterator

from env.cache import elf, pickles

INTERMEDIATE = (".source", ".ttir", ".ttgir", ".llir", ".ptx")
"""Stages between a kernel's source and its cubin. They follow from the source, and hold paths, even as numbers."""

UNREADABLE = (ValueError, AssertionError, struct.error)
"""What reading raises for something that only begins like a pickle or an ELF file."""


def normalised(data: bytes) -> bytes:
    """The same content without elapsed times, addresses and time stamps; what is of no such kind is returned as it is.

    It means the same to torch and to the GPU: times are only reported, and debuggers alone read time stamps.
    """
    if data.startswith(elf.MAGIC):
        return elf.without_stamps(data)
    if pickles.is_pickle(data):
        try:
            return b"".join(step.raw for step in pickles.steps(data, normalised))
        except UNREADABLE:
            return data
    return data


def best_config(data: bytes) -> bytes:
    """A `.best_config`, where torch keeps a kernel's fastest configuration, without the time that its search took."""
    try:
        table = json.loads(data)
    except ValueError:
        return data
    if not isinstance(table, dict) or not any(pickles.TIMES.fullmatch(key) for key in table):
        return data
    return json.dumps({key: 0 if pickles.TIMES.fullmatch(key) else value for key, value in table.items()}).encode()


def entry_name(data: bytes) -> str:
    """The name that torch gives to the file of an entry in `fxgraph/` and `aotautograd/`: a digest of its bytes."""
    return base64.b32encode(hashlib.sha256(data).digest())[:51].decode("ascii").lower()


def decisive_digest(data: bytes, replace: Callable[[str], str]) -> str:
    """Hexadecimal sha256 of what decides in a file: normalised, without debugging information and intermediate stages.

    `replace` makes a text independent of the folder in which it was made.
    """
    digest = hashlib.sha256()
    for part in _parts(data, replace):
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.hexdigest()


def _parts(data: bytes, replace: Callable[[str], str]) -> list[bytes]:
    try:
        if data.startswith(elf.MAGIC):
            return [part for name, content in elf.decisive(data) for part in (name.encode(), _latin(content, replace))]
        if pickles.is_pickle(data):
            return list(_pickle(data, replace))
        return [replace(data.decode("utf-8")).encode()]
    except UNREADABLE:
        return [data]


def _latin(content: bytes, replace: Callable[[str], str]) -> bytes:
    # an assertion on the GPU names its source file, so a path may stand among the constants
    return replace(content.decode("latin-1")).encode("latin-1")


def _pickle(data: bytes, replace: Callable[[str], str]) -> Iterator[bytes]:
    recent: list[str] = []  # the texts pushed last: a byte string's file name stands among them
    for step in pickles.steps(data, bytes):
        if step.text is not None:
            recent = [*recent[-2:], step.text]
        if step.name in pickles.STRINGS:
            # one name for short and long strings: the folder's length decides which it is
            yield b"text"
            yield replace(str(step.argument)).encode("utf-8", "surrogatepass")
        elif step.name in pickles.BLOBS and isinstance(step.argument, bytes):
            follows = any(text.endswith(INTERMEDIATE) for text in recent)
            yield b"intermediate" if follows else decisive_digest(step.argument, replace).encode()
            recent = []
        else:
            yield step.name.encode()
            yield repr(step.argument).encode()

"""Pickles read opcode by opcode, as one reads text: nothing in them is built, imported or called.

Torch's cache entries are pickles. To compare two of them, and to blank what differs by nature, their opcodes are
enough.
"""

from __future__ import annotations

import pickletools
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

TIMES = re.compile(r"(\w*_)?time_taken_(ns|ms)")
"""Names of the fields that hold elapsed time (torch 2.10 to 2.15)."""

ADDRESS = re.compile(r"(?<= at 0x)[0-9a-f]{6,16}(?=>)|(?<=_TENSOR_DATA_PTR'\] = ')[0-9]+(?=')")
"""Memory addresses in text: as `repr` prints them (torch 2.15), and of a function, as a variable (2.11)."""

NUMBERS = frozenset(("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"))
STRINGS = frozenset(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"))
BLOBS = frozenset(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"))
REMEMBER = frozenset(("MEMOIZE", "BINPUT", "LONG_BINPUT"))
RECALL = frozenset(("BINGET", "LONG_BINGET"))

ZERO = b"K\x00"
"""The opcode that pushes the number 0."""


@dataclass(frozen=True, slots=True)
class Step:
    """One opcode, normalised."""

    name: str
    argument: object
    raw: bytes
    """The opcode as a pickle holds it."""
    text: str | None
    """The string that it pushes, also where it recalls one that was pushed before; None for anything else."""


def is_pickle(data: bytes) -> bool:
    """Whether bytes begin and end like a pickle of protocol 2 or later."""
    return len(data) > 3 and data[0] == 0x80 and 2 <= data[1] <= 5 and data.endswith(b".")


def steps(data: bytes, inner: Callable[[bytes], bytes]) -> Iterator[Step]:
    """The opcodes of a pickle with elapsed times zero, addresses blank, and each byte string as `inner` makes it.

    Frames are left out: they only say how much to read at once. Raises ValueError for what is no whole pickle.
    """
    remembered: dict[int, str | None] = {}
    pushed: str | None = None
    for name, argument, raw in _opcodes(data):
        if name in REMEMBER:
            remembered[len(remembered) if name == "MEMOIZE" else _number(argument)] = pushed
            yield Step(name, argument, raw, None)
            continue
        before, pushed = pushed, None
        if name in NUMBERS and before is not None and TIMES.fullmatch(before):
            step = Step("BININT1", 0, ZERO, None)
        elif name in STRINGS:
            pushed = ADDRESS.sub("0", str(argument))
            step = Step(name, pushed, raw if pushed == argument else _string(pushed), pushed)
        elif name in RECALL:
            pushed = remembered.get(_number(argument))
            step = Step(name, argument, raw, pushed)
        elif name in BLOBS and isinstance(argument, bytes):
            content = inner(argument)
            step = Step(name, content, raw if content == argument else _blob(content), None)
        else:
            step = Step(name, argument, raw, None)
        yield step


def _opcodes(data: bytes) -> Iterator[tuple[str, object, bytes]]:
    opcodes = [(opcode.name, argument, place or 0) for opcode, argument, place in pickletools.genops(data)]
    ends = [place for _, _, place in opcodes[1:]] + [opcodes[-1][2] + 1]
    if ends[-1] != len(data):
        raise ValueError("something follows the end of the pickle")
    for (name, argument, place), end in zip(opcodes, ends, strict=True):
        if name != "FRAME":
            yield name, argument, data[place:end]


def _number(argument: object) -> int:
    assert isinstance(argument, int)
    return argument


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _blob(data: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(data)) + data

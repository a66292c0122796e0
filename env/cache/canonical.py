"""JSON with one spelling for each value, and a reader that takes nothing else than JSON: both guard identities."""

from __future__ import annotations

import hashlib
import json
from typing import Any

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""What JSON can hold."""


def canonical(value: Any) -> bytes:
    """A value's only spelling: keys sorted, no blanks, UTF-8; raises ValueError for numbers that JSON does not have."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any) -> str:
    """Hexadecimal sha256 of a value's only spelling."""
    return hashlib.sha256(canonical(value)).hexdigest()


def strict(data: bytes) -> Any:
    """Parse JSON; raises ValueError for a key that stands twice, for NaN and infinities, and for too deep nesting.

    Python's reader takes the last of two equal keys, so what one program has checked another could read otherwise.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"the key {twice!r} stands twice")
        return table

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no JSON")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=once, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deep") from None

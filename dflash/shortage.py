"""Memory that has run out, told from a bug: torch says so in several ways, of which one has a class of its own."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from env.errors import Exit, Failure

SAID = re.compile(r"out of memory|can't allocate memory|Cannot allocate memory|CUBLAS_STATUS_ALLOC_FAILED")
"""In messages of torch, CUDA and cuBLAS, some of which are plain RuntimeErrors."""

WANTED = re.compile(r"(?:tried to allocate|Tried to allocate) ([\d.]+) (bytes|[KMGT]iB)(?:\. GPU (\d+))?")


def told(error: BaseException) -> Failure | None:
    """The sentence for an error that says memory has run out, anywhere in its chain of causes; None for any other."""
    found = next((each for each in _chain(error) if _is_shortage(each)), None)
    if found is None:
        return None
    text = " ".join(str(found).split())
    match = WANTED.search(text)
    where = "of the GPU" if "CUDA" in text or "CUBLAS" in text else "of this machine"
    asked = ""
    if match:
        amount = f"{float(match[1]) / 2**30:,.1f} GiB" if match[2] == "bytes" else f"{match[1]} {match[2]}"
        asked = f": {amount} more were asked for"
    return Failure(
        Exit.HOST,
        f"the memory {where} has run out{asked}",
        details=[text[:400]] if text else [],
        hint="lower `shapes.rows` (and raise `optimizer.accumulate`), `loss.chunk_blocks`, or the sizes of your "
        "configuration; `optimizer.recompute = true` keeps less",
    )


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and SAID.search(str(error)) is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__

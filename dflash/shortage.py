"""Memory or a disk that has run out, told from a bug: torch and compilers say so in several ways, deep in others."""

from __future__ import annotations

import errno
import os
import re

from env.errors import Exit, Failure, chain

SAID = re.compile(r"out of memory|can't allocate memory|Cannot allocate memory|CUBLAS_STATUS_ALLOC_FAILED")
"""In messages of torch, CUDA and cuBLAS, some of which are plain RuntimeErrors."""

WANTED = re.compile(r"(?:tried to allocate|Tried to allocate) ([\d.]+) (bytes|[KMGT]iB)(?:\. GPU (\d+))?")


FULL = {errno.ENOSPC: "No space left on device", errno.EDQUOT: "Disk quota exceeded"}
"""Errors of a disk, and how a compiler says them."""


def told(error: BaseException) -> Failure | None:
    """The sentence for an error that says memory or a disk is full, anywhere in its chain; None for any other."""
    for each in chain(error):
        if _is_full(each):
            return _disk(each)
        if _is_shortage(each):
            return _memory(each)
    return None


def _disk(found: BaseException) -> Failure:
    named = getattr(found, "filename", None) or os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    where = f" while `{named}` was written" if named else ""
    return Failure(
        Exit.STORAGE,
        f"a disk is full{where}",
        hint="free some space and start again: the run goes on from its newest checkpoint; `nox -s cache -- prune` "
        "frees compile caches, and DFLASH_CACHE_HOME names another folder for them",
    )


def _memory(found: BaseException) -> Failure:
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


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL
    return isinstance(error, RuntimeError) and any(words in str(error) for words in FULL.values())


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and SAID.search(str(error)) is not None

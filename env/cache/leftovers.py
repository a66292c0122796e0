"""What killed processes left in the cache folder: half of a seal, of a copy, of a removal, of a bake.

They are no caches and `cache list` does not show them, but they take as much disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from env.cache.seal import open_again
from env.errors import Exit, Failure

QUIET = 3600.0
"""Seconds for which nothing may have changed in one: whoever is at it writes something every few minutes."""

BEGUN = re.compile(r"[0-9a-f]{32}")
"""A bake that was begun, in `baking/`; the same bake would go on from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftover:
    """One folder that nobody finishes."""

    path: Path
    size: int
    """Bytes of all its files."""

    touched: float
    """When something in it was last written, in seconds since 1970."""


def found(home: Path, *, quiet: float = QUIET) -> list[Leftover]:
    """The leftovers below the user's cache folder in which nothing has changed for `quiet` seconds."""
    places = [
        path for kind in ("sealed", "seeded", "cold") for path in _folders(home / kind) if path.name.startswith(".")
    ]
    places += [path for path in _folders(home / "baking") if BEGUN.fullmatch(path.name)]
    looked = [_look(path) for path in places]
    return [each for each in looked if time.time() - each.touched >= quiet]


def free(leftover: Leftover) -> str | None:
    """Delete one; returns why it stays, if it does: because a process is at it.

    Raises:
        Failure: Exit.STORAGE, when it cannot be removed.
    """
    lock = leftover.path.with_suffix(".lock")
    try:
        with contextlib.ExitStack() as held:
            if BEGUN.fullmatch(leftover.path.name) and lock.exists():
                file = held.enter_context(lock.open("r+"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return "a process is using it"
            open_again(leftover.path)
            shutil.rmtree(leftover.path)
    except OSError as error:
        raise Failure(Exit.STORAGE, f"cannot remove {leftover.path}: {error.strerror}") from error
    return None


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return []


def _look(path: Path) -> Leftover:
    size, touched = 0, path.stat().st_mtime
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                status = Path(folder, name).lstat()
                size, touched = size + status.st_size, max(touched, status.st_mtime)
    return Leftover(path=path, size=size, touched=touched)

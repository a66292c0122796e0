"""Prepared data on this machine: where they lie, which there are, and which may go. Only `prune` ever frees any.

<cache home>/data/<name>/           rows, whole
<cache home>/data/.<name>.<pid>     what a process has begun; if that was killed, it is of no use any more
<cache home>/data/.<name>.lock      held while one is made, or freed
<cache home>/data/<name>.used       held, shared, while a process reads them (`env.cache.store.use`); its age is theirs
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from env.cache import places, store
from env.errors import Exit, Failure

FOLDER = "data"
"""Where prepared data lie below the folder of this user's caches."""

MANIFEST = "manifest.json"
"""In each of them: what they are."""

WHOLE, BEGUN = re.compile(r"([0-9a-f]{32})"), re.compile(r"\.([0-9a-f]{32})\.\d+(\.going)?")
"""What the folders are called; nothing else there is ever touched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Prepared data, or what is left of their making."""

    path: Path
    """Their folder."""
    name: str
    """What they are called by: the beginning of their key."""
    whole: bool
    """False for what a process has begun, or began to free, and did not end."""
    size: int
    """Bytes of all files; those that a run has in its own folder too are freed with the last of the two."""
    used: float
    """When they were last asked for, in seconds since 1970."""
    what: str
    """What they are, in words."""


def home(say: Callable[[str], None]) -> Path:
    """The folder of prepared data.

    Raises:
        Failure: Exit.STORAGE, when there is none that this user can write.
    """
    found = places.cache_home()
    if found.notice:
        say(found.notice)
    return found.path / FOLDER


def entries(folder: Path) -> list[Entry]:
    """All prepared data in a folder, the last used first."""
    return sorted(_entries(folder), key=lambda entry: -entry.used)


def _entries(folder: Path) -> Iterator[Entry]:
    for path in sorted(folder.glob("*")) if folder.is_dir() else ():
        whole, begun = WHOLE.fullmatch(path.name), BEGUN.fullmatch(path.name)
        named = whole or begun
        if named is None or not path.is_dir() or path.is_symlink():
            continue
        marks = (path.with_name(f"{path.name}.used"), path / MANIFEST, path)
        yield Entry(
            path=path,
            name=named[1],
            whole=whole is not None,
            size=sum(file.stat().st_size for file in path.glob("**/*") if file.is_file()),
            used=next(mark.stat().st_mtime for mark in marks if mark.exists()),
            what=_told(path) if whole else "left by a process that did not end",
        )


def _told(path: Path) -> str:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        return f"{int(manifest['documents'])} documents in rows of {int(manifest['recipe']['sequence'])}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"its {MANIFEST} cannot be read"


def doomed(found: Sequence[Entry], *, keep: int = 0, older_than: float | None = None) -> list[Entry]:
    """Which a prune would free: all but the `keep` last used, of these only those unused for `older_than` seconds.

    What was left by a process that did not end counts for nothing that is kept.
    """
    now = time.time()
    going = [entry for entry in found if not entry.whole] + [entry for entry in found if entry.whole][keep:]
    return [entry for entry in going if older_than is None or now - entry.used >= older_than]


def free(entry: Entry) -> str | None:
    """Delete one; returns why it stays, if it does: because a process makes or reads it.

    Raises:
        Failure: Exit.STORAGE, when it cannot be removed.
    """
    busy = "a process is using it"
    try:
        with (entry.path.parent / f".{entry.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return busy
            if not entry.path.exists():  # freed, or thrown away, since it was looked at
                return None
            if entry.whole:
                return store.free(_cache(entry))
            shutil.rmtree(entry.path)
    except OSError as error:
        raise Failure(Exit.STORAGE, f"cannot remove `{entry.path}`: {error.strerror}") from error
    return None


def _cache(entry: Entry) -> store.Stored:
    return store.Stored(path=entry.path, kind=FOLDER, cache_id=entry.name, size=entry.size, used=entry.used)

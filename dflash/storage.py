"""Files that are either whole or not there: written beside, forced to the disk, renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from env.errors import Exit, Failure


def refusal(error: OSError, doing: str, path: Path) -> Failure:
    """The sentence for a disk that refuses: what was being done, where, and why it could not be."""
    reasons = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EROFS: "the file system is read-only",
        errno.EACCES: "no permission to write there",
        errno.EPERM: "no permission to write there",
        errno.ENOTDIR: "a part of the path is a file",
        errno.EEXIST: "a part of the path is a file",
    }
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    hints = {
        errno.ENOSPC: "free some space and start again: the run goes on from its newest checkpoint",
        errno.EDQUOT: "free some space and start again: the run goes on from its newest checkpoint",
    }
    return Failure(Exit.STORAGE, f"cannot {doing} in `{path}`: {reason}", hint=hints.get(error.errno or 0))


@contextlib.contextmanager
def held(lock: Path, doing: str, busy: Failure) -> Iterator[None]:
    """Hold a lock file, its folder made if need be, against other processes until the block ends, however it ends.

    Raises:
        Failure: Exit.STORAGE, when the folder cannot be written, with what was being done; `busy`, when another
            process holds the file.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise refusal(error, doing, lock.parent) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        yield


def sync(path: Path) -> None:
    """Force a file's or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, content: bytes) -> None:
    """Replace a file by `content`, atomically.

    Raises:
        Failure: Exit.STORAGE, when the disk refuses; the old file is then still there.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise refusal(error, f"write `{path.name}`", path.parent) from error


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `path` when the block ends well and vanishes when it does not.

    Raises:
        Failure: Exit.STORAGE, when the disk refuses; an old `path` is then still there.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        yield beside
        for file in beside.rglob("*"):
            sync(file)
        sync(beside)
        if path.exists():
            shutil.rmtree(path)
        beside.rename(path)
        sync(path.parent)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise refusal(error, f"write `{path.name}`", path.parent) from error
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def sweep(folder: Path) -> None:
    """Remove what `write` and `new_folder` had begun in a folder when they were killed; nobody may be at work there."""
    for path in folder.glob(".*"):
        if re.fullmatch(r"\..+\.\d+", path.name):
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Plain files, opened so that nothing else can stand in for one: no link, no device, no second name."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from env.errors import Exit, Failure


def refused(path: Path, problem: str) -> Failure:
    """The refusal of a sealed cache for one of its files."""
    return Failure(
        Exit.CACHE,
        f"{path} {problem}",
        hint="it is not used; get it again from where it was sealed, or `nox -s bake -- --config NAME` makes one",
    )


def not_plain(status: os.stat_result) -> str:
    """What a file is, if it is not a plain one with a single name; empty if it is."""
    kinds = {
        stat.S_ISLNK: "is a symbolic link",
        stat.S_ISDIR: "is a folder",
        stat.S_ISFIFO: "is a pipe",
        stat.S_ISSOCK: "is a socket",
        stat.S_ISBLK: "is a device",
        stat.S_ISCHR: "is a device",
    }
    for is_kind, name in kinds.items():
        if is_kind(status.st_mode):
            return name
    if status.st_nlink > 1:
        # whoever holds the other name could change the file after it was checked
        return f"is a hard link: it has {status.st_nlink} names"
    return ""


def open_plain(path: Path) -> BufferedReader:
    """Open a plain file for reading; anything else is refused by name, and never waited for.

    Raises:
        Failure: Exit.CACHE.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise refused(path, "is a symbolic link") from error
        if error.errno == errno.ENOENT:
            raise refused(path, "is missing") from error
        raise refused(path, f"cannot be read: {error.strerror}") from error
    problem = not_plain(os.fstat(descriptor))
    if problem:
        os.close(descriptor)
        raise refused(path, problem)
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path, largest: int) -> bytes:
    """A plain file's bytes, at most so many.

    Raises:
        Failure: Exit.CACHE, also when it has more.
    """
    with open_plain(path) as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise refused(path, f"is larger than a file of its kind can be; at most {largest} bytes are read")
    return data

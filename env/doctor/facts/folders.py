"""The folders that a run reads and writes: on what file system they lie, and what can be done there."""

from __future__ import annotations

import errno
import fnmatch
import mmap
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from env.cache import pins
from env.cache import places as caches
from env.doctor.facts.probing import read


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    point: str
    """Where it is mounted."""

    root: str
    """Which folder of the file system is mounted there; other than / for a bind mount or a cgroup namespace."""

    kind: str
    """File system type: ext4, nfs4, fuse.sshfs."""

    source: str
    """Device or server."""

    options: tuple[str, ...]
    """The mount's own options and the file system's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """A folder of a run, which need not exist yet."""

    role: str
    """What it is for, as `ROLES` calls it."""

    path: str
    """Where it is, or will be made."""

    named_by: str | None = None
    """The environment variable that puts it there; None for the usual place."""

    exists: bool | None = None
    """Whether the folder is there yet."""

    tested: str | None = None
    """What was tried, links followed: the folder, or the nearest parent that exists, in which it would be made."""

    mount: Mount | None = None
    """The file system it lies on."""

    free: int | None = None
    """Bytes that this user may still write there."""

    size: int | None = None
    """Bytes of the whole file system."""

    inodes: int | None = None
    """Files that may still be made; None where the file system does not count them."""

    writable: bool | None = None
    """Whether a file of one page could be written."""

    executable: bool | None = None
    """Whether a file there can be mapped as code, which is what loading a compiled kernel does."""

    trouble: str | None = None
    """What the operating system said at the first failure."""


SHM = "/dev/shm"  # noqa: S108  # the folder itself is what is looked at

ROLES = {
    "home": "HOME",
    "kernels": "compiled kernels",
    "triton": "Triton's kernels",
    "temporary": "temporary files",
    "project": "environments",
    "runs": "runs",
    "models": "downloaded models",
    "shm": "shared memory",
}
"""The roles, with the words by which findings call them."""


def places(
    environ: Mapping[str, str], *, project: Path, here: Path, home: Path | None, uid: int, runs: Path | None = None
) -> tuple[Folder, ...]:
    """Which folders a run that starts `here` would use, by the launch's and the libraries' rules; none is touched.

    `home` is HOME's value or, without it, the password database's: the model hub's library asks that too, the launch
    not.
    """

    def place(role: str, path: Path | str, variable: str | None = None) -> Folder:
        # By text alone: a link is followed only where it may be waited for.
        return Folder(role=role, path=os.path.normpath(here / path), named_by=variable)

    def named(role: str, *variables: str, below: str = "") -> Folder | None:
        variable = next((name for name in variables if environ.get(name)), None)
        return place(role, Path(environ[variable], below), variable) if variable else None

    def kept(role: str, variable: str) -> Folder | None:
        # the launch takes these away, because the cache's identity chooses the folder, unless the user keeps them
        patterns = pins.kept(environ)
        return named(role, variable) if any(fnmatch.fnmatchcase(variable, one) for one in patterns) else None

    temporary = named("temporary", "TMPDIR", "TEMP", "TMP") or place("temporary", "/tmp")  # noqa: S108
    found = [
        named("home", "HOME") or (place("home", home) if home else None),
        kept("kernels", "TORCHINDUCTOR_CACHE_DIR") or place("kernels", *caches.candidates(environ, uid)[0]),
        kept("triton", "TRITON_CACHE_DIR"),
        temporary,
        place("project", project),
        place("runs", runs or "runs"),
        named("models", "HF_HUB_CACHE")
        or named("models", "HF_HOME", below="hub")
        or named("models", "XDG_CACHE_HOME", below="huggingface/hub")
        or (place("models", home / ".cache/huggingface/hub") if home else None),
        place("shm", SHM),
    ]
    return tuple(folder for folder in found if folder is not None)


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """The mounts in their order; lines that are not as proc(5) says are passed over."""
    mounts = []
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        fields, behind = before.split(" "), after.split(" ")
        if not dash or len(fields) < 6 or len(behind) < 2:
            continue
        options = fields[5].split(",") + (behind[2].split(",") if len(behind) > 2 else [])
        mounts.append(
            Mount(
                point=_unescape(fields[4]),
                root=_unescape(fields[3]),
                kind=behind[0],
                source=_unescape(behind[1]),
                options=tuple(dict.fromkeys(options)),
            )
        )
    return tuple(mounts)


def _unescape(field: str) -> str:
    r"""Blanks, tabs, line ends and backslashes stand as \040 and so on."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that a path without links lies on.

    That is the longest mount point, and of equal ones the last, which hides the others (/dev/shm stands twice in many
    containers).

    Of its options only those are kept that are judged: a network mount's name the user and the server's secrets file.
    """
    best: Mount | None = None
    for mount in mounts:
        prefix = mount.point.rstrip("/") + "/"
        inside = path == mount.point or (path + "/").startswith(prefix)
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    if best is None:
        return None
    return replace(best, options=tuple(option for option in best.options if option in ("ro", "rw", "noexec")))


def read_mounts(root: Path = Path("/")) -> tuple[Mount, ...]:
    """The mounts of this process's own namespace; empty if they cannot be read."""
    return parse_mounts(read(root / "proc/self/mountinfo") or "")


def unanswered(folder: Folder, mounts: Sequence[Mount], seconds: float) -> Folder:
    """What can be said of a folder whose file system does not answer: where the path leads, links unfollowed."""
    return replace(folder, mount=mount_of(folder.path, mounts), trouble=f"no answer within {seconds:g} s")


def look(folder: Folder, mounts: Sequence[Mount]) -> Folder:
    """Try what a run will do there, and leave nothing behind. It may never return on a dead network file system."""
    path = Path(os.path.realpath(folder.path))
    folder = replace(folder, exists=path.is_dir())
    while not path.is_dir() and path != path.parent:
        if path.exists():  # a file stands where a folder should be
            found = replace(folder, tested=str(path), mount=mount_of(str(path), mounts))
            return replace(found, writable=False, trouble=f"{path} is not a folder")
        path = path.parent
    found = replace(folder, tested=str(path), mount=mount_of(str(path), mounts))
    try:
        space = os.statvfs(path)
    except OSError as error:
        return replace(found, trouble=error.strerror)
    found = replace(
        found,
        free=space.f_bavail * space.f_frsize,
        size=space.f_blocks * space.f_frsize,
        # btrfs and overlays on it count no inodes and say 0 of 0
        inodes=space.f_favail if space.f_files else None,
    )
    return _try(found, path)


def _try(folder: Folder, path: Path) -> Folder:
    """Write a page to a nameless file and map it as code.

    Mount options tell less than doing it: there are quotas, access lists, read-only roots and security modules.
    """
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"\0" * mmap.PAGESIZE)
            file.flush()
            code = mmap.PROT_READ | mmap.PROT_EXEC
            try:
                mmap.mmap(file.fileno(), mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=code).close()
            except OSError as error:
                refused = error.errno in (errno.EPERM, errno.EACCES)
                return replace(folder, writable=True, executable=False if refused else None, trouble=error.strerror)
    except OSError as error:
        return replace(folder, writable=False, trouble=error.strerror or str(error))
    return replace(folder, writable=True, executable=True)

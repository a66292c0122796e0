"""Where caches lie on this machine: sealed ones, seeded ones, and what is trusted. Standard library only.

Sealed caches may lie anywhere, also on a network file system or a read-only root. Seeded ones are read and written by
every process of a run, so they need a local disk that this user alone can write: they are code.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from env.errors import Exit, Failure

HOME = "DFLASH_CACHE_HOME"
"""The variable that says where caches go; one that cannot be used is refused rather than passed over."""

SEALED = "DFLASH_SEALED"
"""More folders with sealed caches, separated by colons: an image sets it to the caches that were baked into it."""

TRUST = "DFLASH_CACHE_TRUST"
"""More folders that say what is trusted, separated by colons; an image sets it too."""

NETWORK = "DFLASH_NETWORK_CACHE"
"""Set to 1, it allows working copies on a network file system, where Triton's files have been seen to vanish."""

NETWORKED = (
    "nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "gluster", "afs", "9p", "orangefs", "pvfs", "wekafs",
    "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.juicefs", "fuse.gluster", "fuse.ceph",
)  # fmt: skip
"""How the types of network file systems begin."""


@dataclass(frozen=True, slots=True)
class Home:
    """A folder for caches, and why it is not the usual one."""

    path: Path
    notice: str | None = None


def cache_home(environ: Mapping[str, str] | None = None) -> Home:
    """The folder below which this user's caches go, made if need be.

    In this order: `DFLASH_CACHE_HOME`; the user's cache folder (`XDG_CACHE_HOME`, `HOME/.cache`); a private folder
    among the temporary ones. The last is for users without a home, for a read-only root, and for a home on a network.

    Raises:
        Failure: Exit.STORAGE, when none can be used, with the reason of each, or the one that was named cannot.
    """
    environ = os.environ if environ is None else environ
    found = candidates(environ, os.getuid())
    if found[0][1] == HOME:
        path = found[0][0]
        problem = _problem(path, environ)
        if problem:
            raise Failure(
                Exit.STORAGE,
                f"caches cannot go to {path}, as {HOME} says: {problem}",
                hint=f"point {HOME} at a folder on a local disk that is yours alone, or unset it",
            )
        return Home(path)
    reasons: list[str] = []
    for path, _ in found:
        problem = _problem(path, environ)
        if not problem:
            return Home(path, f"caches go to {path}: {'; '.join(reasons)}" if reasons else None)
        reasons.append(f"{path} {problem}")
    raise Failure(
        Exit.STORAGE,
        "there is no folder for caches that this user can write",
        details=reasons,
        hint=f"set {HOME} to one on a local disk, or give the process a writable temporary folder",
    )


def candidates(environ: Mapping[str, str], uid: int) -> tuple[tuple[Path, str | None], ...]:
    """The folders that caches may go to, the first that can be used, and the variable that names each; none is touched.

    The doctor looks at the first, so that it speaks of the folder that a launch would take.
    """
    named = environ.get(HOME)
    if named:
        return ((Path(named), HOME),)
    found: list[tuple[Path, str | None]] = []
    base = environ.get("XDG_CACHE_HOME")
    if base:
        found += [(Path(base) / "dflash", "XDG_CACHE_HOME")] if base.startswith("/") else []
    elif environ.get("HOME", "").startswith("/"):
        found.append((Path(environ["HOME"]) / ".cache/dflash", None))
    # no name of the user: asking for it fails for a user id without a passwd entry
    variable = next((name for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)), None)
    temporary = [environ[variable]] if variable else ["/tmp", "/var/tmp"]  # noqa: S108  # ours alone, and checked
    return (*found, *((Path(folder) / f"dflash-{uid}", None) for folder in temporary))


def _problem(path: Path, environ: Mapping[str, str]) -> str:
    """Why caches cannot go to a folder, as the end of a sentence; empty if they can. Makes it, for this user alone."""
    if re.search(r"\s", str(path)):
        return "has a blank in its name, where torch's commands to compilers would break"
    kind = network(path)
    if kind and environ.get(NETWORK) != "1":
        return f"is on a network file system ({kind}), where Triton's files vanish under other processes"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    if status.st_uid != os.getuid():
        return f"belongs to user {status.st_uid}, not to us ({os.getuid()})"
    if status.st_mode & 0o022 and not _closed(path, status.st_mode, named=str(path) == environ.get(HOME)):
        return "can be written by other users, who could put their code there"
    return ""


def _closed(path: Path, mode: int, *, named: bool) -> bool:
    """Take others' right to write from a folder that only we use; one that the user named may be shared on purpose."""
    if named:
        return False
    try:
        path.chmod(mode & 0o7755)
    except OSError:
        return False
    return True


def network(path: Path) -> str | None:
    """The type of the file system that a folder lies, or would lie, on, if that is on a network."""
    from env.doctor.facts.folders import mount_of, read_mounts

    existing = Path(os.path.realpath(path))
    mount = mount_of(str(existing), read_mounts())
    kind = mount.kind if mount is not None else ""
    return kind if kind.startswith(NETWORKED) else None


def sealed_folders(environ: Mapping[str, str] | None = None, home: Path | None = None) -> tuple[Path, ...]:
    """The folders in which sealed caches lie, the user's own first; they need not exist."""
    environ = os.environ if environ is None else environ
    own = home if home is not None else cache_home(environ).path
    return (own / "sealed", *_listed(environ.get(SEALED)))


def trust_folders(environ: Mapping[str, str] | None = None, home: Path | None = None) -> tuple[Path, ...]:
    """The folders that say what is trusted, the user's own first; they need not exist."""
    environ = os.environ if environ is None else environ
    own = home if home is not None else cache_home(environ).path
    return (own / "trust", *_listed(environ.get(TRUST)))


def _listed(value: str | None) -> Sequence[Path]:
    return [Path(part) for part in (value or "").split(":") if part.startswith("/")]

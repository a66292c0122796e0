"""From a sealed, read-only cache to a directory on this node that a run's processes read and write.

A bare read-only mount will not do: torch turns a miss there into an error, and Triton writes its kernels beside the
entries. So each node makes a copy once: under a lock, hashed while it is copied, and named when it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path

from env.building import say
from env.cache import manifest as manifests
from env.cache import sign
from env.cache.examine import signature_of
from env.cache.manifest import FILES, Manifest
from env.cache.plain import open_plain, refused
from env.cache.seal import unwritable
from env.errors import Exit, Failure

MARK = "dflash-manifest.json"
"""In a seeded directory: the manifest that it was copied by. Written last, so it stands only in a whole copy."""

PIECE = 1 << 20


def seed(sealed: Path, home: Path, believed: sign.Trust) -> tuple[Path, Manifest, str]:
    """A working copy of a sealed cache below `home`, made if need be; its directory, manifest, and who vouches for it.

    Safe with any number of processes at once, and after one was killed in the middle. A copy in which promised files
    are missing or changed gets them back, and nothing else in it is touched.

    Raises:
        Failure: Exit.CACHE, when the sealed cache is refused; Exit.STORAGE, when the copy cannot be written.
    """
    manifest, data = manifests.read(sealed)
    who = sign.check(data, signature_of(sealed), believed, str(sealed))
    files = {name: (sealed / FILES / name, file) for name, file in manifest.files.items()}
    place = copied(files, home, manifest.cache_id, lambda folder: _place(folder, manifest, data), {MARK: data})
    return place, manifest, who


def seed_together(
    sealed: Sequence[Path], home: Path, believed: sign.Trust
) -> tuple[Path, tuple[Manifest, ...], tuple[str, ...]]:
    """One working copy of several sealed caches; its directory, their manifests, and who vouches for each.

    For a process that trains on several devices. A kernel that several of them hold stands there once.

    Raises:
        Failure: as `seed` does; also when two of them have different files of one name.
    """
    read = [manifests.read(one) for one in sealed]
    who = tuple(
        sign.check(data, signature_of(one), believed, str(one)) for one, (_, data) in zip(sealed, read, strict=True)
    )
    files: dict[str, tuple[Path, manifests.File]] = {}
    for one, (manifest, _) in zip(sealed, read, strict=True):
        for name, file in manifest.files.items():
            before = files.setdefault(name, (one / FILES / name, file))
            # each device may have found another winner for a kernel that they share; the first's serves as well
            if before[1].sha256 != file.sha256 and not name.endswith(".best_config"):
                raise refused(one / FILES / name, f"is not {before[0]}, so these caches cannot share a directory")
    first = read[0][0].cache_id
    name = f"{first}.{hashlib.sha256(b''.join(data for _, data in read)).hexdigest()[:12]}"
    marks = {f"{place}.{MARK}" if place else MARK: data for place, (_, data) in enumerate(read)}
    place = copied(files, home, first, lambda folder: folder / name, marks)
    return place, tuple(manifest for manifest, _ in read), who


def copied(
    files: Mapping[str, tuple[Path, manifests.File]],
    home: Path,
    identity: str,
    choose: Callable[[Path], Path],
    marks: Mapping[str, bytes],
) -> Path:
    """The directory below `home` that `choose` names, with these files in it; made or mended under a lock if need be.

    Raises:
        Failure: as `seed` does.
    """
    folder = home / "seeded"
    wanted = {name: file for name, (_, file) in files.items()}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = choose(folder)
        if place.is_dir() and not _lacking(place, wanted):
            return place
        with _alone(folder / f"{identity}.lock"):
            place = choose(folder)  # another process may have made it meanwhile
            if place.is_dir():
                _mend(files, place)
            else:
                _make(files, place, f".{identity[:32]}.", marks)
    except OSError as error:
        raise unwritable(folder, error) from error
    return place


def _place(folder: Path, manifest: Manifest, data: bytes) -> Path:
    """Where the copy of this very cache is or goes; caches of one identity but other contents have other places."""
    first = folder / manifest.cache_id
    if not os.path.lexists(first) or _mark(first) == data:
        return first
    return folder / f"{manifest.cache_id}.{hashlib.sha256(data).hexdigest()[:12]}"


def _mark(place: Path) -> bytes | None:
    try:
        return (place / MARK).read_bytes()
    except OSError:
        return None


def damaged(place: Path, manifest: Manifest) -> list[str]:
    """The promised files that a working copy lacks or has otherwise; by their bytes, which are few.

    Raises:
        Failure: Exit.CACHE, when another user owns the copy or can write in it.
    """
    return _lacking(place, manifest.files)


def _lacking(place: Path, files: Mapping[str, manifests.File]) -> list[str]:
    status = place.lstat()
    if place.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise Failure(
            Exit.CACHE,
            f"{place} belongs to another user or can be written by one, so it cannot hold code for us",
            hint="point DFLASH_CACHE_HOME at a folder that is yours alone",
        )
    return [name for name, file in files.items() if not _is(place / name, file)]


def _is(path: Path, file: manifests.File) -> bool:
    try:
        with open_plain(path) as stream:
            if os.fstat(stream.fileno()).st_size != file.size:
                return False
            return hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256
    except Failure:
        return False


def _make(
    files: Mapping[str, tuple[Path, manifests.File]], place: Path, prefix: str, marks: Mapping[str, bytes]
) -> None:
    """Copy beside the place and rename into it. Runs under the lock, so what a killed process left can go."""
    for leftover in place.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    size, free = sum(file.size for _, file in files.values()), shutil.disk_usage(place.parent).free
    if free < size:
        raise OSError(errno.ENOSPC, f"{size} bytes are needed, {free} are free")
    building = Path(tempfile.mkdtemp(prefix=prefix, dir=place.parent))
    try:
        for name, (source, file) in files.items():
            _copy(source, building / name, file)
        for name, data in marks.items():
            with (building / name).open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
        building.rename(place)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    _keep(place.parent)


def _mend(files: Mapping[str, tuple[Path, manifests.File]], place: Path) -> None:
    """Put back promised files one by one, each whole or not at all: other processes may be running on them."""
    for name in _lacking(place, {name: file for name, (_, file) in files.items()}):
        path = place / name
        beside = path.with_name(f".{os.getpid()}.tmp")
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        try:
            _copy(files[name][0], beside, files[name][1])
            beside.replace(path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                beside.unlink()


def _copy(source: Path, target: Path, file: manifests.File) -> None:
    """Copy a file and refuse it if its bytes, as they were read for the copy, are not what the manifest says.

    It is not forced to the disk, which would take several times as long as the copy: whoever uses the directory
    compares every file with the manifest first, and puts back what a power cut has taken.
    """
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with open_plain(source) as reader:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as writer:
            while piece := _read(reader, source):
                size += len(piece)
                if size > file.size:
                    break
                digest.update(piece)
                writer.write(piece)
    if size != file.size or digest.hexdigest() != file.sha256:
        raise refused(source, "was changed: its bytes are not what the manifest says")


def _read(reader: BufferedReader, source: Path) -> bytes:
    try:
        return reader.read(PIECE)
    except OSError as error:  # not to be taken for an error of the disk that is written to
        raise Failure(Exit.CACHE, f"cannot read {source}: {error.strerror}") from error


def _keep(folder: Path) -> None:
    """Have a folder's names on the disk; file systems that cannot do so keep them their own way."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel takes back when its holder dies, however it dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that copies the compile cache to this node")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

"""The look at a sealed cache that comes before anything in it is used: its manifest, who vouches for it, every file.

Entries are pickles, so nothing is unpickled, imported or run here, and whatever is not exactly as the manifest says is
refused by name.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from env.cache import manifest as manifests
from env.cache import sign
from env.cache.canonical import strict
from env.cache.manifest import DETAILS, FILES, NAME, SIGNATURE, Manifest
from env.cache.plain import not_plain, open_plain, read_plain, refused
from env.errors import Exit, Failure


def examine(folder: Path, believed: sign.Trust, *, hashes: bool = True) -> tuple[Manifest, str]:
    """Look at a sealed cache before anything in it is used; its manifest, and who vouches for it.

    In this order: the manifest's form, its signature, the set of files, their kinds and sizes, and (`hashes`) their
    bytes. Nothing is unpickled, imported or run.

    Raises:
        Failure: Exit.CACHE, naming the file and what is wrong with it.
    """
    found, data = manifests.read(folder)
    who = sign.check(data, signature_of(folder), believed, str(folder))
    there = dict(_walk(folder))
    expected = {f"{FILES}/{name}": file for name, file in found.files.items()}
    if found.details is not None:
        expected[DETAILS] = found.details
    for name in sorted(there):
        if name not in expected and name not in (NAME, SIGNATURE):
            raise refused(folder / name, "is not in the manifest: it was added")
    for name, file in sorted(expected.items()):
        if name not in there:
            raise refused(folder / name, "is missing")
        if there[name] != file.size:
            change = "truncated" if there[name] < file.size else "changed"
            raise refused(folder / name, f"was {change}: it has {there[name]} bytes, the manifest says {file.size}")
    if hashes:
        for name, file in sorted(expected.items()):
            with open_plain(folder / name) as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != file.sha256:
                    raise refused(folder / name, "was changed: its sha256 is not what the manifest says")
    return found, who


def signature_of(folder: Path) -> bytes | None:
    """A sealed cache's signature, if it has one."""
    path = folder / SIGNATURE
    return read_plain(path, 1 << 20) if os.path.lexists(path) else None


def _walk(folder: Path) -> Iterator[tuple[str, int]]:
    """Every file below a folder with its size; whatever is neither a plain file nor a folder is refused."""
    pending = [folder]
    while pending:
        place = pending.pop()
        try:
            entries = sorted(os.scandir(place), key=lambda entry: entry.name)
        except OSError as error:
            raise Failure(Exit.CACHE, f"cannot read {place}: {error.strerror}") from error
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                pending.append(Path(entry.path))
                continue
            problem = not_plain(status)
            if problem:
                raise refused(Path(entry.path), problem)
            yield Path(entry.path).relative_to(folder).as_posix(), status.st_size


def read_details(folder: Path, manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """What torch hashed for each key when a sealed cache was made; empty when it was not kept.

    Raises:
        Failure: Exit.CACHE, when the file is not the one that the manifest names.
    """
    if manifest.details is None:
        return {}
    data = read_plain(folder / DETAILS, manifests.LARGEST)
    if hashlib.sha256(data).hexdigest() != manifest.details.sha256:
        raise refused(folder / DETAILS, "is not what the manifest says")
    try:
        table = strict(data)
        return {
            str(key): tuple(str(table["lines"][place]) for place in places) for key, places in table["keys"].items()
        }
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise refused(folder / DETAILS, "is not as this program writes it") from error

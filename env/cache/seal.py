"""From a directory of caches to a sealed one: normalised, read-only, with a manifest, whole or not at all.

What is sealed are the entries of AOTAutograd and FX with everything beside them that torch would otherwise make again.
Triton's own folder is left out: its files hold absolute paths, which turned a moved cache into a recompilation, and the
entries of FX carry the same kernels and write them wherever the cache lies.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from env.cache import manifest as manifests
from env.cache import normal, places, sign
from env.cache.canonical import Json, canonical, digest
from env.cache.examine import examine, signature_of
from env.cache.factors import cache_id
from env.cache.manifest import DETAILS, FILES, NAME, SIGNATURE, File, Manifest
from env.cache.plain import not_plain
from env.errors import Exit, Failure

ENTRIES = ("fxgraph", "aotautograd")
"""The folders of the two caches whose keys are promised."""

CODE = re.compile(r"[a-z0-9]{2}")
"""How the folders are called in which generated source, its shared objects and its fastest configurations lie."""

SKIPPED = re.compile(r"\.|.*(\.tmp|\.lock|\.pyc|~)$|__pycache__$")
"""Leftovers and what is made again at no cost."""


def seal(
    source: Path,
    folder: Path,
    *,
    graph_id: str,
    gpu_id: str,
    gpu: Mapping[str, Json],
    factors: Mapping[str, Json],
    counts: Mapping[str, int],
    keys: Mapping[str, Sequence[str]] | None = None,
    details: Mapping[str, Sequence[str]] | None = None,
    parent: str | None = None,
    key: Path | None = None,
    trust: Path | None = None,
    code: Sequence[Path] = (),
) -> tuple[Path, Manifest]:
    """Seal the caches in `source` into a folder of their own below `folder`, and return it and its manifest.

    `counts` are the hits that a fresh process's first step counts; `keys` are those that it asks for, all that are
    there if they are not given; `details` is what torch hashed for each (`factors.details`). `key` signs; `trust` is
    the folder in which to note that this cache was sealed here, the user's own if left out; `code` are the folders of
    the code that was compiled, which entries name in comments. The place appears whole or not at all, and read-only.
    Sealing the same thing again returns what is there.

    Raises:
        Failure: Exit.CACHE, for a source that holds no entries, links, or lacks a promised key; Exit.STORAGE, when it
            cannot be written.
    """
    identity = cache_id(factors, graph_id, gpu_id)
    promised = {family: tuple(sorted(set((keys or keys_in(source))[family]))) for family in manifests.FAMILIES}
    _require_entries(source, promised)
    with _temporary(folder, identity) as building:
        files, contents = _copy(source, building / FILES, code)
        noted = _write_details(building, details)
        draft = Manifest(
            cache_id=identity,
            graph_id=graph_id,
            gpu_id=gpu_id,
            gpu=dict(gpu),
            factors=dict(factors),
            keys=promised,
            counts={name: int(counts[name]) for name in manifests.COUNTS},
            files=files,
            digest="0" * 64,
            details=noted,
            parent=parent,
        )
        made = dataclasses.replace(draft, digest=manifests.decisive(draft, contents))
        data = made.to_bytes()
        manifests.parse(data, "the manifest that was just made")  # whatever we write, we can read
        _write(building / NAME, data)
        if key is not None:
            _write(building / SIGNATURE, sign.sign(data, key))
        close(building)
        trust = trust or places.cache_home().path / "trust"
        sign.remember(data, trust, f"sealed {identity}")  # before it appears: others may want it at once
        return _settle(building, folder, made, data, sign.trust([trust]))


def _settle(building: Path, folder: Path, made: Manifest, data: bytes, believed: sign.Trust) -> tuple[Path, Manifest]:
    """Give what was built its name, unless the same cache is there already; return that place and its manifest.

    A further cache of the same identity, as a real card's winners make one, is also named by its digest. One that has
    the same digest is the same only if it can be believed: anyone can write a digest.
    """
    names = (
        made.cache_id,
        f"{made.cache_id}.{made.digest[:12]}",
        f"{made.cache_id}.{hashlib.sha256(data).hexdigest()[:12]}",
    )
    for name in names:
        place = folder / name
        try:
            building.rename(place)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            return place, made
        try:
            found, bytes_found = manifests.read(place)
            if bytes_found != data:
                if found.digest != made.digest:
                    continue
                sign.check(bytes_found, signature_of(place), believed, str(place))
        except Failure:
            continue
        # the same, but damaged: sealing it anew is what whoever refused it said to do; or not signed, and now it is
        if not _is_whole(place) or (signature_of(building) is not None and signature_of(place) is None):
            _replace(place, building)
            return place, made
        return place, found
    raise Failure(Exit.CACHE, f"{folder / names[-1]} is in the way and is not what its name says", hint="move it away")


def _is_whole(place: Path) -> bool:
    try:
        examine(place, sign.Trust(policy="unsigned"))
    except Failure:
        return False
    return True


def _replace(place: Path, building: Path) -> None:
    going = place.with_name(f".{place.name}.{os.getpid()}.going")
    place.rename(going)
    building.rename(place)
    open_again(going)
    shutil.rmtree(going)


def keys_in(source: Path) -> dict[str, list[str]]:
    """The keys of all entries in a directory of caches: AOTAutograd's, FX's, and those of Triton's own folder."""

    def names(pattern: str) -> list[str]:
        return sorted({path.name for path in source.glob(pattern) if path.is_dir()})

    kernels = sorted({path.parent.name for path in source.glob("triton/*/*/*.cubin")})
    return {"aot_autograd": names("aotautograd/*"), "fx": names("fxgraph/*/*"), "triton": kernels}


def _require_entries(source: Path, promised: Mapping[str, Sequence[str]]) -> None:
    there = keys_in(source)
    if not there["fx"]:
        raise Failure(
            Exit.CACHE,
            f"{source} holds no compiled graphs, so there is nothing to seal",
            hint="set TORCHINDUCTOR_CACHE_DIR to it while they are compiled",
        )
    for family in ("aot_autograd", "fx"):
        lacking = sorted(set(promised[family]) - set(there[family]))
        if lacking:
            raise Failure(
                Exit.CACHE,
                f"{source} lacks entries that it should promise: the compilation was not complete",
                details=[f"{family} {key}" for key in lacking[:10]],
            )


def _chosen(source: Path) -> Iterator[Path]:
    """The files that are sealed, in the order of their names; a link among them is refused."""
    for top in sorted(source.iterdir()):
        if top.name in ENTRIES or CODE.fullmatch(top.name):
            for folder, folders, names in os.walk(top):
                folders[:] = sorted(name for name in folders if not SKIPPED.match(name))
                for name in sorted(names):
                    path = Path(folder, name)
                    if SKIPPED.match(name):
                        continue
                    problem = not_plain(path.lstat())
                    if problem:
                        raise Failure(Exit.CACHE, f"{path} {problem}; only plain files are sealed")
                    yield path
                for name in folders:
                    if Path(folder, name).is_symlink():
                        raise Failure(
                            Exit.CACHE, f"{Path(folder, name)} is a symbolic link; only plain files are sealed"
                        )


def _copy(source: Path, target: Path, code: Sequence[Path]) -> tuple[dict[str, File], str]:
    """Copy and normalise the files; their records, and the digest of what decides in them."""
    replace, renamed = _made_independent(source, code)
    files: dict[str, File] = {}
    contents: list[list[str]] = []
    for path in _chosen(source):
        name = path.relative_to(source).as_posix()
        data = path.read_bytes()
        data = normal.best_config(data) if name.endswith(".best_config") else normal.normalised(data)
        same = name
        if name.split("/")[0] in ENTRIES:
            same = path.parent.relative_to(source).as_posix()  # the file's name is a digest of its bytes
            name = f"{same}/{normal.entry_name(data)}"
        elif path.name.split(".")[0] in renamed:
            same = replace(path.name)
        problem = manifests.path_problem(name)
        if problem:
            raise Failure(Exit.CACHE, f"{path} cannot be sealed: its name {problem}")
        _write(target / name, data)
        files[name] = File(size=len(data), sha256=hashlib.sha256(data).hexdigest())
        contents.append([same, normal.decisive_digest(data, replace)])
    return dict(sorted(files.items())), digest(sorted(contents))


def _made_independent(source: Path, code: Sequence[Path]) -> tuple[Callable[[str], str], Mapping[str, str]]:
    """How texts are made independent of the paths of source and code, and which files are named by contents with them.

    Generated code is named by a digest of its text; a wrapper's text names the kernels' files, path and all.
    """
    # as it was named while it was filled, which may have been through a link; the longer first, one may hold the other
    places = [source, *code]
    names = sorted({str(way) for place in places for way in (place.absolute(), place.resolve())}, key=len, reverse=True)
    path = re.compile("|".join(map(re.escape, names)))
    renamed: dict[str, str] = {}
    for file in _chosen(source):
        text = file.read_bytes().decode("utf-8", "replace") if file.suffix in (".py", ".cpp") else ""
        if path.search(text):
            renamed[file.name.split(".")[0]] = "@" + hashlib.sha256(path.sub("@", text).encode()).hexdigest()
    pattern = re.compile("|".join(map(re.escape, [*names, *renamed])))
    return (lambda text: pattern.sub(lambda match: renamed.get(match[0], "@"), text)), renamed


def _write_details(folder: Path, details: Mapping[str, Sequence[str]] | None) -> File | None:
    """Write what torch hashed for each key; most lines are the same for all keys, so each is written once."""
    if not details:
        return None
    lines = sorted({line for key in details for line in details[key]})
    place = {line: index for index, line in enumerate(lines)}
    keys = {key: [place[line] for line in details[key]] for key in sorted(details)}
    data = canonical({"lines": lines, "keys": keys}) + b"\n"
    _write(folder / DETAILS, data)
    return File(size=len(data), sha256=hashlib.sha256(data).hexdigest())


# Writing


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)


class _temporary:  # noqa: N801  # a context manager, used like a function
    """A folder to build in, beside where it will be; whatever stops the block, nothing is left."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def __enter__(self) -> Path:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=f".{self.name[:16]}.", dir=self.folder))
        except OSError as error:
            raise unwritable(self.folder, error) from error
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        open_again(self.path)
        shutil.rmtree(self.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise unwritable(self.folder, error) from error


def close(folder: Path) -> None:
    """Make a folder and everything in it read-only, and have it on the disk."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            Path(place, name).chmod(0o444)
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        Path(place).chmod(0o555)


def open_again(folder: Path) -> None:
    """Make the folders of a sealed cache writable again, as removing it needs."""
    for place, _, _ in os.walk(folder):
        Path(place).chmod(0o700)


def unwritable(folder: Path, error: OSError) -> Failure:
    """What an error while writing a cache means to the user."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Failure(
            Exit.STORAGE,
            f"the disk of {folder} is full",
            hint="make room there, or point DFLASH_CACHE_HOME at another local disk; nothing half made is left",
        )
    return Failure(
        Exit.STORAGE,
        f"cannot write in {folder}: {error.strerror or error}",
        hint="point DFLASH_CACHE_HOME at a folder on a local disk that is yours",
    )

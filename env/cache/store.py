"""The caches of this machine: which there are, which one a process uses, and which may go. Only `prune` ever frees one.

<cache home>/sealed/<cache_id>/    baked here or brought here, read-only
<cache home>/seeded/<cache_id>/    the working copy of a sealed one
<cache home>/cold/<cache_id>/      what a run without a sealed one compiled for itself
<cache home>/trust/                whom sealed caches are believed from
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from env.cache import explain, places, sign
from env.cache import manifest as manifests
from env.cache.canonical import Json, canonical, strict
from env.cache.factors import cache_id
from env.cache.manifest import Manifest
from env.cache.plain import read_plain
from env.cache.seal import open_again, unwritable
from env.cache.seed import MARK, seed
from env.errors import Exit, Failure

FACTORS = "dflash-factors.json"
"""In a cold directory: what it was compiled for."""

KINDS = ("sealed", "seeded", "cold")

NONE_BAKED = (
    "there is no baked cache here, so this run compiles for itself: "
    "`nox -s bake -- --config NAME [--gpu CARD]` makes one"
)

EARLIER = "there is no baked cache here, but kernels of an earlier run: what is missing of them is compiled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What a process needs a cache for; made in the process, and the thread, that trains."""

    factors: Mapping[str, Json]
    """See `factors.collect`."""

    graph_id: str
    """Which graphs it compiles."""

    gpu_id: str
    """Which card it has; `cpu` for none."""

    gpu: Mapping[str, Json]
    """The card's properties, so that a difference can be named."""

    @property
    def cache_id(self) -> str:
        """The name of the cache that fits."""
        return cache_id(self.factors, self.graph_id, self.gpu_id)

    def flat(self) -> dict[str, Json]:
        """Everything by name, as `Manifest.identity` has it."""
        named = {f"gpu.{name}": value for name, value in self.gpu.items()}
        return {"graph_id": self.graph_id, "gpu_id": self.gpu_id, **named, **self.factors}


def here(graph_id: str, device: str) -> Identity:
    """What this process needs a cache for, on a device (`cpu`, `cuda:0`); torch must be there.

    To be asked in the thread that trains, when everything that steers compilation is set and nothing is compiled yet.

    Raises:
        Failure: see `factors.collect` and `env.gpus.read`.
    """
    from env import gpus
    from env.cache.factors import collect

    collected = collect(device)
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return Identity(factors=collected, graph_id=graph_id, gpu_id="cpu", gpu={"name": "cpu"})
    card = gpus.read(int(index or 0))
    properties = {name: getattr(card, name) for name in gpus.DECIDES}
    return Identity(factors=collected, graph_id=graph_id, gpu_id=gpus.gpu_id(card), gpu=properties)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One cache on this machine."""

    path: Path
    kind: str
    """One of `KINDS`."""

    cache_id: str
    """What its folder is called by."""

    size: int
    """Bytes of all its files."""

    used: float
    """When it was last used or made, in seconds since 1970."""

    identity: Mapping[str, Json] | None = None
    """What it is for (`Manifest.identity`); None if that cannot be read."""

    digest: str | None = None
    """A sealed or seeded one's digest."""

    problem: str | None = None
    """Why it cannot be used at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The directory that a process uses, and how it came to it."""

    cache_id: str
    path: Path
    """What TORCHINDUCTOR_CACHE_DIR must be."""

    kind: str
    """`seeded`: everything promised is there. `cold`: what is missing is compiled. `given`: the user named it."""

    manifest: Manifest | None = None
    """What a seeded one promises for the first step."""

    sealed: Path | None = None
    """What a seeded one was copied from."""

    wanted: Identity | None = None
    """What the process needs a cache for."""

    notices: tuple[str, ...] = ()
    """What the user should know: who vouches for it, or why nothing fits."""

    lock: int | None = field(default=None, repr=False)
    """Held while the process lives, so that `prune` leaves the directory alone."""

    @property
    def environ(self) -> dict[str, str]:
        """The variables that make torch and Triton use it; to be set before anything is compiled."""
        if self.kind == "given":
            return {}
        # Triton falls back to a folder in the home directory, which a user id without a passwd entry does not have
        return {"TORCHINDUCTOR_CACHE_DIR": str(self.path), "TRITON_HOME": str(self.path)}


def choose(wanted: Identity, *, environ: Mapping[str, str] | None = None, policy: str | None = None) -> Choice:
    """The cache for a process: the sealed one that fits, copied to this node if need be, or else a directory to fill.

    A directory that the user set (TORCHINDUCTOR_CACHE_DIR, which only survives `pins.pinned` if it is kept) is taken as
    it is. `policy` is what `--allow-unsigned` says. Nothing is ever deleted.

    Raises:
        Failure: Exit.CACHE, when the one that fits is refused: it is named, not passed over, because what was changed
        may
            have been changed on purpose. Exit.STORAGE, when nothing can be written.
    """
    environ = os.environ if environ is None else environ
    given = environ.get("TORCHINDUCTOR_CACHE_DIR")
    if given:
        notice = f"the compile cache is {given}, as TORCHINDUCTOR_CACHE_DIR says; whether it fits is not looked at"
        return Choice(cache_id=wanted.cache_id, path=Path(given), kind="given", wanted=wanted, notices=(notice,))
    home = places.cache_home(environ)
    notices = [home.notice] if home.notice else []
    believed = sign.trust(places.trust_folders(environ, home.path), policy=policy)
    sealed = fitting(places.sealed_folders(environ, home.path), wanted.cache_id)
    if sealed is not None:
        path, manifest, who = seed(sealed, home.path, believed)
        lock = use(path)
        if not path.is_dir():  # freed by a prune just before it was in use
            path, manifest, who = seed(sealed, home.path, believed)
        notices.append(f"compile cache {path.name[:16]}, {who}")
        return Choice(
            cache_id=wanted.cache_id, path=path, kind="seeded", manifest=manifest, sealed=sealed, wanted=wanted,
            notices=tuple(notices), lock=lock,
        )  # fmt: skip
    path = cold(home.path, wanted)
    everything = stored(home.path, environ)
    why = why_cold(wanted, [cache for cache in everything if cache.kind == "sealed"], environ=environ)
    notices += [EARLIER] if why == [NONE_BAKED] and (path / "fxgraph").is_dir() else why
    return Choice(
        cache_id=wanted.cache_id, path=path, kind="cold", wanted=wanted, notices=tuple(notices), lock=use(path)
    )


def fitting(folders: Sequence[Path], identity: str) -> Path | None:
    """The sealed cache of an identity; of several, one made from another by adding winners, else the newest."""
    found: list[tuple[bool, float, Path]] = []
    for folder in folders:
        for path in _entries(folder):
            if path.name.partition(".")[0] == identity and (path / manifests.NAME).exists():
                try:
                    harvested = manifests.read(path)[0].parent is not None
                except Failure:
                    harvested = False  # refused, by name, when it is used
                found.append((harvested, (path / manifests.NAME).stat().st_mtime, path))
    return max(found)[2] if found else None


def cold(home: Path, wanted: Identity) -> Path:
    """The directory that a run fills itself, made with a note of what it is for."""
    path = home / "cold" / wanted.cache_id
    note = {
        "graph_id": wanted.graph_id,
        "gpu_id": wanted.gpu_id,
        "gpu": dict(wanted.gpu),
        "factors": dict(wanted.factors),
    }
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (path / FACTORS).exists():
            fresh = path / f".{os.getpid()}.tmp"
            fresh.write_bytes(canonical(note) + b"\n")
            fresh.replace(path / FACTORS)
    except OSError as error:
        raise unwritable(home, error) from error
    return path


def use(path: Path) -> int | None:
    """Mark a directory as in use for as long as this process lives; a file system without locks goes without."""
    descriptor = None
    try:
        descriptor = os.open(path.with_name(f"{path.name}.used"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.utime(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def why_cold(wanted: Identity, sealed: Sequence[Stored], *, environ: Mapping[str, str] | None = None) -> list[str]:
    """Why no sealed cache fits, in lines: the one that fits best, and what differs."""
    found = nearest(wanted, sealed, environ=environ)
    if found is None:
        return [NONE_BAKED]
    cache, reasons = found
    lines = [f"no baked cache fits, so this run compiles for itself; nearest is {cache.path.name[:16]}:"]
    lines += [f"  {difference.sentence()}" for difference in reasons[:6]]
    more = f"  and {len(reasons) - 6} more: `nox -s cache -- explain --config NAME`"
    return lines + ([more] if len(reasons) > 6 else [])


def nearest(
    wanted: Identity, caches: Sequence[Stored], *, environ: Mapping[str, str] | None = None
) -> tuple[Stored, list[explain.Difference]] | None:
    """The cache with the fewest differences, one for the same graphs first, and what they are."""
    here, feeding = wanted.flat(), variables()
    known = [cache for cache in caches if cache.identity is not None]
    compared = [
        (cache, explain.differences(cache.identity or {}, here, variables=feeding, environ=environ)) for cache in known
    ]

    def rank(pair: tuple[Stored, list[explain.Difference]]) -> tuple[bool, int, float]:
        identity = pair[0].identity or {}
        return identity.get("graph_id") != here["graph_id"], len(pair[1]), -pair[0].used

    return min(compared, key=rank, default=None)


def variables() -> dict[str, tuple[str, ...]]:
    """Which variables feed which settings, where torch can tell."""
    from env.cache.factors import variables

    try:
        return variables()
    except ImportError:
        return {}


def stored(home: Path, environ: Mapping[str, str] | None = None) -> list[Stored]:
    """All caches of this machine, the last used first. Nothing of them is believed: this only reads their records."""
    folders = [("sealed", folder) for folder in places.sealed_folders(environ, home)]
    folders += [(kind, home / kind) for kind in ("seeded", "cold")]
    found = [_look(kind, path) for kind, folder in folders for path in _entries(folder)]
    return sorted(found, key=lambda cache: -cache.used)


def _entries(folder: Path) -> list[Path]:
    """The caches in a folder; what is being built begins with a dot, and locks are files."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _look(kind: str, path: Path) -> Stored:
    record = {"sealed": manifests.NAME, "seeded": MARK, "cold": FACTORS}[kind]
    identity: Mapping[str, Json] | None = None
    digest = problem = None
    try:
        data = read_plain(path / record, manifests.LARGEST)
        if kind == "cold":
            identity = _identity_of(strict(data)).flat()
        else:
            manifest = manifests.parse(data, str(path / record))
            identity, digest = manifest.identity(), manifest.digest
    except Failure as failure:
        problem = failure.message
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{path / record} cannot be read: {error}"
    return Stored(
        path=path,
        kind=kind,
        cache_id=path.name.partition(".")[0],
        size=_size(path),
        used=_used(path),
        identity=identity,
        digest=digest,
        problem=problem,
    )


def _identity_of(table: Any) -> Identity:
    return Identity(
        factors=dict(table["factors"]),
        graph_id=str(table["graph_id"]),
        gpu_id=str(table["gpu_id"]),
        gpu=dict(table["gpu"]),
    )


def read_identity(data: bytes) -> Identity:
    """An identity from JSON, as `factors` prints it.

    Raises:
        Failure: Exit.USAGE, when it is none.
    """
    try:
        return _identity_of(strict(data))
    except (ValueError, KeyError, TypeError) as error:
        raise Failure(
            Exit.USAGE,
            f"this is no identity of a cache: {type(error).__name__}: {error}",
            hint="`nox -s cache -- factors --config NAME` prints one",
        ) from error


def identity_bytes(identity: Identity) -> bytes:
    """An identity as JSON, for `read_identity`."""
    table = {
        "graph_id": identity.graph_id,
        "gpu_id": identity.gpu_id,
        "gpu": dict(identity.gpu),
        "factors": dict(identity.factors),
    }
    return json.dumps(table, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _size(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118  # Path is slow
    return total


def _used(path: Path) -> float:
    """When a cache was last used, or else made."""
    for place in (path.with_name(f"{path.name}.used"), path / manifests.NAME, path / MARK, path / FACTORS, path):
        with contextlib.suppress(OSError):
            return place.stat().st_mtime
    return 0.0


def doomed(caches: Sequence[Stored], *, home: Path, keep: int = 0, older_than: float | None = None) -> list[Stored]:
    """Which caches a prune would free: of each kind all but the `keep` last used, and only those unused for so long.

    Those outside of the user's own folder, as an image's, are never among them.
    """
    now = time.time()
    found = []
    for kind in KINDS:
        mine = [cache for cache in caches if cache.kind == kind and cache.path.parent == home / kind]
        mine.sort(key=lambda cache: -cache.used)
        found += [cache for cache in mine[keep:] if older_than is None or now - cache.used >= older_than]
    return found


def free(cache: Stored) -> str | None:
    """Delete one cache; returns why it stays, if it does: because a process is using it.

    Raises:
        Failure: Exit.STORAGE, when it cannot be removed.
    """
    used = cache.path.with_name(f"{cache.path.name}.used")
    descriptor = None
    try:
        if used.exists():
            descriptor = os.open(used, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return "a process is using it"
        # renamed first: another process never finds a half of it
        going = cache.path.with_name(f".{cache.path.name}.{os.getpid()}.going")
        cache.path.rename(going)
        open_again(going)
        shutil.rmtree(going)
        # the empty lock files stay: whoever waits for one must not end up holding another than those who come later
    except OSError as error:
        raise Failure(Exit.STORAGE, f"cannot remove {cache.path}: {error.strerror}") from error
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return None

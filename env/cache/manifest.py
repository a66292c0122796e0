"""The manifest of a sealed cache: what it is for, what it promises, and every file; read as strictly as it is written.

Whoever reads one trusts nothing in it: types, names of files and numbers are checked before anything else is done with
them, because the entries that it vouches for are pickles, and unpickling a stranger's is running a stranger's program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from env.cache.canonical import Json, canonical, digest, strict
from env.cache.factors import cache_id
from env.cache.plain import read_plain
from env.errors import Exit, Failure

FORMAT = 1
NAME = "manifest.json"
SIGNATURE = "manifest.json.sig"
DETAILS = "details.json"
FILES = "cache"
"""The folder beside the manifest in which the files lie."""

LARGEST = 32 * 1024 * 1024
"""Bytes of a manifest that are read at most; the drafter's has 60 KB."""

MOST = 200_000
"""Files of a cache, at most."""

FAMILIES = ("aot_autograd", "fx", "triton")
"""Whose keys a cache promises."""

COUNTS = ("autograd_hit", "fx_hit", "triton_hit")
"""What the first training step of a fresh process must count: exactly this many hits, no miss, no bypass."""

DIGEST_OVER = (
    "format, graph_id, gpu_id, cache_id, factors, keys, counts, and of each file what decides: elapsed times, memory "
    "addresses, time stamps, debugging information, the stages between a kernel's source and its cubin, the folder in "
    "which it was baked and those of the code that was compiled are left out"
)
"""What the digest covers, in words, for whoever compares two."""

PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]*")
DEEPEST = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """One file of a cache."""

    size: int
    """Bytes."""

    sha256: str
    """Of its bytes as sealed, hexadecimal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a sealed cache says of itself."""

    format: int = FORMAT
    """The version of this record."""

    cache_id: str
    """Which cache it is: see `factors.cache_id`."""

    graph_id: str
    """Which graphs it holds."""

    gpu_id: str
    """Which card it is for; `cpu` for none."""

    gpu: Mapping[str, Json]
    """The card's properties; only a name for the CPU."""

    factors: Mapping[str, Json]
    """Every factor that enters keys, with the value that it had in the bake."""

    keys: Mapping[str, tuple[str, ...]]
    """For AOTAutograd, FX and Triton, the keys that hit."""

    counts: Mapping[str, int]
    """How many hits the first step counts."""

    files: Mapping[str, File]
    """Every file below `cache/`, by its relative path."""

    digest: str
    """Of what decides: equal for two bakes of the same thing, wherever and whenever they were made."""

    digest_over: str = DIGEST_OVER
    """What that is, in words."""

    details: File | None = None
    """`details.json` beside the manifest: what torch hashed for each key; only explanations read it."""

    parent: str | None = None
    """The digest of the cache that this one was made from, by adding what only a real card can decide."""

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files.values())

    def to_bytes(self) -> bytes:
        """The manifest as a file holds it: canonical JSON and a line end."""
        return canonical(asdict(self)) + b"\n"

    def identity(self) -> dict[str, Json]:
        """Everything that `cache_id` is made of, by name, with the card's properties as `gpu.NAME`: for comparisons."""
        return {
            "graph_id": self.graph_id,
            "gpu_id": self.gpu_id,
            **{f"gpu.{name}": value for name, value in self.gpu.items()},
            **self.factors,
        }


def decisive(manifest: Manifest, contents: str) -> str:
    """The digest of a manifest whose files' contents have the given digest (`contents_digest`)."""
    fields = ("format", "cache_id", "graph_id", "gpu_id", "factors", "keys", "counts")
    return digest({**{name: getattr(manifest, name) for name in fields}, "contents": contents})


def read(folder: Path) -> tuple[Manifest, bytes]:
    """The manifest of a sealed cache and the bytes that it was read from, for checking a signature over them.

    Raises:
        Failure: Exit.CACHE, naming what is wrong: no manifest, not a plain file, too large, or not as `parse` wants it.
    """
    path = folder / NAME
    data = read_plain(path, LARGEST)
    return parse(data, str(path)), data


def parse(data: bytes, place: str) -> Manifest:
    """A manifest from its JSON.

    Raises:
        Failure: Exit.CACHE, naming the field: unknown, missing, of another type, a path that leaves the folder, an
            identity that its factors do not have.
    """
    try:
        table = strict(data)
    except ValueError as error:
        raise _refused(f"{place} is not a manifest: {error}") from error
    manifest = _Reader(place).manifest(table)
    made_of = cache_id(manifest.factors, manifest.graph_id, manifest.gpu_id)
    if made_of != manifest.cache_id:
        raise _refused(
            f"{place}: cache_id is not that of its factors",
            [f"it says  {manifest.cache_id}", f"they give {made_of}"],
        )
    return manifest


def path_problem(path: str) -> str:
    """Why a path may not stand in a manifest; empty if it may. Only a few, harmless characters are allowed."""
    if path.startswith(("/", "\\")):
        return "is absolute"
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "leaves its folder"
    if len(path) > 1000 or any(len(part) > 255 for part in parts) or len(parts) > DEEPEST:
        return "is too long"
    if not all(PART.fullmatch(part) for part in parts):
        return "has characters that no cache's file has"
    return ""


def _refused(message: str, details: list[str] | None = None) -> Failure:
    return Failure(
        Exit.CACHE,
        message,
        details=details or (),
        hint="it is not used; get it again from where it was sealed, or `nox -s bake -- --config NAME` makes one",
    )


HEX = re.compile(r"[0-9a-f]{64}")
KEY = re.compile(r"[A-Za-z0-9_-]{1,200}")


class _Reader:
    """Takes a parsed manifest apart; a class only so that every complaint can name the file."""

    def __init__(self, place: str) -> None:
        self.place = place

    def fail(self, field: str, problem: str) -> Failure:
        return _refused(f"{self.place}: {field} {problem}")

    def manifest(self, table: Any) -> Manifest:
        table = self.table(table, "the manifest")
        if table.get("format") != FORMAT or isinstance(table.get("format"), bool):
            raise self.fail("format", f"is {table.get('format')!r}; this program reads {FORMAT}")
        known = set(Manifest.__dataclass_fields__)
        for name in [*(known - set(table)), *(set(table) - known)]:
            raise self.fail(repr(name), "is missing" if name in known else "is unknown")
        parent, details = table["parent"], table["details"]
        return Manifest(
            cache_id=self.hexadecimal(table["cache_id"], "cache_id"),
            graph_id=self.text(table["graph_id"], "graph_id"),
            gpu_id=self.text(table["gpu_id"], "gpu_id"),
            gpu=self.table(table["gpu"], "gpu"),
            factors=self.table(table["factors"], "factors"),
            keys=self.keys(table["keys"]),
            counts=self.counts(table["counts"]),
            files=self.files(table["files"]),
            digest=self.hexadecimal(table["digest"], "digest"),
            digest_over=self.text(table["digest_over"], "digest_over"),
            details=None if details is None else self.file(details, "details"),
            parent=None if parent is None else self.hexadecimal(parent, "parent"),
        )

    def table(self, value: Any, field: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.fail(field, f"is {type(value).__name__}, not a table")
        return value

    def text(self, value: Any, field: str) -> str:
        if not isinstance(value, str) or not value or len(value) > 10_000:
            raise self.fail(field, "is not a text")
        return value

    def hexadecimal(self, value: Any, field: str) -> str:
        if not isinstance(value, str) or not HEX.fullmatch(value):
            raise self.fail(field, "is not 64 hexadecimal digits")
        return value

    def number(self, value: Any, field: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 50:
            raise self.fail(field, "is not a count")
        return value

    def keys(self, value: Any) -> dict[str, tuple[str, ...]]:
        table = self.table(value, "keys")
        if sorted(table) != sorted(FAMILIES):
            raise self.fail("keys", f"are of {', '.join(sorted(table))}, not of {', '.join(FAMILIES)}")
        for family, keys in table.items():
            if not isinstance(keys, list) or len(keys) > MOST:
                raise self.fail(f"keys.{family}", "is not a list of keys")
            for key in keys:
                if not isinstance(key, str) or not KEY.fullmatch(key):
                    raise self.fail(f"keys.{family}", f"holds what is no key: {key!r:.60}")
        return {family: tuple(table[family]) for family in FAMILIES}

    def counts(self, value: Any) -> dict[str, int]:
        table = self.table(value, "counts")
        if sorted(table) != sorted(COUNTS):
            raise self.fail("counts", f"are of {', '.join(sorted(table))}, not of {', '.join(COUNTS)}")
        return {name: self.number(table[name], f"counts.{name}") for name in COUNTS}

    def files(self, value: Any) -> dict[str, File]:
        table = self.table(value, "files")
        if len(table) > MOST:
            raise self.fail("files", f"are {len(table)}; at most {MOST} are read")
        for path in table:
            problem = path_problem(path)
            if problem:
                raise self.fail(f"the path {path!r:.120}", problem)
        return {path: self.file(entry, f"files[{path!r}]") for path, entry in table.items()}

    def file(self, value: Any, field: str) -> File:
        table = self.table(value, field)
        if sorted(table) != ["sha256", "size"]:
            raise self.fail(field, "does not have a size and a sha256")
        return File(
            size=self.number(table["size"], f"{field}.size"),
            sha256=self.hexadecimal(table["sha256"], f"{field}.sha256"),
        )

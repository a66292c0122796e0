"""Text to train on, the shipped one or a user's own file or folder, split into two parts that share nothing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from env.errors import Exit, Failure

SHIPPED = Path(__file__).parent / "text" / "python.txt"
SHIPPED_SHA256 = "01e318af95cce29a32882e0a4c8c9fcf30120203a90cec5c1e8ad480f279a6ca"
SHIPPED_LICENSE = "PSF-2.0"
SEPARATOR = "\f"
"""What stands between two documents of one file: ASCII's own page break."""
SHARE = 10
"""One document in this many is held out."""
WINDOW = 64
"""No run of this many bytes of the held-out part occurs in the training part."""
_FACTOR = 0x9E3779B97F4A7C15
"""Odd, so that multiplying modulo 2**64 loses nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Documents in two parts that share no `WINDOW` bytes in a row."""

    name: str
    """What a person calls it: the shipped text's title, or the path that was given."""
    sha256: str
    """Digest of the file; of a folder, the digest of its files' digests and names, one `sha256sum` line each."""
    license: str | None
    """SPDX name of the licence; None for a user's own text."""
    train: tuple[str, ...]
    """Documents to train on; none is empty."""
    held_out: tuple[str, ...]
    """Documents, or pieces of them, that training never sees; none is empty."""
    overlap: int
    """Bytes taken out of the held-out part because the training part has them too."""


def load(path: Path | None, *, shortest: int = 1) -> Text:
    """Read a text: the shipped one (None), a UTF-8 file, or a folder of them (hidden files are passed over).

    A file holds documents with form feeds between them. Which are held out depends on nothing but the text: every
    tenth document, in the order of the files' paths; where there are fewer than ten, the last tenth of each. From
    these, every passage that the training part has too is taken out, so that nothing learnt by heart can be tested.

    Args:
        path: the file or folder; None for the shipped text.
        shortest: bytes that each of the two parts needs; no tokenizer makes more tokens than there are bytes, so a part
            with fewer bytes than a sequence has tokens cannot fill one.

    Raises:
        Failure: Exit.INPUT when there is no such file, it cannot be read, is not UTF-8, is empty or too short, repeats
            itself so much that nothing could be held out, or when the shipped text is not what was shipped.
    """
    place = SHIPPED if path is None else path
    files = _files(place)
    contents = {file: _read(file) for file in files}
    sha256 = _digest(place, contents)
    if path is None and sha256 != SHIPPED_SHA256:
        raise Failure(
            Exit.INPUT,
            f"the shipped text `{SHIPPED.name}` was changed: sha256 {sha256[:12]}…, recorded {SHIPPED_SHA256[:12]}…",
            hint=f"`git checkout -- dflash/text/{SHIPPED.name}` brings it back; `--text FILE` takes a text of your own",
        )
    documents = [document for file, content in contents.items() for document in _documents(file, content)]
    if not documents:
        raise Failure(Exit.INPUT, f"the text `{place}` is empty")
    total = sum(len(document.encode()) for document in documents)
    if total < shortest:
        raise Failure(Exit.INPUT, f"the text `{place}` has {total} bytes, shorter than a sequence ({shortest})")
    train, candidates = split(documents)
    held_out, overlap = without_overlap(candidates, train)
    for part, called in ((train, "to train on"), (held_out, "to hold out")):
        size = sum(len(document.encode()) for document in part)
        if size < shortest:
            raise Failure(
                Exit.INPUT,
                f"the text `{place}` leaves {size} bytes {called}, shorter than a sequence ({shortest})",
                details=[f"{overlap} bytes were taken out because the training part has them too"] if overlap else [],
            )
    return Text(
        name="CPython 3.11.7 standard library" if path is None else str(path),
        sha256=sha256,
        license=SHIPPED_LICENSE if path is None else None,
        train=tuple(train),
        held_out=tuple(held_out),
        overlap=overlap,
    )


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Training documents and held-out ones: every tenth document, or of fewer than ten the last tenth of each."""
    if len(documents) >= SHARE:
        train = [document for index, document in enumerate(documents) if index % SHARE != SHARE - 1]
        return train, documents[SHARE - 1 :: SHARE]
    train, held_out = [], []
    for document in documents:
        cut = len(document) - len(document) // SHARE
        # A line is left whole where there are lines.
        cut = document.rfind("\n", 0, cut) + 1 or cut
        train.append(document[:cut])
        held_out.append(document[cut:])
    return [part for part in train if part.strip()], [part for part in held_out if part.strip()]


def without_overlap(documents: list[str], others: list[str]) -> tuple[list[str], int]:
    """The pieces of `documents` that share no `WINDOW` bytes in a row with `others`, and how many bytes that cost.

    A piece shorter than a window is dropped: it could not be compared.
    """
    windows = [_window_hashes(document.encode()) for document in documents]
    wanted = np.unique(np.concatenate([np.empty(0, np.uint64), *windows]))
    if wanted.size == 0:
        return [], sum(len(document.encode()) for document in documents)
    shared = np.zeros(wanted.size, dtype=bool)
    for other in others:
        hashes = _window_hashes(other.encode())
        places = np.minimum(np.searchsorted(wanted, hashes), wanted.size - 1)
        shared[places[wanted[places] == hashes]] = True
    pieces: list[str] = []
    lost = 0
    for document, hashes in zip(documents, windows, strict=True):
        data = document.encode()
        kept = _outside(shared[np.searchsorted(wanted, hashes)], len(data))
        # A cut may fall inside a character of several bytes: what is left of it is dropped.
        found = [data[start:end].decode(errors="ignore") for start, end in kept]
        pieces += [piece for piece in found if piece.strip()]
        lost += len(data) - sum(len(piece.encode()) for piece in found)
    return pieces, lost


def _outside(starts: NDArray[np.bool_], length: int) -> list[tuple[int, int]]:
    """Ranges of at least `WINDOW` bytes that no marked window touches; `starts[i]` marks the window from byte i on."""
    if length < WINDOW:
        return []
    edges = np.zeros(length + 1, dtype=np.int64)
    marked = np.flatnonzero(starts)
    np.add.at(edges, marked, 1)
    np.add.at(edges, marked + WINDOW, -1)
    free = np.concatenate([[False], np.cumsum(edges[:-1]) == 0, [False]]).astype(np.int8)
    turns = np.diff(free)
    bounds = zip(np.flatnonzero(turns == 1).tolist(), np.flatnonzero(turns == -1).tolist(), strict=True)
    return [(start, end) for start, end in bounds if end - start >= WINDOW]


def _window_hashes(data: bytes) -> NDArray[np.uint64]:
    """A polynomial hash, modulo 2**64, of each run of `WINDOW` bytes: (max(0, n - WINDOW + 1),).

    Two halves make a whole: h[2w](i) = h[w](i) * factor**w + h[w](i + w), so six products do for 64 bytes. Equal bytes
    have equal hashes; different ones collide with a chance that only costs a few bytes of the held-out part.
    """
    hashes = np.frombuffer(data, dtype=np.uint8).astype(np.uint64)
    width, power = 1, _FACTOR
    while width < WINDOW:
        hashes = hashes[:-width] * np.uint64(power) + hashes[width:] if hashes.size > width else hashes[:0]
        width, power = 2 * width, power * power % 2**64
    return hashes


def _files(place: Path) -> list[Path]:
    try:
        if place.is_dir():
            files = [
                file
                for file in sorted(place.rglob("*"))
                if file.is_file() and not any(part.startswith(".") for part in file.relative_to(place).parts)
            ]
            if not files:
                raise Failure(Exit.INPUT, f"the folder `{place}` holds no text")
            return files
        if place.is_file():
            return [place]
        what = "is neither a file nor a folder" if place.exists() else "does not exist"
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    raise Failure(Exit.INPUT, f"the text `{place}` {what}")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise Failure(Exit.INPUT, f"the text `{file}` cannot be read: {error.strerror}") from None


def _digest(place: Path, contents: dict[Path, bytes]) -> str:
    digests = {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()}
    if not place.is_dir():
        return digests[place]
    lines = [f"{digest}  {file.relative_to(place).as_posix()}\n" for file, digest in digests.items()]
    # names of files are bytes, which need not be UTF-8
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _documents(file: Path, content: bytes) -> list[str]:
    try:
        # -sig: a byte order mark is no part of the text.
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Failure(
            Exit.INPUT, f"the text `{file}` is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}"
        ) from None
    return [part.lstrip("\n") for part in text.split(SEPARATOR) if part.strip()]

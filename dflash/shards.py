"""Rows of tensors in safetensors files of a bounded size: written whole or not at all, read a few rows at a time.

Each file's sha256 is kept apart from it, and compared when the file is first read. Nothing is mapped for longer than a
read takes, so what a process holds does not grow with what lies on the disk.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import save_file
from torch import Tensor

from dflash import storage
from env.errors import Exit, Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file, as it was written."""

    file: str
    """Its name in its folder."""
    rows: int
    """Rows of each of its tensors."""
    size: int
    """Bytes."""
    sha256: str
    """Digest of the whole file."""

    def as_json(self) -> dict[str, Any]:
        """Plain data for a manifest."""
        return asdict(self)


def write(folder: Path, name: str, tensors: dict[str, Tensor]) -> Shard:
    """Write tensors that have one number of rows as one file, atomically.

    Raises:
        Failure: Exit.STORAGE, when the disk refuses; what was begun is removed.
    """
    path = folder / name
    beside = folder / f".{name}.{os.getpid()}"
    try:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, beside)
        storage.sync(beside)
        made = Shard(
            file=name,
            rows=len(next(iter(tensors.values()))),
            size=beside.stat().st_size,
            sha256=storage.sha256(beside),
        )
        beside.replace(path)
        storage.sync(folder)
    except (OSError, safetensors.SafetensorError) as error:
        beside.unlink(missing_ok=True)
        raise storage.refusal(_behind(error), f"write `{name}`", folder) from error
    return made


class Shelf:
    """The rows of many files, numbered through, in the order of the files."""

    def __init__(self, folder: Path, shards: Sequence[Shard], *, what: str, mend: str) -> None:
        """Look at each file's size, and at nothing else yet.

        Args:
            folder: where the files are.
            shards: the files.
            what: what they hold, for sentences.
            mend: the hint of a sentence about a file that is not as it was written.

        Raises:
            Failure: Exit.INPUT, when a file is missing or has another size.
        """
        self.folder, self.shards, self.what, self.mend = folder, tuple(shards), what, mend
        self._ends = list(itertools.accumulate(shard.rows for shard in shards))
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        for shard in shards:
            path = folder / shard.file
            size = path.stat().st_size if path.is_file() else None
            if size is None:
                raise Failure(Exit.INPUT, f"{what}: `{path}` is missing", hint=mend)
            if size != shard.size:
                message = f"{what}: `{path}` has {size} bytes, {shard.size} were written"
                raise Failure(Exit.INPUT, message, hint=mend)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, name: str, rows: Sequence[int]) -> Tensor:
        """The rows of one tensor, stacked in the order that was asked for.

        Raises:
            Failure: Exit.INPUT, when a file was changed since it was written.
        """
        if not rows:  # the last step of an epoch may have passes that are all filling
            return self.read(name, [0])[:0]
        found: Tensor | None = None
        for place, row in enumerate(rows):
            if not 0 <= row < len(self):
                raise IndexError(row)
            at = bisect.bisect_right(self._ends, row)
            shard = self.shards[at]
            self._verify(shard)
            within = row - (self._ends[at] - shard.rows)
            try:
                with safetensors.safe_open(self.folder / shard.file, framework="pt") as opened:
                    values: Tensor = opened.get_slice(name)[within]  # where the file is mapped: copied once, from there
                    if found is None:
                        found = values.new_empty((len(rows), *values.shape))
                    found[place] = values
                    del values
            except (OSError, safetensors.SafetensorError) as error:
                message = f"{self.what}: `{self.folder / shard.file}` cannot be read: {error}"
                raise Failure(Exit.INPUT, message, hint=self.mend) from None
        assert found is not None
        return found

    def _verify(self, shard: Shard) -> None:
        with self._lock:
            if shard.file in self._seen:
                return
            path = self.folder / shard.file
            try:
                sha256 = storage.sha256(path)
            except OSError as error:
                message = f"{self.what}: `{path}` cannot be read: {error.strerror}"
                raise Failure(Exit.INPUT, message, hint=self.mend) from None
            if sha256 != shard.sha256:
                message = f"{self.what}: `{path}` was changed: sha256 {sha256[:12]}…, written {shard.sha256[:12]}…"
                raise Failure(Exit.INPUT, message, hint=self.mend)
            self._seen.add(shard.file)


def sealed(manifest: dict[str, Any]) -> bytes:
    """A manifest as a file that tells when it was changed."""
    return json.dumps({**manifest, "sha256": _digest(manifest)}, sort_keys=True).encode() + b"\n"


def unsealed(content: bytes) -> dict[str, Any]:
    """The manifest that `sealed` was given.

    Raises:
        ValueError: when the content is anything else, or was changed.
    """
    manifest = json.loads(content)
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _digest(manifest):
        raise ValueError("it is not as it was written")
    return manifest


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _behind(error: Exception) -> OSError:
    """The disk's own error: safetensors tells its number in a sentence."""
    if isinstance(error, OSError):
        return error
    text = str(error)
    number = text.partition("(os error ")[2].partition(")")[0]
    return OSError(int(number) if number.isdigit() else 0, text)

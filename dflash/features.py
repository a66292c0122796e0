"""Tapped features of packed rows on the disk: computed once by the target, read by any number of trainings.

A folder of features holds everything that a training reads of its data: the packed rows, the held-out prompts, and for
each row what `target.features` gives, in the compute dtype, so that a training that reads it computes the same numbers.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash import config, prepared, shards, storage, tensor_parallel
from dflash import target as targets
from dflash.data import PADDING
from dflash.graphs import DTYPES
from dflash.passes import Pass
from dflash.prepared import MANIFEST, Stored
from dflash.target import Target
from env.errors import Exit, Failure

SHARD_BYTES = 1 << 28
"""Bytes of a file, about: what a process that was killed has to compute again, and holds in memory."""
ROWS = "rows"
"""The folder of the packed rows, within the one of the features."""
JOURNAL = "shards.jsonl"
"""Files that are whole, a line each; its end tells where to go on."""
_MADE = "`nox -s data -- features --help` says how they are made"
FAULTY = 0.1
"""Share of the rows whose features may be no numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Features on the disk, and the rows that they belong to."""

    folder: Path
    """Where they are."""
    rows: Stored
    """The packed rows whose features are numbers."""
    shelf: shards.Shelf
    """The files."""
    skipped: int
    """Rows that are left out, since their features are NaN or infinite."""

    def read(self, samples: Sequence[int]) -> Tensor:
        """Features of some rows, (len(samples), S, K*H) in the dtype they were computed in, on the CPU.

        A number past the last row stands for an empty one, as `trainer` fills up its last step with: zeros.

        Raises:
            Failure: Exit.INPUT, when a file was changed since it was written.
        """
        numbers = self.rows.numbers
        there = [sample for sample in samples if sample < len(self.rows.tokens)]
        wanted = there if numbers is None else [numbers[sample] for sample in there]
        found = self.shelf.read("features", wanted)
        missing = len(samples) - len(there)
        return torch.cat((found, found.new_zeros(missing, *found.shape[1:]))) if missing else found


class Shelved:
    """Where a drafter's features come from when they lie on the disk: a `trainer.Supply`.

    Of the target it needs the tables only.
    """

    busy = None
    """Nobody works for it."""

    def __init__(self, kept: Kept, target: Target, device: torch.device) -> None:
        self.kept, self.device = kept, device
        dtype = kept.read([0]).dtype
        self.embedding = targets.embedding(target).to(device, dtype)
        self.head = targets.head(target).to(device, dtype)

    def features(self, reading: Pass) -> Tensor:
        """Tapped hidden states (b, S, K*H) of a pass, on the device of training."""
        return self.kept.read(reading.samples).to(self.device)


def identity(settings: config.Config, target: Target, data: str) -> dict[str, Any]:
    """What decides a folder of features, as plain data; `data` is the key of the packed rows."""
    return {
        "target": targets.digest(target),
        "layer_ids": list(settings.drafter.target_layer_ids),
        "sequence": settings.shapes.sequence,
        "dtype": settings.precision.compute,
        "data": data,
    }


def size(settings: config.Config, rows: int) -> int:
    """Bytes that the features of so many rows take on the disk, file headers apart."""
    width = len(settings.drafter.target_layer_ids) * settings.drafter.hidden_size
    return rows * settings.shapes.sequence * width * DTYPES[settings.precision.compute].itemsize


def write(
    settings: config.Config,
    target: Target,
    rows: Stored,
    folder: Path,
    *,
    watch: Callable[[int], None],
    say: Callable[[str], None],
) -> Kept:
    """Write the features of packed rows, going on where an earlier try was stopped or killed.

    Args:
        settings: which layers, which shapes, which dtype.
        target: whose features.
        rows: the packed rows.
        folder: becomes the folder of features.
        watch: takes the number of rows that were just done; may raise to stop, and no whole file is lost then. The
            first time it is told of what an earlier try had done.
        say: takes a sentence for whoever watches; the first says how much of the disk it will take.

    Raises:
        Failure: Exit.STORAGE, when the disk has too little room or refuses; Exit.USAGE, when the folder holds other
            features, or another process writes them; Exit.INPUT, when the features of too many rows are no numbers.
    """
    ours = identity(settings, target, rows.key)
    if tensor_parallel.rank():
        _fill(settings, target, rows, None, watch)
        tensor_parallel.agree(0)
        return _opened(folder, ours)
    whole = {"identity": ours, "rows": len(rows.tokens), "batch": settings.shapes.rows}
    with _occupied(folder):
        if _begun(folder, whole).get("complete"):
            say(f"these features are there already: `{folder}`")
            tensor_parallel.agree(len(rows.tokens))
        else:
            journal = _Journal(folder)
            _require_room(settings, rows, folder, journal, say)
            storage.write(folder / MANIFEST, shards.sealed({**whole, "complete": False}))
            _copy_rows(rows, folder)
            _fill(settings, target, rows, journal, watch)
            storage.write(folder / MANIFEST, shards.sealed({**whole, "complete": True, **journal.content()}))
            if journal.not_finite:
                say(f"{journal.sentence(len(rows.tokens))}: they are left out")
        tensor_parallel.agree(0)  # it is whole, so the others may open it
    return _opened(folder, ours)


def digest(folder: Path) -> str:
    """Digest of a folder's manifest, which holds those of all its files.

    Raises:
        Failure: Exit.INPUT, when there is none.
    """
    try:
        return storage.sha256(folder / MANIFEST)
    except OSError as error:
        what = f"`{folder}` holds no features: its {MANIFEST} cannot be read: {error.strerror}"
        raise Failure(Exit.INPUT, what, hint=_MADE) from None


def opened(folder: Path, settings: config.Config, target: Target) -> Kept:
    """Features that `write` has written, for a training with this configuration and target.

    Raises:
        Failure: Exit.INPUT, when there are none, they are not whole, were changed, or belong to something else: then
            with both values of all that differs.
    """
    theirs = found(folder)[1]
    return _opened(folder, identity(settings, target, str(theirs["data"])))


def _opened(folder: Path, ours: dict[str, Any]) -> Kept:
    kept, theirs = found(folder)
    differing = _differences(theirs, ours)
    if differing:
        raise Failure(
            Exit.INPUT,
            f"the features in `{folder}` are not those of this configuration and target",
            details=differing,
            hint="write them anew (`nox -s data -- features --help`), or name the target and configuration they are of",
        )
    return kept


def found(folder: Path) -> tuple[Kept, dict[str, Any]]:
    """Features that `write` has written, and what they are of (`identity`).

    Raises:
        Failure: Exit.INPUT, when there are none, they are not whole, or were changed.
    """
    try:
        manifest = shards.unsealed((folder / MANIFEST).read_bytes())
        theirs = dict(manifest["identity"])
        if not manifest["complete"]:
            raise Failure(
                Exit.INPUT,
                f"the features in `{folder}` are not whole",
                hint="the same `data -- features` command goes on where it was stopped",
            )
        files = [shards.Shard(**each) for each in manifest["shards"]]
        skipped = [int(row) for row in manifest["not_finite"]]
        data = str(theirs["data"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message = f"`{folder}` holds no features: its {MANIFEST} is missing, or was changed"
        raise Failure(Exit.INPUT, message, hint=_MADE) from None
    kept = Kept(
        folder=folder,
        rows=prepared.opened(folder / ROWS, data, without=skipped),
        shelf=shards.Shelf(folder, files, what="the features", mend=f"write them anew: `rm -r {folder}`"),
        skipped=len(skipped),
    )
    return kept, theirs


class _Journal:
    """What has been written so far; a line that was cut short, and what belongs to no line, does not count."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards: list[shards.Shard] = []
        self.not_finite: list[int] = []
        self.values = {"nan": 0, "infinite": 0}
        path = folder / JOURNAL
        whole = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            try:
                content = json.loads(line)
                shard = shards.Shard(**content["shard"])
                if not line.endswith(b"\n") or (folder / shard.file).stat().st_size != shard.size:
                    break
            except (OSError, ValueError, KeyError, TypeError):
                break
            self._take(shard, content["not_finite"], content["values"])
            whole += len(line)
        if path.exists():
            os.truncate(path, whole)
        for stray in folder.glob(".features-*"):
            stray.unlink()

    @property
    def done(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.size for shard in self.shards)

    def add(self, features: Tensor, bad: list[int], values: dict[str, int]) -> None:
        shard = shards.write(self.folder, f"features-{len(self.shards):05d}.safetensors", {"features": features})
        line = json.dumps({"shard": shard.as_json(), "not_finite": bad, "values": values}) + "\n"
        try:
            with (self.folder / JOURNAL).open("a") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise storage.refusal(error, f"write `{JOURNAL}`", self.folder) from error
        self._take(shard, bad, values)

    def content(self) -> dict[str, Any]:
        return {"shards": [s.as_json() for s in self.shards], "not_finite": self.not_finite, "values": self.values}

    def sentence(self, rows: int) -> str:
        nan, infinite = self.values["nan"], self.values["infinite"]
        first = f"; the first is row {self.not_finite[0]}" if self.not_finite else ""
        return (
            f"the features of {len(self.not_finite)} of {rows} rows are not finite "
            f"({nan:,} NaN, {infinite:,} infinite{first})"
        )

    def _take(self, shard: shards.Shard, bad: list[int], values: dict[str, int]) -> None:
        self.shards.append(shard)
        self.not_finite += bad
        for name in self.values:
            self.values[name] += values[name]


def _fill(
    settings: config.Config, target: Target, rows: Stored, journal: _Journal | None, watch: Callable[[int], None]
) -> None:
    """Compute what is not there yet; without a journal only so that a target that is split over processes is whole."""
    total, batch = len(rows.tokens), settings.shapes.rows
    each = max(1, SHARD_BYTES // size(settings, batch)) * batch
    begun = tensor_parallel.agree(journal.done if journal else 0)
    watch(begun)
    for begin in range(begun, total, each):
        numbers = list(range(begin, min(begin + each, total)))
        parts, bad, values = [], [], {"nan": 0, "infinite": 0}
        for start in range(0, len(numbers), batch):
            some = numbers[start : start + batch]
            found = _features(settings, target, rows, some)
            for row, one in zip(some, found, strict=True):
                if not bool(one.isfinite().all()):
                    bad.append(row)
                    values["nan"] += int(one.isnan().sum())
                    values["infinite"] += int(one.isinf().sum())
            parts.append(found)
            watch(len(some))
        if journal is None:
            continue
        journal.add(torch.cat(parts), bad, values)
        if len(journal.not_finite) > FAULTY * total:
            raise Failure(
                Exit.INPUT,
                f"{journal.sentence(total)}, more than {FAULTY:.0%}",
                hint="a target in bfloat16 that overflows may do better in float32: `precision.compute`",
            )


def _features(settings: config.Config, target: Target, rows: Stored, numbers: list[int]) -> Tensor:
    """As a training computes them: always `shapes.rows` at once, since kernels may round otherwise for fewer."""
    tokens, document = rows.tokens[numbers], rows.document[numbers]
    missing = settings.shapes.rows - len(numbers)
    if missing:
        tokens = torch.cat((tokens, tokens.new_zeros(missing, tokens.shape[1])))
        document = torch.cat((document, document.new_full((missing, document.shape[1]), PADDING)))
    device = target.model.device
    found = targets.features(target, tokens.to(device), document.to(device), settings.drafter.target_layer_ids)
    return found[: len(numbers)].to("cpu", DTYPES[settings.precision.compute])


def _require_room(
    settings: config.Config, rows: Stored, folder: Path, journal: _Journal, say: Callable[[str], None]
) -> None:
    total = len(rows.tokens)
    wanted = size(settings, total) + sum(shard.size for shard in rows.shelf.shards)
    there = journal.bytes
    free = shutil.disk_usage(folder).free
    begun = f", {journal.done} are there" if journal.done else ""
    told = f"{_human(wanted)} ({wanted:,} bytes)"
    say(f"the features of {total} rows take {told} in `{folder}`{begun}; {_human(free)} are free")
    if wanted - there > free:
        raise Failure(
            Exit.STORAGE,
            f"the features take {wanted - there:,} bytes more, and the disk of `{folder}` has {free:,} free",
            hint="name a folder on a larger disk with `--out`, or give less data",
        )


def _copy_rows(rows: Stored, folder: Path) -> None:
    if (folder / ROWS / MANIFEST).exists():
        return
    with storage.new_folder(folder / ROWS) as beside:
        for name in (MANIFEST, *(shard.file for shard in rows.shelf.shards)):
            shutil.copyfile(rows.folder / name, beside / name)


def _begun(folder: Path, whole: dict[str, Any]) -> dict[str, Any]:
    """The manifest of an earlier try in this folder; empty when there is none."""
    try:
        found = shards.unsealed((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        others = [each.name for each in folder.iterdir() if not each.name.startswith(".")]
        if others:
            message = f"`{folder}` is not empty, and holds no features: it has `{others[0]}`"
            raise Failure(Exit.USAGE, message, hint="name another folder with `--out`") from None
        return {}
    except (OSError, ValueError, RecursionError):
        message = f"`{folder / MANIFEST}` was changed"
        raise Failure(Exit.INPUT, message, hint=f"write them anew: `rm -r {folder}`") from None
    theirs = {**found.get("identity", {}), "rows": found.get("rows"), "batch": found.get("batch")}
    differing = _differences(theirs, {**whole["identity"], "rows": whole["rows"], "batch": whole["batch"]})
    if differing:
        message = f"`{folder}` holds features of something else"
        raise Failure(Exit.USAGE, message, details=differing, hint="name another folder with `--out`")
    return found


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    names = [name for name in ours if theirs.get(name) != ours[name]]
    width = max(map(len, names), default=0)
    return [f"{name:<{width}}  features {_short(theirs.get(name))}  asked for {_short(ours[name])}" for name in names]


def _short(value: Any) -> str:
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else str(value)


def _human(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _occupied(folder: Path) -> AbstractContextManager[None]:
    message = f"another process writes features into `{folder}`"
    busy = Failure(Exit.USAGE, message, hint="name another folder with `--out`")
    return storage.held(folder / ".lock", "write features", busy)

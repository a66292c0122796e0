"""What goes through the host's memory and disk: packed rows, files of features, and the copy of a sealed cache."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from dflash import data, shards
from dflash.bench.measure import Bench, Contender, Figure, Floor, quantity, race, require_equal
from dflash.graphs import DTYPES
from env.cache import seed
from env.cache.manifest import File

SHARD = 36 << 20
"""Bytes of a file of features or prepared rows, about."""
FILES, BYTES = 150, 14 << 20
"""A sealed cache of the drafter of qwen3-8b for one card, about."""


def packing(bench: Bench, *, documents: int = 8192) -> list[Figure]:
    """Documents packed into rows, against torch's copy of the same tokens one after the other, unpacked."""
    sequence = bench.settings.shapes.sequence
    lengths = np.random.default_rng(0).integers(sequence // 8, sequence, documents).tolist()
    samples = [
        data.Sample(tokens=torch.arange(length), response=torch.arange(length) > length // 3) for length in lengths
    ]

    def ours() -> data.Rows:
        return data.pack(samples, sequence)

    def theirs() -> tuple[Tensor, Tensor]:
        return torch.cat([sample.tokens for sample in samples]), torch.cat([sample.response for sample in samples])

    rows, (tokens, response) = ours(), theirs()
    held = rows.document >= 0
    require_equal("packed tokens", rows.tokens[held].sort().values, tokens.sort().values)
    require_equal("packed responses", rows.response.sum(), response.sum())
    measured, peers = race(bench, ours, theirs, host=True)
    moved = tokens.nbytes + response.nbytes + sum(part.nbytes for part in (rows.tokens, rows.document, rows.response))
    return [
        Figure(
            benchmark="packing",
            what=f"{documents:,} documents into {len(rows.tokens):,} rows of {sequence:,}, {rows.fill:.1%} full",
            ours=measured,
            floor=Floor(amount=moved, what="samples read, rows written", rate=bench.machine.copying_on_host),
            peer="torch.cat of the same, not packed",
            theirs=peers,
        )
    ]


def features(bench: Bench, *, size: int = SHARD) -> list[Figure]:
    """A file of features, written durably with its digest and read checked, against safetensors' own save and load."""
    sizes, shapes = bench.settings.drafter, bench.settings.shapes
    dtype = DTYPES[bench.settings.precision.compute]
    width = len(sizes.target_layer_ids) * sizes.hidden_size
    rows = max(2, size // (shapes.sequence * width * dtype.itemsize))
    whole = {"features": torch.randn(rows, shapes.sequence, width).to(dtype)}
    folder, plain = bench.folder, bench.folder / "plain.safetensors"
    order = torch.arange(rows).flip(0).tolist()
    shard = shards.write(folder, "ours.safetensors", whole)

    def read() -> Tensor:
        return shards.Shelf(folder, [shard], what="the benchmark's features", mend="run it again").read(
            "features", order
        )

    def load() -> Tensor:
        return safetensors.torch.load_file(plain)["features"][order]

    def save() -> None:
        safetensors.torch.save_file(whole, plain)

    save()
    require_equal("features read back", read(), load())
    hashed = Floor(amount=shard.size, what="the file's bytes hashed", rate=bench.machine.hashing)
    written = Floor(amount=shard.size, what="the file's bytes written", rate=bench.machine.writing)
    writing = race(bench, lambda: shards.write(folder, "ours.safetensors", whole), save, host=True)
    reading = race(bench, read, load, host=True)
    plain.unlink()
    (folder / shard.file).unlink()
    what = f"{rows} rows of features, {quantity(shard.size, 'B')}"
    return [
        Figure(
            benchmark="shards",
            what=f"write {what}",
            ours=writing[0],
            floor=max(hashed, written, key=lambda floor: floor.seconds),
            peer="safetensors' save_file: no digest, not forced to the disk",
            theirs=writing[1],
        ),
        Figure(
            benchmark="shards",
            what=f"read {what}, checked",
            ours=reading[0],
            floor=hashed,
            peer="safetensors' load_file: unchecked",
            theirs=reading[1],
        ),
    ]


def seeding(bench: Bench, *, files: int = FILES, size: int = BYTES) -> list[Figure]:
    """A sealed cache copied to this node and checked, and checked again by the next process, against a plain copy."""
    source, home, plain = (bench.folder / name for name in ("sealed", "home", "plain"))
    noted = _files(source, files, size)
    marks = {seed.MARK: b"{}"}

    def copied() -> Path:
        return seed.copied(noted, home, "bench", lambda folder: folder / "bench", marks)

    place = copied()
    shutil.copytree(source, plain)
    for name in noted:
        if (place / name).read_bytes() != (plain / name).read_bytes():
            raise AssertionError(f"{name} is not as it was sealed")
    cold = race(
        bench,
        Contender(call=copied, before=lambda: shutil.rmtree(home)),
        Contender(call=lambda: shutil.copytree(source, plain), before=lambda: shutil.rmtree(plain)),
        host=True,
    )
    warm = race(
        bench, copied, lambda: [hashlib.sha256((plain / name).read_bytes()).digest() for name in noted], host=True
    )
    hashed = Floor(amount=size, what="every byte hashed", rate=bench.machine.hashing)
    for folder in (source, home, plain):
        shutil.rmtree(folder)
    what = f"a cache of {files} files, {quantity(size, 'B')}"
    return [
        Figure(
            benchmark="seeding",
            what=f"copy {what}, checked",
            ours=cold[0],
            floor=hashed,
            peer="shutil.copytree: unchecked",
            theirs=cold[1],
        ),
        Figure(
            benchmark="seeding",
            what=f"check the copy of {what}",
            ours=warm[0],
            floor=hashed,
            peer="hashlib over the same files",
            theirs=warm[1],
        ),
    ]


def _files(folder: Path, count: int, size: int) -> dict[str, tuple[Path, File]]:
    """Files of a cache's number and size, a few large ones and many small, as kernels and their sources are."""
    shares = np.random.default_rng(0).pareto(1.2, count) + 0.1
    lengths = np.maximum(1, shares / shares.sum() * size).astype(int)
    lengths[0] += size - lengths.sum()
    noted = {}
    for number, length in enumerate(lengths.tolist()):
        name = f"{number % 26:02}/{number}.bin"
        path, content = folder / name, np.random.default_rng(number).bytes(length)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        noted[name] = (path, File(size=length, sha256=hashlib.sha256(content).hexdigest()))
    return noted

"""From lines to packed rows: a bounded window of samples at a time, so that memory does not grow with the data."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash import chats, data, shards
from dflash.chats import Faults, Kind, Place, Record, Refused
from dflash.data import Sample
from dflash.rendering import Renderer
from env.errors import Exit, Failure

WINDOW_TOKENS = 1 << 22
"""Tokens that are packed together, and so held in memory: 1,365 rows of 3,072, of which one is ill filled."""
WINDOW_SAMPLES = 1 << 15
"""Samples that are packed together, at most: very short ones cost memory too."""
BATCH_BYTES = 1 << 22
"""Bytes of lines that are made into samples together."""
SHARE = 10
"""At most one sample in this many is held out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What decides the rows, beside the files."""

    sequence: int
    """Tokens of a row (S)."""
    held_out: int
    """Prompts to hold out for the evaluation, at most; what begins with one of them is not trained on."""
    prompt_tokens: int
    """Tokens of a held-out prompt where no response tells its end."""
    faulty: float
    """Share of the lines that may be of no use."""


@dataclass(slots=True)
class Counter:
    """What has been read and kept so far."""

    lines: int = 0
    """Lines that are not blank."""
    documents: int = 0
    """Samples that are trained on."""
    tokens: int = 0
    """Their tokens."""
    truncated: int = 0
    """Samples that were cut to a row."""


def rows(
    files: Sequence[Path], renderer: Renderer, recipe: Recipe, folder: Path, watch: Callable[[int], None]
) -> dict[str, Any]:
    """Write the packed rows of JSON lines into a folder; what they are, as plain data for its manifest.

    Raises:
        Failure: Exit.INPUT, when nothing is left of them or too many lines are of no use; Exit.STORAGE, when the disk
            refuses.
    """
    faults, counter = Faults(), Counter()
    held = _Held(recipe.held_out, recipe.prompt_tokens)
    window = _Window(recipe.sequence, folder, counter)
    for batch, read in _batches(files, faults, counter):
        for (place, _), found in zip(batch, renderer.samples(batch), strict=True):
            if isinstance(found, Refused):
                faults.add(found, place)
                continue
            sample, cut = found
            if cut:
                faults.add(Refused(Kind.CUT), place)
                counter.truncated += 1
            window.take(held.offered(sample))
        watch(read)
    window.take(held.surplus(counter.documents))
    window.flush()
    judge(files, faults, counter.lines, counter.documents, recipe.faulty)
    return {
        "lines": counter.lines,
        "documents": counter.documents,
        "tokens": counter.tokens,
        "truncated": counter.truncated,
        "held_out": held.prompts(),
        "faults": faults.as_json(),
        "shards": [shard.as_json() for shard in window.written],
    }


class _Window:
    """Samples that wait to be packed together, and the files that were written of earlier ones."""

    def __init__(self, sequence: int, folder: Path, counter: Counter) -> None:
        self.sequence, self.folder, self.counter = sequence, folder, counter
        self.written: list[shards.Shard] = []
        self.waiting: list[Sample] = []
        self.tokens = 0

    def take(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self.waiting.append(sample)
            self.tokens += len(sample.tokens)
            self.counter.documents += 1
            self.counter.tokens += len(sample.tokens)
            if self.tokens >= WINDOW_TOKENS or len(self.waiting) >= WINDOW_SAMPLES:
                self.flush()

    def flush(self) -> None:
        if not self.waiting:
            return
        packed = data.pack(self.waiting, self.sequence)
        tensors = {"tokens": packed.tokens.to(torch.int32), "document": packed.document, "response": packed.response}
        self.written.append(shards.write(self.folder, f"rows-{len(self.written):05d}.safetensors", tensors))
        self.waiting.clear()
        self.tokens = 0


class _Held:
    """The samples whose prompts have the smallest digests: a choice that depends on nothing but content.

    Each sample that is offered comes back sooner or later, to be trained on, unless its prompt is among the few. A
    prompt that so many samples begin with that holding them would take a tenth of the data, or as much memory as a
    window, is not among them.
    """

    def __init__(self, most: int, prompt_tokens: int) -> None:
        self.most, self.prompt_tokens = most, prompt_tokens
        self.kept: dict[str, list[Sample]] = {}
        self.order: list[int] = []  # negated digests: the largest first
        self.common: set[str] = set()  # they keep their place in the order, so that no other prompt takes it late
        self.tokens = 0
        self.count = 0

    def offered(self, sample: Sample) -> list[Sample]:
        """Take a sample; give back those that are to be trained on."""
        if self.most == 0:
            return [sample]
        name = hashlib.sha256(self._prompt(sample).numpy().tobytes()).hexdigest()
        if name in self.common:
            return [sample]
        if name not in self.kept:
            heapq.heappush(self.order, -int(name, 16))
        self._keep(name, sample)
        back: list[Sample] = []
        while len(self.order) > self.most:
            back += self._released(f"{-heapq.heappop(self.order):064x}")
        while self.tokens > WINDOW_TOKENS or self.count > WINDOW_SAMPLES:
            back += self._given_up()
        return back

    def surplus(self, trained: int) -> list[Sample]:
        """What is more than a tenth of all; the last prompt stays, even if its samples serve both ends."""
        back: list[Sample] = []
        total = trained + self.count
        while len(self.kept) > 1 and (self.count * SHARE > total or not self.common.isdisjoint(self.kept)):
            back += self._given_up()
        if len(self.kept) == 1 and (self.count * 2 > total or not self.common.isdisjoint(self.kept)):
            back += next(iter(self.kept.values()))
        return back

    def prompts(self) -> list[list[int]]:
        """The held-out prompts, in the order of their digests."""
        return [self._prompt(self.kept[name][0]).tolist() for name in sorted(self.kept)]

    def _given_up(self) -> list[Sample]:
        """The samples of the prompt that has the most of them; of several, that with the largest digest.

        The only prompt keeps one: an evaluation needs something to begin with.
        """
        name = max(self.kept, key=lambda name: (name in self.common, len(self.kept[name]), name))
        self.common.add(name)
        samples = self._released(name)
        if not self.kept:
            self._keep(name, samples.pop(0))
        return samples

    def _keep(self, name: str, sample: Sample) -> None:
        self.kept.setdefault(name, []).append(sample)
        self.tokens += len(sample.tokens)
        self.count += 1

    def _released(self, name: str) -> list[Sample]:
        samples = self.kept.pop(name, [])
        self.tokens -= sum(len(sample.tokens) for sample in samples)
        self.count -= len(samples)
        return samples

    def _prompt(self, sample: Sample) -> Tensor:
        first = int(sample.response.int().argmax())
        return sample.tokens[:first] if first > 1 else sample.tokens[: self.prompt_tokens]


def _batches(
    files: Sequence[Path], faults: Faults, counter: Counter
) -> Iterator[tuple[list[tuple[Place, Record]], int]]:
    """Records of about `BATCH_BYTES` of lines, and the bytes that were read for them."""
    batch: list[tuple[Place, Record]] = []
    read = 0
    for place, line, length in chats.lines(files):
        counter.lines += 1
        read += length
        try:
            batch.append((place, chats.parse(line)[0]))
        except Refused as refused:
            faults.add(refused, place)
        if read >= BATCH_BYTES:
            yield batch, read
            batch, read = [], 0
    yield batch, read


def judge(files: Sequence[Path], faults: Faults, lines: int, documents: int, faulty: float) -> None:
    """Refuse data of which too little is left.

    Raises:
        Failure: Exit.INPUT, when nothing is left, or more than the share `faulty` of the lines is of no use.
    """
    where = f"`{files[0]}`" if len(files) == 1 else f"`{files[0].parent}` and {len(files)} files in all"
    hint = "the formats that are read are in docs/data.md"
    if documents == 0:
        message = f"nothing in {where} can be trained on, of {lines} lines"
        raise Failure(Exit.INPUT, message, details=faults.sentences(), hint=hint)
    if faults.lost > faulty * lines:
        raise Failure(
            Exit.INPUT,
            f"{faults.lost} of {lines} lines of {where} are of no use, more than {faulty:.0%}",
            details=faults.sentences(),
            hint=f"mend them, or allow more with `--faulty`; {hint}",
        )

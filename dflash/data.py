"""Samples packed into rows of one length: every step of a run has one shape, and no document straddles two rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import safetensors
import torch
from safetensors.torch import save
from torch import Tensor

from dflash import storage
from env.errors import Exit, Failure

PADDING = -1
"""Document number of the places at a row's end that hold nothing."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One document: a prompt and what the target answered."""

    tokens: Tensor
    """(T,) int64."""
    response: Tensor
    """(T,) bool: the tokens that anchors may be drawn from and that are learnt."""

    def __post_init__(self) -> None:
        if self.tokens.shape != self.response.shape or self.tokens.ndim != 1:
            raise ValueError(
                f"tokens {tuple(self.tokens.shape)} and response {tuple(self.response.shape)} must be (T,)"
            )
        if self.tokens.dtype != torch.int64 or self.response.dtype != torch.bool:
            raise ValueError(f"tokens are {self.tokens.dtype}, response {self.response.dtype}: must be int64 and bool")


class Column(Protocol):
    """One value for each token of packed rows, (R, S), wherever it lies: a tensor is one."""

    def __len__(self) -> int:
        """R."""

    def __getitem__(self, rows: list[int], /) -> Tensor:
        """Those rows, (len(rows), S)."""


class Packed(Protocol):
    """Packed documents as a trainer reads them, a few rows at a time; padding only at a row's end.

    `Rows` has them in memory, `prepared.Stored` on the disk.
    """

    @property
    def tokens(self) -> Column:
        """(R, S) int64; 0 where there is padding."""

    @property
    def document(self) -> Column:
        """(R, S) int32: number of the document within its row, rising from 0; PADDING where there is none."""

    @property
    def response(self) -> Column:
        """(R, S) bool; False where there is padding."""

    @property
    def documents(self) -> int:
        """Documents packed."""

    @property
    def truncated(self) -> int:
        """Documents that were longer than a row and lost their ends."""

    @property
    def empty(self) -> int:
        """Samples without a token, which are in no row."""

    @property
    def fill(self) -> float:
        """Share of the places that hold a token; 1 when there are none."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Packed documents; padding only at a row's end."""

    tokens: Tensor
    """(R, S) int64; 0 where there is padding."""
    document: Tensor
    """(R, S) int32: number of the document within its row, rising from 0; PADDING where there is none."""
    response: Tensor
    """(R, S) bool; False where there is padding."""
    documents: int
    """Documents packed."""
    truncated: int
    """Documents that were longer than a row and lost their ends."""
    empty: int
    """Samples without a token, which are in no row."""

    @property
    def fill(self) -> float:
        """Share of the places that hold a token; 1 when there are none."""
        return float((self.document >= 0).float().mean()) if self.document.numel() else 1.0


def pack(samples: Sequence[Sample], sequence: int) -> Rows:
    """Pack documents into rows of `sequence` tokens: the longest first, each into the fullest row that has room for it.

    Best fit decreasing needs at most about 11/9 of the fewest possible rows (Johnson, 1974). Among equals the earlier
    comes first, so the same samples give the same rows.
    """
    if sequence <= 0:
        raise ValueError(f"sequence is {sequence}, must be positive")
    lengths = [min(len(sample.tokens), sequence) for sample in samples]
    order = sorted((index for index, length in enumerate(lengths) if length), key=lambda index: -lengths[index])
    rows: list[list[int]] = []
    # rows_with[n]: rows that have room for exactly n tokens more; bit n of `rooms` says whether there is one.
    rows_with: list[list[int]] = [[] for _ in range(sequence + 1)]
    rooms = 0
    for index in order:
        length = lengths[index]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_with[room].pop()
            if not rows_with[room]:
                rooms &= ~(1 << room)
        else:
            room, row = sequence, len(rows)
            rows.append([])
        rows[row].append(index)
        rows_with[room - length].append(row)
        rooms |= 1 << (room - length)
    return _filled(samples, lengths, rows, sequence)


def _filled(samples: Sequence[Sample], lengths: Sequence[int], rows: Sequence[Sequence[int]], sequence: int) -> Rows:
    # as arrays: cutting a tensor takes longer than copying what was cut, and there may be thousands of documents
    tokens = np.zeros((len(rows), sequence), np.int64)
    document = np.full((len(rows), sequence), PADDING, np.int32)
    response = np.zeros((len(rows), sequence), np.bool_)
    for row, members in enumerate(rows):
        start = 0
        for number, index in enumerate(members):
            end = start + lengths[index]
            tokens[row, start:end] = samples[index].tokens.numpy()[: lengths[index]]
            response[row, start:end] = samples[index].response.numpy()[: lengths[index]]
            document[row, start:end] = number
            start = end
    return Rows(
        tokens=torch.from_numpy(tokens),
        document=torch.from_numpy(document),
        response=torch.from_numpy(response),
        documents=sum(map(len, rows)),
        truncated=sum(len(sample.tokens) > sequence for sample in samples),
        empty=sum(length == 0 for length in lengths),
    )


def positions(document: Tensor) -> Tensor:
    """Place of each token within its own document, (b, S) int64, from document numbers (b, S); padding counts too."""
    places = torch.arange(document.shape[1], device=document.device).expand(document.shape)
    first = torch.ones_like(document, dtype=torch.bool)
    first[:, 1:] = document[:, 1:] != document[:, :-1]
    return places - torch.where(first, places, 0).cummax(1).values


def write(rows: Rows, file: Path) -> None:
    """Write rows as one safetensors file, atomically.

    Raises:
        Failure: Exit.STORAGE, when the disk refuses.
    """
    tensors = {"tokens": rows.tokens, "document": rows.document, "response": rows.response}
    counts = {"documents": rows.documents, "truncated": rows.truncated, "empty": rows.empty}
    # One key: safetensors writes several in an order that changes from call to call.
    storage.write(file, save(tensors, metadata={"counts": json.dumps(counts)}))


def read(file: Path) -> Rows:
    """Read what `write` wrote.

    Raises:
        Failure: Exit.INPUT, when there is no such file or it is something else.
    """
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            counts = json.loads((opened.metadata() or {})["counts"])
            return Rows(
                tokens=opened.get_tensor("tokens"),
                document=opened.get_tensor("document"),
                response=opened.get_tensor("response"),
                documents=counts["documents"],
                truncated=counts["truncated"],
                empty=counts["empty"],
            )
    except (OSError, safetensors.SafetensorError, KeyError, ValueError) as error:
        raise Failure(Exit.INPUT, f"the packed rows `{file}` cannot be read: {error}") from None

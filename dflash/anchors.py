"""Which tokens of a packed sequence begin a draft block, and what the block's slots must predict.

Anchors are drawn anew each epoch from response tokens and fill a fixed number of slots (DFlash, section 4.2); the draw
is keyed by (seed, epoch, sample), so a sample has the same anchors on any rank, in any order, after any restart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchors:
    """The slots of b packed sequences."""

    position: Tensor
    """(b, N) int32: place of each anchor, rising; 0 where the slot is unused."""
    start: Tensor
    """(b, N) int32: first place of the anchor's document; equal to `position` where the slot is unused."""
    positions: Tensor
    """(b, N*B) int32: place of each block token, anchor + slot."""
    ids: Tensor
    """(b, N*B) int64: anchor token, then MASK; MASK throughout where the slot is unused."""
    labels: Tensor
    """(b, N*B) int64: the token that each place must predict; 0 where none is asked for."""
    predicts: Tensor
    """(b, N*B) bool: slot 1 and later of a used block, as far as its response goes on."""


def draw(
    tokens: Tensor,
    document: Tensor,
    response: Tensor,
    *,
    samples: list[int],
    seed: int,
    epoch: int,
    slots: int,
    block: int,
    mask_token: int,
) -> Anchors:
    """Draw the anchors of b packed sequences.

    Args:
        tokens: (b, S) integer token ids.
        document: (b, S) integer index of each token's document in its row, -1 for padding.
        response: (b, S) bool, true where the target wrote the token.
        samples: number of each row in the whole data set; with seed and epoch the only source of randomness.
        seed: the run's seed.
        epoch: passes over the data so far.
        slots: N; with fewer valid anchors the last slots stay unused, with more a uniform choice is made.
        block: B.
        mask_token: id that stands for «to be filled in».
    """
    drawn = [
        _draw_row(
            tokens[row].numpy(), document[row].numpy(), response[row].numpy(), (seed, epoch, sample), slots, block
        )
        for row, sample in enumerate(samples)
    ]
    position, start, ids, labels, predicts = (torch.from_numpy(np.stack(part)) for part in zip(*drawn, strict=True))
    ids = torch.where(ids < 0, mask_token, ids)
    offsets = torch.arange(block, dtype=torch.int32)
    positions = (position.unsqueeze(-1) + offsets).flatten(1)
    return Anchors(position=position, start=start, positions=positions, ids=ids, labels=labels, predicts=predicts)


def _draw_row(
    tokens: np.ndarray, document: np.ndarray, response: np.ndarray, key: tuple[int, int, int], slots: int, block: int
) -> tuple[np.ndarray, ...]:
    length = len(tokens)
    written = response & (document >= 0)
    joined = np.zeros(length, bool)  # this token and the next one were both written, in one document
    joined[:-1] = written[:-1] & written[1:] & (document[:-1] == document[1:])
    valid = np.flatnonzero(joined)
    if len(valid) > slots:
        valid = np.sort(np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).permutation(valid)[:slots])
    used = len(valid)

    breaks = np.flatnonzero(~joined)  # the last token of each run of response tokens, and everything outside of runs
    last = breaks[np.searchsorted(breaks, valid)]
    offsets = np.arange(block)
    wanted = valid[:, None] + offsets
    asked = (offsets > 0) & (wanted <= last[:, None])

    position = np.zeros(slots, np.int32)
    position[:used] = valid
    start = np.zeros(slots, np.int32)
    packed = document[: int((document >= 0).sum())]  # documents rise along a row, padding comes after them
    start[:used] = np.searchsorted(packed, document[valid])
    predicts = np.zeros((slots, block), bool)
    predicts[:used] = asked
    labels = np.zeros((slots, block), np.int64)
    labels[:used] = np.where(asked, tokens[np.minimum(wanted, length - 1)], 0)
    ids = np.full((slots, block), -1, np.int64)
    ids[:used, 0] = tokens[valid]
    return position, start, ids.reshape(-1), labels.reshape(-1), predicts.reshape(-1)

"""Who proposes tokens to `dflash.decode.speculate`: a drafter, or prompt lookup, the yardstick without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash.decode import NOTHING
from dflash.model import Drafter

LONGEST = 3
"""Tokens of the longest suffix that prompt lookup looks for."""


class Drafting:
    """A DFlash drafter: one pass fills a block, from the features of all verified tokens (DFlash, section 4.1).

    The context's keys and values are computed once for each verified token and kept; the block's own are not.
    """

    def __init__(self, drafter: Drafter, model: PreTrainedModel, block: int, *, blank: bool = False) -> None:
        """`blank` replaces the target's features by zeros, which shows how much the drafter owes to them."""
        self.taps = drafter.sizes.target_layer_ids
        self.block = block
        self._drafter = drafter
        self._blank = blank
        target: Any = model
        # called rather than read: some targets scale what they look up
        self._embed: nn.Module = target.get_input_embeddings()
        self._head: nn.Module = target.get_output_embeddings()
        self._device = model.device
        self._masks = [drafter.sizes.mask_token_id] * (block - 1)
        self._contexts: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], fresh: Sequence[Tensor]) -> Tensor:
        """Greedy proposals (R, B - 1) int64, a row at a time: rows differ in length and the drafter has no mask."""
        hidden = [self._draft(row, text, new) for row, text, new in zip(rows, tokens, fresh, strict=True)]
        logits: Tensor = self._head(torch.cat(hidden))
        return logits.argmax(-1)

    def _draft(self, row: int, text: Sequence[int], features: Tensor) -> Tensor:
        """Append features (n, K*H) to a row's context and fill its next block: hidden states (1, B - 1, H)."""
        anchor, known = len(text) - 1, features.shape[0]
        places = torch.arange(anchor - known, anchor + self.block, device=self._device).unsqueeze(0)
        features = (torch.zeros_like(features) if self._blank else features).unsqueeze(0)
        context = self._drafter.context(features, places[:, :known])
        if row in self._contexts:
            pairs = zip(self._contexts[row], context, strict=True)
            context = [(torch.cat((k, new_k), 2), torch.cat((v, new_v), 2)) for (k, v), (new_k, new_v) in pairs]
        self._contexts[row] = context
        block = torch.tensor([[text[-1], *self._masks]], device=self._device)
        return self._drafter.draft(self._embed(block), places[:, known:], context)[:, 1:]


class PromptLookup:
    """n-gram drafting: the longest suffix, 3 tokens at most, that occurred before, and what followed it last time.

    Where what followed runs into the end of the text it goes on with the proposal itself, as LZ77 copies, so that a
    text with a period is continued in full: the strongest form of this yardstick.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, model: PreTrainedModel, block: int) -> None:
        self.block = block
        self._device = model.device

    def __call__(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], fresh: Sequence[Tensor]) -> Tensor:
        """Proposals (R, B - 1) int64, NOTHING throughout a row whose last token never occurred before."""
        del rows, fresh
        return torch.tensor([follow(text, self.block - 1) for text in tokens], device=self._device)


def follow(text: Sequence[int], count: int) -> list[int]:
    """What prompt lookup proposes after a text: `count` tokens, all NOTHING where its last token is new."""
    longest, source = 0, 0
    for end in range(len(text) - 2, -1, -1):
        if text[end] == text[-1]:
            length = 1
            while length < min(LONGEST, end + 1) and text[end - length] == text[-1 - length]:
                length += 1
            if length > longest:
                longest, source = length, end + 1
                if length == LONGEST:
                    break
    if longest == 0:
        return [NOTHING] * count
    copied = list(text)
    for place in range(source, source + count):
        copied.append(copied[place])
    return copied[len(text) :]

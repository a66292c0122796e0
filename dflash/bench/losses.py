"""The loss through a frozen head over a large vocabulary: seconds, and the memory that decides what fits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash import caches, compiling
from dflash.bench.measure import Bench, Figure, Floor, memory, race, require_equal
from dflash.bench.training import TOLERANCE
from dflash.graphs import DTYPES
from dflash.loss import linear_cross_entropy
from dflash.model import Drafter

VOCABULARY = 151_936
"""Qwen3's."""
TOKENS, PIECES = 512, 4
"""Few enough for a CPU: what matters is how many of the logits exist at once."""


def run(bench: Bench, *, vocabulary: int = VOCABULARY, tokens: int = TOKENS) -> list[Figure]:
    """Loss and gradient in chunks, compiled as in training, against all logits at once and torch's cross-entropy."""
    width, dtype = bench.settings.drafter.hidden_size, DTYPES[bench.settings.precision.compute]
    caches.opened(bench.settings, bench.device)
    with torch.device("meta"):  # only its loss is of interest here
        chunk = compiling.compile_regions(Drafter(bench.settings.drafter))
    generator = torch.Generator(bench.device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=bench.device).to(dtype)

    hidden, head = drawn(tokens, width).requires_grad_(), drawn(vocabulary, width) * 0.02
    with bench.device:
        labels = torch.arange(tokens) % vocabulary
        weight = torch.full((tokens,), 1 / tokens)

    def ours() -> tuple[Tensor, Tensor]:
        loss, _ = linear_cross_entropy(hidden, head, labels, weight, chunk=chunk, pieces=PIECES)
        return loss.detach(), torch.autograd.grad(loss, hidden)[0]

    def theirs() -> tuple[Tensor, Tensor]:
        loss = (F.cross_entropy((hidden @ head.T).float(), labels, reduction="none") * weight).sum()
        return loss.detach(), torch.autograd.grad(loss, hidden)[0]

    for what, one, other in zip(("the loss", "its gradient"), ours(), theirs(), strict=True):
        require_equal(what, one, other, tolerance=TOLERANCE[dtype])
    held = memory(bench, ours), memory(bench, theirs)
    measured, peers = race(bench, ours, theirs)
    return [
        Figure(
            benchmark="loss",
            what=f"loss and gradient of {tokens:,} tokens over {vocabulary:,}, width {width}",
            ours=measured,
            floor=Floor(
                amount=4.0 * tokens * width * vocabulary,
                what="logits and gradient",
                rate=bench.machine.products(dtype),
            ),
            peer="all logits, torch's cross_entropy",
            theirs=peers,
            memory=None if None in held else (held[0] or 0, held[1] or 0),
        )
    ]

"""Cross-entropy through the target's frozen head, in chunks: logits of a whole step never exist at once.

The head is not trained, so all that flows back is the gradient of the hidden states, and that is known as soon as the
logits are. Computing it in the forward pass costs two products in all, where recomputing logits would cost three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Chunk: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def decay_weights(block: int, gamma: float) -> Tensor:
    """Weight of each slot of a block, (B,) float32: 0 for the anchor, then exp(-(k - 1) / gamma) (DFlash, eq. 4)."""
    k = torch.arange(block, dtype=torch.float32)
    return torch.exp(-(k - 1) / gamma) * (k > 0)


def chunk_loss(hidden: Tensor, head: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk's loss and its gradient.

    Args:
        hidden: (c, H) normed hidden states.
        head: (V, H) the target's head, in hidden's dtype.
        labels: (c,) int64.
        weight: (c,) float32, 0 where nothing is asked for.

    Returns:
        the weighted sum of cross-entropies, () float32; its gradient (c, H) in hidden's dtype; (c,) bool, true where
        no token has a higher logit than the label.
    """
    logits = (hidden @ head.T).float()
    top = logits.amax(-1)
    exponent = (logits - top.unsqueeze(-1)).exp()
    total = exponent.sum(-1)
    of_label = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    loss = ((top + total.log() - of_label) * weight).sum()
    is_label = torch.arange(head.shape[0], device=head.device) == labels.unsqueeze(-1)
    slope = (exponent / total.unsqueeze(-1) - is_label.float()) * weight.unsqueeze(-1)
    return loss, slope.to(hidden.dtype) @ head, of_label >= top


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weight: Tensor, chunk: Chunk, pieces: int
    ) -> tuple[Tensor, Tensor]:
        parts = [part.chunk(pieces) for part in (hidden, labels, weight)]
        losses, slopes, hits = zip(*(chunk(h, head, y, w) for h, y, w in zip(*parts, strict=True)), strict=True)
        ctx.save_for_backward(torch.cat(slopes))
        right = torch.cat(hits)
        ctx.mark_non_differentiable(right)
        return torch.stack(losses).sum(), right

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * slopes[0].to(gradient.dtype), None, None, None, None, None)


def linear_cross_entropy(
    hidden: Tensor, head: Tensor, labels: Tensor, weight: Tensor, *, chunk: Chunk, pieces: int
) -> tuple[Tensor, Tensor]:
    """Weighted sum of cross-entropies, () float32, and where the label is the likeliest token, (T,) bool.

    Args:
        hidden: (T, H); a gradient flows to it and to nothing else.
        head: (V, H) frozen, in hidden's dtype.
        labels: (T,) int64.
        weight: (T,) float32.
        chunk: `chunk_loss`, compiled or not.
        pieces: how many equal chunks T is cut into; must divide it.
    """
    loss, right = _LinearCrossEntropy.apply(hidden, head, labels, weight, chunk, pieces)  # type: ignore[no-untyped-call]
    return loss, right

"""The drafter's training pass: what a run spends most of its time on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash import caches, config, graphs, mask
from dflash.bench.measure import Bench, Figure, Floor, race, require_equal
from dflash.model import Drafter
from dflash.strict import strict

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""How far gradients may be apart: as far as sums in another order round."""


def run(bench: Bench) -> list[Figure]:
    """Forward and backward of one pass, compiled as in training, against the same written plainly and run as it is."""
    settings, device = bench.settings, bench.device
    caches.opened(settings, device)
    rehearsal = graphs.Rehearsal(settings, device)
    batch, ours = rehearsal.batch, rehearsal.drafter
    with device:
        theirs = Drafter(settings.drafter)
    theirs.load_state_dict(ours.state_dict())
    with strict():
        lost, _ = graphs.micro_step(ours, rehearsal.chunk, settings, batch)
        plain = plainly(theirs, settings, batch)
        tolerance = TOLERANCE[batch.head.dtype]
        require_equal("the loss of a pass", lost, plain, tolerance=tolerance)
        require_equal("the gradient of a pass", gradient(ours), gradient(theirs), tolerance=tolerance)
        ours.zero_grad()
        theirs.zero_grad()

        def peer() -> None:
            plainly(theirs, settings, batch)
            theirs.zero_grad()

        measured, peers = race(bench, rehearsal, peer)
    shapes = settings.shapes
    floor = Floor(
        amount=operations(settings, seen=seen(settings, batch), asked=int((batch.weight > 0).sum())),
        what="products of what is seen and asked",
        rate=bench.machine.products(batch.head.dtype),
    )
    return [
        Figure(
            benchmark="pass",
            what=f"forward and backward of {shapes.rows} x {shapes.sequence} tokens, {shapes.anchors} blocks each",
            ours=measured,
            floor=floor,
            peer="the same uncompiled, dense mask, all logits",
            theirs=peers,
        )
    ]


def plainly(drafter: Drafter, settings: config.Config, batch: graphs.Batch) -> Tensor:
    """The pass as one would write it first: booleans for a mask, all logits at once; the loss, () float32."""
    shapes = settings.shapes
    booleans = mask.dense(batch.position, batch.start, sequence=shapes.sequence, block=shapes.block)
    hidden = drafter(batch.embedded, batch.positions, batch.features, booleans)
    logits = (hidden.flatten(0, 1) @ batch.head.T).float()
    loss = (F.cross_entropy(logits, batch.labels, reduction="none") * batch.weight).sum()
    loss.backward()
    return loss.detach()


def gradient(drafter: Drafter) -> Tensor:
    """All gradients in one row."""
    return torch.cat([parameter.grad.flatten() for parameter in drafter.parameters() if parameter.grad is not None])


def seen(settings: config.Config, batch: graphs.Batch) -> int:
    """Pairs of a query and a key that it sees, over all rows of a pass."""
    before = (batch.position - batch.start).sum() * settings.shapes.block
    return int(before) + settings.shapes.rows * settings.shapes.anchors * settings.shapes.block**2


def operations(settings: config.Config, *, seen: int, asked: int) -> float:
    """Operations of the products that a pass cannot do without; a multiplication is one, and an addition.

    A product costs as much again for each gradient that is needed: of the weight and of what was multiplied. Features
    and embeddings are frozen, so the first products of each have a gradient of the weight alone; the head has one of
    the hidden states alone. Attention is two products, and four more backward.

    Args:
        settings: sizes and shapes.
        seen: pairs of a query and a key.
        asked: places whose logits count.
    """
    sizes, shapes = settings.drafter, settings.shapes
    features, block, width = shapes.rows * shapes.sequence, shapes.rows * shapes.queries, sizes.hidden_size
    wide, narrow = sizes.heads * sizes.head_dim, 2 * sizes.kv_heads * sizes.head_dim
    layer = 3 * features * width * narrow
    layer += 3 * block * width * (2 * wide + narrow + 3 * sizes.intermediate_size)
    layer += 6 * seen * wide
    fused = 2 * features * len(sizes.target_layer_ids) * width * width
    frozen = block * width * (wide + narrow)
    return 2.0 * (sizes.layers * layer + fused - frozen + 2 * asked * width * sizes.vocab_size)

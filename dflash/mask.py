"""What a block may see, stated once and drawn twice: as booleans for the dense reference, as tiles for flex attention.

A token of a block whose anchor stands at position a sees features at positions strictly before a in the anchor's own
document, and all of its own block; nothing else (DFlash, section 4.2). Strictly, because when decoding the anchor is
the bonus token, whose own feature does not exist yet. A block of an unused slot sees itself alone, so that no row of
the attention is empty. Since documents are contiguous, what a block sees of the features is one interval [start, a).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash.config import TILE


def dense(position: Tensor, start: Tensor, *, sequence: int, block: int) -> Tensor:
    """Booleans (b, 1, N*B, S + N*B), true where a query sees a key; `position` and `start` are (b, N) integers."""
    places = torch.arange(sequence, device=position.device)
    before = (places >= start.unsqueeze(-1)) & (places < position.unsqueeze(-1))
    slots = torch.arange(position.shape[1] * block, device=position.device) // block
    own = slots.unsqueeze(1) == slots
    features = before.repeat_interleave(block, 1)
    return torch.cat((features, own.expand(len(position), -1, -1)), -1).unsqueeze(1)


def tiled(position: Tensor, start: Tensor, *, sequence: int, block: int) -> BlockMask:
    """The same mask for flex attention, in tiles of 128 by 128, from (b, N) integers on the device that will attend.

    Made of plain tensor operations: `create_block_mask` goes through vmap, whose tracing raises a process-wide flag in
    torch before 2.14, and materialises the whole mask unless it is compiled.
    """
    rows, slots = position.shape
    queries = slots * block
    in_tile = TILE // block
    edges = torch.arange(0, sequence, TILE, device=position.device)
    first, past = edges, edges + TILE
    begins, ends = (part.view(rows, -1, in_tile, 1) for part in (start, position))
    # (b, query tiles, slots in a tile, feature tiles)
    touched = (begins < past) & (ends > first) & (begins < ends)
    whole = (begins <= first) & (ends >= past)
    touches, covers = touched.any(2), whole.all(2)
    own = torch.eye(queries // TILE, dtype=torch.bool, device=position.device).expand(rows, -1, -1)
    none = torch.zeros_like(own)
    alone = block == TILE  # a tile that is one block: all of it is seen
    partial = torch.cat((touches & ~covers, none if alone else own), -1)
    full = torch.cat((covers, own if alone else none), -1)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:  # noqa: ARG001  # flex attention's signature
        slot = q // block
        feature = (kv >= start[b, slot]) & (kv < position[b, slot])
        same_block = (kv - sequence) // block == slot
        return torch.where(kv < sequence, feature, same_block)

    return BlockMask(
        (queries, sequence + queries),
        *_ordered(partial),
        *_ordered(full),
        *_ordered(partial.transpose(1, 2)),
        *_ordered(full.transpose(1, 2)),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask_mod,
    )


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles each row of (b, R, C) has, (b, 1, R), and which, those first, (b, 1, R, C)."""
    count = tiles.sum(-1, dtype=torch.int32)
    which = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count.unsqueeze(1).contiguous(), which.unsqueeze(1).contiguous()

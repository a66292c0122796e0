"""The block mask of flex attention: made anew for every pass."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dflash import config, mask
from dflash.bench.measure import Bench, Figure, Floor, race, require_equal

PAPER = "qwen3-8b"
"""The preset with the paper's shapes, which are measured beside those of the configuration."""


def run(bench: Bench) -> list[Figure]:
    """The tiles from two numbers a slot, against torch's, which ask a function about every pair of query and key."""
    wanted = {bench.settings.shapes, config.load(PAPER).shapes}
    return [figure(bench, shapes) for shapes in sorted(wanted, key=lambda shapes: shapes.queries)]


def figure(bench: Bench, shapes: config.Shapes) -> Figure:
    """The comparison at one set of shapes."""
    with bench.device:
        position = (torch.arange(shapes.anchors) * (shapes.sequence - 1) // shapes.anchors).int().repeat(shapes.rows, 1)
    # two documents a row
    start = torch.where(position > shapes.sequence // 2, shapes.sequence // 2, 0).int()

    def ours() -> BlockMask:
        return mask.tiled(position, start, sequence=shapes.sequence, block=shapes.block)

    rule = ours().mask_mod

    def theirs() -> BlockMask:
        keys = shapes.sequence + shapes.queries
        return create_block_mask(rule, shapes.rows, None, shapes.queries, keys, device=str(bench.device))

    one, other = ours(), theirs()
    require_equal("tiles of the mask", one.to_dense(), other.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        require_equal(name, getattr(one, name), getattr(other, name))
    measured, peers = race(bench, ours, theirs)
    held = [value for value in one.as_tuple() if isinstance(value, torch.Tensor)]
    moved = sum(value.nbytes for value in (position, start, *held))
    return Figure(
        benchmark="mask",
        what=f"tiles of {shapes.rows} x {shapes.queries:,} queries and {shapes.sequence + shapes.queries:,} keys",
        ours=measured,
        floor=Floor(amount=moved, what="slots read, tiles written", rate=bench.machine.copying),
        peer="torch's create_block_mask",
        theirs=peers,
    )

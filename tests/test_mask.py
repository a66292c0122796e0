"""The mask: both drawings of it against a statement of the rule that shares no code with them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dflash import mask
from dflash.anchors import Anchors, draw
from dflash.config import TILE

SEQUENCE, SLOTS, BLOCK = 256, 16, 16


def brute_force(document: np.ndarray, anchors: Anchors, row: int) -> np.ndarray:
    """The rule, query by query and key by key, from the documents and not from their bounds."""
    sequence = len(document)
    slots = anchors.position.shape[1]
    sees = np.zeros((slots * BLOCK, sequence + slots * BLOCK), bool)
    for slot, within in product(range(slots), range(BLOCK)):
        query = slot * BLOCK + within
        anchor = int(anchors.position[row, slot])
        used = bool(anchors.predicts[row, slot * BLOCK : (slot + 1) * BLOCK].any())
        for key in range(sequence):
            own_document = document[key] >= 0 and document[key] == document[anchor]
            sees[query, key] = used and key < anchor and own_document
        for key in range(slots * BLOCK):
            sees[query, sequence + key] = key // BLOCK == slot
    return sees


@st.composite
def packed_rows(draw_from: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Documents of any lengths with response stretches anywhere, then padding."""
    document = np.full(SEQUENCE, -1, np.int32)
    response = np.zeros(SEQUENCE, bool)
    place = 0
    for index in range(draw_from(st.integers(0, 5))):
        length = draw_from(st.integers(1, SEQUENCE))
        document[place : place + length] = index
        begin = draw_from(st.integers(0, length))
        response[place + begin : place + draw_from(st.integers(begin, length))] = True
        place += length
        if place >= SEQUENCE:
            break
    return document, response


def anchors_of(document: np.ndarray, response: np.ndarray, epoch: int = 0) -> Anchors:
    tokens = torch.arange(SEQUENCE).unsqueeze(0)
    parts = [torch.from_numpy(part).unsqueeze(0) for part in (document, response)]
    return draw(tokens, *parts, samples=[0], seed=0, epoch=epoch, slots=SLOTS, block=BLOCK, mask_token=999)


@settings(deadline=None, max_examples=40)
@given(packed_rows())
def test_the_dense_mask_is_the_rule(row: tuple[np.ndarray, np.ndarray]) -> None:
    anchors = anchors_of(*row)
    drawn = mask.dense(anchors.position, anchors.start, sequence=SEQUENCE, block=BLOCK)
    np.testing.assert_array_equal(drawn[0, 0].numpy(), brute_force(row[0], anchors, 0))


@settings(deadline=None, max_examples=25)
@given(packed_rows())
def test_the_tiles_and_their_mask_mod_are_the_rule(row: tuple[np.ndarray, np.ndarray]) -> None:
    anchors = anchors_of(*row)
    drawn = mask.tiled(anchors.position, anchors.start, sequence=SEQUENCE, block=BLOCK)
    rule = brute_force(row[0], anchors, 0)
    queries, keys = (torch.arange(n) for n in rule.shape)
    zero = torch.tensor(0)
    by_mod = drawn.mask_mod(zero, zero, queries.unsqueeze(1), keys.unsqueeze(0))
    np.testing.assert_array_equal(by_mod.numpy(), rule)

    tiles = rule.reshape(rule.shape[0] // TILE, TILE, rule.shape[1] // TILE, TILE)
    some, every = tiles.any((1, 3)), tiles.all((1, 3))
    for count, index, wanted in (
        (drawn.kv_num_blocks, drawn.kv_indices, some & ~every),
        (drawn.full_kv_num_blocks, drawn.full_kv_indices, every),
        (drawn.q_num_blocks, drawn.q_indices, (some & ~every).T),
        (drawn.full_q_num_blocks, drawn.full_q_indices, every.T),
    ):
        assert count is not None
        assert index is not None
        for line, expected in enumerate(np.asarray(wanted)):
            listed = index[0, 0, line, : count[0, 0, line]].tolist()
            assert listed == np.flatnonzero(expected).tolist()


def test_the_tiles_are_those_that_torch_itself_would_make() -> None:
    document = np.repeat(np.arange(4, dtype=np.int32), SEQUENCE // 4)
    anchors = anchors_of(document, np.ones(SEQUENCE, bool))
    ours = mask.tiled(anchors.position, anchors.start, sequence=SEQUENCE, block=BLOCK)
    queries = SLOTS * BLOCK
    theirs = create_block_mask(ours.mask_mod, 1, 1, queries, SEQUENCE + queries, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("block", [2, 16, 128])
def test_blocks_of_every_size_that_divides_a_tile_are_seen_whole(block: int) -> None:
    slots = 2 * TILE // block
    position = torch.arange(slots, dtype=torch.int32).unsqueeze(0) % SEQUENCE
    start = torch.zeros_like(position)
    tiled = mask.tiled(position, start, sequence=SEQUENCE, block=block)
    theirs = create_block_mask(tiled.mask_mod, 1, 1, slots * block, SEQUENCE + slots * block, device="cpu")
    assert torch.equal(tiled.to_dense(), theirs.to_dense())


def test_compiled_flex_attention_over_the_tiles_equals_the_dense_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    document = np.concatenate([np.full(100, 0), np.full(90, 1), np.full(SEQUENCE - 190, -1)]).astype(np.int32)
    anchors = anchors_of(document, document >= 0)
    shapes = ((1, 4, SLOTS * BLOCK, 64), (1, 2, SEQUENCE + SLOTS * BLOCK, 64), (1, 2, SEQUENCE + SLOTS * BLOCK, 64))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    tiles = mask.tiled(anchors.position, anchors.start, sequence=SEQUENCE, block=BLOCK)
    booleans = mask.dense(anchors.position, anchors.start, sequence=SEQUENCE, block=BLOCK)
    with torch.no_grad():
        flex = torch.compile(flex_attention, fullgraph=True, dynamic=False)(q, k, v, block_mask=tiles, enable_gqa=True)
        reference = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=booleans, enable_gqa=True)
    torch.testing.assert_close(flex, reference, rtol=1e-5, atol=1e-5)

"""Anchors: where they may stand, what their blocks predict, and that nothing but (seed, epoch, sample) decides."""

from __future__ import annotations

import torch

from dflash.anchors import Anchors, draw

MASK = 999


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two rows of 64: a document of 30 with a prompt of 10, one of 20 without, padding; then one whole document."""
    tokens = torch.arange(128).view(2, 64)
    document = torch.full((2, 64), -1, dtype=torch.int32)
    document[0, :30], document[0, 30:50], document[1] = 0, 1, 0
    response = document >= 0
    response[0, :10] = False
    return tokens, document, response


def drawn(*, samples: list[int], epoch: int = 0, slots: int = 8, block: int = 8) -> Anchors:
    tokens, document, response = (part[[0, 1]] for part in rows())
    return draw(
        tokens, document, response, samples=samples, seed=1, epoch=epoch, slots=slots, block=block, mask_token=MASK
    )


def test_anchors_are_response_tokens_that_have_a_successor_in_their_own_document() -> None:
    anchors = drawn(samples=[0, 1], slots=60)
    used = anchors.predicts.view(2, 60, 8).any(-1)
    assert sorted(anchors.position[0][used[0]].tolist()) == [*range(10, 29), *range(30, 49)]
    assert anchors.start[0][used[0]].tolist() == [0] * 19 + [30] * 19


def test_labels_stop_where_the_response_stops() -> None:
    anchors = drawn(samples=[0, 1], slots=60)
    labels, predicts = (part.view(2, 60, 8) for part in (anchors.labels, anchors.predicts))
    at = anchors.position[0].tolist().index(27)
    assert labels[0, at].tolist() == [0, 28, 29, 0, 0, 0, 0, 0]
    assert predicts[0, at].tolist() == [False, True, True, False, False, False, False, False]


def test_a_response_that_ends_inside_its_document_ends_the_labels() -> None:
    tokens, document, response = (part[1:] for part in rows())
    response = response.clone()
    response[0, 20:30] = False
    anchors = draw(tokens, document, response, samples=[0], seed=0, epoch=0, slots=63, block=8, mask_token=MASK)
    predicts = anchors.predicts.view(63, 8)
    at = anchors.position[0].tolist().index(18)
    assert predicts[at].nonzero().flatten().tolist() == [1]
    assert 19 not in anchors.position[0].tolist()


def test_unused_slots_hold_masks_and_predict_nothing() -> None:
    tokens, document, response = rows()
    anchors = draw(
        tokens, document, torch.zeros_like(response), samples=[0, 1], seed=0, epoch=0, slots=8, block=8, mask_token=MASK
    )
    assert not anchors.predicts.any()
    assert (anchors.ids == MASK).all()
    assert torch.equal(anchors.position, anchors.start)


def test_a_block_is_its_anchor_and_masks_at_consecutive_places() -> None:
    anchors = drawn(samples=[0, 1])
    ids, positions = anchors.ids.view(2, 8, 8), anchors.positions.view(2, 8, 8)
    assert (ids[:, :, 1:] == MASK).all()
    assert torch.equal(ids[1, :, 0], anchors.position[1].long() + 64)
    assert torch.equal(positions, anchors.position.unsqueeze(-1) + torch.arange(8, dtype=torch.int32))


def test_only_seed_epoch_and_sample_decide_the_draw() -> None:
    first = drawn(samples=[5, 7])
    assert torch.equal(drawn(samples=[5, 7]).position, first.position)
    assert torch.equal(drawn(samples=[3, 7]).position[1], first.position[1])
    assert not torch.equal(drawn(samples=[5, 8]).position[1], first.position[1])
    assert not torch.equal(drawn(samples=[5, 7], epoch=1).position, first.position)


def test_every_valid_anchor_is_equally_likely() -> None:
    counts = torch.zeros(64)
    for epoch in range(2000):
        counts[drawn(samples=[0, 1], epoch=epoch).position[1].long()] += 1
    share = counts[:63] / 2000
    assert abs(share.mean().item() - 8 / 63) < 1e-6
    assert share.min() > 0.09
    assert share.max() < 0.165

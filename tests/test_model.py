"""The drafter: its tensors, and that training and decoding compute the same thing."""

from __future__ import annotations

import torch

from dflash import config, mask
from dflash.anchors import draw
from dflash.model import Drafter


def small() -> tuple[Drafter, config.Drafter]:
    sizes = config.Drafter(
        hidden_size=32,
        intermediate_size=48,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab_size=64,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        mask_token_id=63,
        target_layers=4,
        target_layer_ids=(0, 2),
    )
    drafter = Drafter(sizes)
    drafter.initialise(0)
    return drafter, sizes


def test_there_are_eleven_tensors_a_layer_and_three_with_the_published_names() -> None:
    drafter, _ = small()
    names = {name for name, _ in drafter.named_parameters()}
    assert len(names) == 11 * 2 + 3
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.k_norm.weight"} <= names
    assert drafter.fc.weight.shape == (32, 64)
    assert all(parameter.dtype == torch.float32 for parameter in drafter.parameters())


def test_the_same_seed_gives_the_same_weights_and_another_seed_does_not() -> None:
    first, second = small()[0], small()[0]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    second.initialise(1)
    assert not torch.equal(first.fc.weight, second.fc.weight)


def test_what_training_computes_for_a_block_is_what_decoding_computes_for_it() -> None:
    """A block in a packed row of two documents, against the same block drafted from its own document alone."""
    drafter, sizes = small()
    generator = torch.Generator().manual_seed(1)
    sequence, slots, block = 128, 32, 4
    document = torch.cat((torch.zeros(50), torch.ones(60), torch.full((18,), -1.0))).int().unsqueeze(0)
    tokens = torch.randint(0, 60, (1, sequence), generator=generator)
    anchors = draw(
        tokens,
        document,
        document >= 0,
        samples=[0],
        seed=0,
        epoch=0,
        slots=slots,
        block=block,
        mask_token=sizes.mask_token_id,
    )
    features = torch.randn(1, sequence, 64, generator=generator)
    table = torch.randn(64, 32, generator=generator)
    seen = mask.dense(anchors.position, anchors.start, sequence=sequence, block=block)
    with torch.no_grad():
        trained = drafter(table[anchors.ids], anchors.positions, features, seen).view(slots, block, -1)
        for slot in range(slots):
            begin, anchor = int(anchors.start[0, slot]), int(anchors.position[0, slot])
            own = features[:, begin:anchor]
            context = drafter.context(own, torch.arange(anchor - begin).unsqueeze(0))
            at = torch.arange(anchor - begin, anchor - begin + block).unsqueeze(0)
            ids = anchors.ids.view(slots, block)[slot].unsqueeze(0)
            decoded = drafter.draft(table[ids], at, context)[0]
            torch.testing.assert_close(trained[slot], decoded, rtol=1e-4, atol=1e-5)


def test_features_at_and_after_an_anchor_cannot_reach_its_block() -> None:
    drafter, _ = small()
    position = torch.full((1, 32), 40, dtype=torch.int32)
    seen = mask.dense(position, torch.zeros_like(position), sequence=128, block=4)
    features = torch.randn(1, 128, 64, requires_grad=True)
    out = drafter(torch.randn(1, 128, 32), torch.arange(128).unsqueeze(0), features, seen)
    (gradient,) = torch.autograd.grad(out.square().sum(), features)
    assert gradient[0, :40].abs().amax(-1).min() > 0
    assert not gradient[0, 40:].any()

"""The loss: against torch's own cross-entropy, value and gradient."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from dflash.loss import chunk_loss, decay_weights, linear_cross_entropy


def test_weights_fall_as_the_paper_says() -> None:
    weights = decay_weights(4, 7.0)
    assert weights.tolist() == pytest.approx([0.0, 1.0, math.exp(-1 / 7), math.exp(-2 / 7)])


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_loss_and_gradient_are_those_of_plain_cross_entropy(pieces: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(32, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(50, 16, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 50, (32,), generator=generator)
    weight = torch.rand(32, generator=generator) * (torch.arange(32) % 3 > 0)

    loss, right = linear_cross_entropy(hidden, head, labels, weight, chunk=chunk_loss, pieces=pieces)
    (gradient,) = torch.autograd.grad(loss * 0.5, hidden)

    logits = hidden @ head.T
    plain = (F.cross_entropy(logits, labels, reduction="none") * weight).sum()
    (expected,) = torch.autograd.grad(plain * 0.5, hidden)
    torch.testing.assert_close(loss.double(), plain.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(right, logits.argmax(-1) == labels)


def test_places_that_predict_nothing_get_no_gradient() -> None:
    hidden = torch.randn(8, 4, requires_grad=True)
    weight = torch.zeros(8)
    loss, _ = linear_cross_entropy(
        hidden, torch.randn(9, 4), torch.zeros(8, dtype=torch.int64), weight, chunk=chunk_loss, pieces=2
    )
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_huge_logits_stay_finite() -> None:
    hidden = torch.full((4, 4), 1e4, requires_grad=True)
    loss, _ = linear_cross_entropy(
        hidden, torch.eye(4) * 1e4, torch.arange(4), torch.ones(4), chunk=chunk_loss, pieces=1
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()

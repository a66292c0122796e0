"""Small training steps that the tests bake, as `package.module:function` names them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash import mask


class Block(nn.Module):
    """A normed product with an activation: a product, a pointwise kernel and a reduction."""

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.relu(self.linear(self.norm(x))) * self.scale
        return out


def block(device: str, width: int = 256) -> Callable[..., Any]:
    """A module that is compiled whole; called with an example, its result is run backward by the bake."""
    with torch.device(device):
        made = Block(width)
    made.compile(fullgraph=True, dynamic=False)
    return made


def step(device: str) -> Callable[..., Any]:
    """A whole step in parts: two modules that share a graph, plain operations between them, its own backward pass."""
    with torch.device(device):
        blocks = [Block(128), Block(128)]
    for one in blocks:
        one.compile(fullgraph=True, dynamic=False)

    def run(x: Tensor) -> None:
        for one in blocks:
            x = one(x) + 1
        x.sum().backward()
        assert all(parameter.grad is not None for one in blocks for parameter in one.parameters())

    return run


def attention(device: str) -> Callable[..., Any]:
    """Block-sparse attention, forward and backward."""

    def attend(q: Tensor, k: Tensor, v: Tensor, tiles: BlockMask) -> Any:
        return flex_attention(q, k, v, block_mask=tiles)

    compiled = torch.compile(attend, fullgraph=True, dynamic=False)

    def run(q: Tensor) -> Any:
        position = torch.zeros(1, 8, dtype=torch.int32, device=device)
        tiles = mask.tiled(position, position, sequence=128, block=16)
        keys = torch.cat((q, q), 2)
        return compiled(q, keys, keys, tiles)

    return run


def changing(device: str) -> Callable[..., Any]:
    """A step with the process's number in its graph: it can hit nowhere."""
    with torch.device(device):
        made = Block(128, scale=float(os.getpid()))
    made.compile(fullgraph=True, dynamic=False)
    return made


def growing(device: str) -> Callable[..., Any]:
    """A step without a fixed shape."""
    compiled = torch.compile(lambda x: x.nonzero(), fullgraph=True, dynamic=True)
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    return compiled


def broken(device: str) -> Callable[..., Any]:
    """A factory that cannot build its step."""
    raise RuntimeError("this step needs a grail")


def gone(device: str) -> Callable[..., Any]:
    """A step whose process dies."""
    os.kill(os.getpid(), 9)
    raise AssertionError


def wide(device: str) -> Callable[..., Any]:
    """A norm as wide as a drafter's, 4096, whose two gradients both read four tensors or more."""
    with torch.device(device):
        norm = nn.RMSNorm(4096)

    def run(x: Tensor) -> Any:
        scales = x.detach()
        return norm(x[0]) * scales[1] * scales[2] * scales[3]

    compiled: Callable[..., Any] = torch.compile(run, fullgraph=True, dynamic=False)
    return compiled


def greedy(device: str) -> Callable[..., Any]:
    """As `wide`, but each torch is to hold three stages of the fused kernel, whether they fit or not."""
    settings: Any = torch._inductor.config.triton
    wanted = {
        "mix_order_reduction": True,
        "mix_order_reduction_allow_multi_stages": True,
        "dynamic_disable_pipelining": False,
    }
    for name, value in wanted.items():
        if hasattr(settings, name):
            setattr(settings, name, value)
    return wide(device)

"""The drafter: a Qwen3-style decoder without a causal mask that reads a frozen target's hidden states.

Every layer attends to [features ; block] with the same key and value weights; only block tokens have queries, and
features are never updated (DFlash, section 4.1 and appendix A.3). Parameters are float32 and carry the names of the
published checkpoints; products run in the dtype of the activations.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash import config

Mask: TypeAlias = "BlockMask | Tensor | None"
"""What a block may see: a BlockMask for flex attention, booleans (b, 1, N*B, S+N*B) for the dense reference, or None
for everything, as when decoding."""

Rotation: TypeAlias = tuple[Tensor, Tensor]
"""Cosine and sine of each position, (b, 1, T, D) each."""


class Linear(nn.Linear):
    """A product without bias, in the dtype of its input: the float32 weight's working copy lives for one call."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root mean square normalisation in float32, returned in the dtype of its input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to (..., width)."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention of a block over [features ; block], with normed queries and keys as in Qwen3."""

    def __init__(self, sizes: config.Drafter) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.q_proj = Linear(sizes.hidden_size, sizes.heads * sizes.head_dim)
        self.k_proj = Linear(sizes.hidden_size, sizes.kv_heads * sizes.head_dim)
        self.v_proj = Linear(sizes.hidden_size, sizes.kv_heads * sizes.head_dim)
        self.o_proj = Linear(sizes.heads * sizes.head_dim, sizes.hidden_size)
        self.q_norm = RMSNorm(sizes.head_dim, sizes.rms_norm_eps)
        self.k_norm = RMSNorm(sizes.head_dim, sizes.rms_norm_eps)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of x (b, T, H): (b, kv_heads, T, D) each."""
        keys = rotate(self.k_norm(self._split(self.k_proj(x))), rotation)
        return keys, self._split(self.v_proj(x))

    def forward(self, x: Tensor, rotation: Rotation, context: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """Attend from block tokens x (b, Q, H) to `context`, (b, kv_heads, T, D) twice, and to themselves."""
        queries = rotate(self.q_norm(self._split(self.q_proj(x))), rotation)
        keys, values = self.keys_values(x, rotation)
        keys = torch.cat((context[0], keys), 2)
        values = torch.cat((context[1], values), 2)
        if isinstance(mask, BlockMask):
            seen = flex_attention(queries, keys, values, block_mask=mask, enable_gqa=True)
            assert isinstance(seen, Tensor)
        else:
            seen = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        out: Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """Gated feed-forward network with SiLU."""

    def __init__(self, sizes: config.Drafter) -> None:
        super().__init__()
        self.gate_proj = Linear(sizes.hidden_size, sizes.intermediate_size)
        self.up_proj = Linear(sizes.hidden_size, sizes.intermediate_size)
        self.down_proj = Linear(sizes.intermediate_size, sizes.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(..., H) to (..., H)."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer, and one compiled region: all layers share a graph, so it is traced once."""

    def __init__(self, sizes: config.Drafter) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = MLP(sizes)

    def forward(self, x: Tensor, features: Tensor, at_block: Rotation, at_features: Rotation, mask: Mask) -> Tensor:
        """Block tokens x (b, Q, H) with features (b, S, H) to (b, Q, H)."""
        context = self.self_attn.keys_values(features, at_features)
        return self.attend(x, at_block, context, mask)

    def attend(self, x: Tensor, rotation: Rotation, context: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """The layer over keys and values that are already there."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, context, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Drafter(nn.Module):
    """K tapped target layers in, hidden states of a block out; embeddings and head stay the target's."""

    def __init__(self, sizes: config.Drafter) -> None:
        super().__init__()
        self.sizes = sizes
        self.fc = Linear(len(sizes.target_layer_ids) * sizes.hidden_size, sizes.hidden_size)
        self.hidden_norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def initialise(self, seed: int) -> None:
        """Draw every matrix from N(0, 0.02), as Qwen3 does; drawn on the CPU, so that all devices start alike."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                drawn = torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator)
                parameter.data.copy_(drawn)

    def project(self, features: Tensor) -> Tensor:
        """Tapped hidden states (b, T, K*H) to the one feature (b, T, H) that all layers share."""
        out: Tensor = self.hidden_norm(self.fc(features))
        return out

    def forward(self, embedded: Tensor, positions: Tensor, features: Tensor, mask: Mask) -> Tensor:
        """Training pass.

        Args:
            embedded: (b, N*B, H) embeddings of [anchor, MASK, ...] of every slot.
            positions: (b, N*B) integer place of each block token in the packed sequence.
            features: (b, S, K*H) tapped hidden states of the target.
            mask: what each block token may see; see `dflash.mask`.

        Returns:
            (b, N*B, H) normed hidden states, to be multiplied with the target's head.
        """
        fused = self.project(features)
        places = torch.arange(fused.shape[1], device=fused.device).unsqueeze(0)
        at_features = self.rotation(places, fused.dtype)
        at_block = self.rotation(positions, fused.dtype)
        # every layer's input requires a gradient, the first one's too: one graph then serves all layers
        x = embedded.detach().requires_grad_(torch.is_grad_enabled())
        for layer in self.layers:
            x = layer(x, fused, at_block, at_features, mask)
        out: Tensor = self.norm(x)
        return out

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values, (b, kv_heads, T, D) for each layer, of features (b, T, K*H) at positions (b, T)."""
        fused = self.project(features)
        rotation = self.rotation(positions, fused.dtype)
        return [layer.self_attn.keys_values(fused, rotation) for layer in self._layers()]

    def draft(self, embedded: Tensor, positions: Tensor, context: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One block, embedded (b, B, H) at positions (b, B), over a context: normed hidden states (b, B, H)."""
        rotation = self.rotation(positions, embedded.dtype)
        x = embedded
        for layer, seen in zip(self._layers(), context, strict=True):
            x = layer.attend(x, rotation, seen, None)
        out: Tensor = self.norm(x)
        return out

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Cosine and sine of rotary embedding (RoFormer, section 3.4.2), computed in float32, (b, 1, T, D) each."""
        pairs = torch.arange(0, self.sizes.head_dim, 2, device=positions.device, dtype=torch.float32)
        frequency = self.sizes.rope_theta ** (-pairs / self.sizes.head_dim)
        angle = positions.unsqueeze(-1).float() * frequency
        angle = torch.cat((angle, angle), -1).unsqueeze(1)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the pairs (i, i + D/2) of x (b, heads, T, D) by their positions' angles, as GPT-NeoX and Qwen3 do."""
    cosine, sine = rotation
    left, right = x.chunk(2, -1)
    return x * cosine + torch.cat((-right, left), -1) * sine

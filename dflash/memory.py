"""What trades time for memory: layers that are computed again, and a training state that is spread over the drafters.

Both stand around the compiled layers, so that the graphs are the baked ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils import checkpoint as activations

from dflash.model import Drafter

MARK = "_is_fsdp_managed_module"
"""What `fully_shard` sets on every module below, and Dynamo looks at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """Among whom the training state is spread."""

    mesh: DeviceMesh
    """The drafters, in the order of their numbers."""
    saving: dist.ProcessGroup
    """The same over Gloo, for threads that write checkpoints while the others' collectives go on."""


def peak(device: torch.device) -> dict[str, float]:
    """The most bytes that tensors have taken on a GPU so far, for the metrics; nothing elsewhere."""
    return {"peak_memory_bytes": float(torch.cuda.max_memory_allocated(device))} if device.type == "cuda" else {}


def recompute(drafter: Drafter) -> None:
    """Keep only what goes into each decoder layer, and compute its insides again in the backward pass."""
    for layer in drafter.layers:
        forward: Any = partial(activations.checkpoint, layer.forward, use_reentrant=False)
        layer.forward = forward


def shard(drafter: Drafter, mesh: DeviceMesh) -> None:
    """Keep 1/D of each float32 weight here, and so of its gradient and moments (FSDP2, PyTorch FSDP, section 3).

    A layer's weights are gathered whole before it runs, forward and backward. After each backward pass every drafter is
    left with the sum of its share's gradients: nobody has to add them up afterwards. All drafters must therefore run
    the same number of passes.
    """
    parts = [*drafter.layers, drafter]
    for part in parts:
        fully_shard(part, mesh=mesh)
    for part in parts:
        assert isinstance(part, FSDPModule)
        part.set_gradient_divide_factor(1.0)  # the loss is divided by the weights of the whole step already
        part.set_force_sum_reduction_for_comms(True)  # Gloo has no other reduction
    for layer in drafter.layers:
        _name_as_unsharded(layer)


def _name_as_unsharded(layer: nn.Module) -> None:
    """Let Dynamo name the weights as those of a module that is not sharded, since names enter the keys of its caches.

    While a layer runs, its weights are ordinary tensors, so nothing else depends on it. The mark was read in torch
    2.10, 2.11 and 2.15.
    """
    for module in layer.modules():
        if getattr(module, MARK, None) is not True:
            raise RuntimeError(f"torch {torch.__version__} marks sharded modules in another way than by `{MARK}`")
        setattr(module, MARK, False)

"""A target larger than one GPU: split over processes by the plan that transformers has for its architecture.

Every process of the group runs the same calls on the same tokens, and gets the same whole features.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from env.errors import Exit, Failure


def split(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Keep this process's part of a model that lies on the CPU, moved to the group's device.

    `from_pretrained` would split while it reads, but only with a package that nothing else here needs; so each process
    holds the whole model in host memory for a moment.

    Raises:
        Failure: Exit.USAGE, when there is no process group; Exit.INPUT, when transformers cannot split this model.
    """
    if not dist.is_initialized():
        hint = "`torchrun --nproc-per-node 2 -m dflash …` starts two"
        raise Failure(Exit.USAGE, f"the target `{name}` is to be split over processes, but there is one", hint=hint)
    size = dist.get_world_size()
    kind: Any = type(model)
    untyped: Any = model
    output = untyped.get_output_embeddings()
    if output is not None and output.weight is untyped.get_input_embeddings().weight:
        # the plan splits the two apart, each in its own way
        output.weight = nn.Parameter(output.weight.detach().clone(), requires_grad=False)
    try:
        plan, _, mesh = kind.prepare_distribute_model(DistributedConfig(tp_plan="auto", tp_size=size), device_map=None)
        made: PreTrainedModel = kind.maybe_distribute_model(model, plan, mesh)
    except (ValueError, RuntimeError, NotImplementedError, KeyError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Failure(Exit.INPUT, f"transformers cannot split the target `{name}` {size} ways: {said}") from None
    return made


def whole(tensor: Tensor) -> Tensor:
    """A weight's full value, also where this process holds a part; then all processes must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

"""What is compiled, and how it is known that nothing else is.

Each decoder layer is a region of its own: all layers share one graph pair, which is traced once. The chunk of the loss
is the other region. Everything around them is a handful of plain operations.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch

from dflash import tracing
from dflash.loss import chunk_loss
from env.errors import Exit, Failure

if TYPE_CHECKING:
    from dflash.loss import Chunk
    from dflash.model import Drafter


def compile_regions(drafter: Drafter) -> Chunk:
    """Mark the drafter's layers for compilation in place and return the compiled chunk of the loss.

    Raises:
        Failure: Exit.HOST, when there is no C++ compiler for the kernels' host code.
    """
    _require_compiler()
    tracing.cure()  # before anything is wrapped: a wrapper keeps the function that tells it whether a trace is going on
    for layer in drafter.layers:
        # not `Module.compile`, which would have what FSDP2 does around a layer inside the graph
        layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)
    compiled: Chunk = torch.compile(chunk_loss, fullgraph=True, dynamic=False)
    return compiled


def _require_compiler() -> None:
    from torch._inductor import config

    wanted = [name for name in config.cpp.cxx if name] if isinstance(config.cpp.cxx, tuple) else [config.cpp.cxx]
    if not any(shutil.which(name) for name in wanted):
        raise Failure(
            Exit.HOST,
            f"no C++ compiler: `{'`, `'.join(wanted)}` is not on the PATH",
            hint="install one (`apt-get install g++`), or name yours in the variable CXX",
        )

"""Do beforehand what the first compiled call would do first: most of a warm first step depends on no data.

Imports, two hashes, the start of the GPU's libraries, and the tracer's own tables, which fill up as it traces for the
first time. All of it can happen while a target is being loaded.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from dflash import config, mask
from dflash.loss import chunk_loss
from dflash.model import Layer

MODULES = (
    "torch._dynamo.backends.cudagraphs",
    "torch._dynamo.backends.distributed",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.backends.onnxrt",
    "torch._dynamo.backends.tensorrt",
    "torch._dynamo.backends.torchxla",
    "torch._dynamo.backends.tvm",
    "torch._dynamo.dce_extra_outputs",
    "torch._export.db.logging",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.compile_fx",
    "torch._inductor.hooks",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch.fx.experimental.validator",
)
"""What torch 2.11 imports in the first compiled call, late and one by one; other versions have fewer of them."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

SMALL = config.Drafter(
    hidden_size=128,
    intermediate_size=128,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=64,
    vocab_size=256,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    mask_token_id=0,
    target_layers=1,
    target_layer_ids=(0,),
)
"""A drafter that has every operation of a real one and takes no time."""


def warm_up(settings: config.Config, device: torch.device) -> None:
    """Import what compiling imports, hash what every cache key contains, start the device, and trace once for nothing.

    The current device must be `device`: its name is part of a key. No cache is asked or filled and nothing of the
    drafter is compiled: only time depends on this.
    """
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError:  # another torch: it then imports something else, later
            continue
    from torch._inductor import cpu_vec_isa
    from torch._inductor.codecache import CacheBase, torch_key
    from torch._inductor.codegen.common import init_backend_registration

    init_backend_registration()
    torch_key()
    if device.type == "cuda":
        CacheBase.get_system()
        _start_triton(device)
        _start_products(settings, device)
    else:
        cpu_vec_isa.pick_vec_isa()  # tries each instruction set in a process of its own
    _trace(settings, device)


def _start_triton(device: torch.device) -> None:
    """Let Triton build the library with which it talks to the driver, in the cache in use rather than in a home folder.

    It needs a C compiler and 0.4 s, once for each cache. torch names this folder too, but only with the first kernel,
    when the library is already in `~/.triton`, or could not be written there.
    """
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from triton.runtime import driver  # type: ignore[import-untyped]  # has no types

    os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device.index or 0))
    driver.active.get_current_target()


def _start_products(settings: config.Config, device: torch.device) -> None:
    """Multiply once at each of the drafter's shapes, both ways: cuBLAS loads a kernel when it is first used."""
    sizes, shapes = settings.drafter, settings.shapes
    dtype = DTYPES[settings.precision.compute]
    wide, narrow = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    block, features = shapes.rows * shapes.queries, shapes.rows * shapes.sequence
    for rows, inputs, outputs in {
        (features, len(sizes.target_layer_ids) * sizes.hidden_size, sizes.hidden_size),
        (features, sizes.hidden_size, narrow),
        (block, sizes.hidden_size, wide),
        (block, sizes.hidden_size, narrow),
        (block, wide, sizes.hidden_size),
        (block, sizes.hidden_size, sizes.intermediate_size),
        (block, sizes.intermediate_size, sizes.hidden_size),
        (settings.loss.chunk_blocks * shapes.block, sizes.hidden_size, sizes.vocab_size),
    }:
        x = torch.zeros(rows, inputs, device=device, dtype=dtype, requires_grad=True)
        weight = torch.zeros(outputs, inputs, device=device, dtype=dtype, requires_grad=True)
        product = F.linear(x, weight)
        product.backward(product.detach())


class _TracedError(Exception):
    """Ends a rehearsal where compiling would begin."""


def _stop(*_: Any) -> Any:
    raise _TracedError


def _trace(settings: config.Config, device: torch.device) -> None:
    """Trace both regions, narrow but at the real lengths, up to the compiler."""
    shapes, dtype = settings.shapes, DTYPES[settings.precision.compute]

    def drawn(*shape: int) -> Tensor:
        return torch.zeros(shape, device=device, dtype=dtype)

    with device:
        layer = Layer(SMALL)
    layer.compile(backend=_stop, fullgraph=True, dynamic=False)
    x = drawn(shapes.rows, shapes.queries, SMALL.hidden_size).requires_grad_()
    features = drawn(shapes.rows, shapes.sequence, SMALL.hidden_size).requires_grad_()
    at_block = (drawn(shapes.rows, 1, shapes.queries, SMALL.head_dim),) * 2
    at_features = (drawn(1, 1, shapes.sequence, SMALL.head_dim),) * 2
    position = torch.zeros(shapes.rows, shapes.anchors, dtype=torch.int32, device=device)
    seen = mask.tiled if device.type == "cuda" else mask.dense
    tiles = seen(position, position, sequence=shapes.sequence, block=shapes.block)
    rows = settings.loss.chunk_blocks * shapes.block
    labels = torch.zeros(rows, dtype=torch.int64, device=device)
    traced = torch.compile(chunk_loss, backend=_stop, fullgraph=True, dynamic=False)
    for region, inputs in (
        (layer, (x, features, at_block, at_features, tiles)),
        (traced, (drawn(rows, SMALL.hidden_size), drawn(SMALL.vocab_size, SMALL.hidden_size), labels, labels.float())),
    ):
        try:
            with torch.set_grad_enabled(region is layer):
                region(*inputs)
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, _TracedError):
                raise

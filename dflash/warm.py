"""Do beforehand what the first compiled call would do first: a third of a warm first step is imports and two hashes.

None of it depends on the model or on data, so it can run while a target is being loaded.
"""

from __future__ import annotations

import importlib
import importlib.util

from torch import device as Device

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
"""What torch 2.11 imports in the first compiled call, late and one by one (0.4 s of 1.7 s); others import less."""


def warm_up(device: Device) -> None:
    """Import what compiling imports, and compute the parts of every cache key that hash torch and Triton themselves.

    The current device must be `device`: its name is one of those parts. Only time depends on this; a module that this
    torch does not have is passed over.
    """
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    from torch._inductor.codecache import CacheBase, torch_key
    from torch._inductor.codegen.common import init_backend_registration

    init_backend_registration()
    torch_key()
    if device.type == "cuda":
        CacheBase.get_system()

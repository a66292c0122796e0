"""Whether what inductor makes fits a card's shared memory: the setting that depends on it, and the sentence if not.

Inductor fuses the two gradients of an RMSNorm, a sum along rows and one along columns, into one kernel that reads
ahead. torch 2.10 lets it hold three stages of its inputs in shared memory and tries nothing smaller; 2.11 holds one,
and 2.15 falls back to one where three do not fit.
"""

# ruff: noqa: SLF001  # torch's settings are private by name

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from env.errors import Exit, Failure, chain

READ_IN = ("2.10", "2.11", "2.15")
"""The versions of torch in which `_inductor.config.triton`, `persistent_reduction` and the launcher were read."""

FUSION = "mix_order_reduction"
LIMIT = "mix_order_reduction_allow_multi_stages"
"""A torch that has this setting sees to it (2.11: off; 2.15: on, with a way back). 2.10 has the fusion as a whole."""

FACTOR = f"inductor.triton.{FUSION}"
VARIABLE = "TORCHINDUCTOR_MIX_ORDER_REDUCTION"
"""Feeds the fusion's setting; whoever keeps it in the environment (`DFLASH_KEEP`) has decided."""

THREE_STAGES = 163_928
"""Bytes of shared memory a block needs for that kernel at a width of 2,049 to 4,096, the larger of its configurations.

What qwen3-8b, in bfloat16, was refused for by torch 2.10 with Triton 3.6. A card with more keeps the fusion.
"""

REFUSED = re.compile(r"out of resource: (.+?),? Required: (\d+),? Hardware limit: ?(\d+)")
"""What torch's loader of kernels says, with the kernel's name, and Triton's, which says `shared memory` instead."""


def fit(devices: Iterable[str]) -> str | None:
    """Set what this process's cards need, before its cache is chosen or anything compiled; idempotent.

    A bake and a training process both call it, so that what they compile has the same keys: the setting is a factor
    like any other. It is one for the process, so the card with the least decides. Most cards need none, nor any with a
    torch that sees to it.

    Args:
        devices: all that this process compiles for, as torch spells them: `cpu`, `cuda:0`.

    Returns:
        what must be said of it; None where nothing was changed.

    Raises:
        Failure: Exit.HOST, for a torch that was never read, or when it sees no such card.
    """
    import torch

    from env import gpus

    indices = [int(index or 0) for kind, _, index in (name.partition(":") for name in devices) if kind == "cuda"]
    if not indices:
        return None
    settings = _settings()
    version = str(torch.__version__)
    if not version.startswith(tuple(f"{known}." for known in READ_IN)) or not hasattr(settings, FUSION):
        raise Failure(
            Exit.HOST,
            f"torch {version}: how much shared memory its kernels take is known only for {', '.join(READ_IN)}",
            details=[f"read there: `torch._inductor.config.triton.{FUSION}`"],
            hint="the environment has drifted: `nox -s doctor` names what is not the locked package",
        )
    if hasattr(settings, LIMIT) or VARIABLE in os.environ:
        return None
    shared = min(gpus.read(index).shared_memory_per_block_optin for index in indices)
    if shared > THREE_STAGES:
        return None
    setattr(settings, FUSION, False)
    return (
        f"a block has {shared:,} bytes of shared memory here, too few for torch {version} to compute both gradients of "
        f"a norm in one kernel: it takes two, which read the same tensors (`triton.{FUSION}` is off)"
    )


def _settings() -> Any:
    """Inductor's settings of Triton, as the process has them."""
    import torch._inductor.config

    return torch._inductor.config.triton


def misfit(error: BaseException) -> Failure | None:
    """The sentence for an error that says that a kernel fits no block's shared memory; None for any other.

    `nox -s bake` and a run on the card both raise it: no configuration that inductor tried can be loaded.
    """
    for each in chain(error):
        found = REFUSED.search(str(each))
        if "No valid triton configs" in str(each) and found is not None:
            import torch

            kernel = "a kernel" if found[1] == "shared memory" else f"the kernel `{found[1]}`"
            return Failure(
                Exit.HOST,
                f"{kernel} needs {int(found[2]):,} bytes of shared memory a block, and {_card(torch)} has "
                f"{int(found[3]):,} (torch {torch.__version__})",
                hint=f"smaller sizes may fit, or another torch (`--variant …`); `{VARIABLE}=0` with "
                f"`DFLASH_KEEP={VARIABLE}`, for the bake and the run, fuses less",
            )
    return None


def _card(torch: Any) -> str:
    try:
        return str(torch.cuda.get_device_name())
    except (RuntimeError, AssertionError):
        return "the card"

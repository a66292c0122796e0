"""Keep the autotuner's winners in the cache that is in use.

A kernel that comes out of a cache entry remembers the path at which it was compiled. torch looks for its winner beside
that path and writes it there: on another machine, in a folder that the baking machine had. Where that folder cannot be
made, the first step fails; where it can, every start benchmarks again or shares winners with whoever has that folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from env.errors import Exit, Failure

READ_IN = ("2.10", "2.11", "2.15")
"""The versions of torch in which `CachingAutotuner` was read."""


def keep_in_cache() -> None:
    """From now on, kernels that are loaded have their winners in the cache directory of this process; idempotent.

    Raises:
        Failure: Exit.HOST, when this torch's autotuner has another shape than those that were read.
    """
    import torch
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    original: Callable[..., Any] | None = getattr(CachingAutotuner, "recheck_autotune_cache", None)
    if original is None:
        raise Failure(
            Exit.HOST,
            f"torch {torch.__version__} loads kernels in a way that was never read",
            details=[f"read in {', '.join(READ_IN)}: `CachingAutotuner.recheck_autotune_cache`"],
        )
    if getattr(original, "moves", False):
        return

    def recheck(self: Any, *args: Any, **kwargs: Any) -> Any:
        _move(self)
        return original(self, *args, **kwargs)

    recheck.moves = True  # type: ignore[attr-defined]  # a mark on the function, so that it is wrapped once
    CachingAutotuner.recheck_autotune_cache = recheck  # type: ignore[method-assign]  # there is no public way


def _move(kernel: Any) -> None:
    """Let a loaded kernel find and keep its winner in this process's cache directory."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if kernel.filename is None:
        return
    baked = Path(kernel.filename)
    here = Path(cache_dir(), baked.parent.name)  # source is filed under two characters of its name
    kernel.filename = str(here / baked.name)
    kept = getattr(getattr(kernel.save_cache_hook, "__self__", None), "local_cache", None)
    if kept is not None:
        store, place = kept
        kernel.save_cache_hook.__self__.local_cache = (store, str(here / Path(place).name))

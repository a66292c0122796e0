"""The process that bakes: it reads one job as JSON on standard input, runs a step, and prints what the caches answered.

Runs in the training environment with caches of its own (`env.bake` starts it); one process serves one device index.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from env.errors import Failure, report
from env.gpus import Gpu


def main() -> int:
    """Read a job, do it, print its outcome as one line of JSON on standard output."""
    job = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a factory prints is no part of the answer
        try:
            outcome = describe(job) if "describe" in job else work(job)
        except Failure as failure:
            return report(failure)
    print(json.dumps(outcome), flush=True)
    return 0


def describe(job: Mapping[str, Any]) -> dict[str, Any]:
    """Say what a bake must know before it begins: the named function's value, and which torch and Triton these are."""
    from torch._inductor.codecache import torch_key
    from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

    return {
        "value": named(job["describe"])(**job["arguments"]),
        "compilers": [torch_key().hex(), triton_key() if HAS_TRITON else None, sys.implementation.cache_tag],
    }


def work(job: Mapping[str, Any]) -> dict[str, Any]:
    """Compile what a step compiles, for the job's GPU or, without one, by really running it on the CPU.

    Raises:
        Failure: see `offline.pretend` and `fitting`, and whatever the factory raises.
    """
    import torch

    from dflash.replay import Observer
    from env.cache import factors, fitting

    factory = named(job["factory"])
    mode: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    device = torch.device("cpu")
    if job["gpu"] is not None:
        from env import offline

        gpu, device = Gpu(**job["gpu"]), torch.device("cuda", job["index"])
        mode = offline.pretend(gpu, index=job["index"], count=job["count"], outputs=Path(job["outputs"]))
    said = fitting.fit([str(device)])
    found = factors.collect(str(device))
    begun = time.perf_counter()
    try:
        with mode, Observer() as observer:
            step = factory(**job["arguments"], device=str(device))
            result = step(*(example(one, device) for one in job["examples"]))
            if isinstance(result, torch.Tensor) and result.requires_grad:
                result.sum().backward()
    except Exception as error:
        refused = fitting.misfit(error)
        if refused is None:
            raise
        raise refused from error
    return {
        "said": said,
        "seconds": time.perf_counter() - begun,
        "counts": observer.counts(),
        "keys": observer.keys,
        "factors": found,
        "details": observer.details,
    }


def named(place: str) -> Callable[..., Any]:
    """The function that `package.module:name` names."""
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def example(described: Mapping[str, Any], device: Any) -> Any:
    """A tensor of the described shape, dtype and gradient on a device; values matter to nobody."""
    import torch

    tensor = torch.zeros(described["shape"], dtype=getattr(torch, described["dtype"]), device=device)
    return tensor.requires_grad_(described["requires_grad"])


if __name__ == "__main__":
    CODE = main()
    # the autograd engine has begun a thread for each device that is not there, and an ordinary exit can trip over them:
    # «terminate called without an active exception» (seen once in thirty bakes, after the work was done)
    atexit._run_exitfuncs()  # noqa: SLF001  # there is no public name, and coverage is written by one of them
    sys.stderr.flush()
    os._exit(CODE)

"""A training process's compile cache: which one it needs, which it gets, whether that held what it promised."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from dflash import HANDED, config, graphs
from env import gpus
from env.cache import factors, store, verify


def identity(settings: config.Config, device: torch.device) -> store.Identity:
    """What this process needs a cache for, to train a configuration on a device.

    Raises:
        Failure: see `factors.collect` and `gpus.read`.
    """
    collected = factors.collect(str(device))
    graph_id = graphs.graph_id(settings, device.type)
    if device.type == "cpu":
        return store.Identity(factors=collected, graph_id=graph_id, gpu_id="cpu", gpu={"name": "cpu"})
    card = gpus.read(device.index)
    properties = {name: value for name, value in asdict(card).items() if name in gpus.DECIDES}
    return store.Identity(factors=collected, graph_id=graph_id, gpu_id=gpus.gpu_id(card), gpu=properties)


def opened(settings: config.Config, device: torch.device) -> store.Choice:
    """Choose the cache and make torch and Triton use it; to be called before anything is compiled.

    Raises:
        Failure: Exit.CACHE, when the one that fits is refused; Exit.STORAGE, when nothing can be written.
    """
    # inductor imports it on every host, and it warns that a CPU run has no CUDA, which nobody has asked
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    choice = store.choose(identity(settings, device), environ=HANDED)
    os.environ.update(choice.environ)
    return choice


def judged(
    choice: store.Choice, counts: Mapping[str, int], keys: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Any], list[str]]:
    """The record of a first step's cache answers, and what must be said of them aloud."""
    record: dict[str, Any] = {"cache_id": choice.cache_id, "kind": choice.kind, "path": str(choice.path), **counts}
    if choice.manifest is None:
        return record, []
    verdict = verify.judge(choice.manifest, {"counts": counts, "keys": keys})
    record["promised"] = dict(verdict.promised)
    record["problems"] = list(verdict.problems)
    if not verdict.problems:
        return record, []
    said = [f"the baked cache did not hold what it promises ({verdict.sentence()})", *verdict.problems]
    return record, [*said, "`nox -s verify` compares it factor by factor"]

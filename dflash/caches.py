"""A training process's compile cache: which one it needs, which it gets, whether that held what it promised."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dflash import HANDED, config, graphs, replay
from env.cache import store, verify
from env.errors import Exit, Failure


def identity(settings: config.Config, device: torch.device) -> store.Identity:
    """What this process needs a cache for, to train a configuration on a device.

    Raises:
        Failure: see `store.here`.
    """
    return store.here(graphs.graph_id(settings, device.type), str(device))


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


def verified(settings: config.Config, device: str = "") -> str:
    """Replay one training step from the sealed cache that fits; the counts in a sentence.

    Raises:
        Failure: Exit.CACHE, when no sealed cache fits, or a promised key did not hit, or anything missed; with the
            factors that differ.
    """
    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", 0)
    wanted = identity(settings, found)
    choice = store.choose(wanted, environ=HANDED)
    if choice.manifest is None:
        raise Failure(
            Exit.CACHE,
            f"there is no baked cache to verify for this configuration on {found}",
            details=choice.notices,
            hint="`nox -s bake -- --config NAME [--gpu CARD]` makes one",
        )
    os.environ.update(choice.environ)
    outcome = replay.replay(settings, found)
    verdict = verify.judge(choice.manifest, outcome, here=wanted.flat(), variables=store.variables())
    if verdict.problems:
        raise verdict.failure(str(choice.path))
    return f"{verdict.sentence()}; first step {outcome['seconds']['first_step']:.2f} s on {outcome['device']}"

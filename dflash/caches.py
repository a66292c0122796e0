"""A training process's compile cache: which one it needs, which it gets, whether that held what it promised."""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash import HANDED, config, graphs, replay, timeline
from env.cache import examine, fitting, places, several, store, verify
from env.cache import harvest as harvesting
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
    _quieten()
    said = fitting.fit([str(device)])
    choice = _saying(said, store.choose(identity(settings, device), environ=HANDED))
    os.environ.update(choice.environ)
    return choice


def _saying(line: str | None, choice: store.Choice) -> store.Choice:
    return choice if line is None else dataclasses.replace(choice, notices=(line, *choice.notices))


def _quieten() -> None:
    # inductor imports it on every host, and it warns that a CPU run has no CUDA, which nobody has asked
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def opened_many(settings: config.Config, devices: Sequence[torch.device]) -> tuple[store.Choice, ...]:
    """As `opened`, for a process that trains on several devices, a thread each: a choice for each device in its order.

    All choices have one directory (`path`), into which every device's sealed cache was copied, and one environment
    (`environ`), which this process has when the call returns: torch knows one directory for a process. To be called
    once, in the main thread, before anything is compiled and before the threads begin; `judged` takes all the choices
    for a first step that all the devices took, or one device's alone.

    Raises:
        Failure: as `opened` does.
    """
    _quieten()
    said = fitting.fit(map(str, devices))
    first, *others = several.choose([identity(settings, device) for device in devices], environ=HANDED)
    os.environ.update(first.environ)
    return (_saying(said, first), *others)


def judged(
    choice: store.Choice | Sequence[store.Choice],
    counts: Mapping[str, int],
    keys: Mapping[str, Sequence[str]],
    details: Mapping[str, Sequence[str]] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """The record of a first step's cache answers, and what must be said of them aloud.

    `details` is what torch hashed for each key that was asked for (`Observer.details`). Of several choices, of a
    process that trains on several devices, all must be promised something, or nothing is judged.
    """
    choices = [choice] if isinstance(choice, store.Choice) else list(choice)
    first = choices[0]
    record: dict[str, Any] = {"cache_id": first.cache_id, "kind": first.kind, "path": str(first.path), **counts}
    if len(choices) > 1:
        record["cache_ids"] = [one.cache_id for one in choices]
    manifests = [one.manifest for one in choices if one.manifest is not None]
    if len(manifests) < len(choices):
        return record, []
    promised = several.together(manifests)
    verdict = verify.judge(promised, {"counts": counts, "keys": keys})
    if verdict.problems:  # what explains a miss is looked up when there is one
        verdict = verify.judge(
            promised,
            {"counts": counts, "keys": keys, "details": details or {}},
            here=_now(first),
            sealed_details=_sealed_details(choices),
            variables=store.variables(),
        )
    record["promised"] = dict(verdict.promised)
    record["problems"] = list(verdict.problems)
    record["reasons"] = list(verdict.reasons)
    if not verdict.problems:
        return record, []
    said = [f"the baked cache did not hold what it promises ({verdict.sentence()})", *verdict.problems]
    why = [line for reason in verdict.reasons for line in reason.splitlines()]
    return record, [*said, *why, "`nox -s verify` compares it factor by factor in a fresh process"]


def _now(choice: store.Choice) -> Mapping[str, Any] | None:
    """The factors as they are now: something in this process may have changed one since the cache was chosen."""
    wanted = choice.wanted
    return None if wanted is None else store.here(wanted.graph_id, several.device(wanted)).flat()


def _sealed_details(choices: Sequence[store.Choice]) -> dict[str, Sequence[str]]:
    """What torch hashed for the keys of sealed caches; empty where it cannot be read any more, which is said."""
    found: dict[str, Sequence[str]] = {}
    for choice in choices:
        if choice.sealed is not None and choice.manifest is not None:
            try:
                found |= examine.read_details(choice.sealed, choice.manifest)
            except Failure as failure:
                print(f"what the sealed keys were made of cannot be told: {failure.message}", file=sys.stderr)
    return found


def verified(
    name: str,
    device: str = "",
    *,
    harvest: bool = False,
    key: Path | None = None,
    picture: Path | None = None,
) -> list[str]:
    """Replay one training step of a configuration from the sealed cache that fits; what came of it, a sentence a line.

    With `harvest`, the winners among the kernels' configurations that this step has found are sealed with the rest as
    a new cache, signed with `key`. With `picture`, two more processes take that step, one with an empty cache, and the
    time of both is drawn there.

    Raises:
        Failure: Exit.CACHE, when no sealed cache fits, or a promised key did not hit, or anything missed; with the
            factors that differ. See `env.cache.harvest`.
    """
    settings = config.load(name)
    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", 0)
    _quieten()
    fitting.fit([str(found)])
    choice = store.choose(identity(settings, found), environ=HANDED)
    if choice.manifest is None:
        card = " --gpu CARD" if found.type == "cuda" else ""
        raise Failure(
            Exit.CACHE,
            f"there is no baked cache to verify for this configuration on {found}",
            details=[
                notice.replace(", so this run compiles for itself", "")
                for notice in choice.notices
                if notice not in {store.NONE_BAKED, store.EARLIER}
            ],
            hint=f"`nox -s bake -- --config {shlex.quote(name)}{card}` makes one",
        )
    os.environ.update(choice.environ)
    outcome = replay.replay(settings, found)
    verdict = verify.judge(
        choice.manifest, outcome, sealed_details=_sealed_details([choice]), variables=store.variables()
    )
    if verdict.problems:
        raise verdict.failure(str(choice.path))
    said = [f"{verdict.sentence()}; first step {outcome['seconds']['first_step']:.2f} s on {outcome['device']}"]
    if harvest:
        said.append(_harvested(choice, key))
    if picture is not None:
        outcomes = timeline.compare(name, str(found), choice.environ, HANDED)
        timeline.draw(outcomes, picture)
        said += [*timeline.lines(outcomes), f"drawn in {picture}, figures in {picture.with_suffix('.json')}"]
    return said


def _harvested(choice: store.Choice, key: Path | None) -> str:
    new = harvesting.news(choice)
    made = harvesting.harvest(choice, places.cache_home(HANDED).path, key=key)
    if made is None:
        return "nothing new to bring back: the cache holds every winner that this device has found"
    place, manifest = made
    winners = "1 winner" if len(new) == 1 else f"{len(new)} winners"
    return (
        f"{winners} brought back: {place}, digest {manifest.digest[:16]}, parent {str(manifest.parent)[:16]}; "
        "runs use it from now on"
    )

"""A run of some or all benchmarks of the closed set, one after the other."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash import config, storage
from dflash.bench import disk, losses, masks, reducing, targets, training
from dflash.bench.machine import Machine
from dflash.bench.measure import BUDGET, Bench, Figure
from env.errors import Exit, Failure

RUNS: dict[str, Callable[[Bench], list[Figure]]] = {
    "pass": training.run,
    "mask": masks.run,
    "loss": losses.run,
    "features": targets.features,
    "responses": targets.responses,
    "gradients": reducing.run,
    "packing": disk.packing,
    "shards": disk.features,
    "seeding": disk.seeding,
}
"""What each of `dflash.bench.NAMES` runs."""


def run(
    names: Sequence[str],
    settings: config.Config,
    home: Path,
    begun: Callable[[str], None],
    *,
    budget: float = BUDGET,
) -> tuple[dict[str, Any], list[Figure]]:
    """What the machine is, and what came of each benchmark.

    Args:
        names: which ones, in this order.
        settings: whose shapes.
        home: a folder of its own on the disk that counts, made if need be; what is written there is removed.
        begun: called with each name when it begins.
        budget: seconds that the measurements of a pair may take.

    Raises:
        Failure: Exit.STORAGE, when nothing can be written there; Exit.USAGE, when another process measures there;
            Exit.HOST, when there is no C++ compiler.
        AssertionError: when a result is not the peer's.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    busy = Failure(Exit.USAGE, "another benchmark runs on this machine: both would measure each other")
    figures: list[Figure] = []
    with storage.held(home / "lock", "measure", busy):
        scratch = home / "files"
        shutil.rmtree(scratch, ignore_errors=True)  # of one that was killed
        try:
            machine = Machine(device, made(scratch))
            described = machine.describe()
            for name in names:
                begun(name)
                place = made(scratch / name)
                bench = Bench(settings=settings, device=device, folder=place, machine=machine, budget=budget)
                figures += RUNS[name](bench)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return described, figures


def made(folder: Path) -> Path:
    """A new folder."""
    try:
        folder.mkdir()
    except OSError as error:
        raise storage.refusal(error, "measure", folder) from error
    return folder

"""A run of some or all benchmarks of the closed set, one after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash import config, storage
from dflash.bench import disk, losses, masks, reducing, targets, training
from dflash.bench.machine import Machine
from dflash.bench.measure import BUDGET, Bench, Figure

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
        home: a folder on the disk that counts; what is written there is removed.
        begun: called with each name when it begins.
        budget: seconds that the measurements of a pair may take.

    Raises:
        Failure: Exit.STORAGE, when nothing can be written there; Exit.HOST, when there is no C++ compiler.
        AssertionError: when a result is not the peer's.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        home.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".bench-", dir=home)
    except OSError as error:
        raise storage.refusal(error, "measure", home) from error
    figures = []
    with folder as scratch:
        machine = Machine(device, Path(scratch))
        described = machine.describe()
        for name in names:
            begun(name)
            place = Path(scratch) / name
            place.mkdir()
            bench = Bench(settings=settings, device=device, folder=place, machine=machine, budget=budget)
            figures += RUNS[name](bench)
    return described, figures

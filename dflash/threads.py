"""All workers of a run in one process, a thread a device: as the run that this project began with, with its race cured.

torch's tracing state is made per thread before anything is wrapped, one thread compiles at a time (`dflash.gate`), and
threads have no process group among themselves: gradients go by explicit copies between devices (`dflash.team`).
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from dflash import caches, features, flow, gate, passes, run, target, tracing, trainer
from dflash.graphs import DTYPES
from dflash.pulse import WORK, Pulse
from dflash.stopping import Stop, Stopped
from dflash.strict import explained, strict
from dflash.team import Circle, Threads
from dflash.topology import Role
from dflash.warm import warm_up
from dflash.watch import Watch
from dflash.worker import Job, say, status_line

PATIENCE = 12 * 3600.0
"""Seconds that threads wait for each other; whether one hangs is judged by the watch."""


class House:
    """What the threads of a process share."""

    def __init__(self, job: Job, stop: Stop) -> None:
        self.job, self.stop = job, stop
        self.settings, self.shape = job.settings, job.shape
        self.rows = job.packed()
        self.total = passes.total_steps(len(self.rows.tokens), self.settings)
        self.circle = Circle(self.shape.drafters, PATIENCE)
        self.channels = flow.Channels(self.shape)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        ranks = range(self.shape.workers)
        self.devices = [torch.device("cuda", rank) if gpus else torch.device("cpu") for rank in ranks]
        self.pulses = [Pulse(f"{self.shape.role(rank)} (thread, process {os.getpid()})") for rank in ranks]
        self.failures: list[BaseException] = []
        self.begun = -1
        self.start = threading.Event()
        """Set when `begun`, the first step, is known."""

    def close(self) -> None:
        """Let nobody wait any longer."""
        self.channels.close()
        self.circle.leave()
        self.start.set()


def work(job: Job, stop: Stop) -> None:
    """Train with a thread a worker until the run ends.

    Raises:
        Failure, Stopped: what the first thread to fail raised.
    """
    tracing.cure()
    house = House(job, stop)
    watch = Watch(house.pulses, stop)
    watch.start()
    model = target.load(job.target, device=torch.device("cpu"), dtype=DTYPES[house.settings.precision.compute])
    drafting = [device for rank, device in enumerate(house.devices) if house.shape.role(rank).drafts]
    drafting = list(dict.fromkeys(drafting))  # on CPUs they are all one
    choices = caches.opened_many(house.settings, drafting)
    for notice in dict.fromkeys(notice for choice in choices for notice in choice.notices):
        say(notice)
    for device in drafting:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            warm_up(house.settings, device)
    with status_line(job, house.total, watch.first_step) as told, strict():
        threads = []
        for rank, device in enumerate(house.devices):
            role = house.shape.role(rank)
            # hooks are hung into a model, so each thread that runs one has its own
            own = copy.deepcopy(model) if role.kind != "drafter" else model
            body = _serve if role.kind == "target" else _draft
            threads.append(gate.thread(_guarded, house, body, role, device, own, choices, told, name=str(role)))
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.05)  # rather than a join, so that signals are noted at once
    watch.over.set()
    if house.failures:
        raise house.failures[0]


def _guarded(house: House, body: Callable[..., None], role: Role, device: torch.device, *more: Any) -> None:
    """What a thread runs: whatever it raises is kept, first come first, and ends the others."""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with explained():
            body(house, role, device, *more)
    except BaseException as error:  # noqa: BLE001  # raised again by the process's main thread
        if not isinstance(error, flow.Lost):
            house.failures.append(error)
        if not isinstance(error, Stopped) or role.number == 0:
            house.close()
    finally:
        house.pulses[_rank(house, role)].work("done", PATIENCE)


def moved(model: target.Target, device: torch.device) -> None:
    """Put a target on a device, in place."""
    module: torch.nn.Module = model.model
    module.to(device)


def _rank(house: House, role: Role) -> int:
    return house.shape.target_rank(role.number) if role.kind == "target" else house.shape.drafter_rank(role.number)


def _draft(house: House, role: Role, device: torch.device, model: target.Target, choices: Any, told: Any) -> None:
    settings, pulse = house.settings, house.pulses[_rank(house, role)]
    team = Threads(role.number, house.shape.drafters, house.circle, pulse)

    def supply(begun: int) -> trainer.Supply:
        if role.number == 0:
            house.begun = begun
            house.start.set()
        if house.job.features:
            return features.Shelved(features.found(Path(house.job.features))[0], model, device)
        if role.kind == "both":
            moved(model, device)
            return trainer.Borrowed(model, device, settings)
        return Taken(house, role, device, model, begun, pulse)

    outcome = trainer.train(
        settings,
        house.rows,
        supply,
        Path(house.job.folder),
        seed=house.job.seed,
        place=trainer.Place(device=device, team=team, pulse=pulse, guard=nullcontext, choices=choices),
        stop=house.stop,
        watch=told,
        say=say,
    )
    if role.number == 0 and outcome.caches is not None:
        run.write_json(Path(house.job.folder) / "caches.json", outcome.caches)


class Taken(flow.Inlet):
    """What a drafter borrows of a target that other threads run."""

    def __init__(
        self, house: House, role: Role, device: torch.device, model: target.Target, begun: int, pulse: Pulse
    ) -> None:
        dtype, shape = DTYPES[house.settings.precision.compute], house.shape
        self.embedding = target.embedding(model).to(device, dtype)
        self.head = target.head(model).to(device, dtype)
        due = flow.order(shape, house.settings.optimizer.accumulate, begun, house.total, drafter=role.number)
        super().__init__(flow.ThreadTake(house.channels, role.number, device, pulse), due)

    def features(self, reading: passes.Pass) -> torch.Tensor:
        """See `trainer.Supply`."""
        return self.take(reading.number, reading.tokens)


def _serve(house: House, role: Role, device: torch.device, model: target.Target, *_: Any) -> None:
    settings, pulse = house.settings, house.pulses[_rank(house, role)]
    moved(model, device)
    borrowed = trainer.Borrowed(model, device, settings)
    with pulse.wait("waiting for the drafters to start", "drafters"):
        house.start.wait()
    outlet = flow.ThreadOutlet(house.channels, role.number, pulse)
    accumulate = settings.optimizer.accumulate
    pulse.fresh()
    for passed, drafter in flow.own(house.shape, accumulate, max(house.begun, 0), house.total, target=role.number):
        step, micro = divmod(passed, accumulate)
        pulse.work(f"pass {micro + 1} of step {step + 1}", WORK)
        (reading,) = passes.passes(house.rows, settings, seed=house.job.seed, step=step, only=micro)
        outlet.put(drafter, flow.header(passed, reading.tokens, pulse), borrowed.features(reading))

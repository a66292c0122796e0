"""How benchmarks measure: ours and a peer's by turns, on one machine, in one process, until the medians mean something.

By turns, because a machine's speed changes while it is used: what slows down one of them then slows down the other.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash import config
from dflash.bench.machine import Machine, Rate

MOST, LEAST = 15, 3
"""Measurements of each contender."""
BUDGET = 6.0
"""Seconds that the measurements of a pair may take, unless `LEAST` of them take longer."""
SHORTEST = 0.01
"""Seconds that one measurement takes at least: a shorter call is repeated within it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What every benchmark is handed."""

    settings: config.Config
    """Whose shapes are measured."""
    device: torch.device
    """Where tensors are; what only the host does is measured there."""
    folder: Path
    """An empty folder for files, on the disk where prepared data lie."""
    machine: Machine
    """Measures what this machine can do at most."""
    budget: float = BUDGET
    """Seconds for each pair of contenders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Measurements of one contender."""

    seconds: tuple[float, ...]
    """Of one call each, in the order in which they were taken."""

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """From the fastest to the slowest, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"median": self.median, "least": min(self.seconds), "spread": self.spread, "all": list(self.seconds)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """The least time that something could take: what it cannot do without, over what this machine can do at most."""

    amount: float
    """Operations, or bytes."""
    what: str
    """Which ones, in a few words."""
    rate: Rate
    """What they are divided by."""

    @property
    def seconds(self) -> float:
        """The quotient."""
        return self.amount / self.rate.value

    @property
    def formula(self) -> str:
        """The quotient in words."""
        return f"{self.what}: {quantity(self.amount, self.rate.unit)} / {self.rate.sentence}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """What came of one comparison."""

    benchmark: str
    """Its name in the suite."""
    what: str
    """What was measured, with its sizes."""
    ours: Times
    """The product's own code."""
    floor: Floor
    """The least that it could take."""
    peer: str
    """What it was compared with."""
    theirs: Times
    """The peer's."""
    memory: tuple[int, int] | None = None
    """The most bytes that ours and the peer took beyond what was there before; None where it was not looked at."""

    @property
    def to_floor(self) -> float:
        """How many times as long as the floor ours takes; 1 would be perfect."""
        return self.ours.median / self.floor.seconds

    @property
    def to_peer(self) -> float:
        """How many times as long as the peer ours takes; below 1 it is faster."""
        return self.ours.median / self.theirs.median

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "benchmark": self.benchmark,
            "what": self.what,
            "ours": self.ours.as_json(),
            "floor": {
                "seconds": self.floor.seconds,
                "formula": self.floor.formula,
                "amount": self.floor.amount,
                "rate": self.floor.rate.as_json(),
            },
            "peer": {"name": self.peer, **self.theirs.as_json()},
            "ratios": {"to_floor": self.to_floor, "to_peer": self.to_peer},
            "memory": None if self.memory is None else dict(zip(("ours", "peer"), self.memory, strict=True)),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One way to do something."""

    call: Callable[[], Any]
    """Does it once."""
    before: Callable[[], Any] | None = None
    """Makes each call like the first; not measured."""


def race(
    bench: Bench, ours: Callable[[], Any] | Contender, theirs: Callable[[], Any] | Contender, *, host: bool = False
) -> tuple[Times, Times]:
    """Measure two contenders by turns, each of which has run once before; `host` says that no GPU takes part."""
    device = torch.device("cpu") if host else bench.device
    pair = [one if isinstance(one, Contender) else Contender(call=one) for one in (ours, theirs)]
    for contender in pair:
        _measured(contender, 1, device)
    once = [_measured(contender, 1, device) for contender in pair]
    # what must be reset before each call cannot be repeated within a measurement
    calls = [
        1 if contender.before else max(1, math.ceil(SHORTEST / max(seconds, 1e-9)))
        for contender, seconds in zip(pair, once, strict=True)
    ]
    whole = sum(count * seconds for count, seconds in zip(calls, once, strict=True))
    rounds = min(MOST, max(LEAST, int(bench.budget / max(whole, 1e-9))))
    taken: list[list[float]] = [[], []]
    for _ in range(rounds):
        for contender, count, seconds in zip(pair, calls, taken, strict=True):
            seconds.append(_measured(contender, count, device))
    first, second = (Times(seconds=tuple(seconds)) for seconds in taken)
    return first, second


def _measured(contender: Contender, calls: int, device: torch.device) -> float:
    """Seconds of one call; on a GPU by its own clock."""
    if contender.before is not None:
        contender.before()
    if device.type == "cuda":
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begun.record()
        for _ in range(calls):
            contender.call()
        ended.record()
        torch.cuda.synchronize(device)
        return float(begun.elapsed_time(ended)) / 1e3 / calls
    start = time.perf_counter()
    for _ in range(calls):
        contender.call()
    return (time.perf_counter() - start) / calls


def memory(bench: Bench, call: Callable[[], Any]) -> int | None:
    """The most bytes that a call takes beyond what was there before; None where the kernel does not tell."""
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
        before = torch.cuda.memory_allocated(bench.device)
        call()
        return torch.cuda.max_memory_allocated(bench.device) - before
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # begins a new peak (man 5 proc)
        before = _resident("VmRSS")
        call()
        return max(0, _resident("VmHWM") - before)
    except (OSError, ValueError):
        return None


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def require_equal(what: str, ours: Tensor, theirs: Tensor, *, tolerance: float = 0.0) -> None:
    """Stop when ours and the peer's differ: times of different results are not to be compared.

    Args:
        what: names them in the message.
        ours: any tensor.
        theirs: must have the same shape.
        tolerance: largest norm of the difference, as a share of the peer's norm; 0 for the same bits.

    Raises:
        AssertionError: when they differ, which is a bug of ours.
    """
    if ours.shape != theirs.shape:
        raise AssertionError(f"{what}: ours is {tuple(ours.shape)}, the peer's {tuple(theirs.shape)}")
    if torch.equal(ours, theirs):
        return
    norm = theirs.double().norm().item()
    apart = (ours.double() - theirs.double()).norm().item() / (norm or 1.0)
    if not apart <= tolerance:
        raise AssertionError(
            f"{what}: ours and the peer's differ by {apart:.2g} of their norm, {tolerance:g} is allowed"
        )


def quantity(amount: float, unit: str) -> str:
    """A number as people read it, such as `12.3 GB`."""
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if amount >= factor:
            return f"{amount / factor:.3g} {prefix}{unit}"
    return f"{amount:.3g} {unit}"


def seconds(length: float) -> str:
    """A time as people read it, such as `12.3 ms`."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if length >= factor:
            return f"{length / factor:.3g} {unit}"
    return f"{length * 1e6:.3g} µs"

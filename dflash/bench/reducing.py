"""Gradients of two drafters summed: in the order of their numbers, over Gloo, between two processes of this host."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch._C._distributed_c10d import FileStore  # public as torch.distributed's, but without types there

from dflash.bench.measure import MOST, Bench, Figure, Floor, Times, quantity, require_equal
from dflash.model import Drafter
from dflash.pulse import Pulse
from dflash.team import Processes, buckets, flat, put_back

DRAFTERS = 2
LARGEST = 1 << 25
"""Numbers that are summed at most: two buckets, so that a drafter of a billion weights does not fill this host."""
PATIENCE = timedelta(seconds=120)


def run(bench: Bench) -> list[Figure]:
    """The ordered sum of all gradients, against all_reduce of the same buckets, between processes on the CPU."""
    with torch.device("meta"):
        sizes = [weight.numel() for weight in Drafter(bench.settings.drafter).parameters()]
    kept: list[int] = []
    for size in sizes:
        kept.append(min(size, LARGEST - sum(kept)))
    told = bench.folder / "reducing.json"
    arguments = ([size for size in kept if size], str(bench.folder / "group"), str(told), bench.budget)
    starter: Any = multiprocessing  # whose functions have no types
    starter.start_processes(_work, arguments, DRAFTERS, daemon=True, start_method="spawn")
    measured = json.loads(told.read_text(encoding="utf-8"))
    told.unlink()
    moved = 4 * sum(kept)
    # each sends the half that the other owns, and its own half once it is summed; both ways at once
    wire = 2 * moved * (DRAFTERS - 1) / DRAFTERS
    return [
        Figure(
            benchmark="gradients",
            what=f"{quantity(moved, 'B')} of gradients summed over {DRAFTERS} processes, on the CPU",
            ours=Times(seconds=tuple(measured["ours"])),
            floor=Floor(amount=wire, what="each half sent twice", rate=bench.machine.sending),
            peer="Gloo's all_reduce: in no fixed order",
            theirs=Times(seconds=tuple(measured["theirs"])),
        )
    ]


def _work(rank: int, sizes: list[int], meeting: str, told: str, budget: float) -> None:
    """One of the processes; the first writes down the times."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, torch.get_num_threads() // DRAFTERS))
    store = FileStore(meeting, DRAFTERS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=DRAFTERS, timeout=PATIENCE)
    group = dist.group.WORLD
    assert group is not None
    team = Processes(rank, DRAFTERS, group, Pulse("a benchmark"))
    generator = torch.Generator().manual_seed(rank)
    drawn = [torch.randn(size, generator=generator) for size in sizes]
    mine, peers = ([part.clone() for part in drawn] for _ in range(2))

    def theirs() -> None:
        for pieces in buckets(peers):
            buffer = flat(pieces, DRAFTERS)
            dist.all_reduce(buffer)
            put_back(buffer, pieces)

    def taken(call: Callable[[], Any]) -> float:
        dist.barrier()
        start = time.perf_counter()
        call()
        spent = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(spent, dist.ReduceOp.MAX)  # it is over when both have it
        return float(spent)

    def ours() -> None:
        team.add(mine)

    once = taken(ours) + taken(theirs)
    for one, other in zip(mine, peers, strict=True):
        require_equal("summed gradients", one, other)
    rounds = min(MOST, max(3, int(budget / once)))
    spent: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        for whose, call, values in (("ours", ours, mine), ("theirs", theirs, peers)):
            for value, fresh in zip(values, drawn, strict=True):
                value.copy_(fresh)  # sums of sums would overflow
            spent[whose].append(taken(call))
    if rank == 0:
        Path(told).write_text(json.dumps(spent), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()

"""From target workers to drafter workers: bounded, in a fixed order, and each side can wait for the other.

Pass g of a run goes from target g mod T to the drafter that its number names. Both ends know the order beforehand, so
nothing is negotiated: a target that is DEPTH passes ahead of a drafter waits for it, and a drafter asks for its next
DEPTH passes before it needs them, so that they travel while it computes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dflash.pulse import Pulse
from dflash.topology import Topology
from env.errors import Exit, Failure

DEPTH = 2
"""Passes on their way from one target to one drafter: one that travels while the one before is computed on."""

HEAD = 4
"""Numbers that go before the features: the pass, the sum of its tokens, and the target's seconds of waiting and of all,
in microseconds."""

POLL = 0.002
"""Seconds between two looks at a transfer that is waited for."""


class Lost(Exception):
    """A peer has gone, or does not answer; whoever supervises the workers knows more."""


def order(topology: Topology, accumulate: int, begun: int, total: int, *, drafter: int) -> Iterator[tuple[int, int]]:
    """The passes of a drafter from step `begun` on, in its order: number from the beginning of the run, and target."""
    for step in range(begun, total):
        for micro in range(accumulate):
            if topology.drafter_of(micro) == drafter:
                passed = step * accumulate + micro
                yield passed, topology.target_of(passed)


def own(topology: Topology, accumulate: int, begun: int, total: int, *, target: int) -> Iterator[tuple[int, int]]:
    """The passes of a target from step `begun` on, in its order: number from the beginning of the run, and drafter."""
    for passed in range(begun * accumulate, total * accumulate):
        if topology.target_of(passed) == target:
            yield passed, topology.drafter_of(passed % accumulate)


def header(passed: int, tokens: Tensor, pulse: Pulse) -> Tensor:
    """What goes before the features of a pass, (HEAD,) int64."""
    elapsed = time.monotonic() - pulse.begun
    return torch.tensor([passed, int(tokens.sum()), int(pulse.idle() * 1e6), int(elapsed * 1e6)])


class Outlet(Protocol):
    """The target's end."""

    def put(self, drafter: int, head: Tensor, features: Tensor) -> None:
        """Hand a pass over, or wait until there is room."""

    def close(self) -> None:
        """Wait until everything has been taken."""


class Inlet:
    """The drafter's end: features of its passes, in its order, with a look at whom they come from."""

    def __init__(self, take: Callable[[int, int], tuple[Tensor, Tensor]], passes: Iterable[tuple[int, int]]) -> None:
        self._take = take
        self._passes = iter(passes)
        self.busy: dict[int, float] = {}
        """Share of its time that each target worked of late, as far as this drafter has heard."""
        self._heard: dict[int, tuple[int, int]] = {}

    def take(self, passed: int, tokens: Tensor) -> Tensor:
        """Features of a pass, on the device of training.

        Raises:
            Failure: Exit.BUG, when another pass arrived, or one of other tokens: then the ends do not agree.
        """
        due, target = next(self._passes)
        head, features = self._take(due, target)
        arrived, told, idle, elapsed = head.tolist()
        if (arrived, due, told) != (passed, passed, int(tokens.sum())):
            raise Failure(
                Exit.BUG,
                f"pass {passed} was due from target {target}, but {arrived} came",
                details=[f"expected next: {due}", f"sum of tokens: {told} there, {int(tokens.sum())} here"],
            )
        before = self._heard.get(target, (0, 0))
        if elapsed > before[1] and idle >= before[0]:
            self.busy[target] = 1 - (idle - before[0]) / (elapsed - before[1])
        self._heard[target] = idle, elapsed
        return features


# Processes


class ProcessOutlet:
    """Sends to drafters that are other processes."""

    def __init__(self, topology: Topology, pulse: Pulse) -> None:
        self._topology = topology
        self._pulse = pulse
        self._under_way: dict[int, deque[list[tuple[Any, Tensor]]]] = {
            number: deque() for number in range(topology.drafters)
        }

    def put(self, drafter: int, head: Tensor, features: Tensor) -> None:
        """See `Outlet`."""
        under_way = self._under_way[drafter]
        while len(under_way) >= DEPTH:
            self._finish(drafter)
        rank, tag = self._topology.drafter_rank(drafter), tag_of(int(head[0]))
        with lost(f"sending to drafter {drafter}"):
            # the tensors are kept with their transfers: nothing else holds them while they travel
            under_way.append(
                [(dist.isend(part, rank, tag=tag + place), part) for place, part in enumerate((head, features))]
            )

    def close(self) -> None:
        """See `Outlet`."""
        for drafter, under_way in self._under_way.items():
            while under_way:
                self._finish(drafter)

    def _finish(self, drafter: int) -> None:
        whom = f"drafter {drafter}"
        with self._pulse.wait(f"waiting for {whom} to take what was sent", "drafters"), lost(f"sending to {whom}"):
            for work, tensor in self._under_way[drafter].popleft():
                finish(work, tensor)


class ProcessTake:
    """Receives from targets that are other processes; asks ahead."""

    def __init__(self, topology: Topology, passes: Iterable[tuple[int, int]], like: Tensor, pulse: Pulse) -> None:
        self._topology = topology
        self._ahead = iter(passes)
        self._like = like
        self._pulse = pulse
        self._under_way: deque[list[tuple[Any, Tensor]]] = deque()

    def __call__(self, passed: int, target: int) -> tuple[Tensor, Tensor]:
        """Header and features of the pass that is due."""
        self._ask()
        transfers = self._under_way.popleft()
        whom = f"target {target}"
        with self._pulse.wait(f"waiting for {whom} to send pass {passed}", "targets"), lost(f"receiving from {whom}"):
            for work, tensor in transfers:
                finish(work, tensor)
        self._ask()
        (_, head), (_, features) = transfers
        return head, features

    def _ask(self) -> None:
        while len(self._under_way) < DEPTH:
            due = next(self._ahead, None)
            if due is None:
                return
            passed, target = due
            rank, tag = self._topology.target_rank(target), tag_of(passed)
            parts = torch.zeros(HEAD, dtype=torch.int64), torch.empty_like(self._like)
            with lost(f"receiving from target {target}"):
                self._under_way.append(
                    [(dist.irecv(part, rank, tag=tag + place), part) for place, part in enumerate(parts)]
                )


def greet(topology: Topology, rank: int, device: torch.device) -> None:
    """Let every target send every drafter a number, pair by pair in one order.

    NCCL connects a pair on its first use and waits for the other end while it does, which must not happen in a circle.
    """
    hello = torch.zeros(1, device=device)
    for target in range(topology.targets):
        for drafter in range(topology.drafters):
            with lost("greeting"):
                if rank == topology.target_rank(target):
                    dist.send(hello, topology.drafter_rank(drafter))
                elif rank == topology.drafter_rank(drafter):
                    dist.recv(hello, topology.target_rank(target))


def tag_of(passed: int) -> int:
    """A tag that no pass under way shares; small, since transports keep it in 32 bits."""
    return 2 * (passed % (1 << 20)) + 2


def finish(work: Any, tensor: Tensor) -> None:
    """Wait until a transfer is done; NCCL's `wait` alone would only make the stream wait, and count as no time."""
    while tensor.is_cuda and not work.is_completed():
        time.sleep(POLL)
    work.wait()


@contextmanager
def lost(doing: str) -> Iterator[None]:
    """Turn what a transport raises when a peer goes into `Lost`."""
    try:
        yield
    except RuntimeError as error:
        raise Lost(f"{doing}: {str(error).strip().splitlines()[0]}") from error


# Threads


class Channels:
    """A bounded queue from each target to each drafter of one process."""

    def __init__(self, topology: Topology) -> None:
        self._queues: dict[tuple[int, int], queue.Queue[tuple[Tensor, Tensor]]] = {
            (target, drafter): queue.Queue(DEPTH)
            for target in range(topology.targets)
            for drafter in range(topology.drafters)
        }
        self._closed = threading.Event()

    def put(self, target: int, drafter: int, item: tuple[Tensor, Tensor]) -> None:
        """Hand over, or wait for room."""
        self._patiently(lambda: self._queues[target, drafter].put(item, timeout=0.1), queue.Full)

    def get(self, target: int, drafter: int) -> tuple[Tensor, Tensor]:
        """Take, or wait for what comes."""
        item: tuple[Tensor, Tensor] = self._patiently(
            lambda: self._queues[target, drafter].get(timeout=0.1), queue.Empty
        )
        return item

    def close(self) -> None:
        """Let nobody wait any longer."""
        self._closed.set()

    def _patiently(self, attempt: Callable[[], Any], again: type[Exception]) -> Any:
        while True:
            if self._closed.is_set():
                raise Lost("the run has ended")
            try:
                return attempt()
            except again:
                continue


class ThreadOutlet:
    """Hands over to drafters that are threads of the same process."""

    def __init__(self, channels: Channels, number: int, pulse: Pulse) -> None:
        self._channels = channels
        self._number = number
        self._pulse = pulse

    def put(self, drafter: int, head: Tensor, features: Tensor) -> None:
        """See `Outlet`."""
        ready = None
        if features.is_cuda:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(features.device))
            ready.synchronize()  # the drafter copies on a stream of its own
        with self._pulse.wait(f"waiting for drafter {drafter} to take what is ready", "drafters"):
            self._channels.put(self._number, drafter, (head, features))

    def close(self) -> None:
        """See `Outlet`; what is in the queues stays there for the drafters."""


class ThreadTake:
    """Takes from targets that are threads of the same process."""

    def __init__(self, channels: Channels, number: int, device: torch.device, pulse: Pulse) -> None:
        self._channels = channels
        self._number = number
        self._device = device
        self._pulse = pulse

    def __call__(self, passed: int, target: int) -> tuple[Tensor, Tensor]:
        """Header and features of the pass that is due."""
        with self._pulse.wait(f"waiting for target {target} to hand over pass {passed}", "targets"):
            head, features = self._channels.get(target, self._number)
        return head, features.to(self._device)

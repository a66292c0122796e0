"""Drafters that share the passes of a step: their gradients become one sum, in one order, whoever computes it.

A ring or a tree adds in an order that depends on the place of a number and on the network. Here every element is added
in the order of the drafters' numbers, by the one drafter that owns its part of the buffer (all-to-all, add,
all-gather: as many bytes over the wire as a ring). So processes and threads, Gloo and NCCL give the same sum, and where
each drafter has one pass of a step, it is the sum that one device alone accumulates, to the bit.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dflash.pulse import Pulse
from env.errors import Exit, Failure

BUCKET = 1 << 24
"""Float32 numbers that are added at once: 64 MiB, so that a billion weights need no second billion beside them."""


class Team(Protocol):
    """The drafters of a run, as one of them sees it."""

    number: int
    """Which one this is; 0 writes metrics and checkpoints."""
    size: int
    """How many there are."""
    together: bool
    """Whether they are threads of one process."""

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all drafters, the same bits for all of them."""

    def share(self, values: Tensor) -> Tensor:
        """The sum over all drafters of (n,) float64 on the CPU."""

    def meet(self) -> None:
        """Wait until all drafters are here."""


class Alone:
    """The team of one."""

    number = 0
    size = 1
    together = False

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Nothing to add."""

    def share(self, values: Tensor) -> Tensor:
        """Nobody to share with."""
        return values

    def meet(self) -> None:
        """Nobody to wait for."""


ALONE = Alone()


def buckets(gradients: Sequence[Tensor], limit: int = BUCKET) -> list[list[Tensor]]:
    """Consecutive tensors, as many at once as hold `limit` numbers; a larger one is cut into flat pieces."""
    found: list[list[Tensor]] = []
    room = 0
    for gradient in gradients:
        for piece in gradient.view(-1).split(limit):
            if piece.numel() > room:
                found.append([])
                room = limit
            found[-1].append(piece)
            room -= piece.numel()
    return found


def flat(pieces: Sequence[Tensor], parts: int) -> Tensor:
    """One buffer of the pieces, (parts * n,), filled up with zeros to a multiple of `parts`."""
    length = sum(piece.numel() for piece in pieces)
    buffer = pieces[0].new_zeros(-(-length // parts) * parts)
    torch.cat([piece.detach() for piece in pieces], out=buffer[:length])
    return buffer


def put_back(buffer: Tensor, pieces: Sequence[Tensor]) -> None:
    """Write a buffer that `flat` made into its pieces."""
    start = 0
    for piece in pieces:
        piece.copy_(buffer[start : start + piece.numel()])
        start += piece.numel()


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the parts, added one after the other."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class Processes:
    """Drafters that are processes of one group."""

    together = False

    def __init__(self, number: int, size: int, group: dist.ProcessGroup, pulse: Pulse) -> None:
        self.number, self.size = number, size
        self._group = group
        self._pulse = pulse

    def add(self, gradients: Sequence[Tensor]) -> None:
        """See `Team`; a bucket at a time."""
        if self.size == 1:
            return
        if gradients[0].is_cuda:
            torch.cuda.current_stream().synchronize()  # this drafter's own backward pass is no wait
        with torch.no_grad(), self._pulse.wait("waiting for the other drafters' gradients", "drafters"):
            for pieces in buckets(gradients):
                buffer = flat(pieces, self.size)
                theirs = torch.empty_like(buffer)
                dist.all_to_all_single(theirs, buffer, group=self._group)
                dist.all_gather_into_tensor(buffer, in_order(theirs.chunk(self.size)), group=self._group)
                put_back(buffer, pieces)
            if gradients[0].is_cuda:
                torch.cuda.current_stream().synchronize()  # so that the wait is counted as one

    def share(self, values: Tensor) -> Tensor:
        """See `Team`; over Gloo, also beside NCCL."""
        if self.size == 1:
            return values
        everyone = [torch.empty_like(values) for _ in range(self.size)]
        with self._pulse.wait("waiting for the other drafters' numbers", "drafters"):
            dist.all_gather(everyone, values, group=self._group)
        return in_order(everyone)

    def meet(self) -> None:
        """See `Team`."""
        self.share(torch.zeros(1, dtype=torch.float64))


class Circle:
    """Where drafters that are threads of one process meet: a place for each, and a barrier that breaks for all."""

    def __init__(self, size: int, patience: float) -> None:
        self.places: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)
        self._patience = patience

    def meet(self) -> None:
        """Wait for all; raises Failure when one has left or does not come."""
        try:
            self._barrier.wait(self._patience)
        except threading.BrokenBarrierError:
            raise Failure(
                Exit.TRAINING,
                "a drafter waited for the others in vain: one of them has failed or hangs",
                hint="what went wrong there is said above",
            ) from None

    def leave(self) -> None:
        """Let nobody wait any longer."""
        self._barrier.abort()


class Threads:
    """Drafters that are threads of one process: a peer's buffer is read where it lies."""

    together = True

    def __init__(self, number: int, size: int, circle: Circle, pulse: Pulse) -> None:
        self.number, self.size = number, size
        self._circle = circle
        self._pulse = pulse

    def add(self, gradients: Sequence[Tensor]) -> None:
        """See `Team`. Threads have no process group among themselves: explicit copies between the devices."""
        if self.size == 1:
            return
        with torch.no_grad():
            for pieces in buckets(gradients):
                buffer = flat(pieces, self.size)
                theirs = self._exchange(buffer)
                mine = [whole.chunk(self.size)[self.number].to(buffer.device) for whole in theirs]
                for owner, total in enumerate(self._exchange(in_order(mine))):
                    buffer.chunk(self.size)[owner].copy_(total)
                put_back(buffer, pieces)
                if buffer.is_cuda:
                    torch.cuda.current_stream(buffer.device).synchronize()
                    self.meet()  # only now may a peer's allocator have its total back

    def share(self, values: Tensor) -> Tensor:
        """See `Team`."""
        return in_order(self._exchange(values))

    def meet(self) -> None:
        """See `Team`."""
        self._exchange(None)

    def _exchange(self, mine: Any) -> list[Any]:
        """What every drafter has put down here, by number. It must not be written to before the next exchange."""
        if isinstance(mine, Tensor) and mine.is_cuda:
            torch.cuda.current_stream(mine.device).synchronize()  # peers read it on streams of their own
        with self._pulse.wait("waiting for the other drafters", "drafters"):
            self._circle.places[self.number] = mine
            self._circle.meet()
            everyone = list(self._circle.places)
            self._circle.meet()
        return everyone

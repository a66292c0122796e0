"""A thread beside each worker that notices what the worker itself cannot: that it hangs, or that a peer does.

Every second it writes down what the worker is doing, in the store that all workers reach, and reads the same of the
others. It ends the process, first saying why and where every thread stands, when

- its own worker has been at one thing for too long,
- a peer has not been heard of for `SILENCE` seconds: stopped, or on a host that was cut off,
- everybody waits and nothing has moved for `STALL` seconds,
- the store does not answer, or the launcher has gone.

The launcher then ends the others and starts all of them again from the last checkpoint.

It also answers a request to stop for which the worker has no ear: until the first step is done, which may have to
compile for minutes, nothing is in memory that is not on the disk, so all end at once. From then on they end the step
they are at, and save. Which of the two it is, is one decision for all workers: whatever came first in the store.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from dflash.pulse import Pulse
from dflash.stopping import Stop, leave, leave_word
from env.errors import Exit

BEAT = 1.0
"""Seconds between two beats."""

SILENCE = float(os.environ.get("DFLASH_SILENCE", "25"))
"""Seconds after which a peer that has not been heard of counts as gone; together with the restart well below 60."""

ARRIVAL = 300.0
"""Seconds that a worker waits for the first sign of another."""

STALL = 45.0
"""Seconds after which a state in which everybody waits counts as a deadlock."""

HUNG = 70
"""Exit code of a worker whose watch found it hanging."""

LOST = 71
"""Exit code of a worker that has lost a peer: whatever happened, happened there."""


STOP, STEP = "stop", "step"
"""What may come first: a request to stop, or the end of the first step."""


class Board(Protocol):
    """What the watch needs of a store that all workers reach."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read keys that exist."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of them exist."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write if the key holds what is expected, or is not there and nothing is; what it holds then."""


@dataclass(kw_only=True, slots=True)
class Peer:
    """What is known of another worker."""

    name: str
    beat: bytes = b""
    """The last that was heard."""
    heard: float = 0.0
    """When that was, in this process's seconds."""
    moved: float = 0.0
    """When it last began something new."""
    count: str = ""
    waiting: bool = False
    doing: str = "starting"


def judge(
    pulse: Pulse, peers: Sequence[Peer], now: float, *, silence: float = SILENCE, stall: float = STALL
) -> tuple[int, str] | None:
    """The exit code and the sentence of what is wrong; None while all is well. Pure."""
    if not pulse.waiting and now - pulse.since > pulse.patience:
        return HUNG, f"{pulse.name} hangs: it has been at «{pulse.doing}» for {now - pulse.since:.0f} s"
    for peer in peers:
        if now - peer.heard > silence:
            return LOST, (
                f"{peer.name} has not been heard of for {now - peer.heard:.0f} s; it was at «{peer.doing}» "
                f"({pulse.name} is at «{pulse.doing}»)"
            )
    still = min([now - pulse.since, *(now - peer.moved for peer in peers)])
    if peers and pulse.waiting and all(peer.waiting for peer in peers) and still > stall:
        circle = "; ".join([f"{pulse.name}: «{pulse.doing}»", *(f"{peer.name}: «{peer.doing}»" for peer in peers)])
        return HUNG, f"everybody has waited for {still:.0f} s: {circle}"
    return None


class Watch(threading.Thread):
    """Watches over the pulses of one process, and over its peers'."""

    def __init__(
        self,
        pulses: Sequence[Pulse],
        stop: Stop,
        *,
        board: Board | None = None,
        rank: int = 0,
        peers: Sequence[str] = (),
        ended: Callable[[], None] | None = None,
    ) -> None:
        """See the module.

        Args:
            pulses: the workers of this process; only a lone one has peers elsewhere.
            stop: shared with the others through the board, whoever was asked.
            board: the store; None where there is nobody else.
            rank: this worker's rank.
            peers: names of all workers by rank, this one's included.
            ended: called when somebody has written that the run has ended.
        """
        super().__init__(name="watch", daemon=True)
        self._pulses, self._stop_asked, self._board, self._rank = pulses, stop, board, rank
        now = time.monotonic()
        others = {other: name for other, name in enumerate(peers) if other != rank}
        self._peers = {other: Peer(name=name, heard=now, moved=now) for other, name in others.items()}
        self._ended = ended
        self._parent = os.getppid()
        self._begun = self._answered = now
        self._complete = not self._peers
        self._lock = threading.Lock()
        self._first = ""
        self._saves = self._answering = False
        self.over = threading.Event()

    def run(self) -> None:
        """Look until the process ends or `over` is set."""
        if self._board is not None:
            # in a thread of its own: over a cable that was cut, an exchange waits for a quarter of an hour
            threading.Thread(target=self._beat, args=(self._board,), name="beat", daemon=True).start()
        while not self.over.wait(BEAT):
            name, now = self._pulses[0].name, time.monotonic()
            if os.getppid() != self._parent:
                end(LOST, f"the launcher of {name} has gone")
            if self._board is None and self._stop_asked.asked():
                self._answer()
            if self._board is not None and now - self._answered > SILENCE:
                end(LOST, f"{name}: the host of the workers' store has not answered for {now - self._answered:.0f} s")
            for pulse in self._pulses:
                found = judge(pulse, [*self._peers.values(), *self._beside(pulse, now)], now)
                if found is not None and not self.over.is_set():
                    end(*found, traces=found[0] == HUNG)

    def _beat(self, board: Board) -> None:
        beats = 0
        while not self.over.wait(BEAT):
            beats += 1
            with contextlib.suppress(RuntimeError, OSError):  # whether it answers is judged by when it last did
                self._exchange(board, beats)
                self._answered = time.monotonic()

    def first_step(self) -> None:
        """Say that the first step of this start is done: called by drafter 0, before it tells anybody else."""
        self._saves = True
        with contextlib.suppress(RuntimeError, OSError):  # a store that does not answer is noticed elsewhere
            if self._came_first(STEP) == STOP:
                leave(_asked)

    def _answer(self) -> None:
        """Answer a request to stop, once."""
        if self._answering or self.over.is_set():
            return
        if self._came_first(STOP) == STOP:
            leave(_asked)  # the launcher says what a rerun goes on from
        self._answering = True
        if self._saves:
            with contextlib.suppress(OSError):
                print("asked to stop: all end the step that they are at, and save", file=sys.stderr, flush=True)

    def _came_first(self, event: str) -> str:
        """Which of `STOP` and `STEP` came first, `event` if none did before: the same answer for all workers."""
        if self._board is not None:
            return self._board.compare_set("first", "", event).decode()
        with self._lock:
            self._first = self._first or event
            return self._first

    def _beside(self, pulse: Pulse, now: float) -> list[Peer]:
        """The other workers of this process."""
        return [
            Peer(name=other.name, heard=now, moved=other.since, waiting=other.waiting, doing=other.doing)
            for other in self._pulses
            if other is not pulse
        ]

    def _exchange(self, board: Board, beats: int) -> None:
        pulse, now = self._pulses[0], time.monotonic()
        board.set(f"beat/{self._rank}", f"{beats}|{pulse.count}|{int(pulse.waiting)}|{pulse.doing}")
        if self._stop_asked.signal is not None:
            board.set("stop", str(int(self._stop_asked.signal)))
        elif board.check(["stop"]):
            self._stop_asked.ask(int(board.multi_get(["stop"])[0]))
        if self._stop_asked.asked():
            self._answer()
        if self._ended is not None and board.check(["ended"]):
            self._ended()
        others = list(self._peers)
        if not self._complete:
            missing = [self._peers[other].name for other in others if not board.check([f"beat/{other}"])]
            for peer in self._peers.values():
                peer.heard = peer.moved = now
            if missing and now - self._begun > ARRIVAL:
                end(LOST, f"{pulse.name} has waited {ARRIVAL:.0f} s for a first sign of {', '.join(missing)}")
            self._complete = not missing
            return
        beaten = board.multi_get([f"beat/{other}" for other in others]) if others else []
        for other, beat in zip(others, beaten, strict=True):
            hear(self._peers[other], beat, time.monotonic())


def hear(peer: Peer, beat: bytes, now: float) -> None:
    """Take down what a peer says."""
    if beat == peer.beat:
        return
    peer.beat, peer.heard = beat, now
    _, count, waiting, peer.doing = beat.decode().split("|", 3)
    peer.waiting = waiting == "1"
    if count != peer.count:
        peer.count, peer.moved = count, now


def first(error: BaseException) -> str:
    """An error's first line, without what follows it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _asked() -> int:
    leave_word()
    return int(Exit.DONE)


def end(code: int, sentence: str, *, traces: bool = False) -> NoReturn:
    """End the process at once, whatever its other threads are in."""
    with contextlib.suppress(OSError):
        if sentence:
            print(f"error: {sentence}", file=sys.stderr, flush=True)
        if traces:
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    os._exit(code)

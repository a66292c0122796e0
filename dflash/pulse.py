"""What a worker is doing just now: whether it works or waits, for whom, and since when.

Kept by the worker's own thread, read by the one that watches over it, so nothing here takes a lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

WORK = 40.0
"""Seconds that a worker may be at one piece of work before it counts as hung: a pass takes far less than a second."""

START = 1800.0
"""The same for what may take long: loading a target, compiling, saving to a slow disk."""


class Pulse:
    """The state of one worker, told by itself."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        """Rises with every new thing that is begun: while it rises, the worker lives."""
        self.doing = "starting"
        self.patience = START
        self.waiting = False
        self.since = time.monotonic()
        self.begun = self.since
        self.waited: dict[str, float] = {}
        """Seconds waited so far, by for whom."""

    def work(self, what: str, patience: float = WORK) -> None:
        """Say what is begun; longer than `patience` seconds, and the worker counts as hung."""
        self._turn(what, patience, waiting=False)

    @contextmanager
    def wait(self, what: str, whom: str) -> Iterator[None]:
        """Say that the block waits for `whom`; its seconds are not work."""
        before = self.doing, self.patience
        begun = time.monotonic()
        self._turn(what, self.patience, waiting=True)
        try:
            yield
        finally:
            now = time.monotonic()
            self.waited[whom] = self.waited.get(whom, 0.0) + now - begun
            self._turn(before[0], before[1], waiting=False)

    def idle(self) -> float:
        """Seconds waited so far, for anybody."""
        return sum(self.waited.values())

    def fresh(self) -> None:
        """Forget what was waited so far: from here on it counts, as after a first step that compiled."""
        self.waited.clear()
        self.begun = time.monotonic()

    def _turn(self, what: str, patience: float, *, waiting: bool) -> None:
        self.doing, self.patience, self.waiting = what, patience, waiting
        self.since = time.monotonic()
        self.count += 1

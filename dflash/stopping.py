"""Ctrl-C and SIGTERM: noted when they come, answered where a run can be left whole."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from env.errors import Exit

CODES = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED}


class Stopped(Exception):
    """The run was asked to stop and has saved what it had; `code` is what the shell must see."""

    def __init__(self, code: Exit, where: str) -> None:
        super().__init__(where)
        self.code = code
        self.where = where


class Stop:
    """Whether a signal has asked the run to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Remember the first signal; the second one ends the process at once, for whoever cannot wait."""
        if self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = signal.Signals(number)

    def ask(self, number: int) -> None:
        """Note what another process was asked."""
        self.signal = self.signal or signal.Signals(number)

    def asked(self) -> bool:
        """Whether to save and stop."""
        return self.signal is not None

    def stopped(self, where: str) -> Stopped:
        """The exception to raise once everything is saved; `where` says what a rerun will go on from."""
        assert self.signal is not None
        return Stopped(CODES[self.signal], where)


@contextmanager
def listening() -> Iterator[Stop]:
    """Note SIGINT and SIGTERM during the block instead of dying of them."""
    stop = Stop()
    before = {number: signal.signal(number, stop.note) for number in CODES}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

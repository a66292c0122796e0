"""Ctrl-C and SIGTERM: noted when they come, answered where a run can be left whole.

While a first step compiles, which may take minutes, nothing is in memory that is not on the disk: there they are
answered at once, by one process alone here, and by the workers of a spread run as `dflash.watch` has them agree.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from env.errors import Exit, speak

WORD = "DFLASH_STOPPED"
"""The variable by which a launcher names the file that its workers make when they end because somebody was asked to
stop: on another node perhaps, of which the launcher would hear nothing."""

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
        self.ends_the_process = False
        """Whether signals are this process's own to answer: a worker's are its agent's."""

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
    def at_once(self, where: str) -> Iterator[None]:
        """End the process within the block when a signal comes; `where` says what a rerun will go on from.

        For a block in which nothing can be lost, as a checkpoint has everything that there is. The interpreter sees a
        signal only between two steps of the main thread, which a compilation or a backward pass of another thread can
        keep from taking any, so a thread waits for the signal itself.

        Raises:
            Stopped: at once, when a signal had come before.
        """
        if not self.ends_the_process or threading.current_thread() is not threading.main_thread():
            yield
            return
        if self.asked():
            raise self.stopped(where)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        watcher = threading.Thread(target=_end_on_signal, args=(reader, where), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            os.close(writer)  # the watcher reads an end
            watcher.join()
            os.close(reader)


def tell(code: Exit, where: str) -> int:
    """Say on standard error that a run has stopped and what a rerun goes on from; returns the exit code."""
    speak(f"stopped: {where}\nhint: the same command goes on from there")
    return int(code)


def leave_word() -> None:
    """Let this worker's launcher know that the run was asked to stop; where it cannot be told, that is said."""
    if place := os.environ.get(WORD):
        try:
            Path(place).touch()
        except OSError as error:
            speak(f"this node's launcher does not hear that the run was asked to stop: {place}: {error.strerror}")


def _end_on_signal(reader: int, where: str) -> None:
    while number := os.read(reader, 1):
        if number[0] in CODES:
            leave(lambda: tell(CODES[signal.Signals(number[0])], where))


def leave(last: Callable[[], int]) -> NoReturn:
    """End the process at once with the code that `last` gives, and whatever it has started with it."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\n")  # a progress bar has hidden the cursor
    code = last()
    for child in descendants(os.getpid()):  # compilers, which would go on for nobody
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    os._exit(code)


def hear(stop: Stop) -> None:
    """Note SIGINT and SIGTERM from now on, also while the main thread is in something that no handler interrupts.

    As a collective of torch is, or a compilation. A second signal changes nothing: a worker's agent kills.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are not ours
    for number in CODES:
        signal.signal(number, lambda *_: None)  # Python writes to the pipe only where there is a handler
    threading.Thread(target=_note, args=(reader, stop), name="signals", daemon=True).start()


def _note(reader: int, stop: Stop) -> None:
    while number := os.read(reader, 1):
        if number[0] in CODES:
            stop.ask(number[0])


def descendants(process: int) -> list[int]:
    """The processes that a process has started, and those that they have, children before their parents' children."""
    parents: dict[int, list[int]] = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # the name, in parentheses, may hold anything; state and parent follow it
            parent = int(place.read_text(errors="replace").rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(place.parent.name))
    found = list(parents.get(process, ()))
    for child in found:
        found += parents.get(child, ())
    return found


@contextmanager
def listening() -> Iterator[Stop]:
    """Note SIGINT and SIGTERM during the block instead of dying of them."""
    stop = Stop()
    stop.ends_the_process = True
    before = {number: signal.signal(number, stop.note) for number in CODES}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

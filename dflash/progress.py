"""What a person sees while a run works: a bar on a terminal, a line now and then elsewhere; all on standard error."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

QUIET = 5.0
"""Seconds between two lines where there is no terminal: a log of an hour stays readable."""
REFRESH = 0.1
"""Seconds between two drawings of the bar; drawn by whoever advances, so that no thread runs beside a compiler's."""
SHORTEST, LONGEST = 8, 40
"""Columns of the bar itself; with fewer it would say nothing."""
WINDOW = 30.0
"""Seconds over which speed is measured: the first, slow steps are soon forgotten, a single slow one does not jump."""


class Track:
    """One piece of work of known size, measured as it advances."""

    def __init__(self, title: str, total: int, *, unit: str, status: str, clock: Callable[[], float]) -> None:
        """See `track`."""
        self.title, self.total, self.done, self.unit, self.status = title, total, 0, unit, status
        self.loss: float | None = None
        self.note = ""
        self.clock = clock
        self.began = clock()
        self._tokens = 0
        self._marks: deque[tuple[float, int]] = deque([(self.began, 0)])
        self._units: deque[tuple[float, int]] = deque([(self.began, 0)])
        self._show: Callable[[], None] = lambda: None

    def advance(self, count: int = 1, *, loss: float | None = None, tokens: int = 0, note: str = "") -> None:
        """Say that `count` more units are done, with the latest loss, the tokens that they took, and a remark."""
        self.done += count
        self._tokens += tokens
        self.loss = self.loss if loss is None else loss
        self.note = note or self.note
        now = self.clock()
        self._marks.append((now, self._tokens))
        _forget(self._marks, now)
        if count:  # units may be far apart, and between them nothing is known of the next
            self._units.append((now, self.done))
            _forget(self._units, now)
        self._show()

    def skip(self, count: int) -> None:
        """Say that `count` units had been done before this began: they tell nothing about its speed."""
        self.done += count
        now = self.clock()
        self._marks, self._units = deque([(now, self._tokens)]), deque([(now, self.done)])

    def reached(self, unit: int, *, loss: float | None = None, tokens: int = 0, note: str = "") -> None:
        """Say that unit number `unit` (1, 2, ...) is done, as `advance` does.

        Those before the first that is told of were an earlier start's. They say nothing about the speed, and neither
        does the time until then: it goes into reading and compiling.
        """
        if unit == self.done + 1:
            self.advance(loss=loss, tokens=tokens, note=note)
        else:
            self.skip(unit - self.done)
            self.advance(0, loss=loss, note=note)

    @property
    def speed(self) -> float | None:
        """Tokens a second of late; None when none were told of."""
        seconds = self._marks[-1][0] - self._marks[0][0]
        tokens = self._marks[-1][1] - self._marks[0][1]
        return tokens / seconds if seconds > 0 and tokens else None

    @property
    def left(self) -> float | None:
        """Seconds to the end at the speed of late; None before the first advance."""
        seconds = self._units[-1][0] - self._units[0][0]
        units = self._units[-1][1] - self._units[0][1]
        return seconds / units * (self.total - self.done) if units else None

    def facts(self) -> list[str]:
        """Loss, speed and time, as far as they are known."""
        facts = []
        if self.loss is not None:
            facts.append(f"loss {self.loss:.3f}")
        if self.speed is not None:
            facts.append(f"{self.speed:,.0f} tokens/s")
        if self.done >= self.total:
            facts.append(f"took {duration(self.clock() - self.began)}")
        elif self.left is not None:
            facts.append(f"{duration(self.left)} left")
        return [*facts, self.note] if self.note else facts


def _forget(marks: deque[tuple[float, int]], now: float) -> None:
    """Drop what lies before the window, down to two marks, which a speed needs."""
    while len(marks) > 2 and now - marks[1][0] > WINDOW:
        marks.popleft()


@contextlib.contextmanager
def track(
    title: str,
    total: int,
    *,
    unit: str = "steps",
    status: str = "",
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Track]:
    """Show a piece of work while the block runs; call `advance` of what is yielded.

    Args:
        title: what is being done, such as `training the drafter`.
        total: units that it takes.
        unit: what is counted.
        status: what every line must say beside the numbers, such as `environment drifted`; empty for nothing.
        stream: where to; standard error unless given.
        clock: seconds, rising.
    """
    work = Track(title, total, unit=unit, status=status, clock=clock)
    stream = sys.stderr if stream is None else stream
    terminal = stream.isatty() and os.environ.get("TERM") not in {"dumb", "unknown"}
    with _bar(work, stream) if terminal else _lines(work, stream):
        yield work


def duration(seconds: float) -> str:
    """A time as people write it: 0:07, 12:34, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextlib.contextmanager
def _lines(work: Track, stream: TextIO) -> Iterator[None]:
    shown = float("-inf")

    def say(*, ended: bool = False) -> None:
        nonlocal shown
        now = work.clock()
        if not ended and (now - shown < QUIET or work.done >= work.total):  # its last line comes at the end
            return
        shown = now
        counted = f"{work.done:,} of {work.total:,} {work.unit}"
        stopped = ended and work.done < work.total
        line = f"{work.title}: " + ", ".join([f"stopped at {counted}" if stopped else counted, *work.facts()])
        with contextlib.suppress(BrokenPipeError):  # whoever read the log has gone; the run need not
            print(f"{line} [{work.status}]" if work.status else line, file=stream, flush=True)

    say()
    work._show = say  # noqa: SLF001  # the two halves of this module
    try:
        yield
    finally:
        say(ended=True)


@contextlib.contextmanager
def _bar(work: Track, stream: TextIO) -> Iterator[None]:
    console = Console(file=stream, highlight=False)
    drawn = work.clock()

    with Live(_row(work, console.width), console=console, auto_refresh=False) as live:

        def draw() -> None:
            nonlocal drawn
            now = work.clock()
            if now - drawn >= REFRESH:
                drawn = now
                live.update(_row(work, console.width), refresh=True)

        work._show = draw  # noqa: SLF001  # the two halves of this module
        try:
            yield
        finally:
            live.update(_row(work, console.width), refresh=True)


def _row(work: Track, width: int) -> Table:
    """The bar with its numbers, in one line; where that is too long it does without the unit, the bar, the speed."""
    count = f"{work.done:,}/{work.total:,}"
    facts = work.facts()
    brief = [fact for fact in facts if fact != work.note]
    slow = [fact for fact in brief if not fact.endswith("tokens/s")]
    candidates = [
        (SHORTEST, [f"{count} {work.unit}", *facts]),
        (SHORTEST, [count, *facts]),
        (SHORTEST, [count, *brief]),
        (0, [count, *brief]),
        (0, [count, *slow]),
    ]
    for bar, told in candidates:
        texts = [work.title, *told, *([work.status] if work.status else [])]
        room = width - sum(len(text) + 2 for text in texts)
        if room >= bar:
            break
    styles = [None, "bold", *[None] * (len(told) - 1), "yellow"]
    cells: list[Text | ProgressBar] = [Text(text, style or "") for text, style in zip(texts, styles, strict=False)]
    if bar:
        cells.insert(1, ProgressBar(total=max(work.total, 1), completed=work.done, width=min(room, LONGEST)))
    row = Table.grid(padding=(0, 2, 0, 0))
    for _ in cells:
        row.add_column(no_wrap=True, overflow="ellipsis")
    row.add_row(*cells)
    return row

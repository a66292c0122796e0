"""How the product fails: one clear sentence, the evidence under it, the way out, and an exit code of its own."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import sys
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Exit(IntEnum):
    """Exit codes of every command; the README has the same table."""

    DONE = 0
    BUG = 1
    """A traceback: our own mistake."""
    USAGE = 2
    """The command line or a configuration is wrong."""
    DRIFT = 3
    """The environment is not the locked one."""
    INPUT = 4
    """A text, a target, a checkpoint or another input cannot be used."""
    HOST = 5
    """This machine lacks something: a compiler, a driver, a card, memory."""
    STORAGE = 6
    """A disk is full or a folder cannot be written."""
    CACHE = 7
    """A compile cache was refused, or missed where it must hit."""
    TRAINING = 8
    """Training cannot go on: numbers that are not finite, a recompile, a fallback to slow code."""
    LOCK = 9
    """A lock is stale, edited, inconsistent, cannot be resolved, or holds a package with a known vulnerability."""
    UNREACHABLE = 10
    """A package index, a registry, a feed of advisories or another node does not answer."""
    INTERRUPTED = 130
    """Stopped by Ctrl-C (SIGINT), after saving."""
    TERMINATED = 143
    """Stopped by SIGTERM, after saving."""


class Failure(Exception):
    """Something a user can mend. `details` are lines of evidence, `hint` names the mending command in backticks."""

    def __init__(self, code: Exit, message: str, *, details: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = tuple(details)
        self.hint = hint

    def __str__(self) -> str:
        lines = [f"error: {self.message}", *(f"  {line}" for line in self.details)]
        if self.hint is not None:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


def report(failure: Failure) -> int:
    """Print a failure on standard error and return its exit code; readable without colour."""
    speak(visible(str(failure)))
    return int(failure.code)


def speak(text: str) -> None:
    """Print the last words of a program on standard error; that nobody hears them does not change its exit code."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # whoever read has gone, or the disk is full; Python would stumble over the rest at its end
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came of, the latest first: libraries wrap what a kernel or a disk has said."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def full_output(probe: bytes = b"") -> Failure | None:
    """The failure of standard output, if it takes nothing more; Python would complain again at its end."""
    output: Any = sys.stdout
    if output is None:  # it was closed before the program began
        return None
    try:
        output.flush()
        os.write(output.fileno(), probe)
    except BrokenPipeError:  # who read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
        return None
    except ValueError:  # it is no file
        return None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
        said = f"cannot write to standard output: {error.strerror}"
        return Failure(Exit.STORAGE, said, hint="what is on the disk is whole; the same command says it again")
    return None


def nobody_reads() -> bool:
    """Whether standard output is a pipe whose reader has seen enough, as `head` does; then nothing more goes there."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would complain again at its end
    return True


def visible(text: str) -> str:
    r"""A text with every control character but line ends and tabs written out, as in \x1b: a path may hold any.

    They would move the cursor, colour the terminal or hide what stands before them.
    """
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def speak_anywhere() -> None:
    """Let standard output take any character, whatever the locale: one that it cannot show is written as its number.

    A program's last line must not be a traceback for a Greek letter.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")

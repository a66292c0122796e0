"""What making an environment takes, whichever environment: one maker at a time, beside its place, with clear failures.

Standard library only: the bootstrap uses it before anything is installed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from env.errors import Exit, Failure

TAIL = 64 * 1024
"""Bytes of a failed program's output that are searched for the reason."""

REASONS: tuple[tuple[re.Pattern[str], Exit, str], ...] = (
    # Order matters: a full disk also breaks downloads, and pip calls an unreachable index a package without versions.
    (re.compile(r"No space left on device|Disk quota exceeded|os error 28\b"), Exit.STORAGE, "the disk is full"),
    (
        re.compile(r"Hash mismatch|DO NOT MATCH THE HASHES", re.IGNORECASE),
        Exit.LOCK,
        "a downloaded file is not the one that the lock names",
    ),
    (
        re.compile(
            r"error sending request|Failed to fetch|Could not connect|dns error|timed out|NewConnectionError|ProxyError"
            r"|Max retries exceeded|Retrying \(|name resolution|Network is unreachable|network was disabled",
            re.IGNORECASE,
        ),
        Exit.UNREACHABLE,
        "no package index answers",
    ),
    (re.compile(r"No interpreter found for"), Exit.HOST, "the Python that was asked for is not installed"),
    (
        re.compile(r"No solution found|ResolutionImpossible|No matching distribution|not found in the (package )?reg"),
        Exit.LOCK,
        "the requirements cannot be met",
    ),
)

HINTS = {
    Exit.HOST: "install it, or leave `--python` out: the Python that runs the noxfile is then used",
    Exit.STORAGE: "make room, then run the same command again; what was half made is gone",
    Exit.LOCK: "if the lock is the committed one, the index serves another file under that name: use another index",
    Exit.UNREACHABLE: "check the network; pip's and uv's index, proxy and CA settings are honoured",
}


def say(text: str) -> None:
    """Tell the user what takes time; on standard error, since a program's output may be piped on."""
    print(f"dflash: {text}", file=sys.stderr, flush=True)


@contextmanager
def exclusively(place: Path) -> Iterator[int]:
    """Hold the lock of a folder that is about to be made, waiting for another process that makes it.

    Yields the lock's file descriptor: children that inherit it keep others out even if this process is killed.
    """
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(place.with_name(f"{place.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unwritable(place.parent, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that makes {place.name}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def beside(place: Path) -> Iterator[Path]:
    """Yield a folder to build in; it takes the place when the block ends well and is removed otherwise.

    Whatever happens, the place holds the old folder, the new one or, for an instant between two renames, none: never a
    mixture. What a killed process left is cleared away first; the caller holds the lock (`exclusively`). SIGTERM
    unwinds like Ctrl-C.
    """
    ours = re.compile(re.escape(place.name) + r"\.(building|old)-[0-9]+")  # a user's own `NAME.old-backup` is not
    for leftover in [path for path in place.parent.glob("*") if ours.fullmatch(path.name)]:
        shutil.rmtree(leftover, ignore_errors=True)
    building = place.with_name(f"{place.name}.building-{os.getpid()}")
    old = place.with_name(f"{place.name}.old-{os.getpid()}")
    with terminable():
        try:
            yield building
            if place.exists():
                place.rename(old)
            building.rename(place)
        except OSError as error:
            raise _unwritable(place.parent, error) from error
        finally:
            shutil.rmtree(building, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise, so that children are stopped and half-made folders removed."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(int(Exit.TERMINATED))

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _unwritable(folder: Path, error: OSError) -> Failure:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return Failure(Exit.STORAGE, f"the disk of {folder} is full", hint=HINTS[Exit.STORAGE])
    return Failure(Exit.STORAGE, f"cannot write in {folder}: {error.strerror or error}")


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    show: bool = True,
    keep: Sequence[int] = (),
    cwd: Path | None = None,
) -> None:
    """Run a program, show its output as it comes, and turn its failure into a `Failure` that names the reason.

    Its output goes through us, because the reason stands only there. On a terminal the program gets a terminal of its
    own, so that its progress bars stay. With `show` off, its output is shown only if it fails. `keep` are file
    descriptors that it inherits.
    """
    ours, its = _channel()
    process = subprocess.Popen(
        command, env=dict(environ), cwd=cwd, stdin=subprocess.DEVNULL, stdout=its, stderr=its, pass_fds=tuple(keep)
    )
    os.close(its)
    seen = b""
    try:
        while chunk := _read(ours):
            seen = (seen + chunk)[-TAIL:]
            if show:
                _print(chunk)
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        os.close(ours)
    if code != 0:
        if not show:
            _print(seen)
        raise explain(command, code, seen.decode("utf-8", "replace"))


def _print(chunk: bytes) -> None:
    sys.stderr.buffer.write(chunk)
    sys.stderr.buffer.flush()


def _channel() -> tuple[int, int]:
    """Two ends of what carries a program's output: a terminal if we have one, else a pipe."""
    if not sys.stderr.isatty():
        return os.pipe()
    ours, its = pty.openpty()
    size = fcntl.ioctl(sys.stderr.fileno(), termios.TIOCGWINSZ, bytes(8))
    fcntl.ioctl(its, termios.TIOCSWINSZ, size)
    return ours, its


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError as error:
        if error.errno == errno.EIO:  # how a terminal says that its other end was closed
            return b""
        raise


def explain(command: Sequence[str], code: int, output: str) -> Failure:
    """The `Failure` for a program that failed: its reason, where the output tells one, and the lines that say so."""
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in re.split(r"[\r\n]+", output)]
    for pattern, exit_code, sentence in REASONS:
        evidence = [line for line in lines if pattern.search(line)]
        if evidence:
            return Failure(exit_code, sentence, details=evidence[-2:], hint=HINTS[exit_code])
    program = " ".join(Path(word).name if word.startswith("/") else word for word in command[:4])
    return Failure(Exit.BUG, f"`{program} …` failed with exit code {code}; its words are above")

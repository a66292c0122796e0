"""Looking without being hurt: files that may be missing, commands that may hang, file systems that may never answer."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENOUGH = 256 * 1024
"""Bytes of a file or of a command's output that are read; no fact is longer, and a command that prints for ever must
not fill the memory of a host that may already be short of it."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended."""

    code: int
    """Its exit status; negative for a signal."""
    output: str
    """Standard output and standard error as they came, at most `ENOUGH` bytes."""


def run(command: Sequence[str], *, seconds: float, environ: Mapping[str, str] | None = None) -> Ran | None:
    """Run a command with a time limit; None if it cannot be started, does not end, or prints without end.

    The whole process group is killed at the limit: killing the child alone would leave a grandchild (`nvidia-smi` is a
    shell script on some hosts) holding the pipe, and reading would go on for ever.
    """
    variables = {**(os.environ if environ is None else environ), "LC_ALL": "C", "LANGUAGE": ""}
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
    except (OSError, ValueError):
        return None
    assert process.stdout is not None
    with process.stdout as pipe:
        output = _drain(pipe.fileno(), time.monotonic() + seconds)
        try:
            # After the pipe has closed the program is nearly done; one that lingers is as hung as one that prints
            # nothing.
            process.wait(timeout=1 if output is not None else 0)
        except subprocess.TimeoutExpired:
            output = None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return None if output is None else Ran(process.returncode, output.decode("utf-8", "replace"))


def _drain(pipe: int, deadline: float) -> bytes | None:
    """Read to the end of the pipe; None if the deadline comes first or there is too much."""
    output = bytearray()
    while len(output) < ENOUGH:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            return None
        chunk = os.read(pipe, 65536)
        if not chunk:
            return bytes(output)
        output += chunk
    return None


def read(path: Path) -> str | None:
    """The beginning of a file as text, whatever bytes it holds; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(ENOUGH).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None


def number(text: str | None) -> int | None:
    """The whole number that a one-line file holds; None for anything else (`max`, garbage, nothing)."""
    try:
        return int(text.strip()) if text is not None else None
    except ValueError:
        return None


def together(probes: Mapping[str, Callable[[], Any]], *, seconds: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Run all probes at once; what each found, and for each that found nothing, why.

    Threads, because a `stat` on a network file system whose server is gone never returns and cannot be given a time
    limit; daemon threads, because the report must come out and the process end all the same.
    """
    found: dict[str, Any] = {}
    trouble: dict[str, str] = {}

    def look(name: str, probe: Callable[[], Any]) -> None:
        try:
            found[name] = probe()
        except Exception as error:  # noqa: BLE001  # the doctor speaks on the sickest of hosts: any error is a fact
            trouble[name] = f"{type(error).__name__}: {error}"

    threads = {name: threading.Thread(target=look, args=(name, probe), daemon=True) for name, probe in probes.items()}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + seconds
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            trouble[name] = f"no answer within {seconds:g} s"
    # Copies: a thread that answers late must not change what is being judged.
    return dict(found), dict(trouble)

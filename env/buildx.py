"""Run a build, show what it prints, and say in one sentence what it failed of.

BuildKit marks what a step prints with the step's number and its seconds (`#20 1.502 Unpacking gcc`), and the step that
failed with its exit code: that step alone is asked. Patterns for a registry's words would fit anything that a compiler
or a time stamp may say, so they see only what buildx says itself (buildx 0.13).
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from itertools import takewhile

from env import building, remote
from env.building import say
from env.errors import Exit, Failure
from env.variants import ROOT

KEPT = 2000
"""Lines of a build's output that are searched for the reason."""

PATIENCE = 10.0
"""Seconds for docker to cancel a build, before it is killed."""

_STEP = re.compile(r"#(\d+) \d+\.\d+ (.*)")
_BROKEN = re.compile(r"#(\d+) ERROR: process .* did not complete successfully: exit code: (\d+)")


def run(words: Sequence[str]) -> None:
    """Say a command of `docker buildx`, run it at the project's root, and show what it prints.

    Raises:
        Failure: it failed, see `explain`.
    """
    say(shlex.join(words))
    lines: deque[str] = deque(maxlen=KEPT)
    # both streams through the pipe: docker passes a signal on to buildx only if its standard output is no terminal
    with subprocess.Popen(
        words,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                sys.stderr.write(line)
                lines.append(line)
        except BaseException:  # we are being stopped: nothing may go on behind our back
            _end(process)
            raise
    if process.returncode:
        raise explain(words, process.returncode, lines)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()


def explain(words: Sequence[str], code: int, output: Sequence[str]) -> Failure:
    """The `Failure` for a build's output: what the broken step said, or what buildx says if no step broke.

    Our own programs in a step say it in a sentence and with an exit code, which is kept.
    """
    lines = [line.rstrip() for line in output]
    broken = [match.groups() for line in lines if (match := _BROKEN.match(line))]
    if not broken:
        own = [line for line in lines if re.match(r"(#\d+ )?ERROR: ", line)]
        return remote.explain(words, code, "\n".join(own or lines))
    number, status = broken[-1][0], int(broken[-1][1])
    said = [match[2] for line in lines if (match := _STEP.match(line)) and match[1] == number]
    told = _told(said, status)
    if told is not None and status > Exit.USAGE:  # pip and uv end with 1 or 2, whatever it was
        return told
    reason = building.explain(words, status, "\n".join(said))
    if reason.code is not Exit.BUG:
        return reason
    return told or Failure(Exit.BUG, f"a step of the build failed with exit code {status}", details=said[-4:])


def _told(said: Sequence[str], status: int) -> Failure | None:
    """The last `Failure` that a program of ours, or uv, has printed; None if there is none."""
    starts = [number for number, line in enumerate(said) if line.startswith("error: ")]
    if not starts:
        return None
    first, *rest = said[starts[-1] :]
    details = [line.strip() for line in takewhile(lambda line: line.startswith("  "), rest)]
    hints = [line.removeprefix("hint: ") for line in rest if line.startswith("hint: ")]
    code = Exit(status) if status in {int(each) for each in Exit} else Exit.BUG
    message = f"the build stopped: {first.removeprefix('error: ')}"
    return Failure(code, message, details=details, hint=hints[0] if hints else None)

"""Errors as a terminal gets them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from env.errors import Exit, Failure, report, visible

ROOT = Path(__file__).parent.parent


def test_control_characters_of_a_path_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure(Exit.INPUT, "the text `a\x1b[2J\rb\x07` does not exist", details=["\x9b31m"], hint="`ls`\x7f")
    assert report(failure) == Exit.INPUT
    said = capsys.readouterr().err
    assert said == "error: the text `a\\x1b[2J\\x0db\\x07` does not exist\n  \\x9b31m\nhint: `ls`\\x7f\n"
    assert visible("naïve τ\tübung\n") == "naïve τ\tübung\n"


def test_a_path_that_is_not_utf8_is_written_out_too() -> None:
    code = "import os, sys; from env.errors import *; sys.exit(report(Failure(Exit.INPUT, f'no `{sys.argv[1]}`')))"
    command = [os.fsencode(sys.executable), b"-c", code.encode(), b"caf\xe9\x1b[1m"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False)
    assert done.returncode == Exit.INPUT
    assert done.stderr == b"error: no `caf\\udce9\\x1b[1m`\n"


def test_a_full_standard_output_is_named() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123  # a device
        done = subprocess.run(
            [sys.executable, "-m", "dflash", "train", "--help"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == Exit.STORAGE
    assert done.stderr.startswith("error: cannot write to standard output: No space left on device\n")
    assert "Exception ignored" not in done.stderr


def test_a_list_of_which_the_first_line_is_enough_ends_well() -> None:
    """As `... | head -1`, which has gone before the rest is written; click would end with 1 without a word."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "dflash", "bench", "--list"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (Exit.DONE, "")


def test_another_pipe_that_breaks_is_no_silent_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash import cli, config

    def broken(_: str) -> None:
        raise BrokenPipeError(errno.EPIPE, "a worker's")

    monkeypatch.setattr(config, "load", broken)
    with monkeypatch.context() as streams:  # click puts its own in their place
        streams.setattr(sys, "stdout", sys.__stdout__)
        streams.setattr(sys, "stderr", sys.__stderr__)
        with pytest.raises(BrokenPipeError, match="a worker's"):
            cli.main(["train"])


def test_an_error_that_nobody_hears_keeps_its_exit_code() -> None:
    """As in `... 2>&1 | head -1`, when head has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys; from env.errors import *; sys.exit(report(Failure(Exit.INPUT, 'no')))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, stderr=writer, check=False)
    os.close(writer)
    assert done.returncode == Exit.INPUT


def test_a_letter_that_the_terminal_cannot_show_is_no_traceback() -> None:
    code = "from env.errors import speak_anywhere; speak_anywhere(); print('\u03c4 8.44')"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\\u03c4 8.44\n", b"")
    for program in ("env/__main__.py", "dflash/__main__.py"):
        assert "    speak_anywhere()\n" in (ROOT / program).read_text()


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_program_that_is_started_without_a_standard_stream_has_one(closed: str, tmp_path: Path) -> None:
    code = (
        "import os, sys; from env import bootstrap; bootstrap._open_standard_streams(); "
        "sys.stdin.read(); print('x', flush=True); print('y', file=sys.stderr, flush=True); "
        "os.execv(sys.executable, [sys.executable, '-c', 'import os; [os.fstat(n) for n in (0, 1, 2)]'])"
    )
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=environ, cwd=tmp_path, stdin=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.parametrize("device", ["banana", "cuda:x", "mps", "cuda:0 "])
def test_a_device_that_cannot_be_is_a_usage_error(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    from dflash.cli import main

    assert main(["verify", "--device", device]) == Exit.USAGE
    assert capsys.readouterr().err == f"error: --device {device}: must be `cpu`, or a GPU as in `cuda:0`\n"

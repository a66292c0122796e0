from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from dflash.progress import duration, track
from dflash.trainer import Step
from dflash.worker import Job, status_line

ROOT = Path(__file__).parents[1]
WORK = """
import sys
from dflash.progress import track
with track("training the drafter", 30, status=sys.argv[1]) as work:
    for step in range(30):
        work.advance(loss=5 - step / 10, tokens=2304)
print("the result")
"""


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def on_a_terminal(status: str, *, columns: int, **environment: str) -> str:
    """Everything a real terminal of that width is sent while the work runs in a process of its own."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    known = {key: value for key, value in os.environ.items() if key not in {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}}
    process = subprocess.Popen(
        [sys.executable, "-c", WORK, status],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env={**known, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment},
    )
    os.close(theirs)
    sent = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # what Linux says when the other end is closed
            break
        if not piece:
            break
        sent += piece
    os.close(ours)
    assert process.wait() == 0
    return sent.decode()


def plain(sent: str) -> str:
    """What stands on the screen: without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent)


def test_a_terminal_shows_a_bar_with_loss_speed_and_time_and_then_the_cursor_again() -> None:
    sent = on_a_terminal("", columns=100)
    assert re.search(r"training the drafter +━+ +30/30 steps +loss 2\.100 +[\d,]+ tokens/s +took 0:0\d", plain(sent))
    assert "\x1b[33m" not in sent
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l")


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_a_status_stands_on_a_terminals_line_however_narrow_it_is(columns: int) -> None:
    sent = plain(on_a_terminal("drifted", columns=columns))
    last = sent.split("the result")[0].replace("\r", "\n").strip().splitlines()[-1]
    assert last.startswith("training the drafter")
    assert last.rstrip().endswith("drifted")
    assert "…" not in last
    assert len(last) <= columns
    assert "loss 2.100" in last


def test_no_color_is_honoured_on_a_terminal() -> None:
    coloured = on_a_terminal("drifted", columns=100)
    without = on_a_terminal("drifted", columns=100, NO_COLOR="1")
    colours = re.compile(r"\x1b\[(3\d|9\d|38;[\d;]+)m")
    assert colours.search(coloured)
    assert not colours.search(without)
    assert "drifted" in without


def test_a_dumb_terminal_gets_plain_lines() -> None:
    assert "\x1b" not in on_a_terminal("", columns=80, TERM="dumb")


def test_a_pipe_gets_plain_lines_on_standard_error_and_only_results_on_standard_output() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORK, "drifted"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "FORCE_COLOR": "1"},
    )
    assert done.stdout == "the result\n"
    first, last = done.stderr.splitlines()
    assert first == "training the drafter: 0 of 30 steps [drifted]"
    pattern = r"training the drafter: 30 of 30 steps, loss 2\.100, [\d,]+ tokens/s, took 0:0\d \[drifted\]"
    assert re.fullmatch(pattern, last)


def test_work_survives_that_whoever_read_its_lines_has_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    gone = io.TextIOWrapper(os.fdopen(writer, "wb", buffering=0), write_through=True)
    with gone, track("decoding", 2, stream=gone) as work:
        work.advance()
    assert work.done == 1


def lines(steps: int, seconds: float) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    with track("training", 1000, stream=stream, clock=clock) as work:
        for _ in range(steps):
            clock.now += seconds
            work.advance(loss=1.5, tokens=100)
    return stream.getvalue().splitlines()


def test_lines_come_at_most_every_five_seconds_and_at_the_end() -> None:
    told = lines(40, 0.5)
    counted = [int(line.split(" of")[0].split()[-1]) for line in told]
    assert counted == [0, 10, 20, 30, 40, 40]
    assert told[-1] == "training: stopped at 40 of 1,000 steps, loss 1.500, 200 tokens/s, 8:00 left"


def test_the_last_line_says_how_long_it_took() -> None:
    assert lines(1000, 0.5)[-1] == "training: 1,000 of 1,000 steps, loss 1.500, 200 tokens/s, took 8:20"


def test_time_left_follows_the_speed_of_late() -> None:
    assert lines(100, 6)[-2] == "training: 100 of 1,000 steps, loss 1.500, 17 tokens/s, 1:30:00 left"


def test_work_that_is_cut_short_says_where_it_stopped() -> None:
    assert lines(3, 0.1)[-1].startswith("training: stopped at 3 of 1,000 steps, loss 1.500")


def test_work_that_is_taken_up_again_measures_its_own_speed_only() -> None:
    stream, clock = io.StringIO(), Clock()
    with track("training", 384, stream=stream, clock=clock) as work:
        clock.now += 14  # compiling
        work.reached(301, loss=1.5, tokens=100)
        for step in range(302, 322):
            clock.now += 0.5
            work.reached(step, loss=1.5, tokens=100)
    told = stream.getvalue().splitlines()
    assert told[1:] == [
        "training: 301 of 384 steps, loss 1.500",
        "training: 311 of 384 steps, loss 1.500, 200 tokens/s, 0:36 left",
        "training: 321 of 384 steps, loss 1.500, 200 tokens/s, 0:32 left",
        "training: stopped at 321 of 384 steps, loss 1.500, 200 tokens/s, 0:32 left",
    ]


def test_a_worker_that_takes_training_up_again_tells_the_time_left_by_its_own_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {name: str(tmp_path) for name in ("target", "rows", "folder")}
    job = Job(tables={}, seed=0, **names, topology=[0, 1], launcher="processes", status="environment changed")
    with status_line(job, 384, lambda: None) as watch:
        for number in (301, 302):
            time.sleep(0.2)
            watch(Step(step=number, total=384, loss=1.5, tokens=100, seconds=0.2))
    last = capsys.readouterr().err.splitlines()[-1]
    found = re.search(r"stopped at 302 of 384 steps, loss 1\.500, \d+ tokens/s, (\d+):(\d\d) left", last)
    assert found, last
    assert int(found[1]) * 60 + int(found[2]) >= 16
    assert last.endswith("[environment changed]")


def test_what_is_not_known_is_not_shown() -> None:
    stream, clock = io.StringIO(), Clock()
    with track("decoding", 4, unit="prompts", stream=stream, clock=clock) as work:
        clock.now += 8
        work.advance(2)
    assert stream.getvalue().splitlines()[1] == "decoding: 2 of 4 prompts, 0:08 left"


def test_an_early_slow_step_is_forgotten() -> None:
    stream, clock = io.StringIO(), Clock()
    with track("training", 1000, stream=stream, clock=clock) as work:
        clock.now += 60  # compiling
        work.advance(tokens=100)
        for _ in range(100):
            clock.now += 1
            work.advance(tokens=100)
        assert work.speed == pytest.approx(100)
        assert work.left == pytest.approx(899)


@pytest.mark.parametrize(
    ("seconds", "written"), [(0.4, "0:00"), (7, "0:07"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")]
)
def test_a_time_is_written_as_people_do(seconds: float, written: str) -> None:
    assert duration(seconds) == written


def test_a_unit_that_takes_longer_than_the_window_still_tells_the_time_left() -> None:
    now = 0.0
    stream = io.StringIO()
    with track("responding", 40, unit="lines", stream=stream, clock=lambda: now) as work:
        work.skip(20)
        for _ in range(3):
            for _ in range(50):
                now += 2.0
                work.advance(0, tokens=100)
            work.advance(4)
        assert work.left == pytest.approx(200)
        now += 50.0
        work.advance(0, tokens=100)
        assert work.left is not None

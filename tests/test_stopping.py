"""Signals: noted where a run must be left whole, and answered at once where nothing can be lost."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dflash import stopping
from env.errors import Exit

ROOT = Path(__file__).parent.parent
PROGRAM = """
import os, subprocess, sys, time
from dflash.stopping import descendants, listening
with listening() as stop:
    with stop.at_once("step 7 of 9 is saved"):
        child = subprocess.Popen(["sh", "-c", "sleep 98765 & wait"], stdin=subprocess.DEVNULL)
        print(child.pid, flush=True)
        {block}
    print("outside", flush=True)
    time.sleep(0.5)
    print("asked" if stop.asked() else "not asked", flush=True)
    for one in descendants(os.getpid()):
        os.kill(one, 9)
    child.wait()
"""


def start(block: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("{block}", block)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, Exit.INTERRUPTED), (signal.SIGTERM, Exit.TERMINATED)])
def test_a_signal_ends_a_block_in_which_nothing_can_be_lost_and_its_children(
    number: signal.Signals, code: Exit
) -> None:
    # a main thread that waits outside of Python, where handlers do not run
    process = start("import ctypes; ctypes.CDLL(None).pause(); ctypes.CDLL(None).sleep(600)")
    assert process.stdout is not None
    process.stdout.readline()
    begun = time.monotonic()
    while len(children := stopping.descendants(process.pid)) < 2:  # the shell, and what it started
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)  # waits for whoever holds the pipes, so for the children too
    assert time.monotonic() - begun < 10
    assert (process.returncode, out) == (code, "")
    assert err == "stopped: step 7 of 9 is saved\nhint: the same command goes on from there\n"
    assert len(children) == 2


def test_after_the_block_signals_are_noted_again() -> None:
    process = start("pass")
    assert process.stdout is not None
    process.stdout.readline()
    assert process.stdout.readline() == "outside\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "asked\n", "")


def test_a_signal_that_came_before_the_block_is_answered_at_its_beginning() -> None:
    stop = stopping.Stop()
    stop.ends_the_process = True
    stop.note(signal.SIGTERM, None)
    with pytest.raises(stopping.Stopped, match="step 7") as stopped, stop.at_once("step 7"):
        raise AssertionError
    assert stopped.value.code is Exit.TERMINATED


def test_in_another_thread_and_in_an_agents_worker_the_block_just_runs() -> None:
    ran: list[bool] = []
    asked = stopping.Stop()
    asked.ask(signal.SIGTERM)
    with asked.at_once("nowhere"):
        ran.append(True)

    def work() -> None:
        stop = stopping.Stop()
        stop.ends_the_process = True
        with stop.at_once("nowhere"):
            ran.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [True, True]


def test_the_block_leaves_nothing_behind() -> None:
    before = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    with stopping.listening() as stop, stop.at_once("nowhere"):
        pass
    assert (len(list(Path("/proc/self/fd").iterdir())), threading.active_count()) == before
    assert signal.set_wakeup_fd(-1) == -1


HEARING = """
import os, signal, threading, time
from dflash.stopping import Stop, hear
stop = Stop()
hear(stop)
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
os.waitpid(child, 0)
time.sleep(0.2)
print("asked" if stop.asked() else "not asked", flush=True)
def tell():
    while not stop.asked():
        time.sleep(0.01)
    os.write(1, b"asked")
    os._exit(0)
threading.Thread(target=tell).start()
print("waiting", flush=True)
import ctypes
ctypes.CDLL(None).pause()
ctypes.CDLL(None).sleep(600)
"""


def test_a_worker_hears_a_signal_while_its_main_thread_is_outside_of_python_and_none_of_a_child_s() -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", HEARING], env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["not asked\n", "waiting\n"]
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, "asked")


def test_a_worker_that_cannot_tell_its_launcher_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(stopping.WORD, str(tmp_path / "word"))
    stopping.leave_word()
    assert (tmp_path / "word").exists()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(stopping.WORD, str(tmp_path / "gone" / "word"))
    stopping.leave_word()
    assert f"{tmp_path}/gone/word: No such file or directory" in capsys.readouterr().err
    monkeypatch.delenv(stopping.WORD)
    stopping.leave_word()
    assert capsys.readouterr().err == ""


def test_torch_s_agent_says_nothing_of_its_own() -> None:
    from dflash import launch

    launch.hush()
    for name in ("agent.server.api", "agent.server.local_elastic_agent", "multiprocessing.api", "rendezvous.api"):
        assert not logging.getLogger(f"torch.distributed.elastic.{name}").isEnabledFor(logging.ERROR)

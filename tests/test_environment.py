from __future__ import annotations

import errno
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from wheelhouse import Wheelhouse, pin

from env import building, drift, environment, index, variants
from env.bootstrap import python_version
from env.errors import Exit, Failure

NAME = f"cu130-py{python_version()}"


class Place(NamedTuple):
    """Where environments are made in a test, and from what."""

    home: Path
    locks: Path
    house: Wheelhouse


@pytest.fixture
def place(tmp_path: Path, package_index: Wheelhouse, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A project whose cu130 is one small package, and whose dev adds another."""
    home, root = tmp_path / ".nox" / "environments", tmp_path
    monkeypatch.setattr(environment, "HOME", home)
    monkeypatch.setattr(environment, "ROOT", root)
    (root / "requirements").mkdir()
    (root / "requirements" / "cu130.txt").write_text(pin("torch", "2.11.0", package_index.add("torch", "2.11.0")))
    (root / "requirements" / "dev.txt").write_text(pin("pytest", "9.0", package_index.add("pytest", "9.0")))
    return Place(home, root / "requirements", package_index)


def packages(python: Path) -> set[str]:
    return {each.name.partition("-")[0] for each in python.parent.parent.glob("lib/python*/site-packages/*.dist-info")}


def left_in(home: Path) -> set[str]:
    return {path.name for path in home.iterdir() if not path.name.endswith(".lock")}


def test_an_environment_holds_exactly_what_its_lock_says_and_is_undrifted(place: Place) -> None:
    python = environment.ensure("cu130")
    assert python == environment.python_of("cu130") == place.home / NAME / "bin" / "python"
    assert packages(python) == {"torch"}
    assert drift.compare(python, place.locks / "cu130.txt") == ()
    said = subprocess.run(
        [python, "-c", "import torch; print(torch.version)"], capture_output=True, text=True, check=True
    )
    assert said.stdout == "2.11.0\n"
    assert left_in(place.home) == {NAME}


def test_the_second_time_nothing_is_run_and_nothing_is_asked_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    environment.ensure("cu130")
    before = (place.home / NAME).stat().st_mtime_ns
    place.house.asked.clear()
    monkeypatch.setattr(environment, "run", lambda *_, **__: pytest.fail("a program was run"))
    assert environment.ensure("cu130") == environment.python_of("cu130")
    assert place.house.asked == []
    assert (place.home / NAME).stat().st_mtime_ns == before


def test_what_changed_an_environment_is_left_to_be_seen(place: Place) -> None:
    python = environment.ensure("cu130")
    extra = next(python.parent.parent.glob("lib/python*/site-packages")) / "flashinfer.py"
    extra.touch()
    environment.ensure("cu130")
    assert extra.exists()
    assert environment.repair("cu130") == python
    assert not extra.exists()
    assert left_in(place.home) == {NAME}


def test_a_file_edited_in_an_environment_does_not_come_back_with_its_repair(place: Place) -> None:
    python = environment.ensure("cu130")
    module = next(python.parent.parent.glob("lib/python*/site-packages/torch/__init__.py"))
    with module.open("a") as file:  # in place, as many editors do: a linked file would change in uv's cache, too
        file.write("drifted = True\n")
    environment.repair("cu130")
    assert "drifted" not in module.read_text()


def test_an_environment_for_checks_holds_both_locks_and_follows_them_unasked(place: Place) -> None:
    python = environment.ensure("cu130", ["dev"])
    assert python.parent.parent.name == f"{NAME}-dev"
    assert packages(python) == {"torch", "pytest"}
    assert packages(environment.ensure(None, ["dev"])) == {"pytest"}
    place.house.asked.clear()
    environment.ensure("cu130", ["dev"])
    assert place.house.asked == []
    with (place.locks / "dev.txt").open("a") as lock:
        lock.write(pin("ruff", "1.0", place.house.add("ruff", "1.0")))
    assert packages(environment.ensure("cu130", ["dev"])) == {"torch", "pytest", "ruff"}


def test_console_scripts_run_where_the_environment_was_moved_to(place: Place) -> None:
    scripts = {
        "tool/__init__.py": "def main(): print('here')\n",
        "tool-1.0.dist-info/entry_points.txt": "[console_scripts]\ntool = tool:main\n",
    }
    with (place.locks / "cu130.txt").open("a") as lock:
        lock.write(pin("tool", "1.0", place.house.add("tool", "1.0", files=scripts)))
    tool = environment.ensure("cu130").with_name("tool")
    assert subprocess.run([tool], capture_output=True, text=True, check=True).stdout == "here\n"


def test_a_file_that_is_not_the_locked_one_is_refused_and_nothing_is_left(place: Place) -> None:
    place.house.add("torch", "2.11.0", files={"torch/__init__.py": "evil = True\n"})
    with pytest.raises(Failure, match="a downloaded file is not the one that the lock names") as caught:
        environment.ensure("cu130")
    assert caught.value.code == Exit.LOCK
    assert left_in(place.home) == set()


def test_a_failed_repair_leaves_the_old_environment(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = environment.ensure("cu130")
    before = sorted(python.parent.parent.rglob("*"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "another-cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(Failure, match="no package index answers") as caught:
        environment.repair("cu130")
    assert caught.value.code == Exit.UNREACHABLE
    assert sorted(python.parent.parent.rglob("*")) == before
    assert left_in(place.home) == {NAME}


def test_too_little_room_is_refused_before_anything_starts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(place.locks)._replace(free=3_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    needed = variants.load().variant("cu130").installed_gb
    with pytest.raises(Failure, match=f"cu130 takes {needed} GB in .*; 3.0 GB are free there") as caught:
        environment.ensure("cu130")
    assert caught.value.code == Exit.STORAGE
    assert place.house.asked == []


def test_where_nothing_can_be_written_another_variant_is_refused_with_the_one_that_is_there(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (NAME, "cu128-py3.11.building-7"):
        (place.home / name).mkdir(parents=True)
        (place.home / name / "pyvenv.cfg").write_text("")
    monkeypatch.setattr(os, "access", lambda path, _mode: path != place.home)  # as on an image's read-only root
    assert environment.ensure("cu130") == place.home / NAME / "bin" / "python"
    with pytest.raises(Failure) as caught:
        environment.ensure("cu132")
    assert caught.value.code == Exit.USAGE
    other = f"cu132-py{python_version()}"
    assert caught.value.message == f"{place.home} holds {NAME}, not {other}, and cannot be written"
    assert caught.value.hint == "`--variant cu130` is there"
    assert caught.value.details == ()
    monkeypatch.setenv("DFLASH_VARIANT", "cu132")  # somebody has changed an image's variable
    with pytest.raises(Failure) as caught:
        environment.ensure("cu132")
    assert caught.value.details == ("DFLASH_VARIANT names cu132",)
    assert "`nox -s image -- --variant cu132` builds that one" in (caught.value.hint or "")
    assert left_in(place.home) == {NAME, "cu128-py3.11.building-7"}


def test_a_python_that_the_locks_do_not_serve_is_refused(place: Place) -> None:
    with pytest.raises(Failure, match=r"the locks serve Python 3\.11, 3\.12, 3\.13, not 3\.9") as caught:
        environment.ensure("cu130", python="3.9")
    assert caught.value.code == Exit.USAGE


def test_a_python_that_is_not_installed_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = next(one for one in ("3.13", "3.12") if one != python_version())
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(place.home))
    if shutil.which(f"python{absent}"):
        pytest.skip(f"Python {absent} is here")
    with pytest.raises(Failure, match="the Python that was asked for is not installed") as caught:
        environment.ensure("cu130", python=absent)
    assert caught.value.code == Exit.HOST


def test_two_at_once_make_one_environment(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    place.house.hold = threading.Event()
    threads = [threading.Thread(target=in_a_process, args=(place,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_for(lambda: any(path.endswith(".whl") for path in place.house.asked))
    time.sleep(1)
    place.house.hold.set()
    for thread in threads:
        thread.join()
    assert packages(environment.python_of("cu130")) == {"torch"}
    assert capfd.readouterr().err.count("making the environment") == 1
    assert left_in(place.home) == {NAME}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_installation_that_is_stopped_leaves_none_and_the_next_one_succeeds(
    place: Place, number: signal.Signals
) -> None:
    place.house.hold = threading.Event()
    process = start(place)
    try:
        wait_for(lambda: any(path.endswith(".whl") for path in place.house.asked))
        process.send_signal(number)
        code = process.wait(60)
    finally:
        process.kill()
        process.wait()
        place.house.hold.set()
    assert code == {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert not environment.python_of("cu130").exists()
    if number != signal.SIGKILL:
        assert left_in(place.home) == set()
    assert packages(environment.ensure("cu130")) == {"torch"}
    assert left_in(place.home) == {NAME}


def start(place: Place) -> subprocess.Popen[bytes]:
    """Make the environment in a process of its own, as a launch does."""
    program = (
        "import sys; from pathlib import Path; from env import __main__, environment\n"
        f"environment.HOME, environment.ROOT = Path({str(place.home)!r}), Path({str(place.locks.parent)!r})\n"
        "made = sys.modules['made'] = type(sys)('made')\n"
        "made.main = lambda _: environment.ensure('cu130') and 0\n"
        "__main__.COMMANDS['make'] = 'made:main'; sys.exit(__main__.main(['make']))\n"
    )
    return subprocess.Popen([sys.executable, "-c", program], cwd=variants.ROOT)


def in_a_process(place: Place) -> None:
    assert start(place).wait(240) == 0


def wait_for(condition: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------------------ reasons


@pytest.mark.parametrize(
    ("output", "code", "sentence"),
    [
        ("error: failed to write to file: No space left on device (os error 28)", Exit.STORAGE, "the disk is full"),
        ("x No solution found when resolving dependencies:", Exit.LOCK, "the requirements cannot be met"),
        ("error: Request failed after 3 retries\n  Caused by: dns error", Exit.UNREACHABLE, "no package index answers"),
        ("error: something else", Exit.BUG, "`uv pip sync …` failed with exit code 2; its words are above"),
    ],
)
def test_a_failed_program_s_words_tell_the_reason(output: str, code: Exit, sentence: str) -> None:
    failure = building.explain(["/usr/bin/uv", "pip", "sync"], 2, f"\x1b[31m{output}\x1b[0m\r\n")
    assert (failure.code, failure.message) == (code, sentence)
    assert all("\x1b" not in line for line in failure.details)


def test_a_full_disk_under_our_own_feet_is_a_sentence(tmp_path: Path) -> None:
    def fill() -> None:
        with building.beside(tmp_path / "place") as folder:
            folder.mkdir()
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Failure, match="is full") as caught:
        fill()
    assert caught.value.code == Exit.STORAGE
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_cleared_away_and_nothing_else(tmp_path: Path) -> None:
    for name in ("place.building-7", "place.old-7", "place.old-backup", "place.old-7-mine", "place2.old-7"):
        (tmp_path / name).mkdir()
    with building.beside(tmp_path / "place") as folder:
        folder.mkdir()
    kept = {"place", "place.old-backup", "place.old-7-mine", "place2.old-7"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Failure, match="cannot write in ") as caught, building.exclusively(tmp_path / "file" / "place"):
        pass
    assert caught.value.code == Exit.STORAGE


def test_progress_is_shown_on_a_terminal_through_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """In a process whose standard error is a terminal: the program that it runs has one, too, of the same width."""
    ours, its = pty.openpty()
    program = (
        "import os, sys; from env import building\n"
        "asked = 'import os, sys; print(sys.stderr.isatty(), os.get_terminal_size(2))'\n"
        "building.run([sys.executable, '-c', asked], os.environ)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=variants.ROOT, stderr=its)
    os.close(its)
    seen = b""
    while chunk := building._read(ours):
        seen += chunk
    os.close(ours)
    assert process.wait() == 0
    assert seen.startswith(b"True os.terminal_size(")


# ----------------------------------------------------------------------------------------------------- index settings


def test_what_pip_is_told_holds_for_uv() -> None:
    told = {
        "index-url": "https://main/simple",
        "extra-index-url": "https://one/simple\nhttps://two/simple",
        "find-links": "/wheels /more",
        "cert": "/etc/ca.pem",
        "client-cert": "/etc/me.pem",
        "trusted-host": "main other",
        "proxy": "http://proxy:3128",
    }
    environ = index.uv_environment({"PATH": "/bin"}, told)
    assert environ == {
        "PATH": "/bin",
        "UV_DEFAULT_INDEX": "https://main/simple",
        "UV_INDEX": "https://one/simple https://two/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/etc/ca.pem",
        "SSL_CLIENT_CERT": "/etc/me.pem",
        "UV_INSECURE_HOST": "main,other",
        "HTTPS_PROXY": "http://proxy:3128",
        "HTTP_PROXY": "http://proxy:3128",
    }
    further = {"UV_INDEX": "https://one", "UV_EXTRA_INDEX_URL": "https://two", "UV_FIND_LINKS": "/wheels"}
    for own in ({}, further):
        locking = index.uv_environment(own, told, only_main_index=True)
        assert "UV_DEFAULT_INDEX" in locking
        assert not further.keys() & locking.keys()
    assert index.uv_environment(further, {}) == further


def test_what_uv_is_told_itself_comes_first_and_what_bends_a_lock_goes() -> None:
    own = {
        "UV_INDEX_URL": "https://uv/simple",
        "SSL_CERT_FILE": "/uv.pem",
        "https_proxy": "http://uv",
        "UV_CONSTRAINT": "c.txt",
    }
    told = {"index-url": "https://pip/simple", "cert": "/pip.pem", "proxy": "http://pip"}
    environ = index.uv_environment(own, told)
    assert environ == {key: value for key, value in own.items() if key != "UV_CONSTRAINT"} | {
        "HTTP_PROXY": "http://pip"
    }


def test_pip_s_variables_come_before_its_files_and_install_before_global() -> None:
    listing = ":env:.index-url='https://env'\nglobal.index-url='https://global'\nglobal.cert='g'\ninstall.cert='i'\nlist.format='x'\n"
    assert index.read_settings(listing) == {"index-url": "https://env", "cert": "i"}

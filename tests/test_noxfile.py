from __future__ import annotations

import ast
import hashlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from clones import Clone
from wheelhouse import Wheelhouse, pin

from env import bootstrap
from env.errors import Exit, Failure
from env.variants import ROOT

NOXFILE = ROOT / "noxfile.py"
SESSIONS = [
    "train",
    "data",
    "tests",
    "lint",
    "typecheck",
    "lock",
    "bake",
    "base",
    "image",
    "verify",
    "bench",
    "cache",
    "push",
    "pull",
    "rootfs",
    "audit",
    "doctor",
]
FAKE_NOX = {"nox/__init__.py": "", "nox/__main__.py": "import sys; print('nox', *sys.argv[1:])\n"}


@pytest.fixture
def fresh(tmp_path: Path, package_index: Wheelhouse) -> Clone:
    """A clone without tools, whose tools' lock is one small package that stands where nox stands."""
    clone = Clone(tmp_path / "clone", package_index)
    clone.write("requirements/tools.txt", pin("nox", "1.0", package_index.add("nox", "1.0", files=FAKE_NOX)))
    return clone


def tools(clone: Clone) -> Path:
    return bootstrap.tools_python(clone.root).parent.parent


def left_in(clone: Clone) -> set[str]:
    return {path.name for path in (clone.root / ".nox").iterdir() if not path.name.endswith(".lock")}


# -------------------------------------------------------------------------------------------------------- the menu


def test_the_list_of_sessions_reads_like_a_menu(clone: Clone) -> None:
    done = clone.run("-l")
    assert done.returncode == 0, done.stderr
    menu = [line[2:].partition(" -> ") for line in done.stdout.splitlines() if line.startswith(("* ", "- "))]
    assert [name for name, _, _ in menu] == SESSIONS
    assert all(text for _, _, text in menu)


def test_help_needs_nothing_installed(fresh: Clone) -> None:
    for word in ("-h", "--help"):
        done = fresh.run(word)
        assert done.returncode == 0
        assert "python3 noxfile.py -s SESSION [-- OPTIONS]" in done.stdout
    assert not (fresh.root / ".nox").exists()


def test_every_session_s_command_exists() -> None:
    from env import __main__

    tree = ast.parse(NOXFILE.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "run"]
    names = {call.args[1].value for call in calls if isinstance(call.args[1], ast.Constant)}
    assert names <= __main__.COMMANDS.keys()
    assert len(calls) == len(SESSIONS)


def test_an_unknown_command_and_none_are_refused(clone: Clone) -> None:
    assert clone.env("trian").returncode == Exit.USAGE
    done = clone.env()
    assert done.returncode == Exit.USAGE
    assert "commands: launch, tests" in done.stderr
    asked = clone.env("--help")
    assert asked.returncode == Exit.DONE
    assert "commands: launch, tests" in asked.stdout


# ------------------------------------------------------------------------------------------------------ the bootstrap


def test_the_first_time_the_tools_are_installed_and_the_second_time_nothing_is(fresh: Clone) -> None:
    first = fresh.run("-s", "train", "--", "--seed", "1")
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"nox -f {fresh.root / 'noxfile.py'} -s train -- --seed 1\n"
    assert "setting up the tools" in first.stderr
    assert left_in(fresh) == {tools(fresh).name}
    fresh.house.asked.clear()
    before = tools(fresh).stat().st_mtime_ns
    second = fresh.run("-s", "train", "--", "--seed", "1")
    assert (second.returncode, second.stdout, second.stderr) == (0, first.stdout, "")
    assert fresh.house.asked == []
    assert tools(fresh).stat().st_mtime_ns == before


def test_tools_follow_their_lock_and_are_remade_when_their_python_is_gone(fresh: Clone) -> None:
    folder, lock = tools(fresh), fresh.root / "requirements" / "tools.txt"
    (folder / "bin").mkdir(parents=True)
    (folder / bootstrap.STAMP).write_text(hashlib.sha256(lock.read_bytes()).hexdigest())
    (folder / "bin" / "python").symlink_to("/nowhere/python")
    assert "setting up the tools" in fresh.run("-l").stderr
    with lock.open("a") as file:
        file.write(pin("rich", "1.0", fresh.house.add("rich", "1.0")))
    assert "setting up the tools" in fresh.run("-l").stderr
    assert list(folder.glob("lib/python*/site-packages/rich"))
    assert left_in(fresh) == {folder.name}


def test_a_file_that_is_not_the_locked_one_is_refused(fresh: Clone) -> None:
    fresh.house.add("nox", "1.0", files={"nox/__main__.py": "evil = True\n"})
    done = fresh.run("-l")
    assert done.returncode == Exit.LOCK
    assert "error: a downloaded file is not the one that the lock names" in done.stderr
    assert left_in(fresh) == set()


def test_no_network_is_one_sentence(fresh: Clone) -> None:
    done = fresh.run("-l", PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert done.returncode == Exit.UNREACHABLE
    assert "error: no package index answers" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_bootstrap_that_is_stopped_is_made_anew_by_the_next_one(fresh: Clone, number: signal.Signals) -> None:
    fresh.house.hold = threading.Event()
    process = fresh.start("-l")
    assert process.stdout is not None
    try:
        end = time.monotonic() + 240
        while not any(path.endswith(".whl") for path in fresh.house.asked):
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(number)
        code = process.wait(60)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        fresh.house.hold.set()
    assert code == {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143}[number]
    assert not tools(fresh).exists()
    assert fresh.run("-l").returncode == 0
    assert left_in(fresh) == {tools(fresh).name}


def test_two_bootstraps_at_once_make_the_tools_once(fresh: Clone) -> None:
    done: list[subprocess.CompletedProcess[str]] = []
    threads = [threading.Thread(target=lambda: done.append(fresh.run("-l"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.returncode for each in done] == [0, 0]
    assert sum(each.stderr.count("setting up the tools") for each in done) == 1
    assert sum(path.endswith(".whl") for path in fresh.house.asked) == 1


def test_pip_settings_that_would_bend_the_tools_are_set_aside(fresh: Clone, tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("nox<1\n")
    bent = {
        "PIP_CONSTRAINT": str(tmp_path / "constraints.txt"),
        "PIP_USER": "1",
        "PIP_TARGET": str(tmp_path / "target"),
    }
    assert fresh.run("-l", **bent).returncode == 0
    assert not (tmp_path / "target").exists()


def _managed() -> str | None:
    """A Python of the system's package manager that refuses `pip install` (PEP 668), new enough for us."""
    python = "/usr/bin/python3"
    asks = "import ensurepip, os, sys, sysconfig; m = os.path.join(sysconfig.get_path('stdlib'), 'EXTERNALLY-MANAGED')"
    asks += "; sys.exit(not ((3, 11) <= sys.version_info < (3, 14) and os.path.exists(m)))"
    if not os.access(python, os.X_OK):
        return None
    return python if subprocess.run([python, "-c", asks], check=False, capture_output=True).returncode == 0 else None


@pytest.mark.skipif(_managed() is None, reason="the system's Python does not refuse `pip install`")
def test_it_works_where_the_system_python_refuses_pip_install(fresh: Clone) -> None:
    done = subprocess.run(
        [str(_managed()), "noxfile.py", "-l"],
        cwd=fresh.root, capture_output=True, text=True, env=fresh.environ(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nox ")


# ----------------------------------------------------------------------------------------------- this Python won't do


def test_an_old_python_gets_a_sentence_and_can_read_it() -> None:
    ast.parse(NOXFILE.read_text(), feature_version=(3, 7))
    program = f"import runpy, sys; sys.version_info = (3, 10, 1); runpy.run_path({str(NOXFILE)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == Exit.HOST
    assert done.stderr.startswith("error: dflash needs Python 3.11 to 3.13; this is ")
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize("version", ["3.6", "3.8", "3.10"])
def test_a_real_old_python_gets_that_sentence(version: str) -> None:
    found = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"), shutil.which(f"python{version}")]
    python = next((str(each) for each in found if each), None)
    if python is None or subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"there is no Python {version} here, or only a name for none")
    done = subprocess.run([python, str(NOXFILE), "-l"], capture_output=True, text=True, check=False)
    assert done.returncode == Exit.HOST
    assert done.stderr.startswith("error: dflash needs Python 3.11 to 3.13; this is 3.")


def test_a_python_newer_than_the_locks_gets_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bootstrap, "python_version", lambda: "3.14")
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "tools.txt").touch()
    with pytest.raises(Failure, match=r"this Python is 3\.14 .*; the locks serve 3\.11 to 3\.13") as caught:
        bootstrap.ensure_tools(tmp_path)
    assert caught.value.code == Exit.HOST


@pytest.mark.parametrize("missing", ["venv", "ensurepip"])
def test_a_python_that_cannot_make_environments_gets_a_sentence(fresh: Clone, missing: str) -> None:
    program = f"import runpy, sys; sys.modules[{missing!r}] = None; sys.argv = ['noxfile.py', '-l']"
    program += "; sys.path.insert(0, '.'); runpy.run_path('noxfile.py', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=fresh.root,
        capture_output=True,
        text=True,
        env=fresh.environ(),
        check=False,
    )
    assert done.returncode == Exit.HOST
    assert f"lacks `{missing}`, which makes private environments" in done.stderr
    assert "`apt install python3-venv` brings it" in done.stderr


# ------------------------------------------------------------------------------------------------------ the user's nox


def nox(clone: Clone, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the user's own nox: the one beside the Python that runs the tests."""
    pytest.importorskip("nox")
    return subprocess.run(
        [sys.executable, "-m", "nox", *arguments],
        cwd=clone.root, capture_output=True, text=True, env=clone.environ(), check=False,
    )  # fmt: skip


def test_the_user_s_own_nox_does_the_same_and_brings_the_tools(fresh: Clone) -> None:
    fresh.write("dflash/__main__.py", "import sys; sys.exit(7)")
    listed = nox(fresh, "-l")
    assert listed.returncode == 0, listed.stderr
    assert not (fresh.root / ".nox").exists() or not tools(fresh).exists()
    done = nox(fresh, "-s", "train")
    assert "setting up the tools" in done.stderr
    assert tools(fresh).exists()


def test_the_user_s_own_nox_passes_exit_codes_on(clone: Clone) -> None:
    clone.write("dflash/__main__.py", "import sys; print(sys.argv[1:]); sys.exit(7)")
    done = nox(clone, "-s", "train", "--", "--seed", "1")
    assert done.returncode == 7, done.stderr
    assert "['train', '--seed', '1']" in done.stdout


def test_a_setup_that_fails_under_the_user_s_own_nox_keeps_its_exit_code(fresh: Clone) -> None:
    fresh.house.add("nox", "1.0", files={"nox/__main__.py": "evil = True\n"})
    done = nox(fresh, "-s", "train")
    assert done.returncode == Exit.LOCK
    assert "error: a downloaded file is not the one that the lock names" in done.stderr


def test_train_among_others_is_refused_rather_than_dropping_them(clone: Clone) -> None:
    done = clone.run("-s", "lock", "train", "--", "--check")
    assert done.returncode == 1
    assert "`train` replaces nox, so it must be the only session" in done.stdout + done.stderr


def test_sessions_in_a_row_all_run_and_a_failure_is_not_lost(clone: Clone) -> None:
    clone.write("env/__main__.py", "import sys; print('ran', sys.argv[1]); sys.exit(sys.argv[1] == 'lint')")
    done = clone.run("-s", "lint", "typecheck")
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["ran lint", "ran typecheck"]


def test_the_locked_tools_are_the_ones_that_the_noxfile_s_python_has(tools: Path) -> None:
    stamp = (tools.parent.parent / bootstrap.STAMP).read_text()
    assert stamp == hashlib.sha256((ROOT / "requirements" / "tools.txt").read_bytes()).hexdigest()


def test_our_own_overhead_the_second_time_is_at_most_a_second(clone: Clone) -> None:
    """From `python3 noxfile.py -s train` to the trainer's first line; processor time, since others may be busy here."""
    import resource

    clone.write("dflash/__main__.py", "")
    assert clone.run("-s", "train").returncode == 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert clone.run("-s", "train").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 1.0


def test_importing_the_noxfile_costs_no_bootstrap(tmp_path: Path) -> None:
    pytest.importorskip("nox")
    assert "train" in runpy.run_path(str(NOXFILE), run_name="noxfile")


@pytest.mark.skipif(os.getuid() != 0, reason="another user id can only be taken by root")
def test_a_user_id_without_a_passwd_entry_and_without_home_is_given_a_word_for_it() -> None:
    """Nox looks for a home folder as it is imported, and would end with a traceback."""
    code = (
        "import os, pwd, sys; sys.path.insert(0, sys.argv[1]); from env import bootstrap; "
        "os.setgroups([]); os.setgid(54321); os.setuid(54321); "
        "print(bootstrap.environment({})['HOME'], bootstrap.environment({'HOME': '/here'})['HOME'])"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(ROOT)], env={}, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("/nonexistent /here\n", "")
    assert bootstrap._has_home()

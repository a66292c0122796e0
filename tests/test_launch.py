from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from clones import Clone

from env import launch, variants
from env.errors import Exit, Failure

TRAINER = '''
"""Stands where the trainer stands: says what it was given, waits for a signal if told to, ends with its own code."""
import json, os, signal, sys, time

def stop(number, frame):
    print("saved", flush=True)
    sys.exit(128 + number)

signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
seen = {"arguments": sys.argv[1:], "environ": dict(os.environ), "pid": os.getpid(), "cwd": os.getcwd()}
print(json.dumps(seen | {"path": sys.path, "executable": sys.executable}), flush=True)
if "--wait" in sys.argv:
    time.sleep(60)
sys.exit(7 if "--seven" in sys.argv else 0)
'''


@pytest.fixture
def clone(clone: Clone) -> Clone:
    """A clone whose trainer is a few lines, and whose cu130 environment is a small package, made from its lock."""
    clone.write("dflash/__init__.py", "")
    clone.write("dflash/__main__.py", TRAINER)
    return clone


def told(output: str) -> dict[str, object]:
    return dict(json.loads(next(line for line in output.splitlines() if line.startswith("{"))))


# ---------------------------------------------------------------------------------------------------------- arguments


def test_our_options_are_taken_out_wherever_they_stand_and_the_rest_is_untouched() -> None:
    options, rest = launch.take(
        ["train", "--variant", "cu128", "--seed=1", "--repair", "--python=3.12", "-x", "--allow-drift"]
    )
    assert options == launch.Options(variant="cu128", python="3.12", repair=True, allow_drift=True)
    assert rest == ["train", "--seed=1", "-x"]


def test_from_two_dashes_on_everything_is_the_program_s() -> None:
    options, rest = launch.take(["train", "--", "--variant", "cu128", "--repair"])
    assert options == launch.Options()
    assert rest == ["train", "--", "--variant", "cu128", "--repair"]


@pytest.mark.parametrize("arguments", [["--variant"], ["--variant="], ["--python"]])
def test_an_option_without_its_value_is_refused(arguments: list[str]) -> None:
    with pytest.raises(Failure, match="needs a value") as caught:
        launch.take(arguments)
    assert caught.value.code == Exit.USAGE


# -------------------------------------------------------------------------------------------------------- environment


def test_the_program_runs_in_the_locked_environment_with_its_record(clone: Clone, tmp_path: Path) -> None:
    done = clone.env("launch", "dflash", "train", "--seed", "1", PYTHONPATH="/stray", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    seen = told(done.stdout)
    environ = seen["environ"]
    assert isinstance(environ, dict)
    assert seen["arguments"] == ["train", "--seed", "1"]
    assert seen["executable"] == str(clone.environment("cu130") / "bin" / "python")
    assert environ["PYTHONPATH"] == str(clone.root)
    assert isinstance(seen["path"], list)
    assert "" not in seen["path"]
    record = json.loads(Path(environ["DFLASH_ENVIRONMENT"]).read_text())
    assert record["variant"] == "cu130"
    assert record["drift"] == []
    assert "TORCHINDUCTOR_CACHE_DIR" not in environ, "the trainer chooses by the cache's identity"
    assert Path(environ["DFLASH_ENVIRONMENT"]).is_relative_to(tmp_path / "dflash")


def test_help_tells_our_options_too_and_names_every_variant(clone: Clone) -> None:
    done = clone.env("launch", "dflash", "train", "--help")
    assert done.stdout.startswith(launch.HELP)
    assert told(done.stdout)["arguments"] == ["train", "--help"]
    assert "|".join(variants.load().variants) in launch.HELP


def test_equal_launches_share_one_record(clone: Clone, tmp_path: Path) -> None:
    paths = {
        str(told(clone.env("launch", "dflash", XDG_CACHE_HOME=str(tmp_path)).stdout)["environ"]["DFLASH_ENVIRONMENT"])  # type: ignore[index]
        for _ in range(2)
    }
    assert len(paths) == 1


def test_the_program_s_own_exit_code_is_the_command_s(clone: Clone) -> None:
    assert clone.env("launch", "dflash", "--seven").returncode == 7


def test_another_variant_has_an_environment_of_its_own(clone: Clone) -> None:
    assert clone.env("launch", "dflash").returncode == 0
    done = clone.env("launch", "dflash", "--variant", "cu128")
    assert told(done.stdout)["executable"] == str(clone.environment("cu128") / "bin" / "python")
    refused = clone.env("launch", "dflash", "--variant", "cu129")
    assert refused.returncode == Exit.USAGE
    assert "there is no variant `cu129`" in refused.stderr


def test_the_environment_variable_stands_in_for_the_option_and_is_overruled_by_it(clone: Clone) -> None:
    assert clone.env("launch", "dflash").returncode == 0
    done = clone.env("launch", "dflash", DFLASH_VARIANT="cu128")
    assert told(done.stdout)["executable"] == str(clone.environment("cu128") / "bin" / "python")
    done = clone.env("launch", "dflash", "--variant", "cu130", DFLASH_VARIANT="cu128")
    assert told(done.stdout)["executable"] == str(clone.environment("cu130") / "bin" / "python")
    refused = clone.env("launch", "dflash", DFLASH_VARIANT="cu129")
    assert refused.returncode == Exit.USAGE
    assert "error: there is no variant `cu129`, which DFLASH_VARIANT names; " in refused.stderr


def test_the_command_that_mends_drift_means_the_drifted_variant(clone: Clone) -> None:
    assert clone.env("launch", "dflash").returncode == 0
    (clone.site("cu130") / "sitecustomize.py").write_text("")
    # a hint begins as the user began: `nox` or `python3 noxfile.py`, by which these tests may have been started
    assert " -s train -- --repair`" in clone.env("launch", "dflash", "train").stderr
    told_so = clone.env("launch", "dflash", "train", "--variant", "cu130", DFLASH_VARIANT="cu128").stderr
    assert " -s train -- --variant cu130 --repair`" in told_so


def test_drift_stops_the_launch_until_it_is_mended_or_allowed(clone: Clone) -> None:
    assert clone.env("launch", "dflash").returncode == 0
    extra = clone.site("cu130") / "flashinfer-0.6.1.dist-info"
    extra.mkdir()
    (extra / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer\nVersion: 0.6.1\n")
    refused = clone.env("launch", "dflash", "train", DFLASH_FRONT_DOOR="python3 noxfile.py")
    assert refused.returncode == Exit.DRIFT
    assert refused.stdout == ""
    assert "flashinfer" in refused.stderr
    assert "`python3 noxfile.py -s train -- --repair` installs the locked set" in refused.stderr
    assert extra.exists()
    allowed = clone.env("launch", "dflash", "train", "--allow-drift")
    assert allowed.returncode == 0
    assert "going on in an environment that is not the locked one (cu130)" in allowed.stderr
    environ = told(allowed.stdout)["environ"]
    assert isinstance(environ, dict)
    assert [one["name"] for one in json.loads(Path(environ["DFLASH_ENVIRONMENT"]).read_text())["drift"]] == [
        "flashinfer"
    ]
    assert clone.env("launch", "dflash", "train", "--repair").returncode == 0
    assert not extra.exists()
    assert clone.env("launch", "dflash", "train").returncode == 0


def test_the_gate_and_all_else_before_the_program_take_half_a_second_at_most(clone: Clone) -> None:
    """Processor time, since others may be busy here; looking at a real environment's files adds a tenth of a second."""
    assert clone.env("launch", "dflash").returncode == 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert clone.env("launch", "dflash").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.5


# ------------------------------------------------------------------------------------------------------------- pins


def test_what_the_host_would_feed_into_cache_keys_is_taken_away_said_and_recorded(
    clone: Clone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/usr/bin/g++")
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    ended = clone.env("launch", "dflash", "train")
    environ = told(ended.stdout)["environ"]
    assert isinstance(environ, dict)
    record = json.loads(Path(environ["DFLASH_ENVIRONMENT"]).read_text())
    for name in ("CXX", "TORCHINDUCTOR_MAX_AUTOTUNE"):
        assert name not in environ
        assert f"took away {name}=" in ended.stderr
        assert any(name in sentence for sentence in record["overridden"])


# ------------------------------------------------------------------------------------------------- the whole way down


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_trainer_through_the_noxfile_and_its_code_comes_back(
    clone: Clone, number: signal.Signals
) -> None:
    process = clone.start("-s", "train", "--", "--wait")
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    seen = told(next(line for line in lines if line.startswith("{")))
    assert seen["pid"] == process.pid, "no process is left in between that could swallow anything"
    os.kill(process.pid, number)
    assert process.wait(60) == 128 + number
    assert "saved" in process.stdout.read()
    process.stdout.close()


def test_ctrl_c_on_a_terminal_reaches_the_trainer_and_no_one_kills_it_meanwhile(clone: Clone) -> None:
    """As a terminal does it: SIGINT to the whole foreground group. The trainer takes longer than nox's patience."""
    clone.write("dflash/__main__.py", TRAINER.replace('print("saved"', 'time.sleep(2); print("saved"'))
    process = clone.start("-s", "train", "--", "--wait", group=True)
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    next(line for line in lines if line.startswith("{"))
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert "saved" in process.stdout.read()
    process.stdout.close()


def test_relative_paths_are_the_user_s_own(clone: Clone, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    done = subprocess.run(
        [sys.executable, clone.root / "noxfile.py", "-s", "train"],
        cwd=tmp_path / "elsewhere", capture_output=True, text=True, env=clone.environ(), check=False,
    )  # fmt: skip
    assert told(done.stdout)["cwd"] == str(tmp_path / "elsewhere")


def test_the_trainer_s_exit_code_is_what_the_shell_sees(clone: Clone) -> None:
    assert clone.run("-s", "train", "--", "--seven").returncode == 7

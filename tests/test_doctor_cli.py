"""The doctor's command line as people, scripts and sick hosts meet it: real processes, real exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import RESOURCES, host, plan

from env.doctor import Finding, Severity, cli, exit_code
from env.doctor.report import as_json, as_text, terminal
from env.errors import Exit
from env.variants import ROOT

PLAIN = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM")}


def doctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor on recorded facts: quick, and the same everywhere."""
    return subprocess.run(
        [sys.executable, "-m", "env.doctor", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**PLAIN, **environ},
        timeout=300,
    )


def facts(name: str) -> str:
    return str(RESOURCES / f"{name}.json")


# Exit codes.


def test_the_exit_code_is_the_worst_findings() -> None:
    def code(*findings: Finding) -> Exit:
        return exit_code(findings)

    warning, error = Finding(Severity.WARNING, "w"), Finding(Severity.ERROR, "e")
    drift = Finding(Severity.ERROR, "d", code=Exit.DRIFT)
    assert code() is Exit.DONE
    assert code(warning, Finding(Severity.UNKNOWN, "u"), Finding(Severity.OK, "o", code=Exit.DRIFT)) is Exit.DONE
    assert code(warning, error) is Exit.HOST
    assert code(error, drift, error) is Exit.DRIFT


def test_a_host_that_lacks_something_exits_with_5_and_says_what_and_what_mends_it() -> None:
    done = doctor("--host", facts("h100-driver-550"), "--variant", "cu130")
    assert done.returncode == Exit.HOST
    assert done.stderr == ""
    assert "error    driver" in done.stdout
    assert "driver 550.54.15 is older than cu130 needs (580)" in done.stdout
    assert "hint: update the driver to 580 or newer, or use `--variant cu128`" in done.stdout
    assert done.stdout.rstrip().endswith("exit code 5")


def test_the_same_host_with_the_variant_that_fits_exits_with_0() -> None:
    done = doctor("--host", facts("h100-driver-550"), "--variant", "cu128")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--variant", "cu13"], "there is no variant `cu13`"),
        (["--config", "none-such"], "the configuration `none-such` cannot be read"),
        (["--host", "/nonexistent.json"], "cannot be read: No such file or directory"),
        (["--host", str(ROOT / "pyproject.toml")], "holds no host's facts"),
        (["--unknown"], "unrecognized arguments: --unknown"),
        (["--var", "cu130"], "unrecognized arguments"),
        (["--only", "nothing"], "invalid choice"),
        (["--compare", "/nonexistent/a"], "RUN_B"),
        (["--full", "--compare", "/nonexistent/a", "/nonexistent/b"], "unrecognized arguments: --full"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_one_sentence(arguments: list[str], words: str) -> None:
    done = doctor(*arguments)
    assert done.returncode == Exit.USAGE
    assert words in done.stderr
    assert "Traceback" not in done.stderr


# JSON.


def test_json_is_complete_and_its_shape_is_fixed() -> None:
    done = doctor("--host", facts("v100"), "--config", "qwen3-8b", "--json")
    report = json.loads(done.stdout)
    assert list(report) == ["schema", "variant", "config", "worst", "exit_code", "findings", "host"]
    assert (report["schema"], report["variant"], report["config"]) == (1, "cu130", "qwen3-8b")
    assert (report["worst"], report["exit_code"], done.returncode) == ("error", 5, 5)
    for finding in report["findings"]:
        assert list(finding) == ["check", "severity", "finding", "details", "remedy", "exit_code"]
        assert finding["exit_code"] == (5 if finding["severity"] == "error" else 0)
    assert [card["name"] for card in report["host"]["nvidia"]["cards"]] == ["Tesla V100-SXM2-32GB"] * 4


def test_what_one_host_recorded_another_judges_alike(tmp_path: Path) -> None:
    first = doctor("--host", facts("rtx-pro-6000"), "--json")
    (tmp_path / "report.json").write_text(first.stdout, encoding="utf-8")
    second = doctor("--host", str(tmp_path / "report.json"), "--json")
    assert second.stdout == first.stdout
    piped = subprocess.run(
        [sys.executable, "-m", "env.doctor", "--host", "-", "--json"],
        input=first.stdout,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=PLAIN,
    )
    assert piped.stdout == first.stdout


def test_a_configuration_of_ones_own_is_named(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('preset = "tiny"\n', encoding="utf-8")
    assert json.loads(doctor("--host", facts("v100"), "--config", str(mine), "--json").stdout)["config"] == str(mine)


def test_without_presets_a_host_is_judged_for_no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli, "PRESETS", tmp_path)
    assert cli.main(["--host", facts("rtx-pro-6000")]) == 0


def test_only_the_checks_that_are_asked_for_are_made() -> None:
    report = json.loads(doctor("--host", facts("v100"), "--only", "driver", "--only", "clock", "--json").stdout)
    assert [finding["check"] for finding in report["findings"]] == ["driver", "clock"]


# The report for people.

EXAMPLE = [
    ("driver", Finding(Severity.OK, "driver 580; cu130 needs 580 or newer", ("read from /sys",))),
    (
        "card-memory",
        Finding(Severity.ERROR, "first, " + "too small " * 12, ("drafter 18.9 GB",), "train on a larger card " * 5),
    ),
    ("clock", Finding(Severity.WARNING, "late")),
]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_lines_are_aligned_and_fit_the_width(width: int) -> None:
    lines = as_text(plan(), EXAMPLE, width=width).splitlines()
    assert all(len(line) <= max(width, 60) for line in lines[1:]), lines
    starts = [line.index(word) for line in lines for word in ("driver 580", "first,", "late") if word in line]
    assert len(set(starts)) == 1
    assert any(line.strip().startswith("hint: train on") for line in lines)
    assert "read from /sys" not in "\n".join(lines)
    assert "read from /sys" in as_text(plan(), EXAMPLE, width=width, full=True)


def test_without_a_terminal_each_finding_is_one_line_so_that_logs_can_be_searched() -> None:
    lines = as_text(plan(), EXAMPLE).splitlines()
    assert sum("first," in line for line in lines) == 1


def test_the_severity_is_a_word_and_colour_only_adds_to_it() -> None:
    plain, coloured = as_text(plan(), EXAMPLE), as_text(plan(), EXAMPLE, colour=True)
    assert "\033[" not in plain
    assert "\033[31;1merror" in coloured
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == plain
    assert plain.splitlines()[-1] == "1 error, 1 warning, 1 ok; exit code 5"


def test_escape_sequences_and_line_ends_in_facts_do_not_reach_the_terminal() -> None:
    text = as_text(plan(), [("x", Finding(Severity.NOTE, "a\033[2Jb\nc", ("\r\x07d",)))])
    assert "\033" not in text
    assert "\r" not in text
    assert "a [2Jb c" in text


def test_a_command_is_not_broken_over_lines() -> None:
    finding = Finding(Severity.NOTE, "m", remedy="one of many words, or `a command of several words`, or another way")
    for width in range(50, 90):
        assert "`a command of several words`" in as_text(plan(), [("x", finding)], width=width)


def test_columns_of_the_gates_details_stay_aligned() -> None:
    text = as_text(plan(), [("x", Finding(Severity.NOTE, "m", ("torch      locked 1   found 2",)))])
    assert "torch      locked 1   found 2" in text


def on_terminal(*arguments: str, **environ: str) -> str:
    """What the doctor prints to a terminal of 80 columns."""
    leader, follower = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "env.doctor", *arguments],
        stdout=follower,
        stderr=follower,
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
        env={**PLAIN, "TERM": "xterm", **environ},
    )
    os.close(follower)
    output = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # the other side has closed it
            break
        if not chunk:
            break
        output += chunk
    os.close(leader)
    process.wait()
    return output.decode()


def test_a_real_terminal_is_wrapped_and_coloured_and_no_color_is_honoured() -> None:
    coloured = on_terminal("--host", facts("slurm-login-node"))
    assert "\033[33mwarning" in coloured
    plain = on_terminal("--host", facts("slurm-login-node"), NO_COLOR="1")
    assert "\033[" not in plain
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == plain
    assert max(map(len, plain.splitlines())) <= 80
    assert "\033[" not in on_terminal("--host", facts("slurm-login-node"), TERM="dumb")
    assert "\033[" in on_terminal("--host", facts("slurm-login-node"), NO_COLOR="")


def test_a_pipe_is_neither_wrapped_nor_coloured_unless_told(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        assert terminal(file, {}) == (None, False)
        assert terminal(file, {"COLUMNS": "72"}) == (72, False)
        assert terminal(file, {"FORCE_COLOR": "1"}) == (None, True)
        assert terminal(file, {"FORCE_COLOR": "1", "NO_COLOR": "1"}) == (None, False)
        assert terminal(file, {"COLUMNS": "wide"}) == (None, False)


def test_a_reader_that_leaves_early_and_an_ascii_terminal_are_no_errors(tmp_path: Path) -> None:
    command = f"{sys.executable} -m env.doctor --host {facts('v100')} --full | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=ROOT, env=PLAIN)
    assert done.stdout.split() == ["5"]
    assert done.stderr == ""
    odd = json.loads(Path(facts("slurm-login-node")).read_text(encoding="utf-8"))
    odd["folders"][0]["path"] = "/home/\u00e4\udcff"
    (tmp_path / "odd.json").write_text(json.dumps(odd), encoding="utf-8")
    done = doctor("--host", str(tmp_path / "odd.json"), "--full", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert r"/home/\xe4" in done.stdout


# Questions that others answer.


def test_compare_is_handed_to_the_record_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from env import record

    asked: list[list[str]] = []

    def answer(argv: list[str]) -> int:
        asked.append(list(argv))
        return 0

    monkeypatch.setattr(record, "main", answer)
    assert cli.main(["--compare", "a", "b", "--json"]) == 0
    assert cli.main(["--json", "--compare", "a", "b"]) == 0
    assert asked == [["a", "b", "--json"], ["--json", "a", "b"]]


def asked_of(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from env import environment

    monkeypatch.setattr(environment, "python_of", lambda *_, **__: Path(python))


def test_what_needs_torch_is_put_to_the_training_environments_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" "[$PYTHONPATH]" "[$TORCHINDUCTOR_CACHE_DIR]"; exit 5\n')
    python.chmod(0o755)
    asked_of(str(python), monkeypatch)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/of/the/host")
    for arguments, words in (
        (["--compile"], "-P -m dflash.diagnose"),
        (["--variant", "cu132", "--compile", "--json", "--no-cure"], "-P -m dflash.diagnose --no-cure --json"),
        (["--gpu-row"], "-P -m env.gpus 0"),
        (["--gpu-row", "3", "--variant", "cu128", "--json"], "-P -m env.gpus 3 --json"),
        (["--json", "--gpu-row=5"], "-P -m env.gpus 5 --json"),
    ):
        assert cli.main(arguments) == Exit.HOST, "its exit code is ours"
        said = capfd.readouterr()
        assert said.out == f"{words} [{ROOT}] []\n", "started as a launch would: nothing of the host's enters"
        assert "TORCHINDUCTOR_CACHE_DIR" in said.err


def test_without_a_gpu_the_row_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked_of(sys.executable, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # torch sets them in a process that has compiled
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["--gpu-row"]) == Exit.HOST
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "error: torch sees no GPU 0 here\n")


def test_without_an_environment_to_ask_it_is_said_which_and_how_to_make_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked_of(str(tmp_path / "none/bin/python"), monkeypatch)
    assert cli.main(["--compile", "--variant", "cu132"]) == Exit.HOST
    said = capfd.readouterr().err
    assert "there is no environment of cu132 here yet, and so no torch to ask" in said
    assert "`nox -s train -- --variant cu132 --help` makes it" in said
    for question in ("--compile", "--gpu-row"):
        with pytest.raises(SystemExit) as ended:
            cli.main([question, "--help"])
        assert ended.value.code == 0
        assert f"doctor {question} --json" in capfd.readouterr().out


# Sick hosts, for real.


def test_this_machine_is_examined_and_the_report_holds_all_that_was_asked() -> None:
    from env.doctor import main

    done = subprocess.run(
        [sys.executable, "-m", "env.doctor", "--json", "--variant", "cu132"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=PLAIN,
    )
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"]
    names = [finding["check"] for finding in report["findings"]]
    assert {"system", "driver", "compiler", "writable", "disk", "memory", "shm", "clock", "environment"} <= set(names)
    assert main(["--host", facts("rtx-pro-6000")]) == 0


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Path]:
    """What the doctor needs, copied to where every user may read it."""
    place = Path("/tmp") / f"doctor-cli-{os.getpid()}"
    place.mkdir(mode=0o755)
    try:
        shutil.copytree(ROOT / "env", place / "env", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "dflash" / "presets", place / "dflash" / "presets")
        subprocess.run(["chmod", "-R", "a+rX", str(place)], check=True)
        yield place
    finally:
        shutil.rmtree(place)


def as_nobody(place: Path, *arguments: str, **environ: str) -> dict[str, Any]:
    """The report of the doctor run by user id 12345, with the system's own Python and nothing but the library."""
    if os.getuid() != 0:
        pytest.skip("becoming another user needs root")
    version = subprocess.run(
        ["/usr/bin/python3", "-c", "import sys; print(sys.version_info >= (3, 11))"],
        capture_output=True,
        text=True,
        check=False,
    )
    if version.stdout.strip() != "True":
        pytest.skip("the system has no Python 3.11 that every user may run")
    start = "import sys; sys.path.insert(0, sys.argv.pop(1)); from env.doctor import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-S", "-B", "-c", start, str(place), "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        user=12345,
        group=12345,
        extra_groups=[],
        cwd="/",
        env={"PATH": "/usr/bin:/bin", **environ},
    )
    assert done.stderr == ""
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == report["exit_code"]
    return report


def severities(report: dict[str, Any]) -> dict[str, str]:
    return {finding["check"]: finding["severity"] for finding in report["findings"]}


def test_a_real_user_id_without_an_entry_a_name_or_a_home_gets_a_whole_report(elsewhere: Path) -> None:
    report = as_nobody(elsewhere, "--run", "/tmp/dflash-doctor-run")
    assert severities(report)["user"] == "note"
    assert severities(report)["writable"] == "error"  # the project's folder is root's, and no environment is made yet
    kernels = next(folder for folder in report["host"]["folders"] if folder["role"] == "kernels")
    assert kernels["path"] == "/tmp/dflash-12345"
    assert kernels["writable"] is True


def test_with_a_name_and_a_home_the_same_user_is_fine(elsewhere: Path) -> None:
    report = as_nobody(elsewhere, "--run", "/tmp/dflash-doctor-run", USER="x", HOME="/tmp")
    assert severities(report)["user"] == "ok"


def test_a_path_without_any_program_is_reported_and_ends_with_5() -> None:
    done = doctor("--json", "--only", "compiler", PATH="/nonexistent")
    report = json.loads(done.stdout)
    assert done.returncode == Exit.HOST
    finding = next(finding for finding in report["findings"] if finding["check"] == "compiler")
    assert finding["finding"].startswith("no C++ compiler")


def test_starting_takes_little_time() -> None:
    listed = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "env.doctor", "--host", facts("v100")],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=PLAIN,
    )
    names = {line.rpartition("|")[2].strip() for line in listed.stderr.splitlines() if line.startswith("import time:")}
    assert "env.doctor.cli" in names
    assert not names & {"torch", "numpy", "rich", "typer", "packaging", "env.drift", "env.environment"}


def test_the_text_and_the_json_say_the_same() -> None:
    findings = [("driver", Finding(Severity.ERROR, "old", remedy="update"))]
    report = json.loads(as_json(plan(), findings, host()))
    assert report["findings"][0]["remedy"] == "update"
    assert "hint: update" in as_text(plan(), findings)

"""Looking without being hurt: the doctor must come to an end on any host."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from env.doctor.facts import probing


def script(folder: Path, text: str) -> list[str]:
    file = folder / "program"
    file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    file.chmod(0o755)
    return [str(file)]


def test_a_command_is_run_and_its_words_and_code_are_kept(tmp_path: Path) -> None:
    answer = probing.run(script(tmp_path, "echo out; echo err >&2; exit 7"), seconds=10)
    assert answer == probing.Ran(7, "out\nerr\n")


def test_a_command_that_is_not_there_or_is_no_program_gives_nothing(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program", encoding="utf-8")
    (tmp_path / "text").chmod(0o755)
    for command in ("/nonexistent/program", str(tmp_path), str(tmp_path / "text"), "nul\0byte"):
        assert probing.run([command], seconds=10) is None


def test_a_hanging_command_is_stopped_with_the_grandchild_that_holds_its_pipe(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    start = time.monotonic()
    answer = probing.run(script(tmp_path, f"sleep 600 & echo $! > {pid}; echo begun; wait"), seconds=0.5)
    assert answer is None
    assert time.monotonic() - start < 10
    grandchild = int(pid.read_text(encoding="utf-8"))
    deadline = time.monotonic() + 10
    while Path(f"/proc/{grandchild}").exists() and time.monotonic() < deadline:
        state = Path(f"/proc/{grandchild}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        if state == "Z":  # killed, and waits for whoever reaps orphans here
            return
        time.sleep(0.05)
    assert not Path(f"/proc/{grandchild}").exists()


def test_a_command_that_closes_its_output_and_lingers_is_stopped(tmp_path: Path) -> None:
    start = time.monotonic()
    assert probing.run(script(tmp_path, "exec >&- 2>&-; sleep 600"), seconds=60) is None
    assert time.monotonic() - start < 30


def test_a_command_that_prints_without_end_fills_no_memory(tmp_path: Path) -> None:
    assert probing.run(script(tmp_path, "yes"), seconds=60) is None


def test_a_command_sees_no_input_and_speaks_english(tmp_path: Path) -> None:
    answer = probing.run(script(tmp_path, "cat; echo $LC_ALL"), seconds=10, environ={**os.environ, "LC_ALL": "de_DE"})
    assert answer is not None
    assert answer.output == "C\n"


def test_output_in_any_encoding_is_text(tmp_path: Path) -> None:
    answer = probing.run([sys.executable, "-c", r"import os; os.write(1, b'\xff\xfe\x00 ok')"], seconds=30)
    assert answer is not None
    assert answer.output.endswith("ok")


def test_a_file_that_is_missing_or_a_folder_or_forbidden_is_no_fact(tmp_path: Path) -> None:
    assert probing.read(tmp_path / "nothing") is None
    assert probing.read(tmp_path) is None
    (tmp_path / "bytes").write_bytes(b"\xff\xfe 580\n")
    text = probing.read(tmp_path / "bytes")
    assert text is not None
    assert "580" in text


@pytest.mark.parametrize(("text", "value"), [("12\n", 12), ("max\n", None), ("", None), (None, None), ("1e3", None)])
def test_a_number_is_a_number_or_nothing(text: str | None, value: int | None) -> None:
    assert probing.number(text) == value


def test_probes_run_at_once_and_one_that_fails_or_hangs_costs_only_its_own_fact() -> None:
    def fails() -> None:
        raise ZeroDivisionError("no")

    start = time.monotonic()
    found, trouble = probing.together(
        {"good": lambda: 1, "slow": lambda: time.sleep(0.3), "fails": fails, "hangs": lambda: time.sleep(8)}, seconds=1
    )
    assert time.monotonic() - start < 5
    assert found == {"good": 1, "slow": None}
    assert trouble == {"fails": "ZeroDivisionError: no", "hangs": "no answer within 1 s"}

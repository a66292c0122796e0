"""The diagnosis says what is there, in any environment that has torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from racing import run

from dflash import tracing
from dflash.diagnose import shortened, sound
from env import environment, variants
from env.doctor import training
from env.errors import Exit, Failure

ROOT = Path(__file__).parent.parent


@cache
def found() -> dict[str, Any]:
    done = run("-m", "dflash.diagnose", "--json")
    assert done.returncode == Exit.DONE, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_it_sees_what_torch_does_as_it_is() -> None:
    seen, shared = found()["as it is"], tracing.flag_shape() == "process-wide"
    assert seen["flag here"] == seen["flag inside a forward"] == seen["flag inside a compiled call"] == "clear"
    assert seen["flag inside that trace"] == "set"
    assert (seen["flag while another thread traces"] == "set") == shared
    assert ("FX to symbolically trace" in seen["a compiled call while another thread traces"]) == shared
    compiling = seen["is_compiling() while another thread compiles"]
    assert (compiling == "True") == (tracing.session_shape() == "process-wide")
    assert not sound(seen)


def test_it_puts_the_cure_in_and_sees_that_it_holds() -> None:
    assert sound(found()["cured"])
    assert found()["sound"]
    assert found()["refused"] is None
    assert found()["cure"]["read"]


def test_it_shows_the_guard_as_this_torch_has_it() -> None:
    place, _, source = found()["guard"]["the check in every compiled call"].partition("\n")
    file, line = place.split(":")
    assert file == "torch/_dynamo/eval_frame.py"
    text = (Path(torch.__file__).parent / "_dynamo" / "eval_frame.py").read_text().splitlines()
    assert text[int(line) - 1].strip() == source.splitlines()[0].strip()
    assert "Detected that you are using FX to symbolically trace" in source


def test_it_shows_who_sets_the_flag_from_the_setter_to_the_call() -> None:
    stack = found()["set_by"]
    assert stack[0].startswith("torch/fx/_symbolic_trace.py:")
    assert stack[0].endswith("in trace")
    assert any("proxy_tensor.py" in line for line in stack)
    assert any(line.startswith("torch/_dynamo/eval_frame.py:") and "compile_wrapper" in line for line in stack)


def test_it_says_whether_a_setting_reaches_other_threads() -> None:
    assert found()["settings"]["a setting made in one thread"].startswith(("reaches all", "stays there"))


def test_its_report_reads_in_a_pipe_without_colour_or_long_lines() -> None:
    done = run("-m", "dflash.diagnose", "--no-cure", NO_COLOR="1")
    assert done.returncode == Exit.DONE
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"torch {torch.__version__}, Python ")
    assert "\x1b" not in done.stdout
    assert max(map(len, lines[1:])) <= 120
    assert any(line.startswith("a compiled call while another thread traces") for line in lines)


def test_an_unknown_torch_is_described_and_the_refusal_is_the_exit_code() -> None:
    program = (
        "import torch, sys; torch.compiler._is_compiling_flag = 0; import dflash.diagnose as d; sys.exit(d.main([]))"
    )
    done = run("-c", program)
    assert done.returncode == Exit.HOST
    assert "the cure is refused" in done.stdout
    assert "in a shape that was never read" in done.stdout
    assert "a compiled call" in done.stdout


def test_a_python_without_torch_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "dflash.diagnose"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == Exit.HOST
    assert "error: this Python has no torch" in done.stderr


def test_a_long_answer_is_shortened_in_the_table_only() -> None:
    assert shortened("x" * 60) == "x" * 45 + "…"
    assert shortened("short") == "short"


def test_another_torch_than_that_of_the_variant_which_the_environment_names_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "HOME", tmp_path)
    monkeypatch.delenv(variants.NAMED, raising=False)
    assert training.interpreter(None) == Path(sys.executable)
    monkeypatch.setenv(variants.NAMED, "cu128")
    with pytest.raises(Failure, match="no environment of cu128 here yet") as refused:
        training.interpreter(None)
    assert refused.value.code == Exit.HOST

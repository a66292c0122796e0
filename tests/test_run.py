"""A run's folder: which one a rerun takes, what it refuses, what it keeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash import config, run
from dflash.stopping import Stopped, listening
from env.errors import Exit, Failure

TINY = config.load("tiny")
GIVEN = {"seed": 0, "config": {"shapes": {"rows": 6}}}


def begin(folder: Path, given: dict[str, object] = GIVEN) -> bool:
    with run.occupied(folder, TINY, given) as begun:
        return begun


def test_a_rerun_takes_the_unfinished_folder_and_a_finished_one_is_left_alone(tmp_path: Path) -> None:
    first = run.choose(tmp_path, "tiny", GIVEN)
    assert first == tmp_path / "tiny"
    begin(first)
    assert run.choose(tmp_path, "tiny", GIVEN) == first
    assert run.choose(tmp_path, "tiny", {**GIVEN, "seed": 1}) == tmp_path / "tiny-2"
    run.write_json(first / "summary.json", {})
    assert run.choose(tmp_path, "tiny", GIVEN) == tmp_path / "tiny-2"
    begin(tmp_path / "tiny-2")
    run.write_json(tmp_path / "tiny-2" / "summary.json", {})
    (tmp_path / "tiny-other").mkdir()
    assert run.choose(tmp_path, "tiny", GIVEN) == tmp_path / "tiny-3"


def test_a_run_is_begun_once(tmp_path: Path) -> None:
    assert not begin(tmp_path / "run")
    assert begin(tmp_path / "run")
    assert config.parse(json.loads((tmp_path / "run" / "config.json").read_text()), "it") == TINY


def test_a_run_that_was_given_something_else_is_refused_with_both_values(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(Failure) as caught:
        begin(tmp_path, {"seed": 0, "config": {"shapes": {"rows": 8}}})
    assert caught.value.details == ("config.shapes.rows: was 6, is 8",)
    assert caught.value.code == Exit.USAGE


def test_a_run_that_began_before_a_key_existed_goes_on_with_its_default(tmp_path: Path) -> None:
    given = {"seed": 0, "config": config.to_tables(TINY)}
    older = json.loads(json.dumps(given))
    del older["config"]["optimizer"]["recompute"]
    assert not begin(tmp_path / "tiny", older)
    assert run.choose(tmp_path, "tiny", given) == tmp_path / "tiny"
    assert begin(tmp_path / "tiny", given)
    given["config"]["optimizer"]["recompute"] = True  # type: ignore[index]  # a table of tables
    with pytest.raises(Failure) as caught:
        begin(tmp_path / "tiny", given)
    assert caught.value.details == ("config.optimizer.recompute: was false, is true",)


def test_a_second_trainer_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with run.occupied(tmp_path, TINY, GIVEN), pytest.raises(Failure, match="another process is training"):
        begin(tmp_path)


def test_an_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Failure, match=r"cannot keep a run in .*: a part of the path is a file") as caught:
        begin(tmp_path / "file" / "run")
    assert caught.value.code == Exit.STORAGE


def test_an_environment_that_was_not_checked_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(run.ENVIRONMENT, raising=False)
    begin(tmp_path)
    assert run.drifted(tmp_path) == "environment not checked"


@pytest.mark.parametrize(
    ("record", "said"),
    [({"env_id": "ab", "drift": []}, ""), ({"env_id": "ab", "drift": ["torch"]}, "environment drifted")],
)
def test_the_environment_that_was_handed_over_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: dict[str, object], said: str
) -> None:
    handed = tmp_path / "handed.json"
    handed.write_text(json.dumps(record))
    monkeypatch.setenv(run.ENVIRONMENT, str(handed))
    begin(tmp_path / "run")
    assert run.environment(tmp_path / "run") == record
    assert run.drifted(tmp_path / "run") == said


def test_a_record_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run.ENVIRONMENT, str(tmp_path / "none.json"))
    with pytest.raises(Failure, match="does not exist"):
        begin(tmp_path / "run")


def test_metrics_go_on_after_the_step_that_was_saved(tmp_path: Path) -> None:
    metrics = run.Metrics(tmp_path, "metrics", 0)
    for step in (1, 2, 3):
        metrics.add(step, {"loss": step / 3, "accuracy": [0.5, None]}, {"tokens_per_second": 7.0})
    metrics.close()
    again = run.Metrics(tmp_path, "metrics", 2)
    again.add(3, {"loss": 1.0})
    again.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[2] == {"step": 3, "loss": 1.0}
    assert lines[0] == {"step": 1, "loss": 1 / 3, "accuracy": [0.5, None]}
    assert list((tmp_path / "tensorboard" / "metrics").glob("events.*"))


@pytest.mark.parametrize("content", [b'{"step": 1}\n', b'{"step": 1}\n{"step": 3}\n', b'{"step": 1}\n{"st', b"[]\n2\n"])
def test_damaged_metrics_are_refused_before_training_goes_on(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(Failure, match="was damaged") as caught:
        run.Metrics(tmp_path, "metrics", 2)
    assert caught.value.code == Exit.INPUT
    assert (tmp_path / "metrics.jsonl").read_bytes() == content


def _read_by_its_user(name: str, folder: Path) -> None:
    if name == "given.json":
        begin(folder)
    elif name == "timing.json":
        run.Phases(folder)
    else:
        run.drifted(folder)


@pytest.mark.parametrize("name", ["given.json", "timing.json", "environment.json"])
def test_a_record_of_another_shape_is_refused(tmp_path: Path, name: str) -> None:
    begin(tmp_path)
    (tmp_path / name).write_text("[1]")
    with pytest.raises(Failure, match="cannot be read: it holds a list"):
        _read_by_its_user(name, tmp_path)


def test_phases_add_up_over_restarts(tmp_path: Path) -> None:
    run.Phases(tmp_path).add("train", 1.5)
    phases = run.Phases(tmp_path)
    with phases.measured("train"):
        pass
    assert json.loads((tmp_path / "timing.json").read_text())["train"] >= 1.5


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, Exit.INTERRUPTED), (signal.SIGTERM, Exit.TERMINATED)])
def test_a_signal_is_noted_and_has_its_exit_code(number: signal.Signals, code: Exit) -> None:
    before = signal.getsignal(number)
    with listening() as stop:
        assert not stop.asked()
        os.kill(os.getpid(), number)
        assert stop.asked()
        stopped = stop.stopped("step 3")
    assert isinstance(stopped, Stopped)
    assert (stopped.code, stopped.where) == (code, "step 3")
    assert signal.getsignal(number) == before


def test_a_second_signal_ends_the_process_at_once() -> None:
    program = (
        "import os, signal\nfrom dflash.stopping import listening\nwith listening():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    print('noted', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    print('never')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert ended.stdout == "noted\n"
    assert ended.returncode == -signal.SIGTERM

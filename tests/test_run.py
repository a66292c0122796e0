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

ROOT = Path(__file__).parent.parent
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


Record = dict[str, object]
BEGAN: Record = {
    "env_id": "aa",
    "variant": "cu130",
    "python": "3.11.7",
    "torch": "2.11.0+cu130",
    "drift": [],
}
OTHER: Record = {
    "env_id": "bb",
    "variant": "cu128",
    "python": "3.12.1",
    "torch": "2.10.0+cu128",
    "drift": [],
}
DRIFTED: Record = {**BEGAN, "drift_allowed": True, "drift": [{"name": "six"}], "packages": {"six": "1.17.0"}}


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, record: dict[str, object] | None) -> str:
    """Begin or resume a run as the launcher would, or without it; what its status lines say."""
    monkeypatch.delenv(run.ENVIRONMENT, raising=False)
    if record is not None:
        handed = folder.with_name("handed.json")
        handed.write_text(json.dumps(record))
        monkeypatch.setenv(run.ENVIRONMENT, str(handed))
    begin(folder)
    return run.drifted(folder)


def test_a_run_that_goes_on_in_the_environment_it_began_in_keeps_its_record_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert start(folder, monkeypatch, BEGAN) == ""
    before = (folder / "environment.json").read_bytes()
    assert start(folder, monkeypatch, BEGAN) == ""
    assert (folder / "environment.json").read_bytes() == before


def test_a_run_that_would_go_on_in_another_environment_is_refused_with_both_values_and_the_way_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    start(folder, monkeypatch, BEGAN)
    with pytest.raises(Failure, match="began in another environment than this one") as caught:
        start(folder, monkeypatch, OTHER)
    assert caught.value.code == Exit.DRIFT
    assert 'variant: was "cu130", is "cu128"' in caught.value.details
    assert 'env_id: was "aa", is "bb"' in caught.value.details
    assert caught.value.hint is not None
    assert "`nox -s train -- --variant cu130 --python 3.11` goes on in the one that it began in" in caught.value.hint
    assert "`--allow-drift`" in caught.value.hint
    assert run.environment(folder) == BEGAN
    with pytest.raises(Failure) as locked_anew:
        start(folder, monkeypatch, {**BEGAN, "env_id": "cc"})
    assert locked_anew.value.details == ('env_id: was "aa", is "cc"',)
    assert "goes on in the one that it began in" not in str(locked_anew.value)


def test_another_environment_that_was_let_pass_is_recorded_and_said_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    start(folder, monkeypatch, BEGAN)
    assert start(folder, monkeypatch, {**OTHER, "drift_allowed": True}) == "environment changed"
    other = {key: OTHER[key] for key in ("env_id", "variant", "python", "torch")} | {"drift_allowed": True}
    assert run.environment(folder) == {**BEGAN, "resumed": [other]}
    assert start(folder, monkeypatch, BEGAN) == "environment changed"


def test_a_drift_that_was_let_pass_when_a_run_went_on_is_recorded_once_and_said_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    start(folder, monkeypatch, {**BEGAN, "packages": {"numpy": "2.4.6"}})
    for _ in range(2):
        assert start(folder, monkeypatch, DRIFTED) == "environment drifted"
        assert run.environment(folder)["resumed"] == [
            {"drift": [{"name": "six"}], "packages": {"numpy": None, "six": "1.17.0"}, "drift_allowed": True}
        ]
    assert start(folder, monkeypatch, BEGAN) == "environment drifted"


@pytest.mark.parametrize("records", [(BEGAN, None), (None, BEGAN)])
def test_a_run_that_was_started_once_without_the_launcher_says_so_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: tuple[dict[str, object] | None, ...]
) -> None:
    said = [start(tmp_path / "run", monkeypatch, record) for record in records]
    assert said[-1] == "environment not checked"


def test_a_target_s_folder_may_be_spelled_otherwise_and_another_one_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("m", "other"):
        Path(name).mkdir()
    Path("link").symlink_to("m")
    begin(Path("runs/tiny"), {**GIVEN, "target": "m"})
    for name in ("./m", "link", str(tmp_path / "m")):
        assert run.choose(Path("runs"), "tiny", {**GIVEN, "target": name}) == Path("runs/tiny")
        assert begin(Path("runs/tiny"), {**GIVEN, "target": name})
    assert run.choose(Path("runs"), "tiny", {**GIVEN, "target": "other"}) == Path("runs/tiny-2")
    for other in ("other", None):
        with pytest.raises(Failure, match="given something else"):
            begin(Path("runs/tiny"), {**GIVEN, "target": other})


def test_once_a_target_was_read_its_weights_decide_whether_it_is_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begin(folder, {**GIVEN, "target": "m"})
    run.keep_target(folder, "m", "ab")
    assert begin(folder, {**GIVEN, "target": "where/it/was/moved"})
    run.keep_target(folder, "where/it/was/moved", "ab")
    with pytest.raises(Failure, match=r"`m` is not the one that the run in .* began with") as caught:
        run.keep_target(folder, "m", "cd")
    assert caught.value.details == ("sha256 of its weights: was ab, is cd",)
    assert caught.value.code == Exit.USAGE
    with pytest.raises(Failure, match="given something else"):
        begin(folder, {**GIVEN, "target": None})


def test_what_a_killed_writer_left_half_written_is_removed_when_the_run_goes_on(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("checkpoints", "target-training-0123456789ab")]
    begin(tmp_path)
    (places[0] / "step-00000004").mkdir(parents=True)
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom dflash import storage\n"
        "with storage.new_folder(Path(sys.argv[1])) as first, storage.new_folder(Path(sys.argv[2])):\n"
        "    (first / 'part').write_text('half')\n    print('half', flush=True)\n    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, *(str(place / "step-00000008") for place in places)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half\n"
        writer.kill()
    assert [len(list(place.glob(".step-00000008.*"))) for place in places] == [1, 1]
    assert begin(tmp_path)
    assert [path.name for place in places for path in place.iterdir()] == ["step-00000004"]
    assert (tmp_path / ".lock").exists()


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

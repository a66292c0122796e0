"""The data session's programs, as a person starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import chatting
import micro
import pytest
import torch

from dflash import cli, features, target
from env.errors import Exit

ROOT = Path(__file__).parent.parent
MICRO = micro.toml(
    drafter={"vocab_size": 288},
    optimizer={"epochs": 1, "accumulate": 2},
    data={"prompts": 0},
    evaluation={"prompts": 2, "prompt_tokens": 16, "response_tokens": 16},
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data-cli")
    (folder / "micro.toml").write_text(MICRO)
    chatting.folder(folder / "target")
    chatting.folder(folder / "templateless", None)
    chatting.write(folder / "chats.jsonl", *chatting.many(30), b"{")
    chatting.write(folder / "blank.jsonl", b"{", b"[]")
    return folder


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("DFLASH_CACHE_HOME", str(place / "caches"))
    monkeypatch.delenv("DFLASH_ENVIRONMENT", raising=False)


def data(*arguments: str, **options: str) -> int:
    given = {"target": "target", "data": "chats.jsonl", **options}
    return cli.main(["data", *arguments, *(word for name, value in given.items() for word in (f"--{name}", value))])


def test_preparing_says_what_is_left_and_prints_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert data("prepare", config="micro.toml") == 0
    out, err = capsys.readouterr()
    folder = Path(out.strip())
    assert (folder / "manifest.json").exists()
    assert folder.parent.parent.name == "caches"
    assert "28 documents in " in err
    assert "  1 not JSON: first line 31 of `chats.jsonl`" in err
    assert "MiB of memory were in use" in err
    assert data("prepare", config="micro.toml") == 0
    again, err = capsys.readouterr()
    assert again == out
    assert "these data were prepared before" in err


def test_preparing_without_the_weights_finds_what_a_training_finds(place: Path) -> None:
    whole = target.load(str(place / "target"), device=torch.device("cpu"), dtype=torch.float32)
    tokenizer, ends = target.reader(str(place / "target"))
    assert ends == target.stop_tokens(whole)
    assert tokenizer.get_vocab() == whole.tokenizer.get_vocab()


def test_responses_are_rewritten_and_prepared_again(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data("regenerate", "--response-tokens", "12", "--batch", "8", out="ours.jsonl") == 0
    out, err = capsys.readouterr()
    assert out == "ours.jsonl\n"
    assert "the target `target` on cpu in float32" in err
    assert "30 of 31 lines written, 40 responses" in err
    assert "  1 not JSON: first line 31" in err
    assert len((place / "ours.jsonl").read_text().splitlines()) == 30
    assert data("prepare", config="micro.toml", data="ours.jsonl", faulty="1") == 0


def test_features_are_written_for_a_configuration(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data("features", config="micro.toml", out="kept") == 0
    out, err = capsys.readouterr()
    assert out == "kept\n"
    assert "are free" in err
    manifest = json.loads((place / "kept" / "manifest.json").read_text())
    assert manifest["complete"]
    assert manifest["identity"]["layer_ids"] == [0, 1, 2]
    assert data("features", config="micro.toml", out="kept") == 0
    assert "these features are there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "options", "code", "sentence"),
    [
        (["prepare"], {"data": "none.jsonl"}, Exit.INPUT, "the data `none.jsonl` does not exist"),
        (["prepare"], {"target": "none/of/it"}, Exit.INPUT, "does not exist"),
        (["prepare"], {"target": "caches"}, Exit.INPUT, "holds no model"),
        (["prepare"], {"config": "nine"}, Exit.USAGE, "no configuration is called `nine`"),
        (["prepare"], {"faulty": "2"}, Exit.USAGE, "--faulty"),
        (["prepare", "--speed", "1"], {}, Exit.USAGE, "--speed"),
        (["prepare"], {"target": "templateless"}, Exit.INPUT, "has no chat template, which the chat in line 1"),
        (["regenerate"], {}, Exit.USAGE, "--out"),
        (["regenerate"], {"out": "a", "temperature": "-1"}, Exit.USAGE, "--temperature"),
        (["regenerate"], {"out": "chats.jsonl"}, Exit.USAGE, "is the data themselves"),
        (["regenerate"], {"out": "/"}, Exit.USAGE, "`/` is a folder"),
        (["regenerate"], {"out": "a", "target": "templateless"}, Exit.INPUT, "has no chat template"),
        (["regenerate"], {"out": "c", "data": "blank.jsonl"}, Exit.INPUT, "nothing was written of the 2 lines"),
        (["features"], {"out": "b", "config": "tiny"}, Exit.INPUT, "is not the one that the drafter is configured for"),
        (["features"], {"out": "target", "config": "micro.toml"}, Exit.USAGE, "is not empty, and holds no features"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_sentence(
    arguments: list[str],
    options: dict[str, str],
    code: Exit,
    sentence: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (place / "caches").mkdir(exist_ok=True)
    assert data(*arguments, **options) == code
    _, err = capsys.readouterr()
    assert err.count("error:") == 1
    assert sentence in err
    assert "Traceback" not in err


def test_a_command_without_its_own_is_answered_with_the_help_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data"]) == Exit.USAGE
    out, err = capsys.readouterr()
    assert "regenerate" in out + err
    assert "error" not in out + err


def test_the_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["data", "--help"],
        *(["data", name, "--help"] for name in ("prepare", "regenerate", "features")),
    ):
        assert cli.main(arguments) == 0
        assert "nox -s data -- features --target T" in " ".join(capsys.readouterr().out.split())


def test_a_work_that_is_asked_to_stop_says_what_is_kept_and_goes_on(place: Path) -> None:
    lines = [chatting.chat(f"what is {number} times 37?", "?") for number in range(3000)]
    chatting.write(place / "many.jsonl", *lines)
    arguments = ["--target", "target", "--data", "many.jsonl", "--out", "stopped.jsonl", "--response-tokens", "4"]
    command = [sys.executable, "-m", "dflash", "data", "regenerate", "--batch", "4", *arguments]
    environ: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (place / "stopped.jsonl.json").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert process.returncode == Exit.TERMINATED
    assert "of 3000 lines is kept beside `stopped.jsonl`" in err
    done = json.loads((place / "stopped.jsonl.json").read_text())["state"]["lines"]
    assert 0 < done < 3000
    assert (place / "stopped.jsonl.partial").read_bytes().count(b"\n") == done


def test_what_was_kept_is_opened_for_the_same_target_only(place: Path) -> None:
    from dflash import config

    settings = config.load(str(place / "micro.toml"))
    whole = target.load(str(place / "target"), device=torch.device("cpu"), dtype=torch.float32)
    if not (place / "kept").exists():
        assert data("features", config="micro.toml", out="kept") == 0
    assert features.opened(place / "kept", settings, whole).skipped == 0


def test_features_of_a_target_split_over_two_processes_are_those_of_the_whole_within_rounding(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chatting.folder(place / "large", num_attention_heads=4, num_key_value_heads=2)
    assert data("features", target="large", config="micro.toml", out="one") == 0
    capfd.readouterr()
    assert data("features", target="large", config="micro.toml", out="two", split="2") == 0
    out, err = capfd.readouterr()
    assert out == "two\n"
    assert err.count("are free") == 1  # what all would say is said once
    one, two = (features.found(place / name)[0] for name in ("one", "two"))
    rows = list(range(len(one.rows.tokens)))
    torch.testing.assert_close(two.read(rows), one.read(rows), rtol=1e-4, atol=1e-3)


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dflash", "train", "--config", "micro.toml", "--target", "target", *arguments]
    environ: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def trained(*arguments: str) -> str:
    with started(*arguments) as process:
        _, err = process.communicate()
    assert process.returncode == 0, err
    return err


def summary(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return content


@pytest.mark.timeout(1200)
def test_a_training_on_kept_features_ends_with_the_bytes_of_one_whose_target_computed_them(place: Path) -> None:
    err = trained("--data", "chats.jsonl", "--run", "live")
    assert "28 documents in " in err
    assert "  1 not JSON: first line 31 of `chats.jsonl`" in err
    if not (place / "kept").exists():
        assert data("features", config="micro.toml", out="kept") == 0
    err = trained("--features", "kept", "--run", "read")
    assert "28 documents in " in err
    live, read = summary(place / "live"), summary(place / "read")
    assert live["export_sha256"] == read["export_sha256"]
    assert (place / "live" / "metrics.jsonl").read_bytes() == (place / "read" / "metrics.jsonl").read_bytes()
    assert live["tau"] == read["tau"]
    assert live["prompts"] == 2
    assert set(live["identical_responses"].values()) == {2}
    content = json.loads((place / "live" / "data.json").read_text())
    assert (content["documents"], content["held_out"], content["left_out"]["json"][0]) == (28, 2, 1)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (
            ["--data", "chats.jsonl", "--features", "kept"],
            Exit.USAGE,
            "--data and --features each say what to train on",
        ),
        (["--data", "chats.jsonl", "--text", "micro.toml"], Exit.USAGE, "--data and --text each say what to train on"),
        (["--run", ""], Exit.USAGE, "`--run` names nothing"),
        (["--data="], Exit.USAGE, "`--data` names nothing"),
        (["--seed", str(2**63)], Exit.USAGE, "--seed"),
        ([], Exit.USAGE, "cuts no prompts from a text (data.prompts is 0), and no data are named"),
        (["--data", "none.jsonl"], Exit.INPUT, "the data `none.jsonl` does not exist"),
        (["--features", "caches"], Exit.INPUT, "`caches` holds no features"),
        (["--features", "kept", "--topology", "1:1", "--run", "x"], Exit.USAGE, "leave nothing to do for 1 targets"),
        (["--text", "micro.toml", "--faulty", "0.5"], Exit.USAGE, "`--faulty` is about the lines of a `--data`"),
        (["--max-restarts=1"], Exit.USAGE, "`--max-restarts` is only heeded with a `--topology`"),
        (["--rdzv-endpoint", "node0:1"], Exit.USAGE, "`--rdzv-endpoint` is only heeded with a `--topology`"),
    ],
)
def test_a_training_that_cannot_be_is_one_sentence(
    arguments: list[str], code: Exit, sentence: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "caches").mkdir(exist_ok=True)
    assert cli.main(["train", "--config", "micro.toml", "--target", "target", *arguments]) == code
    _, err = capsys.readouterr()
    assert err.count("error:") == 1
    assert sentence in err


def test_a_job_system_may_set_variables_for_a_run_of_one_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")
    monkeypatch.setenv("PET_NODE_RANK", "0")
    assert cli.main(["train", "--config", "micro.toml", "--target", "target", "--data", "none.jsonl"]) == Exit.INPUT
    assert "the data `none.jsonl` does not exist" in capsys.readouterr().err


def test_workers_find_rows_and_features_on_the_disk(place: Path, tmp_path: Path) -> None:
    from dflash import config, prepared, sources
    from dflash.passes import passes
    from dflash.worker import Job

    settings = config.load(str(place / "micro.toml"))
    if not (place / "kept").exists():
        assert data("features", config="micro.toml", out="kept") == 0
    kept = features.found(place / "kept")[0]
    sources.place(kept.rows, tmp_path / "rows")
    sources.place(kept.rows, tmp_path / "rows")  # a second start finds them
    told: dict[str, Any] = {
        "tables": config.to_tables(settings),
        "seed": 0,
        "target": "target",
        "folder": str(tmp_path),
        "status": "",
    }
    more: dict[str, Any] = {"topology": [0, 1], "launcher": "processes"}
    lines = Job(**told, **more, rows=str(tmp_path / "rows")).packed()
    assert isinstance(lines, prepared.Stored)
    assert torch.equal(lines.tokens[[0, 5]], kept.rows.tokens[[0, 5]])
    read = Job(**told, **more, rows="none", features=str(place / "kept")).packed()
    assert torch.equal(read.tokens[[0, 5]], kept.rows.tokens[[0, 5]])
    whole = target.load(str(place / "target"), device=torch.device("cpu"), dtype=torch.float32)
    shelved = features.Shelved(kept, whole, torch.device("cpu"))
    assert torch.equal(shelved.embedding, target.embedding(whole))
    (reading, _) = passes(kept.rows, settings, seed=0, step=0)
    live = target.features(whole, reading.tokens, reading.document, settings.drafter.target_layer_ids)
    assert torch.equal(shelved.features(reading), live)

"""Whole runs as a person starts them: a real trainer in its own process, stopped, killed, resumed, refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import micro
import pytest
import safetensors.torch

from env.errors import Exit

ROOT = Path(__file__).parent.parent
MICRO = micro.toml(
    optimizer={"epochs": 2},
    checkpoint={"every": 4},
    target={"rows": 4, "sequence": 64, "steps": 12, "intermediate_size": 96},
    data={"prompts": 24, "prompt_tokens": 32, "response_tokens": 32},
    evaluation={"prompts": 2, "prompt_tokens": 32, "response_tokens": 32},
)


class Trainer:
    """Starts the trainer on one small configuration, with one compile cache for all runs of this file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "micro.toml"
        self.config.write_text(MICRO)
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT), "DFLASH_CACHE_HOME": str(folder / "caches")}
        self.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "dflash", "train", "--config", str(self.config), *arguments]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=500)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def refused(self, *arguments: str) -> tuple[int, str]:
        ended = self.run(*arguments)
        assert "Traceback" not in ended.stderr
        return ended.returncode, ended.stderr


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def whole(trainer: Trainer) -> Path:
    """A run that nothing disturbed."""
    ended = trainer.run("--run", "whole")
    assert ended.returncode == 0, ended.stderr
    assert "acceptance length τ" in ended.stdout
    return trainer.folder / "whole"


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.02)


def lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


def assert_the_same(one: Path, other: Path) -> None:
    assert summary(one)["export_sha256"] == summary(other)["export_sha256"]
    assert summary(one)["tau"] == summary(other)["tau"]
    for name in ("metrics.jsonl", "target_metrics.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


def test_a_run_leaves_what_a_person_looks_for(whole: Path) -> None:
    for name in ("config.json", "environment.json", "metrics.jsonl", "evaluation.json", "timing.json", "summary.json"):
        assert (whole / name).stat().st_size > 0
    assert (whole / "drafter" / "model.safetensors").exists()
    assert (whole / "target" / "config.json").exists()
    assert list((whole / "pictures").glob("*.png"))
    assert list((whole / "tensorboard").rglob("events.*"))
    content = summary(whole)
    assert set(content["identical_responses"].values()) == {content["prompts"]}
    assert lines(whole / "metrics.jsonl") == content["steps"]


def test_the_second_run_is_the_same_and_every_kernel_hits(trainer: Trainer, whole: Path) -> None:
    ended = trainer.run("--run", "again")
    assert ended.returncode == 0, ended.stderr
    assert_the_same(whole, trainer.folder / "again")
    assert "cache of an earlier run" in ended.stdout
    caches = summary(trainer.folder / "again")["caches"]
    assert caches["autograd_hit"] > 0
    assert caches["fx_hit"] > 0
    assert [caches[name] for name in ("autograd_miss", "autograd_bypass", "fx_miss", "fx_bypass")] == [0, 0, 0, 0]


def test_a_run_that_was_killed_anywhere_ends_as_if_nothing_had_happened(trainer: Trainer, whole: Path) -> None:
    folder = trainer.folder / "killed"
    for name, count in (("target_metrics.jsonl", 6), ("metrics.jsonl", 2), ("metrics.jsonl", 7)):
        process = trainer.start("--run", str(folder))
        wait_for(lambda name=name, count=count: lines(folder / name) >= count, process)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert trainer.run("--run", str(folder)).returncode == 0
    assert_the_same(whole, folder)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, Exit.INTERRUPTED), (signal.SIGTERM, Exit.TERMINATED)])
def test_a_run_that_is_asked_to_stop_saves_says_where_and_goes_on(
    trainer: Trainer, whole: Path, number: signal.Signals, code: Exit
) -> None:
    folder = trainer.folder / f"stopped-{number.name}"
    process = trainer.start("--run", str(folder))
    wait_for(lambda: lines(folder / "metrics.jsonl") >= 5, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code
    assert "stopped: step " in err
    assert "is saved in" in err
    assert trainer.run("--run", str(folder)).returncode == 0
    assert_the_same(whole, folder)


def test_a_run_that_is_asked_to_stop_while_it_compiles_ends_at_once(trainer: Trainer) -> None:
    code = """
import subprocess, sys
from dflash import trainer
def slow(*_):
    print("compiling", flush=True)
    subprocess.run(["sleep", "98765"])  # as a compiler would be waited for
trainer.warm_up = slow
from dflash.cli import main
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "train", "--config", str(trainer.config), "--run", "hurried"]
    process = subprocess.Popen(
        command, cwd=trainer.folder, env=trainer.environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)  # which also waits for whoever holds the pipes: nobody is left
    assert time.monotonic() - begun < 10
    assert process.returncode == Exit.TERMINATED
    assert "stopped: the first step was being compiled, so nothing is lost: none of 12 steps was trained yet" in err
    assert "hint: the same command goes on from there" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--config", "nine.toml"], Exit.USAGE, "the configuration `nine.toml` does not exist"),
        (["--config", "wrong.toml"], Exit.USAGE, "wrong.toml: shapes.ancors: unknown key"),
        (["--seed", "-1"], Exit.USAGE, "--seed"),
        (["--speed", "1"], Exit.USAGE, "--speed"),
        (["--config", "qwen3-8b"], Exit.USAGE, "none is named"),
        (["--target", "no-model"], Exit.INPUT, "holds no model"),
        (["--text", "empty.txt"], Exit.INPUT, "is empty"),
        (["--text", "latin.txt"], Exit.INPUT, "UTF-8"),
        (["--text", "short.txt"], Exit.INPUT, "shorter than a sequence"),
        (["--run", "wrong.toml/run"], Exit.STORAGE, "a part of the path is a file"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_sentence(
    trainer: Trainer, arguments: list[str], code: Exit, sentence: str
) -> None:
    (trainer.folder / "wrong.toml").write_text('preset = "tiny"\n[shapes]\nancors = 3\n')
    (trainer.folder / "no-model").mkdir(exist_ok=True)
    (trainer.folder / "empty.txt").write_text("")
    (trainer.folder / "latin.txt").write_bytes("é".encode("latin-1") * 400)
    (trainer.folder / "short.txt").write_text("short")
    returned, err = trainer.refused(*arguments)
    assert returned == code, err
    assert sentence in err
    assert err.count("error:") == 1


def test_a_run_whose_reader_has_gone_ends_well(trainer: Trainer, whole: Path) -> None:
    """As with `| head -1`: both streams are broken pipes before the first line is written."""
    process = trainer.start("--run", str(whole))
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=300) == 0


def test_without_a_compiler_a_run_says_so(trainer: Trainer, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trainer.environ, "PATH", "/nonexistent")
    code, err = trainer.refused("--run", "compilerless", "--target", str(whole / "target"))
    assert code == Exit.HOST
    assert "no C++ compiler" in err


def test_a_target_that_was_trained_anew_between_two_starts_is_refused_and_its_path_may_be_spelled_otherwise(
    trainer: Trainer, whole: Path
) -> None:
    folder, target = trainer.folder / "retrained", trainer.folder / "m"
    shutil.copytree(whole / "target", target)
    process = trainer.start("--run", str(folder), "--target", "m")
    wait_for((folder / "target.json").exists, process)
    process.kill()
    process.communicate()
    kept = json.loads((folder / "target.json").read_text())["sha256"]
    tensors = safetensors.torch.load_file(target / "model.safetensors")
    next(iter(tensors.values()))[0] += 1
    safetensors.torch.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    code, err = trainer.refused("--run", str(folder), "--target", "./m")
    assert code == Exit.USAGE
    assert "error: the target `./m` is not the one that the run in" in err
    assert f"sha256 of its weights: was {kept}, is " in err


def test_a_checkpoint_that_was_cut_short_is_refused(trainer: Trainer, whole: Path) -> None:
    folder = trainer.folder / "cut"
    process = trainer.start("--run", str(folder))
    saved = "checkpoints/step-*/__0_0.distcp"
    wait_for(lambda: any(folder.glob(saved)), process)
    process.kill()
    process.communicate()
    file = max(folder.glob(saved))
    file.write_bytes(file.read_bytes()[:-100])
    code, err = trainer.refused("--run", str(folder))
    assert code == Exit.INPUT
    assert "is cut short" in err

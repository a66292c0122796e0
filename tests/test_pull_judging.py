"""What `nox -s pull` and `nox -s push` decide before they touch an engine or a registry."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
from hosts import card
from test_labels import GOOD

from env import labels, pull, push
from env.errors import Exit, Failure

PIN = "registry.example/dflash@sha256:" + "a" * 64
STRICT = argparse.Namespace(allow_other_lock=False, allow_cold=False)


@pytest.fixture(autouse=True)
def no_driver_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`nvidia-smi` of this machine has no say."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["registry.example/dflash:1", "--unsigned"], "is a tag, which can stand for another image tomorrow"),
        (["registry.example/dflash", "--unsigned"], "is a tag, which can stand for another image tomorrow"),
        ([PIN], "one of `--key FILE` and `--unsigned` must say what is believed"),
        ([PIN, "--unsigned", "--key", "x"], "one of `--key FILE` and `--unsigned` must say what is believed"),
        ([PIN, "--key", "/nowhere/cosign.pub"], "there is no such file"),
        (["not a reference", "--unsigned"], "is no reference of an image"),
    ],
)
def test_a_pull_that_cannot_be_meant_is_refused_before_anything_is_asked(argv: list[str], sentence: str) -> None:
    with pytest.raises(Failure, match=sentence) as caught:
        pull.main(argv)
    assert caught.value.code == Exit.USAGE


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([PIN, "--unsigned"], "names a digest, which the push is to find out"),
        (["registry.example/dflash:1"], "one of `--key FILE` and `--unsigned` must say whether it is signed"),
        (["registry.example/dflash:1", "--key", "/nowhere/cosign.key"], "there is no such file"),
    ],
)
def test_a_push_that_cannot_be_meant_is_refused_before_anything_is_asked(argv: list[str], sentence: str) -> None:
    with pytest.raises(Failure, match=sentence) as caught:
        push.main(argv)
    assert caught.value.code == Exit.USAGE


def test_an_archive_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="there is no archive") as caught:
        push.loaded(tmp_path / "image.tar")
    assert caught.value.code == Exit.INPUT


def test_a_host_that_fits_is_passed_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pull.judge(GOOD, "image", STRICT, card(tmp_path / "host", "580.95.05", "NVIDIA H200", "NVIDIA H200"))
    assert capsys.readouterr().err == ""


def test_a_host_without_a_driver_passes_and_hears_what_was_not_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pull.judge(GOOD, "image", STRICT, tmp_path)
    assert "the floor of the image (580) was not checked" in capsys.readouterr().err


@pytest.mark.parametrize("driver", ["579.99", "470.256.02", "5"])
def test_a_driver_below_the_floor_is_refused(driver: str, tmp_path: Path) -> None:
    with pytest.raises(Failure, match=f"needs NVIDIA driver 580 or newer, and this host has {driver}") as caught:
        pull.judge(GOOD, "image", STRICT, card(tmp_path / "host", driver, "NVIDIA H200"))
    assert caught.value.code == Exit.HOST


def test_cards_without_kernels_are_named_once_each_and_can_be_let_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = card(tmp_path / "host", "580.95.05", "NVIDIA T4", "NVIDIA H200", "NVIDIA T4", "NVIDIA L40S")
    with pytest.raises(
        Failure, match="this host has NVIDIA L40S and NVIDIA T4, and its kernels are for h200"
    ) as caught:
        pull.judge(GOOD, "image", STRICT, host)
    assert caught.value.code == Exit.HOST
    assert "--gpu l40s" in str(caught.value.hint)
    pull.judge(GOOD, "image", argparse.Namespace(allow_other_lock=False, allow_cold=True), host)
    assert "there are no kernels for NVIDIA L40S and NVIDIA T4 in it" in capsys.readouterr().err


def test_another_lock_is_refused_and_can_be_let_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = dataclasses.replace(GOOD, env_id="0" * 64)
    with pytest.raises(Failure, match="was built from another lock") as caught:
        pull.judge(other, "image", STRICT, tmp_path)
    assert caught.value.code == Exit.DRIFT
    pull.judge(other, "image", argparse.Namespace(allow_other_lock=True, allow_cold=False), tmp_path)
    assert "`--allow-other-lock` takes it" in capsys.readouterr().err
    unknown = dataclasses.replace(GOOD, variant="cu126")
    with pytest.raises(Failure, match="is of variant `cu126`"):
        pull.judge(unknown, "image", argparse.Namespace(allow_other_lock=True, allow_cold=False), tmp_path)


def test_labels_of_an_image_without_any_gpu_say_so() -> None:
    bare = labels.read({**GOOD.as_dict(), labels.CACHES: ""}, "image")
    assert pull.without_kernels(bare.gpus, ["NVIDIA H200"]) == ["NVIDIA H200"]

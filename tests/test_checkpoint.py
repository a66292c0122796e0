"""Checkpoints and the files under them: whole or not there, checked before they are read."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dflash import checkpoint, storage
from env.errors import Exit, Failure


def fresh(width: int = 8) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.LayerNorm(width))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return model, [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


def train(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    for _ in range(steps):
        model(torch.linspace(-1, 1, 16).view(2, 8)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizers = fresh()
    train(model, optimizers, 3)
    checkpoint.save(tmp_path, 3, model, optimizers, keep=2)
    train(model, optimizers, 4)
    other, others = fresh()
    assert checkpoint.resume(tmp_path, other, others) == 3
    train(other, others, 4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_without_a_checkpoint_a_run_begins_at_nought(tmp_path: Path) -> None:
    assert checkpoint.resume(tmp_path / "none", *fresh()) == 0


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    model, optimizers = fresh()
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, model, optimizers, keep=2)
    assert checkpoint.steps(tmp_path) == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "is cut short"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"x"), "was changed"),
        (lambda file: file.unlink(), "lacks its file"),
        (lambda file: (file.parent / "manifest.json").unlink(), "no readable manifest.json"),
        (lambda file: (file.parent / "manifest.json").write_text("{"), "no readable manifest.json"),
        (lambda file: (file.parent / "manifest.json").write_text('{"files": []}'), "no readable manifest.json"),
        (lambda file: (file.parent / "manifest.json").write_text('{"files": {}}'), "no readable manifest.json"),
    ],
)
def test_a_harmed_checkpoint_is_refused_and_nothing_is_loaded(tmp_path: Path, harm: object, sentence: str) -> None:
    assert callable(harm)
    model, optimizers = fresh()
    train(model, optimizers, 1)
    for step in (1, 2):
        place = checkpoint.save(tmp_path, step, model, optimizers, keep=2)
    harm(place / "__0_0.distcp")
    other, others = fresh()
    before = [parameter.clone() for parameter in other.parameters()]
    with pytest.raises(Failure) as caught:
        checkpoint.resume(tmp_path, other, others)
    assert sentence in caught.value.message
    assert caught.value.code == Exit.INPUT
    assert "step 1 is the one before" in (caught.value.hint or "")
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


def test_a_full_disk_is_one_sentence_and_leaves_the_checkpoint_before(small_disk: Path) -> None:
    model, optimizers = fresh()
    checkpoint.save(small_disk, 1, model, optimizers, keep=2)
    large = torch.nn.Linear(1024, 1024)
    with pytest.raises(Failure, match="the disk is full") as caught:
        checkpoint.save(small_disk, 2, large, [torch.optim.AdamW(large.parameters())], keep=2)
    assert caught.value.code == Exit.STORAGE
    assert [path.name for path in small_disk.iterdir()] == ["step-00000001"]
    assert checkpoint.resume(small_disk, *fresh()) == 1


def test_what_a_thread_saves_is_the_state_of_that_moment_and_waits_its_turn(tmp_path: Path) -> None:
    model, optimizers = fresh()
    saver = checkpoint.Saver(tmp_path, keep=2)
    train(model, optimizers, 3)
    saver.save(3, model, optimizers)
    train(model, optimizers, 4)  # meanwhile
    saver.save(7, model, optimizers)
    saver.wait()
    assert checkpoint.steps(tmp_path) == [3, 7]
    for step in (7, 3):
        other, others = fresh()
        assert checkpoint.resume(tmp_path, other, others) == step
        expected, beside = fresh()
        train(expected, beside, step)
        assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), other.parameters(), strict=True))
        shutil.rmtree(checkpoint.where(tmp_path, step))


def test_what_the_disk_refuses_a_thread_is_raised_where_training_goes_on(small_disk: Path) -> None:
    large = torch.nn.Linear(1024, 1024)
    saver = checkpoint.Saver(small_disk, keep=2)
    saver.save(1, large, [torch.optim.AdamW(large.parameters())])
    with pytest.raises(Failure, match="the disk is full"):
        saver.wait()
    saver.check()
    assert list(small_disk.iterdir()) == []


def test_a_full_disk_leaves_the_old_file(small_disk: Path) -> None:
    file = small_disk / "numbers.json"
    storage.write(file, b"old")
    with pytest.raises(Failure, match="the disk is full"):
        storage.write(file, bytes(2 << 20))
    assert file.read_bytes() == b"old"
    assert list(small_disk.iterdir()) == [file]


def test_a_folder_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Failure, match="a part of the path is a file"):
        storage.write(tmp_path / "file" / "below.json", b"")


def test_a_block_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    def fail() -> None:
        with storage.new_folder(tmp_path / "new") as beside:
            (beside / "part").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []

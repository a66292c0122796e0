from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from dflash import checkpoint, config, small_target, target, text
from env.errors import Exit, Failure

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent
TRAIN = "".join(f"{number} squared is {number * number}.\n" for number in range(400))
HELD_OUT = "".join(f"{number} squared is {number * number}.\n" for number in range(400, 440))
TEXT = text.Text(name="squares", sha256="0" * 64, license=None, train=(TRAIN,), held_out=(HELD_OUT,), overlap=0)
STEPS = 12


def settings(*, every: int = 5, drafter: dict[str, Any] | None = None, **recipe: Any) -> config.Config:
    whole = config.load("tiny")
    assert whole.target is not None
    small = {"hidden_size": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "target_layers": 3}
    short = {"rows": 4, "sequence": 32, "steps": STEPS, "intermediate_size": 48}
    return dataclasses.replace(
        whole,
        drafter=dataclasses.replace(whole.drafter, **(small | (drafter or {}))),
        target=dataclasses.replace(whole.target, **(short | recipe)),
        checkpoint=config.Checkpoint(every=every, keep=1),
    )


def train(folder: Path, chosen: config.Config | None = None, *, seed: int = 0, words: text.Text = TEXT) -> Any:
    """Train in this process; returns the summary and the numbers of each step."""
    lines: list[dict[str, Any]] = []
    summary = small_target.train(
        chosen or settings(), words, folder, seed=seed, device=CPU, stop=lambda: None, report=lines.append
    )
    return summary, lines


def elsewhere(folder: Path, metrics: Path, *, kill_after: int | None = None) -> None:
    """Train in a process of its own, which is killed once it has reported a step; appends its numbers to a file."""
    command = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import json, time
from pathlib import Path
import test_small_target as tests
from dflash import small_target
def report(numbers):
    with Path({str(metrics)!r}).open("a") as file:
        file.write(json.dumps(numbers) + "\\n")
    print(numbers["step"], flush=True)
    if numbers["step"] == {kill_after}:
        time.sleep(600)  # the kill must not come a step later
small_target.train(
    tests.settings(), tests.TEXT, Path({str(folder)!r}), seed=0, device=tests.CPU, stop=lambda: None, report=report
)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if kill_after is not None and int(line) == kill_after:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == (0 if kill_after is None else -signal.SIGKILL)


def lines_of(metrics: Path) -> list[dict[str, Any]]:
    """Numbers of each step, the later ones where a step was done again."""
    found = [json.loads(line) for line in metrics.read_text().splitlines()]
    return list({numbers["step"]: numbers for numbers in found}.values())


def refusal(folder: Path, chosen: config.Config | None = None, **other: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        train(folder, chosen, **other)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """A model this small only waits for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("small") / "target"
    return folder, *train(folder)


def test_a_byte_is_its_own_token_and_special_names_come_after_the_bytes(tmp_path: Path) -> None:
    made = small_target.tokenizer()
    made.save_pretrained(tmp_path)
    loader: Any = AutoTokenizer
    back = loader.from_pretrained(tmp_path)
    words = "aé→𝄞\n\t\x00 x<|mask|>"
    for each in (made, back):
        assert each.encode(words, add_special_tokens=False, split_special_tokens=True) == list(words.encode())
        assert each.decode(list(words.encode())) == words
        assert each.convert_tokens_to_ids(list(small_target.SPECIAL)) == list(range(256, 272))
        assert (each.eos_token_id, each.mask_token_id, each.pad_token_id, len(each)) == (256, 257, 258, 272)


def test_training_gives_an_ordinary_folder_that_is_a_target_like_any_other(trained: Any) -> None:
    folder, summary, _ = trained
    found = target.load(str(folder), device=CPU, dtype=torch.float32)
    target.check(found, settings().drafter)
    assert target.stop_tokens(found) == {small_target.END}
    assert not torch.equal(target.embedding(found), target.head(found))
    assert target.encode(found, "ab").tolist() == [97, 98]
    assert {path.name for path in folder.parent.iterdir()} == {"target"}
    assert summary == small_target.Summary(**json.loads((folder / small_target.SUMMARY).read_text()))
    assert summary.parameters == sum(weight.numel() for weight in found.model.parameters())
    assert (summary.held_out_loss, summary.held_out_bytes) == small_target.held_out_loss(found.model, TEXT.held_out, 32)


def test_every_step_is_reported_and_training_learns(tmp_path: Path) -> None:
    summary, lines = train(tmp_path / "target", settings(steps=80))
    assert [numbers["step"] for numbers in lines] == list(range(1, 81))
    assert all(set(numbers) == {"step", "loss", "lr"} for numbers in lines)
    assert lines[0]["loss"] == pytest.approx(math.log(272), rel=0.02)
    assert summary.held_out_loss < 0.5 * math.log(272)


def test_two_processes_give_the_same_weights_and_numbers(trained: Any, tmp_path: Path) -> None:
    folder, _, lines = trained
    elsewhere(tmp_path / "target", tmp_path / "metrics")
    assert lines_of(tmp_path / "metrics") == lines
    for name in ("model.safetensors", "config.json", "tokenizer.json", small_target.SUMMARY):
        assert (tmp_path / "target" / name).read_bytes() == (folder / name).read_bytes()


def test_a_training_killed_twice_goes_on_to_the_same_weights_and_numbers(trained: Any, tmp_path: Path) -> None:
    _, summary, lines = trained
    folder, metrics = tmp_path / "target", tmp_path / "metrics"
    elsewhere(folder, metrics, kill_after=3)
    elsewhere(folder, metrics, kill_after=8)
    assert not folder.exists()
    elsewhere(folder, metrics)
    assert small_target._made(folder) == summary
    assert lines_of(metrics) == lines
    done = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    # The first kill came before any checkpoint, the second after that of step 5.
    assert [done.count(1), done.count(5), done.count(STEPS)] == [2, 1, 1]


@pytest.mark.parametrize("step", [1, 5, STEPS])
def test_a_training_that_is_stopped_saves_the_step_it_was_at(trained: Any, tmp_path: Path, step: int) -> None:
    _, summary, lines = trained
    seen: list[dict[str, Any]] = []

    def stop() -> None:
        if len(seen) == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small_target.train(settings(), TEXT, tmp_path / "target", seed=0, device=CPU, stop=stop, report=seen.append)
    (places,) = tmp_path.iterdir()
    assert checkpoint.steps(places) == [step]
    again, rest = train(tmp_path / "target")
    assert again == summary
    assert seen + rest == lines


def test_a_finished_folder_is_used_as_it_is(trained: Any) -> None:
    folder, summary, _ = trained
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert train(folder) == (summary, [])
    # Neither how often it is saved nor the drafter's own depth decides anything about the target.
    assert train(folder, settings(every=1, drafter={"layers": 1})) == (summary, [])
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_another_seed_text_or_recipe_is_another_target(trained: Any, tmp_path: Path) -> None:
    _, summary, _ = trained
    folder = tmp_path / "target"
    digests = {summary.sha256}
    changes: tuple[dict[str, Any], ...] = (
        {"seed": 1},
        {"words": dataclasses.replace(TEXT, sha256="1" * 64, train=(TRAIN[::-1],))},
        {"chosen": settings(lr=0.01)},
        {"chosen": settings(drafter={"rope_theta": 5000.0})},
    )
    for change in changes:
        digests.add(train(folder, **change)[0].sha256)
    assert len(digests) == 5


def test_a_folder_whose_weights_were_changed_is_trained_anew(tmp_path: Path) -> None:
    summary, _ = train(tmp_path / "target")
    with (tmp_path / "target" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    assert train(tmp_path / "target")[0] == summary
    assert target.load(str(tmp_path / "target"), device=CPU, dtype=torch.float32)


def test_somebody_elses_folder_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "precious").write_text("mine")
    failure = refusal(tmp_path / "target")
    assert failure.code is Exit.INPUT
    assert "is no small target of ours" in failure.message
    assert (tmp_path / "target" / "precious").read_text() == "mine"


def test_a_text_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    failure = refusal(tmp_path / "target", words=dataclasses.replace(TEXT, train=("short",)))
    assert failure.code is Exit.INPUT
    assert failure.message == "the training part of `squares` has 6 tokens, a sequence needs 33"


def test_a_configuration_that_cannot_be_this_tokenizers_is_refused(tmp_path: Path) -> None:
    for chosen, words in (
        (dataclasses.replace(settings(), target=None), "no table [target]"),
        (settings(drafter={"vocab_size": 271}), "drafter.vocab_size is 271, the small target has 272 tokens"),
        (settings(drafter={"mask_token_id": 97}), "drafter.mask_token_id is 97"),
        (settings(drafter={"mask_token_id": 258}), "drafter.mask_token_id is 258"),
    ):
        failure = refusal(tmp_path / "target", chosen)
        assert failure.code is Exit.USAGE
        assert words in failure.message


def test_a_loss_that_is_not_finite_stops_the_training(tmp_path: Path) -> None:
    failure = refusal(tmp_path / "target", settings(lr=1e30))
    assert failure.code is Exit.TRAINING
    assert "the small target's loss is" in failure.message


def test_training_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    def precisions() -> tuple[str, ...]:
        cpu: Any = torch.backends.mkldnn
        return (
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.fp32_precision,
            cpu.matmul.fp32_precision,
        )

    before = precisions()
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    train(tmp_path / "target", settings(steps=1))
    assert torch.equal(torch.rand(3), expected)
    assert precisions() == before, "they are in the keys of all compiled graphs, so a baked cache would not fit"


def test_an_epoch_takes_every_window_once_in_an_order_of_its_own() -> None:
    stream = torch.arange(1000)
    count = 999 // 32
    starts = [
        int(window[0]) for step in range(count * 2) for window in small_target.batch(stream, 1, 32, seed=0, step=step)
    ]
    first, second = starts[:count], starts[count:]
    for epoch in (first, second):
        assert len({start % 32 for start in epoch}) == 1
        assert sorted(epoch) == list(range(min(epoch), min(epoch) + 32 * count, 32))
    assert first != second
    # A step's windows depend on nothing but (seed, step), and rows only group them.
    grouped = small_target.batch(stream, 4, 32, seed=0, step=2)
    assert [int(window[0]) for window in grouped] == starts[8:12]
    assert [int(window[0]) for window in small_target.batch(stream, 4, 32, seed=1, step=2)] != starts[8:12]


def test_a_stream_of_one_window_is_enough() -> None:
    windows = small_target.batch(torch.arange(33), 3, 32, seed=0, step=5)
    assert torch.equal(windows, torch.arange(33).expand(3, 33))


def test_documents_are_joined_by_an_end_of_text() -> None:
    assert small_target.join(["ab", "é"]).tolist() == [97, 98, 256, 0xC3, 0xA9, 256]


def test_the_rate_rises_in_a_line_and_falls_in_a_line() -> None:
    recipe = settings(steps=10, warmup=0.2, lr=1.0).target
    assert recipe is not None
    rates = [small_target.learning_rate(step, recipe) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, pytest.approx(8 / 9)]
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] == pytest.approx(1 / 9)


def test_the_held_out_loss_is_the_mean_over_every_byte_but_a_windows_first() -> None:
    model: Any = small_target.build(settings(), 0)
    documents = ["one two three four", "x", "y" * 40]
    lost, count = 0.0, 0
    for document in documents:
        data = document.encode()
        for start in range(0, len(data), 16):
            window = torch.tensor([list(data[start : start + 16])])
            if window.shape[1] > 1:
                logits = model(input_ids=window).logits[0, :-1]
                lost += F.cross_entropy(logits, window[0, 1:], reduction="sum").item()
                count += window.shape[1] - 1
    found, over = small_target.held_out_loss(model, documents, 16)
    assert over == count
    assert found == pytest.approx(lost / count, rel=1e-5)
    assert small_target.held_out_loss(model, [], 16) == (0.0, 0)

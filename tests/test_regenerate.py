from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_target import model, wrapped

from dflash import config, regenerate, small_target, target, text
from dflash.data import Sample
from env.errors import Exit, Failure

LINES = tuple("".join(f"{name}{number}: {number * 37}\n" for number in range(200)) for name in "abc")
TEXT = text.Text(name="lines", sha256="0" * 64, license=None, train=LINES, held_out=("held out " * 20,), overlap=0)


def tiny(seed: int = 3, **changes: Any) -> target.Target:
    sizes: dict[str, Any] = {
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        # Large weights, so that a random model does not say one and the same thing over and over.
        "initializer_range": 0.5,
    }
    torch.manual_seed(seed)
    maker: Any = transformers.Qwen3ForCausalLM
    model = maker(transformers.Qwen3Config(**(sizes | changes))).eval().requires_grad_(False)
    return target.Target(model=model, tokenizer=small_target.tokenizer(), name="tiny", packs=True)


def settings(**data: int) -> config.Config:
    wanted = {"prompts": 150, "prompt_tokens": 12, "response_tokens": 9} | data
    return dataclasses.replace(config.load("tiny"), data=config.Data(**wanted))


def samples(whole: target.Target, folder: Path, *, seed: int = 0, **data: int) -> list[Sample]:
    return regenerate.samples(settings(**data), TEXT, whole, folder, seed=seed, watch=lambda _count, *, made: None)


def same(first: list[Sample], second: list[Sample]) -> bool:
    pairs = list(zip(first, second, strict=True))
    return all(torch.equal(a.tokens, b.tokens) and torch.equal(a.response, b.response) for a, b in pairs)


def stamps(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in (folder / "samples").iterdir()}


def test_prompts_are_distinct_pieces_of_the_documents_and_the_same_for_the_same_seed() -> None:
    whole = tiny()
    cut = regenerate.prompts(whole, LINES, 300, 40, seed=1)
    words = [bytes(prompt).decode() for prompt in cut]
    assert all(any(word in document for document in LINES) for word in words)
    assert all(len(prompt) == 40 for prompt in cut)
    assert len(set(words)) == 300
    assert cut == regenerate.prompts(whole, LINES, 300, 40, seed=1)
    assert cut != regenerate.prompts(whole, LINES, 300, 40, seed=2)


def test_every_place_of_every_document_long_enough_can_begin_a_prompt() -> None:
    documents = ["abcd", "x", "", "efg"]
    cut = regenerate.prompts(tiny(), documents, 3, 3, seed=0)
    assert sorted(bytes(prompt).decode() for prompt in cut) == ["abc", "bcd", "efg"]


def test_more_prompts_than_the_text_has_room_for_are_refused() -> None:
    with pytest.raises(Failure, match="has room for 3 prompts of 3 tokens, 4 are asked for") as caught:
        regenerate.prompts(tiny(), ["abcd", "x", "", "efg"], 4, 3, seed=0)
    assert caught.value.code is Exit.INPUT
    with pytest.raises(Failure, match="has room for 0 prompts"):
        regenerate.prompts(tiny(), [], 1, 3, seed=0)


def test_continuations_are_the_targets_own_greedy_choices() -> None:
    whole = tiny()
    prompt = torch.tensor(regenerate.prompts(whole, LINES, 20, 16, seed=0))
    found = regenerate.continuations(whole, prompt, 24)
    for start, answer in zip(prompt.tolist(), found, strict=True):
        assert len(answer) == 24 or answer[-1] == small_target.END
        # Without a cache, a token at a time: nothing is shared with what is tested.
        logits = whole.model(input_ids=torch.tensor([start + answer])).logits[0, len(start) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer
    assert len({tuple(answer) for answer in found}) > 10


@pytest.mark.parametrize("kind", ["llama", "mistral-sliding", "gpt2", "qwen3-next"])
def test_continuations_of_other_architectures_are_greedy_too(kind: str) -> None:
    whole = wrapped(model(kind))
    prompt = torch.tensor(regenerate.prompts(whole, LINES, 3, 10, seed=0))
    for start, answer in zip(prompt.tolist(), regenerate.continuations(whole, prompt, 8), strict=True):
        logits = whole.model(input_ids=torch.tensor([start + answer])).logits[0, len(start) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer


def test_a_models_own_sampling_settings_change_nothing() -> None:
    whole = tiny()
    prompt = torch.tensor(regenerate.prompts(whole, LINES, 8, 16, seed=0))
    before = regenerate.continuations(whole, prompt, 16)
    generation: Any = whole.model.generation_config
    generation.do_sample, generation.repetition_penalty, generation.temperature = True, 5.0, 9.0
    assert regenerate.continuations(whole, prompt, 16) == before


def test_a_continuation_ends_with_its_first_stop_token() -> None:
    whole = tiny()
    prompt = torch.tensor(regenerate.prompts(whole, LINES, 30, 16, seed=0))
    free = regenerate.continuations(whole, prompt, 16)
    generation: Any = whole.model.generation_config
    generation.eos_token_id = [free[0][5], free[1][2]]
    ends = target.stop_tokens(whole)
    wanted = []
    for answer in free:
        stop = next((place + 1 for place, token in enumerate(answer) if token in ends), None)
        wanted.append(answer[:stop])
    assert regenerate.continuations(whole, prompt, 16) == wanted
    assert any(len(answer) < 16 for answer in wanted)


def test_samples_mark_the_answer_and_only_the_answer(tmp_path: Path) -> None:
    made = samples(tiny(), tmp_path)
    assert len(made) == 150
    for sample in made:
        assert sample.tokens.dtype == torch.int64
        assert sample.response.tolist() == [False] * 12 + [True] * (len(sample.tokens) - 12)
        assert any(bytes(sample.tokens[:12].tolist()).decode() in document for document in TEXT.train)


def test_samples_do_not_depend_on_where_a_run_was_interrupted(tmp_path: Path) -> None:
    whole = tiny()
    unbroken = samples(whole, tmp_path / "unbroken")
    told: list[tuple[int, bool]] = []

    def count(count: int, *, made: bool) -> None:
        told.append((count, made))

    def stop(_count: int, *, made: bool) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate.samples(settings(), TEXT, whole, tmp_path / "broken", seed=0, watch=stop)
    kept = stamps(tmp_path / "broken")
    assert list(kept) == ["00000.safetensors"]
    again = regenerate.samples(settings(), TEXT, whole, tmp_path / "broken", seed=0, watch=count)
    assert same(again, unbroken)
    assert told == [(128, False), (22, True)]
    assert stamps(tmp_path / "broken")["00000.safetensors"] == kept["00000.safetensors"]
    for name in ("00000.safetensors", "00001.safetensors"):
        files = [tmp_path / run / "samples" / name for run in ("broken", "unbroken")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_kept_samples_are_used_again_only_when_all_that_decides_them_is_the_same(tmp_path: Path) -> None:
    first = samples(tiny(), tmp_path)
    kept = stamps(tmp_path)
    assert same(samples(tiny(), tmp_path), first)
    assert stamps(tmp_path) == kept
    for change in ({"seed": 1}, {"response_tokens": 8}, {"prompt_tokens": 13}):
        assert not same(samples(tiny(), tmp_path, **change), first)
        assert stamps(tmp_path).items().isdisjoint(kept.items())
        assert same(samples(tiny(), tmp_path), first)
        kept = stamps(tmp_path)
    assert not same(samples(tiny(seed=4), tmp_path), first)


def test_a_damaged_file_of_samples_is_made_again(tmp_path: Path) -> None:
    whole = tiny()
    first = samples(whole, tmp_path)
    file = tmp_path / "samples" / "00000.safetensors"
    good = file.read_bytes()
    flipped = bytearray(good)
    flipped[-1] ^= 1
    for bad in (good[:-5], bytes(flipped), b"", b"nonsense" * 10):
        file.write_bytes(bad)
        assert same(samples(whole, tmp_path), first)
        assert file.read_bytes() == good


def test_a_configuration_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="nothing to train on") as caught:
        samples(tiny(), tmp_path, prompts=0)
    assert caught.value.code is Exit.USAGE


def test_a_run_that_is_killed_leaves_only_whole_files(tmp_path: Path) -> None:
    command = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import test_regenerate as tests
from dflash import regenerate
regenerate.BATCH = 4
counts = []
def watch(count, *, made):
    counts.append(count)
    if len(counts) == 3:
        print("three", flush=True)
regenerate.samples(tests.settings(), tests.TEXT, tests.tiny(), Path({str(tmp_path)!r}), seed=0, watch=watch)
"""
    paths = [str(Path(__file__).parent.parent), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"three\n"
        process.send_signal(signal.SIGKILL)
    done = [file for file in (tmp_path / "samples").iterdir() if not file.name.startswith(".")]
    assert len(done) >= 3
    whole = tiny()
    cut = torch.tensor(regenerate.prompts(whole, TEXT.train, 150, 12, seed=0))
    for file in done:
        part = cut.split(4)[int(file.stem)]
        key = regenerate._key(target.digest(whole), part, 9, target.stop_tokens(whole))
        assert regenerate._read(file, key) == regenerate.continuations(whole, part, 9)

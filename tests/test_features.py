from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chatting
import micro
import pytest
import torch

from dflash import config, features, prepared, rendering, target
from dflash.preparing import Recipe
from env.errors import Exit, Failure

RECIPE = Recipe(sequence=128, held_out=2, prompt_tokens=16, faulty=0.1)
TABLES = micro.toml(
    drafter={"vocab_size": 288},
    data={"prompts": 0},
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> config.Config:
    file = tmp_path_factory.mktemp("config") / "micro.toml"
    file.write_text(TABLES)
    return config.load(str(file))


@pytest.fixture(scope="module")
def whole() -> target.Target:
    return chatting.chatting()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> prepared.Stored:
    folder = tmp_path_factory.mktemp("data")
    ends = frozenset({256, 273})
    whole = rendering.Renderer(tokenizer=chatting.tokenizer(), name="tiny", ends=ends, sequence=128)
    file = chatting.write(folder / "a.jsonl", *chatting.many(25))
    return prepared.prepare(file, whole, RECIPE, folder / "home", watch=lambda _: None, say=lambda _: None)


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch, settings: config.Config) -> None:
    monkeypatch.setattr(features, "SHARD_BYTES", features.size(settings, 4))


def write(
    settings: config.Config, whole: target.Target, rows: prepared.Stored, folder: Path, **options: Any
) -> features.Kept:
    given: dict[str, Any] = {"watch": lambda _: None, "say": lambda _: None} | options
    return features.write(settings, whole, rows, folder, **given)


def refusal(call: Callable[[], object]) -> Failure:
    with pytest.raises(Failure) as caught:
        call()
    return caught.value


def test_what_is_kept_is_what_the_target_gives_for_the_same_rows_in_any_order(
    settings: config.Config, whole: target.Target, rows: prepared.Stored, tmp_path: Path
) -> None:
    said: list[str] = []
    kept = write(settings, whole, rows, tmp_path / "out", say=said.append)
    assert len(kept.shelf.shards) > 3
    assert len(kept.rows.tokens) == len(rows.tokens) == len(kept.shelf)
    assert kept.rows.held_out == rows.held_out
    for some in ([7, 2], [0, len(rows.tokens) - 1]):
        live = target.features(whole, rows.tokens[some], rows.document[some], (0, 1, 2))
        assert torch.equal(kept.read(some), live)
    total = features.size(settings, len(rows.tokens))
    assert total == len(rows.tokens) * 128 * 3 * 64 * 4
    assert f"the features of {len(rows.tokens)} rows take" in said[0]
    assert sum(shard.size for shard in kept.shelf.shards) - total < 200 * len(kept.shelf.shards)


def test_an_empty_row_has_zeros(
    settings: config.Config, whole: target.Target, rows: prepared.Stored, tmp_path: Path
) -> None:
    kept = write(settings, whole, rows, tmp_path / "out")
    found = kept.read([1, len(rows.tokens)])
    assert torch.equal(found[0], kept.read([1])[0])
    assert not found[1].any()
    assert kept.read([len(rows.tokens)] * 2).shape == (2, 128, 192)


def test_a_second_call_finds_them_and_another_target_or_configuration_is_refused_with_both_values(
    settings: config.Config, whole: target.Target, rows: prepared.Stored, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write(settings, whole, rows, out)
    said: list[str] = []
    write(settings, whole, rows, out, say=said.append)
    assert said == [f"these features are there already: `{out}`"]
    taps = dataclasses.replace(settings, drafter=dataclasses.replace(settings.drafter, target_layer_ids=(0, 2)))
    half = dataclasses.replace(settings, precision=config.Precision(compute="bfloat16"))
    other = chatting.chatting(initializer_range=0.2)
    for given, of, detail in (
        (taps, whole, "layer_ids  features [0, 1, 2]  asked for [0, 2]"),
        (half, whole, "dtype  features float32  asked for bfloat16"),
        (settings, other, "target  features "),
    ):
        for call, code in (
            (lambda given=given, of=of: features.opened(out, given, of), Exit.INPUT),
            (lambda given=given, of=of: write(given, of, rows, out), Exit.USAGE),
        ):
            failure = refusal(call)
            assert failure.code is code
            assert len(failure.details) == 1
            assert failure.details[0].startswith(detail)


def test_a_flipped_bit_is_refused_by_name_and_a_missing_file_too(
    settings: config.Config, whole: target.Target, rows: prepared.Stored, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write(settings, whole, rows, out)
    shard = out / "features-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    kept = features.opened(out, settings, whole)
    kept.read([0, 3])
    failure = refusal(lambda: kept.read([0, 4]))
    assert failure.code is Exit.INPUT
    assert failure.message.startswith(f"the features: `{shard}` was changed: sha256 ")
    shard.unlink()
    assert refusal(lambda: features.opened(out, settings, whole)).message == f"the features: `{shard}` is missing"
    (out / "manifest.json").write_bytes(b"{}")
    assert "holds no features" in refusal(lambda: features.opened(out, settings, whole)).message
    assert "was changed" in refusal(lambda: write(settings, whole, rows, out)).message


def test_a_killed_writer_goes_on_and_ends_with_the_same_bytes(
    settings: config.Config, whole: target.Target, rows: prepared.Stored, tmp_path: Path
) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    write(settings, whole, rows, unbroken)
    done = []
    for _ in range(2):

        def work(say: Callable[[str], None]) -> None:
            def watch(count: int) -> None:
                say(str(count))
                time.sleep(0.05)

            write(settings, whole, rows, broken, watch=watch)

        with chatting.forked(work) as process:
            done.append(int(process.line()))
            for _ in range(3):
                process.line()
            assert "another process writes" in refusal(lambda: write(settings, whole, rows, broken)).message
            process.kill()
        assert "are not whole" in refusal(lambda: features.opened(broken, settings, whole)).message
    assert done == [0, 4]
    with (broken / "shards.jsonl").open("ab") as journal:
        journal.write(b'{"shard": {"fi')
    kept = write(settings, whole, rows, broken)
    for shard in kept.shelf.shards:
        assert (broken / shard.file).read_bytes() == (unbroken / shard.file).read_bytes()
    assert (broken / "manifest.json").read_bytes() == (unbroken / "manifest.json").read_bytes()


def test_a_disk_without_room_is_refused_before_anything_is_computed(
    settings: config.Config,
    whole: target.Target,
    rows: prepared.Stored,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _place: usage._replace(free=1000))
    failure = refusal(lambda: write(settings, whole, rows, tmp_path / "out"))
    assert failure.code is Exit.STORAGE
    assert "bytes more, and the disk of" in failure.message
    assert "has 1,000 free" in failure.message
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_folder_of_something_else_is_left_alone(
    settings: config.Config, whole: target.Target, rows: prepared.Stored, tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    failure = refusal(lambda: write(settings, whole, rows, tmp_path))
    assert failure.code is Exit.USAGE
    assert "has `thesis.tex`" in failure.message
    (tmp_path / "file").write_text("")
    assert refusal(lambda: write(settings, whole, rows, tmp_path / "file")).code is Exit.STORAGE


def spoilt(rows: prepared.Stored, bad: set[int]) -> target.Target:
    """A target whose features are NaN for the rows that begin with the same tokens as those numbered `bad`."""
    made = chatting.chatting()
    beginnings = [rows.tokens[[row]][0, :60] for row in bad]

    def hook(_module: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        for row, tokens in enumerate(options["input_ids"]):
            if any(torch.equal(tokens[:60], each) for each in beginnings):
                spoiling.append(row)

    spoiling: list[int] = []

    def spoil(_module: Any, _inputs: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        for row in spoiling:
            states[row, 5, 3] = float("nan")
            states[row, 6, :2] = float("inf")
        spoiling.clear()
        return output

    model: Any = made.model
    model.model.register_forward_pre_hook(lambda m, i, o: hook(m, i, o, None), with_kwargs=True)
    model.model.layers[2].register_forward_hook(spoil)
    return made


def test_features_that_are_no_numbers_are_counted_and_left_out_and_too_many_are_refused(
    settings: config.Config, whole: target.Target, rows: prepared.Stored, tmp_path: Path
) -> None:
    said: list[str] = []
    kept = write(settings, spoilt(rows, {3}), rows, tmp_path / "out", say=said.append)
    total = len(rows.tokens)
    wanted = (
        f"the features of 1 of {total} rows are not finite (1 NaN, 2 infinite; the first is row 3): they are left out"
    )
    assert said[-1] == wanted
    assert kept.skipped == 1
    assert len(kept.rows.tokens) == total - 1
    assert torch.equal(kept.rows.tokens[[3]], rows.tokens[[4]])
    live = target.features(whole, rows.tokens[[4, 5]], rows.document[[4, 5]], (0, 1, 2))
    assert torch.equal(kept.read([3, 4]), live)
    assert bool(kept.read(list(range(total - 1))).isfinite().all())
    failure = refusal(lambda: write(settings, spoilt(rows, set(range(8))), rows, tmp_path / "many"))
    assert failure.code is Exit.INPUT
    assert "not finite" in failure.message
    assert "more than 10%" in failure.message


def test_the_manifest_says_what_the_features_are_of(
    settings: config.Config, whole: target.Target, rows: prepared.Stored, tmp_path: Path
) -> None:
    half = dataclasses.replace(settings, precision=config.Precision(compute="bfloat16"))
    made = dataclasses.replace(whole, model=chatting.model().to(torch.bfloat16))
    kept = write(half, made, rows, tmp_path / "out")
    assert kept.read([0]).dtype == torch.bfloat16
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["identity"] == {
        "target": target.digest(made),
        "layer_ids": [0, 1, 2],
        "sequence": 128,
        "dtype": "bfloat16",
        "data": rows.key,
    }
    assert [shard["sha256"] for shard in manifest["shards"]] == [shard.sha256 for shard in kept.shelf.shards]

"""Configurations: what is read, and that each refusal names the place, what stands there and what may."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from dflash import config
from env.errors import Exit, Failure


def refused(tables: dict[str, object]) -> Failure:
    with pytest.raises(Failure) as caught:
        config.parse(tables, "mine.toml")
    assert caught.value.code == Exit.USAGE
    return caught.value


def tiny_with(**changes: dict[str, object]) -> dict[str, object]:
    tables = config.to_tables(config.load("tiny"))
    for table, values in changes.items():
        tables[table] = {**tables[table], **values}
    return tables


@pytest.mark.parametrize("name", config.presets())
def test_every_preset_is_a_configuration_and_survives_being_written(name: str) -> None:
    settings = config.load(name)
    tables = config.to_tables(settings)
    assert config.parse(tables, name) == settings
    assert json.loads(json.dumps(tables)) == tables


def test_the_presets_are_the_three_that_the_help_names() -> None:
    assert config.presets() == ["qwen3-4b", "qwen3-8b", "tiny"]


def test_the_large_presets_are_the_papers_recipe() -> None:
    settings = config.load("qwen3-8b")
    assert (settings.shapes.anchors, settings.shapes.block, settings.shapes.sequence) == (512, 16, 3072)
    assert settings.drafter.target_layer_ids == (1, 9, 17, 25, 33)
    assert (settings.optimizer.lr, settings.optimizer.warmup, settings.optimizer.clip) == (6e-4, 0.04, 1.0)
    assert (settings.optimizer.epochs, settings.loss.gamma) == (6, 7.0)


@pytest.mark.parametrize(
    ("tables", "sentence", "hint"),
    [
        ({"shapez": {}}, "mine.toml: shapez: unknown key", "did you mean `shapes`?"),
        ({"drafter": {"hiden_size": 1}}, "mine.toml: drafter.hiden_size: unknown key", "did you mean `hidden_size`?"),
        ({"loss": {"zzz": 1}}, "mine.toml: loss.zzz: unknown key", "known there: gamma, chunk_blocks"),
        ({"target": {"stepz": 1}}, "mine.toml: target.stepz: unknown key", "did you mean `steps`?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_right_one(
    tables: dict[str, object], sentence: str, hint: str
) -> None:
    failure = refused(tables)
    assert failure.message == sentence
    assert failure.hint == hint


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"drafter": {"layers": "two"}}, "mine.toml: drafter.layers: Expected `int`, got `str`"),
        ({"drafter": {"layers": 0}}, "mine.toml: drafter: layers is 0, must be positive"),
        ({"drafter": {"heads": 3}}, "mine.toml: drafter: heads (3) must be a multiple of kv_heads (2)"),
        ({"drafter": {"head_dim": 63}}, "must be even"),
        ({"drafter": {"mask_token_id": 272}}, "mask_token_id is 272, must be a row of the table (0 to 271)"),
        ({"drafter": {"target_layer_ids": [1, 1, 1]}}, "must rise without repeating a layer"),
        ({"drafter": {"target_layer_ids": []}}, "target_layer_ids is empty"),
        ({"drafter": {"target_layer_ids": [0, 4]}}, "must lie in 0 to 3 (target_layers)"),
        ({"shapes": {"sequence": 300}}, "mine.toml: shapes: sequence is 300, must be a multiple of 128"),
        ({"shapes": {"anchors": 3}}, "anchors * block is 3 * 16 = 48, must be a multiple of 128"),
        ({"shapes": {"block": 1}}, "block is 1, must be at least 2"),
        ({"shapes": {"block": 24}}, "block is 24, must divide 128"),
        ({"shapes": {"anchors": 384}}, "anchors (384) must be fewer than sequence (384)"),
        ({"loss": {"chunk_blocks": 7}}, "loss.chunk_blocks (7) must divide"),
        ({"loss": {"gamma": 0.0}}, "gamma is 0.0, must be positive"),
        ({"optimizer": {"warmup": 1.0}}, "warmup is 1.0, must be a share"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "betas is [0.9, 1.0]"),
        ({"precision": {"compute": "float16"}}, "mine.toml: precision.compute: Invalid enum value 'float16'"),
        ({"data": {"response_tokens": 400}}, "data.prompt_tokens + data.response_tokens is 464, must fit"),
        ({"checkpoint": {"every": 0}}, "every is 0, must be positive"),
        ({"evaluation": {"prompts": 0}}, "prompts is 0, must be positive"),
        ({"drafter": {"vocab_size": 9 * 10**18}}, "vocab_size is 9000000000000000000, must be below"),
        ({"drafter": {"rms_norm_eps": float("nan")}}, "rms_norm_eps is nan, must be positive and finite"),
        ({"drafter": {"rope_theta": 0.0}}, "rope_theta is 0.0, must be positive and finite"),
        ({"optimizer": {"lr": float("inf")}}, "lr is inf, must be positive and finite"),
        ({"optimizer": {"weight_decay": float("inf")}}, "weight_decay is inf"),
        ({"data": {"response_tokens": 0}}, "response_tokens is 0, must be positive"),
        ({"target": {"warmup": -1}}, "warmup is -1"),
    ],
)
def test_an_impossible_value_is_refused_where_it_stands(changes: dict[str, dict[str, object]], sentence: str) -> None:
    assert sentence in refused(tiny_with(**changes)).message


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"optimizer": {"kind": "sgd"}}, "may be `adamw` or `muon`"),
        ({"precision": {"compute": "float16"}}, "may be `bfloat16` or `float32`"),
    ],
)
def test_a_word_that_is_none_of_several_is_answered_with_those(
    changes: dict[str, dict[str, object]], hint: str
) -> None:
    assert refused(tiny_with(**changes)).hint == hint


def test_a_missing_table_is_named_and_that_a_preset_can_bring_it() -> None:
    tables = config.to_tables(config.load("tiny"))
    del tables["loss"]
    failure = refused(tables)
    assert "missing required field `loss`" in failure.message
    assert 'preset = "tiny"' in (failure.hint or "")


def test_a_users_file_may_begin_with_a_mark_and_end_its_lines_with_cr_lf(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(b'\xef\xbb\xbfpreset = "tiny"\r\n[optimizer]\r\nepochs = 1\r\n')
    assert config.load(str(file)).optimizer.epochs == 1


def test_a_users_file_changes_what_it_names_and_keeps_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('preset = "tiny"\n[optimizer]\nepochs = 1\n')
    tiny = config.load("tiny")
    assert config.load(str(file)) == dataclasses.replace(tiny, optimizer=dataclasses.replace(tiny.optimizer, epochs=1))


@pytest.mark.parametrize(
    ("name", "content", "sentence", "hint"),
    [
        ("qwen3_8b", None, "no configuration is called `qwen3_8b`", "did you mean `--config qwen3-8b`?"),
        ("zzz", None, "no configuration is called `zzz`", "presets are `qwen3-4b`, `qwen3-8b`, `tiny`"),
        ("no.toml", None, "does not exist", None),
        ("bad.toml", b"[drafter\n", "cannot be read", None),
        ("bytes.toml", b"\xff\xfe", "cannot be read", None),
        ("digits.toml", b"x = " + b"9" * 5000, "cannot be read", None),
        ("deep.toml", b"x = " + b"[" * 5000, "cannot be read", None),
        ("base.toml", b'preset = "tiney"\n', "no preset is called `tiney`", "did you mean `tiny`?"),
    ],
)
def test_a_configuration_that_cannot_be_had_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, sentence: str, hint: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(Failure) as caught:
        config.load(name)
    assert sentence in caught.value.message
    assert (caught.value.hint or "").startswith(hint or "")


def test_a_state_is_not_spread_under_an_optimizer_that_turns_whole_matrices() -> None:
    recipe = config.load("tiny").optimizer
    assert dataclasses.replace(recipe, kind="adamw", shard=True).shard
    with pytest.raises(ValueError, match='shard is true, which needs kind = "adamw"'):
        dataclasses.replace(recipe, kind="muon", shard=True)

"""Kernels that a card's shared memory has no room for: avoided where that is known, one sentence where it is not."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash import caches, config
from dflash.strict import explained
from env import bake, gpus
from env.bake import Example, Kitchen, Recipe
from env.cache import explain, fitting, several, store
from env.cache.canonical import Json
from env.errors import Exit, Failure
from env.gpus import Gpu

SMALL, LARGE = gpus.find("rtx-pro-6000"), gpus.find("h200")
HAS_LIMIT = not torch.__version__.startswith("2.10.")
WIDE = Recipe(
    name="wide", factory="tests.bakesteps:wide", examples=(Example(shape=(4, 8192, 4096), requires_grad=True),)
)


def kitchen(folder: Path) -> Kitchen:
    return Kitchen(python=Path(sys.executable), home=folder / "baking", out=folder / "sealed")


def test_a_wide_norm_is_baked_for_a_card_with_little_shared_memory_by_every_torch(tmp_path: Path) -> None:
    said: list[str] = []
    baked = bake.bake(WIDE, SMALL, kitchen(tmp_path), say=said.append)
    assert baked.manifest.factors[fitting.FACTOR] is HAS_LIMIT
    told = [line for line in said if "101,376 bytes of shared memory here" in line]
    assert len(told) == (0 if HAS_LIMIT else 1)


def test_a_kernel_that_fits_no_block_is_one_sentence_and_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(Failure) as caught:
        bake.bake(replace(WIDE, factory="tests.bakesteps:greedy"), SMALL, kitchen(tmp_path))
    failure = caught.value
    assert failure.code is Exit.HOST
    assert failure.message.startswith("the kernel `triton_per_fused_")
    assert f"bytes of shared memory a block, and {SMALL.name} has 101,376 (torch {torch.__version__})" in str(failure)
    assert f"`{fitting.VARIABLE}=0` with `DFLASH_KEEP={fitting.VARIABLE}`" in str(failure)
    assert not failure.details
    assert "Traceback" not in str(failure)


@pytest.fixture
def without_limit(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Settings as torch 2.10 has them; every device is a card of the tests' choice."""
    settings = SimpleNamespace(**{fitting.FUSION: True})
    monkeypatch.setattr(fitting, "_settings", lambda: settings)
    monkeypatch.delenv(fitting.VARIABLE, raising=False)
    return settings


def hold(monkeypatch: pytest.MonkeyPatch, *cards: Gpu) -> None:
    monkeypatch.setattr(gpus, "read", lambda index=0: cards[index])


@pytest.mark.parametrize("card", gpus.load().values(), ids=list(gpus.load()))
def test_without_a_limit_only_cards_with_too_little_lose_the_fusion(
    card: Gpu, without_limit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(monkeypatch, card)
    little = card.shared_memory_per_block_optin == 101_376
    for _ in range(2):  # and again, as a process that has chosen its cache replays in itself
        said = fitting.fit(["cuda:0"])
        assert getattr(without_limit, fitting.FUSION) is not little
        assert (said is not None) is little
        if said is not None:
            assert said.startswith("a block has 101,376 bytes of shared memory here, too few for torch")


def test_of_several_cards_in_a_process_the_one_with_the_least_decides(
    without_limit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(monkeypatch, LARGE, SMALL)
    assert fitting.fit(["cpu", "cuda:0"]) is None
    assert fitting.fit(["cuda:0", "cuda:1"]) is not None
    assert getattr(without_limit, fitting.FUSION) is False


def test_nothing_is_changed_for_a_cpu_with_a_torch_that_has_a_limit_or_where_the_user_has_decided(
    without_limit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(monkeypatch, SMALL)
    assert fitting.fit(["cpu"]) is None
    with monkeypatch.context() as kept:
        kept.setenv(fitting.VARIABLE, "1")
        assert fitting.fit(["cuda:0"]) is None
    setattr(without_limit, fitting.LIMIT, False)
    assert fitting.fit(["cuda:0"]) is None
    assert getattr(without_limit, fitting.FUSION) is True


@pytest.mark.parametrize(("version", "settings"), [("2.99.0", {fitting.FUSION: True}), (torch.__version__, {})])
def test_a_torch_that_was_never_read_is_refused(
    version: str, settings: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(fitting, "_settings", lambda: SimpleNamespace(**settings))
    with pytest.raises(Failure, match=r"known only for 2\.10, 2\.11, 2\.15") as refusal:
        fitting.fit(["cuda:0"])
    assert refusal.value.code is Exit.HOST


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "out of resource: triton_per_fused_add_3 Required: 163928 Hardware limit:101376 Reducing block sizes",
            "the kernel `triton_per_fused_add_3` needs 163,928 bytes of shared memory a block, and ",
        ),
        (
            "out of resource: shared memory, Required: 163928, Hardware limit: 101376. Reducing block sizes",
            "a kernel needs 163,928 bytes of shared memory a block, and ",
        ),
    ],
)
def test_a_run_on_the_card_says_it_as_a_bake_does(text: str, sentence: str) -> None:
    """As torch's loader and Triton's say it; a run raises it out of its first step."""

    inner = RuntimeError(f"No valid triton configs. OutOfMemoryError: {text}")
    with pytest.raises(Failure) as caught, explained():
        raise LookupError("something about it") from inner
    assert caught.value.code is Exit.HOST
    assert caught.value.message.startswith(sentence)
    assert "has 101,376 (torch" in caught.value.message


def test_other_errors_are_left_alone() -> None:
    assert fitting.misfit(RuntimeError("No valid triton configs. PTXASError: something else")) is None
    assert fitting.misfit(RuntimeError("CUDA out of memory")) is None


def test_a_run_says_what_was_chosen_for_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def fit(devices: Any) -> str:
        asked.append(list(devices))
        return "less is fused"

    chosen = store.Choice(cache_id="c", path=Path("/c"), kind="cold", notices=("there is no baked cache",))
    monkeypatch.setattr(fitting, "fit", fit)
    monkeypatch.setattr(caches, "identity", lambda settings, device: device)
    monkeypatch.setattr(store, "choose", lambda wanted, environ: chosen)
    monkeypatch.setattr(several, "choose", lambda wanted, environ: (chosen,) * len(wanted))
    monkeypatch.setattr(os, "environ", {})
    settings, devices = config.load("tiny"), [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert caches.opened(settings, devices[0]).notices == ("less is fused", "there is no baked cache")
    first, second = caches.opened_many(settings, devices)
    assert (first.notices, second.notices) == (("less is fused", "there is no baked cache"), chosen.notices)
    assert asked == [["cuda:0"], ["cuda:0", "cuda:1"]]


def test_verify_names_the_setting_only_where_the_card_does_not_explain_it() -> None:
    sealed: dict[str, Json] = {"gpu_id": "a", "gpu.multi_processor_count": 132, fitting.FACTOR: True}
    other: dict[str, Json] = {"gpu_id": "b", "gpu.multi_processor_count": 188, fitting.FACTOR: False}
    assert [one.name for one in explain.differences(sealed, other)] == ["gpu.multi_processor_count"]
    assert [one.name for one in explain.differences(sealed, {**sealed, fitting.FACTOR: False})] == [fitting.FACTOR]

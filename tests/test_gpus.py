"""The table of GPUs, and what two cards must share to share their kernels."""

from __future__ import annotations

import dataclasses
import tomllib
import types
from typing import Any

import pytest

from env import gpus
from env.errors import Exit, Failure

WANTED = {
    "h100-sxm": "NVIDIA H100 80GB HBM3",
    "h100-pcie": "NVIDIA H100 PCIe",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
    "rtx-pro-6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "rtx-pro-6000-workstation": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "rtx-pro-6000-max-q": "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "rtx-5090": "NVIDIA GeForce RTX 5090",
    "rtx-4090": "NVIDIA GeForce RTX 4090",
    "l40s": "NVIDIA L40S",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "a100-80gb": "NVIDIA A100-SXM4-80GB",
}


def test_every_card_that_was_promised_has_a_row_with_its_exact_name() -> None:
    assert {row.key: row.name for row in gpus.load().values()} == WANTED


def test_only_rows_that_were_read_off_a_card_say_so_and_all_others_name_their_source() -> None:
    assert [row.key for row in gpus.load().values() if row.verified] == ["h200"]
    assert all(len(row.source) > 20 for row in gpus.load().values())


def test_rows_are_possible_cards() -> None:
    for row in gpus.load().values():
        assert row.warp_size == 32
        assert row.shared_memory_per_block == 48 * 1024
        # a block may have all of a multiprocessor's shared memory but the kilobyte that CUDA keeps
        assert row.shared_memory_per_block_optin == row.shared_memory_per_multiprocessor - 1024
        assert row.max_threads_per_multi_processor in (1536, 2048)
        assert row.L2_cache_size % 2**20 == 0


def test_a_card_is_found_by_its_key_and_by_its_exact_name() -> None:
    assert gpus.find("b200").name == "NVIDIA B200"
    assert gpus.find("NVIDIA H100 PCIe").key == "h100-pcie"


@pytest.mark.parametrize(
    ("asked", "meant"), [("rtx-pro-600", "rtx-pro-6000"), ("H200", "h200"), ("a100-80", "a100-80gb")]
)
def test_an_unknown_card_is_told_the_nearest_one(asked: str, meant: str) -> None:
    with pytest.raises(Failure) as caught:
        gpus.find(asked)
    assert caught.value.code == Exit.USAGE
    assert caught.value.hint == f"did you mean `--gpu {meant}`?"


def test_a_card_like_no_other_is_told_how_to_make_a_row() -> None:
    with pytest.raises(Failure, match="--gpu-row"):
        gpus.find("§")


def test_kernels_belong_to_what_enters_them_and_not_to_memory_sizes() -> None:
    row = gpus.find("h200")
    assert gpus.gpu_id(dataclasses.replace(row, total_memory=1, L2_cache_size=1, verified=False)) == gpus.gpu_id(row)
    for name in gpus.DECIDES:
        value = getattr(row, name)
        change: dict[str, Any] = {name: value + "!" if isinstance(value, str) else value + 1}
        other = dataclasses.replace(row, **change)
        assert gpus.gpu_id(other) != gpus.gpu_id(row), name
    assert len({gpus.gpu_id(one) for one in gpus.load().values()}) == len(WANTED)


def test_a_row_is_written_as_it_is_read() -> None:
    row = gpus.find("l40s")
    assert gpus.parse(gpus.as_row(row)) == {"l40s": row}
    assert tomllib.loads(gpus.as_row(row))["l40s"]["multi_processor_count"] == 142


def test_what_differs_between_a_row_and_a_card_is_named_with_both_values() -> None:
    row = gpus.find("h200")
    card = dataclasses.replace(row, multi_processor_count=114, source="a card")
    assert gpus.differences(row, row) == []
    assert gpus.differences(row, card) == ["multi_processor_count: the row says 132, the card 114"]


def test_a_card_that_is_not_there_cannot_be_read() -> None:
    with pytest.raises(Failure, match="torch sees no GPU 0 here"):
        gpus.read()
    with pytest.raises(Failure, match="`first` is no device index"):
        gpus.main(["first"])


def test_the_row_of_a_card_is_printed_and_compared_with_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    row = gpus.find("h200")
    seen = types.SimpleNamespace(**row.properties() | {"multi_processor_count": 131})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: seen)
    assert gpus.main([]) == 0
    printed = capsys.readouterr().out
    assert gpus.parse(printed)["h200"].multi_processor_count == 131
    assert "# multi_processor_count: the row says 132, the card 131" in printed
    seen.multi_processor_count, seen.name = 132, "NVIDIA H900"
    assert gpus.read().key == "h900"
    del seen.L2_cache_size
    with pytest.raises(Failure, match="does not tell a card's L2_cache_size"):
        gpus.read()


def test_a_misshapen_table_is_our_own_mistake_and_raises_at_once() -> None:
    with pytest.raises(TypeError):
        gpus.parse('[x]\nname = "X"\n')

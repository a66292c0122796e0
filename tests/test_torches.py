"""The table of what differs between the locked torches, in docs/environment.md, says what this torch does."""

from __future__ import annotations

import json
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from racing import run
from torch.nn.attention.flex_attention import flex_attention

from env import variants

ROOT = Path(__file__).parent.parent


@cache
def column() -> dict[str, str]:
    """This torch's column, by the rows' names."""
    lines = (ROOT / "docs" / "environment.md").read_text().partition("## What differs between the variants")[2]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines() if line[:1] == "|"]
    place = table[0].index(variant().name)
    return {row[0]: row[place] for row in table[2:]}


def variant() -> variants.Variant:
    public = torch.__version__.partition("+")[0]
    return next(variant for variant in variants.load().variants.values() if variant.torch == public)


@cache
def seen() -> dict[str, dict[str, str]]:
    answer: dict[str, dict[str, str]] = json.loads(run("-m", "dflash.diagnose", "--json").stdout)
    return answer


def test_the_packages_are_those_of_the_table() -> None:
    public = torch.__version__.partition("+")[0]
    assert column()["torch, CUDA, Triton"] == f"{public}, {torch.version.cuda}, {metadata.version('triton')}"
    assert column()["oldest driver"] == variant().driver
    assert column()["oldest card"] == str(torch._C._cuda_getArchFlags()).split()[0]
    assert column()["GB installed, at most"] == str(variant().installed_gb)


@pytest.mark.parametrize(
    "row",
    [
        "flag while another thread traces",
        "a compiled call while another thread traces",
        "a module's call while another thread traces",
        "is_compiling() while another thread compiles",
    ],
)
def test_a_second_thread_finds_what_the_table_says(row: str) -> None:
    assert column()[f"as torch is: {row}"] == f"`{seen()['as it is'][row].partition(':')[0]}`"
    assert column()[f"cured: {row}"] == f"`{seen()['cured'][row].partition(':')[0]}`"


def test_a_setting_reaches_the_threads_that_the_table_says() -> None:
    assert column()["a setting made in one thread"] == seen()["settings"]["a setting made in one thread"].split(" (")[0]


def test_flex_attention_learns_on_the_cpu_where_the_table_says() -> None:
    query, key, value = (torch.ones(1, 1, 16, 16, requires_grad=True) for _ in range(3))
    compiled: Any = torch.compile(flex_attention)
    try:
        compiled(query, key, value).sum().backward()
        answer = "there are some"
    except Exception as error:  # noqa: BLE001  # which one it is differs, and is what is looked at
        answer = "refused" if "CPU" in str(error) else "a failure inside torch"
    assert column()["gradients of compiled flex attention on the CPU"] == answer

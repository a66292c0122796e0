"""What a configuration needs: exact where it can be, and held against the drafter itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from env.doctor.need import PRESETS, derive, read
from env.errors import Exit, Failure


def test_the_8b_drafter_has_the_1_05_billion_parameters_that_are_told_of_it() -> None:
    need = read("qwen3-8b")
    # 5 layers of 192,946,432 (q, k, v, o, three MLP matrices, four norms), fc 5 * 4096^2, two norms.
    assert need.parameters == 5 * 192_946_432 + 5 * 4096 * 4096 + 2 * 4096
    assert need.state == need.parameters * 18
    assert need.checkpoint == need.parameters * 12
    assert need.target_files == pytest.approx(16.4e9, rel=0.01)  # Qwen3-8B: 8.19 billion parameters in bfloat16


def test_the_formula_counts_what_the_real_drafter_has() -> None:
    from dflash.config import load
    from dflash.model import Drafter

    drafter = Drafter(load("tiny").drafter)
    assert sum(weight.numel() for weight in drafter.parameters()) == read("tiny").parameters


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_every_preset_has_a_need(name: str) -> None:
    need = read(name)
    assert 0 < need.parameters < need.checkpoint < need.state < need.drafter
    assert need.run > need.checkpoint
    assert need.target > 0


def test_a_target_that_the_run_trains_itself_is_no_download() -> None:
    assert read("tiny").target_files == 0
    assert read("tiny").target < 1e9


def tables() -> dict[str, Any]:
    import tomllib

    return tomllib.loads((PRESETS / "qwen3-8b.toml").read_text(encoding="utf-8"))


def test_more_of_anything_needs_more() -> None:
    base = derive("x", tables())
    for table, key in (("shapes", "rows"), ("shapes", "anchors"), ("shapes", "block"), ("drafter", "layers")):
        more = tables()
        more[table][key] *= 2
        assert derive("x", more).drafter > base.drafter, key
    more = tables()
    more["loss"]["chunk_blocks"] *= 2
    assert derive("x", more).drafter > base.drafter
    more = tables()
    more["checkpoint"]["keep"] *= 2
    assert derive("x", more).run > base.run
    more = tables()
    more["precision"]["compute"] = "float32"
    assert derive("x", more).drafter > base.drafter
    assert derive("x", more).state < base.state  # no working copy beside the float32 weights


def test_a_users_file_may_change_a_preset(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('preset = "qwen3-8b"\n[drafter]\nlayers = 1\n', encoding="utf-8")
    assert read(str(mine)).parameters < read("qwen3-8b").parameters / 3
    whole = tmp_path / "whole.toml"
    whole.write_text((PRESETS / "tiny.toml").read_text(encoding="utf-8"), encoding="utf-8")
    assert read(str(whole)).parameters == read("tiny").parameters


def test_a_configuration_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(Failure, match="`qwen-9b` cannot be read: No such file") as refused:
        read("qwen-9b")
    assert refused.value.code is Exit.USAGE
    assert "`tiny`" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[drafter]\n", "is missing"),
        ("not toml", "cannot be read"),
        ('preset = "tiny"\n[drafter]\nlayers = "two"\n', "layers is 'two'"),
        ('preset = "tiny"\n[shapes]\nrows = 0\n', "rows is 0"),
        ('preset = "tiny"\ndrafter = 1\n', "sizes that are needed"),
        ('preset = "none-such"\n', "`none-such` cannot be read"),
    ],
)
def test_sizes_that_are_missing_or_impossible_are_refused_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(Failure) as refused:
        read(str(file))
    assert refused.value.code is Exit.USAGE
    assert words in refused.value.message


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "binary.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Failure, match="cannot be read"):
        read(str(file))

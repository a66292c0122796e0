"""Prepared data are freed by hand only, and never while a process reads or makes them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import chatting
import pytest
from test_prepared import RECIPE, prepare

from dflash import cli, data, prepared, preparing, sources, stock
from dflash.preparing import Recipe
from env.errors import Exit

OTHER = Recipe(sequence=256, held_out=3, prompt_tokens=16, faulty=0.1)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(preparing, "BATCH_BYTES", 4000)  # several looks at whether to stop
    return tmp_path / "caches" / stock.FOLDER


@pytest.fixture
def prune(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        assert cli.main(["data", "prune", *arguments]) == Exit.DONE
        return capsys.readouterr().out

    return run


def folders(home: Path) -> set[str]:
    return {path.name for path in home.iterdir() if path.is_dir()}


def test_prepared_data_are_freed_when_that_is_asked_for_the_last_used_last(
    tmp_path: Path, home: Path, prune: Callable[..., str]
) -> None:
    assert prune() == "nothing to free\n"
    file = chatting.write(tmp_path / "a.jsonl", *chatting.many(40))
    old, new = (prepare(file, home, recipe).folder for recipe in (RECIPE, OTHER))
    os.utime(old.with_name(f"{old.name}.used"), (0, time.time() - 3 * 86400))
    said = prune().splitlines()
    assert said[0].startswith(f"would be freed: {new}  0.")
    assert said[0].endswith(" MB, last used 0.0 h ago, 37 documents in rows of 256")
    assert said[1].startswith(f"would be freed: {old}")
    assert "last used 3 days ago, 37 documents in rows of 128" in said[1]
    assert said[2].endswith(" MB would be freed; `--yes` does it")
    assert prune("--older-than", "4", "--yes") == prune("--keep", "2", "--yes") == "nothing to free\n"
    assert folders(home) == {old.name, new.name}
    prepare(file, home)  # now it is the other that was used last
    assert prune("--keep", "1", "--yes").startswith(f"freed: {new}")
    assert folders(home) == {old.name}
    assert prepare(file, home).documents == 37
    (home / "notes").mkdir()
    assert prune("--yes").startswith(f"freed: {old}")
    assert folders(home) == {"notes"}, "what is nobody's stays"
    assert prepare(file, home).folder == old, "and is made again"


def test_what_a_process_reads_or_makes_stays_and_goes_when_it_has_gone(
    tmp_path: Path, home: Path, prune: Callable[..., str]
) -> None:
    file = chatting.write(tmp_path / "a.jsonl", *chatting.many(200))

    def read(say: Callable[[str], None]) -> None:
        rows = prepare(file, home)
        say(rows.folder.name)
        time.sleep(600)
        say(str(rows.tokens[[0]]))

    def make(say: Callable[[str], None]) -> None:
        def watch(_read: int) -> None:
            say("read")
            time.sleep(600)

        prepare(file, home, OTHER, watch=watch)

    with chatting.forked(read) as reader, chatting.forked(make) as maker:
        name = reader.line()
        assert maker.line() == "read"
        assert [line.split(": ")[0] for line in prune("--yes").splitlines()[:-1]] == ["kept, a process is using it"] * 2
        (begun,) = folders(home) - {name}
        maker.kill()
        said = prune("--yes")
        assert f"freed: {home / begun}" in said
        assert "left by a process that did not end" in said
        assert folders(home) == {name}
        reader.kill()
    assert prune("--yes").startswith(f"freed: {home / name}")
    assert folders(home) == set()


def test_rows_that_nobody_reads_any_more_are_let_go_and_a_run_keeps_its_own(
    tmp_path: Path, home: Path, prune: Callable[..., str]
) -> None:
    rows: data.Packed = prepare(chatting.write(tmp_path / "a.jsonl", *chatting.many(40)), home)
    assert prune("--yes").startswith("kept, a process is using it")
    assert rows.tokens[[0]].shape == (1, 128)
    sources.place(rows, tmp_path / "run" / "rows")
    del rows
    assert prune("--yes").startswith("freed: ")
    kept = prepared.opened(tmp_path / "run" / "rows")
    assert kept.tokens[[0]].shape == (1, 128)


def test_what_cannot_be_read_is_shown_and_freed_and_what_cannot_be_removed_is_a_sentence(
    home: Path, prune: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = home / ("0" * 32)
    damaged.mkdir(parents=True)
    (damaged / stock.MANIFEST).write_text("[")
    assert prune().splitlines()[0].endswith("its manifest.json cannot be read")

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refused)
        assert cli.main(["data", "prune", "--yes"]) == Exit.STORAGE
        assert capsys.readouterr().err == f"error: cannot remove {damaged}: Permission denied\n"
    assert prune("--yes").startswith("freed: ")

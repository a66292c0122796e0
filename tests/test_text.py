from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash import text
from env.errors import Exit, Failure

LINES = "".join(f"line {number} says {number * number}\n" for number in range(2000))


def refusal(path: Path | None, *, shortest: int = 1) -> str:
    with pytest.raises(Failure) as caught:
        text.load(path, shortest=shortest)
    assert caught.value.code is Exit.INPUT
    assert "\n" not in caught.value.message
    return caught.value.message


def windows(documents: tuple[str, ...] | list[str]) -> set[bytes]:
    found: set[bytes] = set()
    for document in documents:
        data = document.encode()
        found.update(data[start : start + text.WINDOW] for start in range(len(data) - text.WINDOW + 1))
    return found


def test_the_shipped_text_is_under_a_mebibyte_names_its_licence_and_ships_it() -> None:
    files = list(text.SHIPPED.parent.iterdir())
    assert sum(file.stat().st_size for file in files) < 2**20
    shipped = text.load(None)
    assert shipped.license == "PSF-2.0"
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (text.SHIPPED.parent / "LICENSE.txt").read_text()
    notice = (text.SHIPPED.parent / "NOTICE.md").read_text()
    for file in ("python.txt", "LICENSE.txt"):
        assert hashlib.sha256((text.SHIPPED.parent / file).read_bytes()).hexdigest() in notice


def test_no_64_bytes_of_the_shipped_held_out_part_occur_in_its_training_part() -> None:
    shipped = text.load(None)
    assert not windows(shipped.held_out) & windows(shipped.train)
    assert sum(map(len, shipped.train)) > 800_000
    assert sum(map(len, shipped.held_out)) > 80_000


def test_every_load_gives_the_same_split() -> None:
    assert text.load(None) == text.load(None)


def test_a_changed_shipped_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "python.txt"
    changed.write_bytes(text.SHIPPED.read_bytes() + b" ")
    monkeypatch.setattr(text, "SHIPPED", changed)
    assert "was changed" in refusal(None)


def test_a_file_of_fewer_than_ten_documents_holds_out_the_end_of_each(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(LINES + "\f\n" + LINES.upper())
    mine = text.load(tmp_path / "mine.txt", shortest=256)
    assert mine.name == str(tmp_path / "mine.txt")
    assert mine.sha256 == hashlib.sha256((tmp_path / "mine.txt").read_bytes()).hexdigest()
    assert mine.license is None
    assert len(mine.train) == 2
    assert "".join((mine.train[0], mine.held_out[0])) == LINES
    assert mine.train[0].endswith("\n")
    assert len(mine.held_out[0]) == pytest.approx(len(LINES) / 10, rel=0.1)


def test_a_folder_holds_out_every_tenth_file_and_passes_over_hidden_ones(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for number in range(10):
        (tmp_path / "deep" / f"{number}.txt").write_text(
            f"{number}: " + "".join(chr(97 + number) * 9 for _ in "x" * 99)
        )
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_bytes(b"\xff\xfe")
    (tmp_path / "nothing.txt").write_text("")
    mine = text.load(tmp_path)
    assert [document[0] for document in mine.train] == list("012345678")
    assert [document[0] for document in mine.held_out] == ["9"]


def test_the_digest_of_a_folder_changes_with_a_name_and_with_a_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    first = text.load(tmp_path).sha256
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    second = text.load(tmp_path).sha256
    (tmp_path / "b.txt").write_text(LINES + "x")
    assert len({first, second, text.load(tmp_path).sha256}) == 3


def test_a_file_name_that_is_not_utf8_is_a_name_like_any_other(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text(LINES)
    first = text.load(folder)
    assert first.train
    (folder / os.fsdecode(b"caf\xe9.txt")).rename(folder / os.fsdecode(b"caf\xe8.txt"))
    assert text.load(folder).sha256 != first.sha256


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(b"\xef\xbb\xbf" + LINES.encode())
    assert text.load(tmp_path / "mine.txt").train[0].startswith("line 0")


def test_a_missing_text_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.txt").endswith("does not exist")


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n\f\n")
    assert refusal(tmp_path / "empty.txt").endswith("is empty")
    (tmp_path / "folder").mkdir()
    assert refusal(tmp_path / "folder").endswith("holds no text")


def test_a_text_that_is_not_utf8_is_refused_naming_file_and_byte(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    assert refusal(tmp_path).endswith("latin.txt` is not UTF-8: byte 3 is 0xe9")


def test_a_text_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("twelve bytes")
    assert refusal(tmp_path / "short.txt", shortest=384).endswith("has 12 bytes, shorter than a sequence (384)")
    (tmp_path / "short.txt").write_text(LINES[:1000])
    assert "to hold out, shorter than a sequence (384)" in refusal(tmp_path / "short.txt", shortest=384)


def test_a_text_that_repeats_itself_leaves_nothing_to_hold_out(tmp_path: Path) -> None:
    (tmp_path / "again.txt").write_text("all work and no play makes a dull text\n" * 1000)
    assert "leaves 0 bytes to hold out" in refusal(tmp_path / "again.txt")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that even root cannot read")
def test_a_text_that_cannot_be_read_is_refused() -> None:
    assert "cannot be read" in refusal(Path("/proc/self/mem"))
    assert "cannot be read" in refusal(Path("x" * 5000))


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe").endswith("is neither a file nor a folder")


PIECES = st.lists(st.sampled_from(["a", "bc\n", "é", "def f(x):\n", "x" * 20, "y" * 40, "→" * 30]), max_size=30)
DOCUMENTS = st.lists(PIECES.map("".join), max_size=4)


@settings(deadline=None)
@given(documents=DOCUMENTS, others=DOCUMENTS)
def test_what_is_left_of_documents_shares_no_window_with_others(documents: list[str], others: list[str]) -> None:
    pieces, lost = text.without_overlap(documents, others)
    assert not windows(pieces) & windows(others)
    assert all(any(piece in document for document in documents) for piece in pieces)
    total = sum(len(document.encode()) for document in documents)
    assert lost + sum(len(piece.encode()) for piece in pieces) <= total
    # Nothing is taken out for nothing: what shares no window stays whole.
    untouched = [document for document in documents if len(document.encode()) >= text.WINDOW and document.strip()]
    untouched = [document for document in untouched if not windows([document]) & windows(others)]
    assert set(untouched) <= set(pieces)


@settings(deadline=None)
@given(documents=DOCUMENTS)
def test_a_split_loses_nothing_but_blank_parts(documents: list[str]) -> None:
    train, held_out = text.split(documents)
    joined = sorted("".join(train + held_out).replace("\n", ""))
    assert joined == sorted("".join(documents).replace("\n", ""))

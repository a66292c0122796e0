from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import chatting
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash import chats
from dflash.chats import Kind, Refused
from env.errors import Exit, Failure


def kind(line: bytes | None) -> Kind:
    with pytest.raises(Refused) as caught:
        chats.parse(line)
    return caught.value.kind


def read(file: Path) -> list[tuple[int, bytes | None]]:
    return [(place.number, line) for place, line, _ in chats.lines([file])]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (b"{", Kind.JSON),
        (b"", Kind.JSON),
        (b'{"text": NaN}', Kind.JSON),
        (b'{"text": "a", "n": -Infinity}', Kind.JSON),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", Kind.JSON),
        (b'{"text": "\x01"}', Kind.JSON),
        (b'{"text": "a"} {"text": "b"}', Kind.JSON),
        (b'{"text": "\xff"}', Kind.UTF8),
        ('{"text": "a"}'.encode("utf-16"), Kind.UTF8),
        (b'{"text": "a", "text": "b"}', Kind.TWICE),
        (b'{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}', Kind.TWICE),
        (b'{"text": "\\ud800"}', Kind.SURROGATE),
        (b'{"messages": [{"role": "user", "content": "\\uDC00 a"}]}', Kind.SURROGATE),
        (b'{"text": "a", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", Kind.DEEP),
        (b'{"a":' * 100_000, Kind.DEEP),
        (b"[1, 2]", Kind.SHAPE),
        (b'"text"', Kind.SHAPE),
        (b"null", Kind.SHAPE),
        (b"{}", Kind.SHAPE),
        (b'{"text": 5}', Kind.SHAPE),
        (b'{"prompt": ["a"], "response": "b"}', Kind.SHAPE),
        (b'{"prompt": "a", "response": 5}', Kind.SHAPE),
        (b'{"messages": []}', Kind.SHAPE),
        (b'{"messages": "hello"}', Kind.SHAPE),
        (b'{"messages": ["hello"]}', Kind.SHAPE),
        (b'{"messages": [{"content": "a"}]}', Kind.SHAPE),
        (b'{"messages": [{"role": 5, "content": "a"}]}', Kind.SHAPE),
        (b'{"messages": [{"role": "user"}]}', Kind.SHAPE),
        (b'{"messages": [{"role": "user", "content": [{"image": "a"}]}]}', Kind.SHAPE),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": "all"}', Kind.SHAPE),
        (b'{"conversations": [{"from": "human", "value": null}]}', Kind.SHAPE),
        (b'{"text": " \\n"}', Kind.EMPTY),
        (None, Kind.LINE),
    ],
)
def test_a_line_of_no_use_is_named_by_its_kind(line: bytes | None, wanted: Kind) -> None:
    assert kind(line) is wanted


@given(st.binary(max_size=60))
def test_whatever_a_line_holds_it_is_a_record_or_a_fault(line: bytes) -> None:
    with contextlib.suppress(Refused):
        chats.parse(line)


RECURSIVE = st.recursive(
    st.none() | st.booleans() | st.text(max_size=4) | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["messages", "conversations", "role", "content", "from", "value", "text", "prompt", "tools"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(RECURSIVE)
def test_whatever_json_holds_it_is_a_record_or_a_fault(content: Any) -> None:
    with contextlib.suppress(Refused):
        chats.parse(json.dumps(content).encode())


def test_chats_of_both_forms_are_the_same_chat() -> None:
    ours, whole = chats.parse(json.dumps(chatting.chat("a", "b", system="s")).encode())
    assert whole == chatting.chat("a", "b", system="s")
    pairs = [("system", "s"), ("human", "a"), ("gpt", "b")]
    theirs, _ = chats.parse(json.dumps({"conversations": [{"from": f, "value": v} for f, v in pairs]}).encode())
    mixed = {"conversations": chatting.chat("a", "b", system="s")["messages"]}
    assert ours == theirs == chats.parse(json.dumps(mixed).encode())[0]


def test_texts_and_pairs_are_read_as_they_are() -> None:
    assert chats.parse(b'{"text": "a\\r\\n", "id": 5}\r\n')[0] == chats.Plain(text="a\r\n")
    assert chats.parse(b'{"prompt": "a", "response": "b"}')[0] == chats.Pair(prompt="a", response="b")
    assert chats.parse(b'{"prompt": "a"}')[0] == chats.Pair(prompt="a", response=None)
    assert chats.parse(b'{"text": "\\ud83d\\ude00"}')[0] == chats.Plain(text="😀")


def test_parts_of_a_message_are_joined_and_a_call_of_a_tool_needs_no_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [{"function": {"name": "f", "arguments": {}}}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": calls}]
    record, _ = chats.parse(json.dumps({"messages": messages}).encode())
    assert isinstance(record, chats.Chat)
    assert [message["content"] for message in record.messages] == ["ab", ""]
    assert record.messages[1]["tool_calls"] == calls


def test_line_ends_marks_and_blank_lines_are_no_part_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}\n{"text": "c"}')
    assert [number for number, _ in read(file)] == [1, 4, 5]
    assert [chats.parse(line)[0] for _, line in read(file)] == [chats.Plain(text=text) for text in "abc"]
    file.write_bytes(b"")
    assert read(file) == []


def test_a_huge_line_is_passed_over_and_the_next_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "LONGEST", 40)
    monkeypatch.setattr(chats, "_PIECE", 16)
    file = chatting.write(tmp_path / "a.jsonl", {"text": "x" * 200}, {"text": "b"}, b'{"text": "' + b"c" * 28 + b'"}')
    assert [(number, line and len(line)) for number, line in read(file)] == [(1, None), (2, 14), (3, 41)]
    assert sum(length for *_, length in chats.lines([file])) == file.stat().st_size
    file.write_bytes(b"x" * 100)
    assert read(file) == [(1, None)]


def test_a_folders_files_are_read_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/z.jsonl", ".hidden.jsonl", ".git/c.jsonl", "notes.txt"):
        chatting.write(tmp_path / name, {"text": name})
    assert [str(file.relative_to(tmp_path)) for file in chats.files(tmp_path)] == ["a/z.jsonl", "b.jsonl"]


def test_data_that_are_not_there_or_no_file_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, said in (("none", "does not exist"), ("empty", "holds no .jsonl file"), ("pipe", "is neither a file")):
        with pytest.raises(Failure, match=said) as caught:
            chats.files(tmp_path / name)
        assert caught.value.code is Exit.INPUT


def test_a_digest_is_of_contents_and_not_of_names(tmp_path: Path) -> None:
    one = chatting.write(tmp_path / "a.jsonl", {"text": "a"})
    same = chatting.write(tmp_path / "elsewhere" / "b.jsonl", {"text": "a"})
    other = chatting.write(tmp_path / "c.jsonl", {"text": "c"})
    assert chats.digest([one]) == chats.digest([same]) != chats.digest([other])
    assert chats.digest([one, other]) != chats.digest([other, one])
    with pytest.raises(Failure, match="cannot be read"):
        chats.digest([tmp_path / "none"])


def test_faults_are_counted_with_the_first_line_of_each_kind() -> None:
    faults = chats.Faults()
    for number in (3, 4, 9):
        faults.add(Refused(Kind.JSON, "odd"), chats.Place(file="f", number=number))
    faults.add(Refused(Kind.CUT), chats.Place(file="g", number=1))
    assert faults.lost == 3
    assert faults.sentences() == [
        "3 not JSON: first line 3 of `f` (odd)",
        "1 longer than a sequence, cut to it: first line 1 of `g`",
    ]
    assert chats.Faults.from_json(json.loads(json.dumps(faults.as_json()))).found == faults.found

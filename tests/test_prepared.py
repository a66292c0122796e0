from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chatting
import pytest
import torch

from dflash import chats, data, prepared, preparing, rendering
from dflash.chats import Kind
from dflash.data import Sample
from dflash.preparing import Recipe, _Held
from env.errors import Exit, Failure

ENDS = frozenset({256, 273})
RECIPE = Recipe(sequence=128, held_out=3, prompt_tokens=16, faulty=0.1)


def renderer(template: str | None = chatting.CHATML, sequence: int = 128) -> rendering.Renderer:
    return rendering.Renderer(tokenizer=chatting.tokenizer(template), name="tiny", ends=ENDS, sequence=sequence)


def prepare(path: Path, home: Path, recipe: Recipe = RECIPE, **options: Any) -> prepared.Stored:
    given: dict[str, Any] = {"watch": lambda _read: None, "say": lambda _line: None} | options
    whole = given.pop("renderer", None) or renderer(sequence=recipe.sequence)
    return prepared.prepare(path, whole, recipe, home, **given)


def documents(rows: data.Packed) -> Counter[str]:
    found: list[str] = []
    for row in range(len(rows.tokens)):
        tokens, document = rows.tokens[[row]][0], rows.document[[row]][0]
        found += [chatting.text(tokens[document == number]) for number in range(int(document.max()) + 1)]
    return Counter(found)


def refusal(path: Path, home: Path, recipe: Recipe = RECIPE) -> Failure:
    with pytest.raises(Failure) as caught:
        prepare(path, home, recipe)
    assert caught.value.code is Exit.INPUT
    return caught.value


def test_every_chat_is_in_the_rows_once_or_held_out(tmp_path: Path) -> None:
    stored = prepare(chatting.write(tmp_path / "a.jsonl", *chatting.many(60)), tmp_path / "home")
    whole = renderer()
    wanted: Counter[str] = Counter()
    for content in chatting.many(60):
        record, _ = chats.parse(json.dumps(content).encode())
        ((sample, _),) = whole.samples([(chats.Place(file="f", number=1), record)])  # type: ignore[misc]  # no Refused
        wanted[chatting.text(sample.tokens)] += 1
    found = documents(stored)
    missing = wanted - found
    assert not found - wanted
    prompts = [chatting.text(list(prompt)) for prompt in stored.held_out]
    assert sorted(text.split("assistant\n")[0] + "assistant\n" for text in missing) == sorted(prompts)
    assert (stored.documents, len(prompts)) == (57, 3)
    assert stored.fill > 0.7
    assert stored.sentence().startswith(f"57 documents in {len(stored.tokens)} rows")


def test_a_row_read_from_the_disk_is_the_row_that_packing_made(tmp_path: Path) -> None:
    file = chatting.write(tmp_path / "a.jsonl", *chatting.many(40))
    stored = prepare(file, tmp_path / "home", Recipe(sequence=128, held_out=0, prompt_tokens=16, faulty=0.1))
    found = renderer().samples([(place, chats.parse(line)[0]) for place, line, _ in chats.lines([file])])
    rows = data.pack([one[0] for one in found if isinstance(one, tuple)], 128)
    order = list(reversed(range(len(rows.tokens))))
    for mine, theirs in (
        (stored.tokens, rows.tokens),
        (stored.document, rows.document),
        (stored.response, rows.response),
    ):
        assert len(mine) == len(theirs)
        assert torch.equal(mine[order], theirs[order])
        assert mine[order].dtype == theirs.dtype
        assert torch.equal(mine[[]], theirs[[]]), "a pass that is all filling reads no row"
    assert stored.fill == pytest.approx(rows.fill)
    with pytest.raises(IndexError):
        stored.tokens[[len(rows.tokens)]]


def test_packing_in_windows_changes_which_row_a_document_is_in_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = chatting.write(tmp_path / "a.jsonl", *chatting.many(60))
    whole = prepare(file, tmp_path / "home")
    monkeypatch.setattr(preparing, "WINDOW_TOKENS", 600)
    monkeypatch.setattr(preparing, "BATCH_BYTES", 500)
    pieces = prepare(file, tmp_path / "other")
    assert len(pieces.shelf.shards) > 5
    assert documents(pieces) == documents(whole)
    assert pieces.held_out == whole.held_out
    again = prepare(file, tmp_path / "third")
    assert [shard.sha256 for shard in again.shelf.shards] == [shard.sha256 for shard in pieces.shelf.shards]


def test_the_same_content_elsewhere_is_found_and_anything_that_decides_is_not(tmp_path: Path) -> None:
    home = tmp_path / "home"
    said: list[str] = []
    first = prepare(chatting.write(tmp_path / "a.jsonl", *chatting.many(20)), home)
    elsewhere = chatting.write(tmp_path / "there" / "b.jsonl", *chatting.many(20))
    assert prepare(elsewhere, home, say=said.append).folder == first.folder
    assert said == [f"these data were prepared before: `{first.folder}`"]
    others = [
        prepare(elsewhere, home, Recipe(sequence=256, held_out=3, prompt_tokens=16, faulty=0.1)),
        prepare(elsewhere, home, renderer=renderer(chatting.MARKED)),
        prepare(chatting.write(tmp_path / "a.jsonl", *chatting.many(21)), home),
    ]
    folders = {stored.folder for stored in [first, *others]}
    assert len(folders) == 4


def test_what_is_of_no_use_is_counted_by_kind_and_the_rest_is_trained_on(tmp_path: Path) -> None:
    odd: list[Any] = [
        b"{",
        b"\xff\xfe",
        b'{"a": 1}',
        chatting.chat("a", ""),
        chatting.chat("a"),
        chatting.chat("a", "b" * 500),
    ]
    file = chatting.write(tmp_path / "a.jsonl", *chatting.many(70), *odd)
    stored = prepare(file, tmp_path / "home")
    assert {kind: count for kind, (count, _) in stored.faults.found.items()} == {
        Kind.JSON: 1, Kind.UTF8: 1, Kind.SHAPE: 1, Kind.EMPTY: 1, Kind.SILENT: 1, Kind.CUT: stored.truncated,
    }  # fmt: skip
    said: list[str] = []
    prepared.report(prepare(file, tmp_path / "home"), said.append)
    assert f"  1 not JSON: first line 71 of `{file}` (Expecting property name" in said[2]
    assert len(said) == 7


def test_nothing_left_and_too_many_faults_are_sentences_with_numbers(tmp_path: Path) -> None:
    home = tmp_path / "home"
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")
    assert refusal(empty, home).message == f"nothing in `{empty}` can be trained on, of 0 lines"
    none = chatting.write(tmp_path / "none.jsonl", b"{", chatting.chat("a"))
    assert len(refusal(none, home).details) == 2
    many = chatting.write(tmp_path / "many.jsonl", *chatting.many(10), b"{", b"}")
    assert refusal(many, home).message == f"2 of 12 lines of `{many}` are of no use, more than 10%"
    stored = prepare(many, home, Recipe(sequence=128, held_out=3, prompt_tokens=16, faulty=0.5))
    assert stored.faults.lost == 2
    # what was prepared is found, and judged anew
    assert refusal(many, home).message == f"2 of 12 lines of `{many}` are of no use, more than 10%"
    assert not [each for each in home.iterdir() if each.is_dir() and each.name.startswith(".")]


@pytest.mark.parametrize(("count", "held"), [(1, 1), (2, 1), (19, 1), (40, 3)])
def test_few_samples_give_up_few_of_them(tmp_path: Path, count: int, held: int) -> None:
    stored = prepare(chatting.write(tmp_path / "a.jsonl", *chatting.many(count)), tmp_path / "home")
    assert len(stored.held_out) == held
    assert stored.documents == max(1, count - held)


def test_a_prompt_that_is_held_out_is_nowhere_in_the_rows(tmp_path: Path) -> None:
    answers = [
        chatting.chat(f"what is {number} times 37?", f"{answer} it is") for answer in "abc" for number in range(30)
    ]
    stored = prepare(chatting.write(tmp_path / "a.jsonl", *answers), tmp_path / "home")
    assert len(stored.held_out) == 3
    for prompt in stored.held_out:
        text = chatting.text(list(prompt))
        assert not [document for document in documents(stored) if document.startswith(text)]


def test_a_beginning_that_much_of_the_data_shares_is_not_held_out_and_nothing_is_lost(tmp_path: Path) -> None:
    head = "A licence that stands at the head of each file. "
    shared = [{"text": f"{head}{number} frogs"} for number in range(100)]
    others = [{"text": f"{number} toads sat on a stone and sang"} for number in range(9)]
    stored = prepare(chatting.write(tmp_path / "a.jsonl", *others, *shared), tmp_path / "home")
    assert stored.documents == 109 - len(stored.held_out)
    assert not [prompt for prompt in stored.held_out if head.startswith(chatting.text(list(prompt)))]
    assert stored.sentence().endswith(" held out")

    stored = prepare(chatting.write(tmp_path / "b.jsonl", *shared), tmp_path / "home")
    assert (stored.documents, len(stored.held_out)) == (100, 1), "nothing else to begin an evaluation with"


def test_what_goes_with_the_prompts_that_are_held_out_is_said(tmp_path: Path) -> None:
    answers = [chatting.chat(f"what is {number}?", f"{answer} it is") for answer in "abc" for number in range(30)]
    stored = prepare(chatting.write(tmp_path / "a.jsonl", *answers), tmp_path / "home")
    assert stored.documents == 81
    assert stored.sentence().endswith("3 held out (9 documents begin with them)")


def test_samples_that_wait_take_no_more_memory_than_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash.preparing.WINDOW_SAMPLES", 8)
    held = _Held(64, 4)
    response = torch.zeros(6, dtype=torch.bool)
    waiting = []
    samples = [Sample(tokens=torch.tensor([1, 2, 3, 4, 5, n]), response=response) for n in range(100)]
    samples += [Sample(tokens=torch.tensor([n, 2, 3, 4, 5, 6]), response=response) for n in range(100)]
    back = []
    for sample in samples:
        back += held.offered(sample)
        waiting.append(held.count)
    back += held.surplus(len(back))
    assert max(waiting) <= 8
    assert len(back) + sum(map(len, held.kept.values())) == 200
    assert [1, 2, 3, 4] not in held.prompts()
    assert held.prompts()


def test_a_changed_file_and_a_changed_manifest_are_refused_by_name(tmp_path: Path) -> None:
    file = chatting.write(tmp_path / "a.jsonl", *chatting.many(30))
    folder = prepare(file, tmp_path / "home").folder
    shard = folder / "rows-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    stored = prepare(file, tmp_path / "home")
    with pytest.raises(Failure, match=r"rows-00000.safetensors` was changed: sha256 .*, written") as caught:
        stored.tokens[[0]]
    assert caught.value.hint == f"remove it, and it is made again: `rm -r {folder}`"
    shard.write_bytes(content[:-1])
    assert f"has {len(content) - 1} bytes, {len(content)} were written" in refusal(file, tmp_path / "home").message
    shard.unlink()
    assert "is missing" in refusal(file, tmp_path / "home").message
    manifest = folder / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"lines": 30', b'"lines": 31'))
    assert "manifest.json` is missing, or was changed" in refusal(file, tmp_path / "home").message
    manifest.write_bytes(b"[]")
    assert "manifest.json` is missing, or was changed" in refusal(file, tmp_path / "home").message


def test_data_that_change_while_they_are_read_are_refused(tmp_path: Path) -> None:
    file = chatting.write(tmp_path / "a.jsonl", *chatting.many(30))
    with pytest.raises(Failure, match="changed while they were read"):
        prepare(file, tmp_path / "home", watch=lambda _read: chatting.write(file, *chatting.many(31)) and None)
    assert prepare(file, tmp_path / "home").documents == 28


def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    file = chatting.write(tmp_path / "a.jsonl", *chatting.many(30))
    (tmp_path / "home").write_text("a file")
    with pytest.raises(Failure, match="a part of the path is a file") as caught:
        prepare(file, tmp_path / "home")
    assert caught.value.code is Exit.STORAGE


def test_one_of_two_at_once_makes_them_and_a_killed_one_leaves_nothing_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "BATCH_BYTES", 4000)
    file, home = chatting.write(tmp_path / "a.jsonl", *chatting.many(200)), tmp_path / "home"

    def work(say: Callable[[str], None], *, hang: bool) -> None:
        def watch(_read: int) -> None:
            say("read")
            time.sleep(600 if hang else 0)

        stored = prepare(file, home, watch=watch, say=say)
        say(str([shard.sha256 for shard in stored.shelf.shards]))

    with chatting.forked(lambda say: work(say, hang=True)) as first:
        assert first.line() == "read"
        with chatting.forked(lambda say: work(say, hang=False)) as second:
            assert second.line() == "waiting for another process that prepares the same data"
            first.kill()
            out = second.rest()
            assert second.wait() == 0
    assert out[0] == "read"
    with chatting.forked(lambda say: work(say, hang=False)) as third:
        again = third.rest()
        assert third.wait() == 0
    assert again[0].startswith("these data were prepared before")
    assert again[-1] == out[-1]
    assert len([each for each in home.iterdir() if each.is_dir()]) == 1


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "WINDOW_TOKENS", 1 << 17)
    monkeypatch.setattr(preparing, "BATCH_BYTES", 1 << 17)
    files = {count: tmp_path / f"{count}.jsonl" for count in (400, 4000)}
    for count, file in files.items():
        lines = (chatting.chat(f"what is {number} times 37?", f"it is {number * 37}. " * 40) for number in range(count))
        chatting.write(file, *lines)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def work(say: Callable[[str], None]) -> None:
        for file in files.values():
            most = [0]
            prepare(file, tmp_path / "home", watch=lambda _read, most=most: most.append(max(most.pop(), resident())))
            say(str(most[0]))

    with chatting.forked(work) as process:
        small, large = map(int, process.rest())
    assert large - small < 8 << 20, "ten times the file takes no more memory"

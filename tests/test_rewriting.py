from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chatting
import pytest
import torch
from test_target import model

from dflash import chats, decode, rewriting, small_target, target
from dflash.chats import Kind
from env.errors import Exit, Failure

WANTED = rewriting.Wanted(response_tokens=16, temperature=0.0, top_p=1.0, seed=0, batch=4)
DRAWN = rewriting.Wanted(response_tokens=16, temperature=0.8, top_p=0.9, seed=1, batch=4)


@pytest.fixture(scope="module")
def whole() -> target.Target:
    return chatting.chatting(max_position_embeddings=512)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return chatting.write(tmp_path / "in.jsonl", *chatting.many(22))


def rewrite(
    whole: target.Target, path: Path, out: Path, wanted: rewriting.Wanted = WANTED, **options: Any
) -> rewriting.Written:
    given: dict[str, Any] = {"watch": lambda _lines, _tokens: None, "say": lambda _line: None} | options
    return rewriting.rewrite(whole, path, out, wanted, **given)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_bytes().splitlines()]


def refusal(call: Callable[[], object]) -> Failure:
    with pytest.raises(Failure) as caught:
        call()
    return caught.value


def greedy(whole: target.Target, prompt: list[int], count: int) -> list[int]:
    """A token at a time, without a cache or a neighbour."""
    answer: list[int] = []
    while len(answer) < count and not (answer and answer[-1] in target.stop_tokens(whole)):
        made: Any = whole.model
        answer.append(int(made(input_ids=torch.tensor([prompt + answer])).logits[0, -1].argmax()))
    return answer


def test_every_response_is_the_targets_own_in_the_light_of_those_before_it(
    whole: target.Target, data: Path, tmp_path: Path
) -> None:
    state = rewrite(whole, data, tmp_path / "out.jsonl")
    tokenizer: Any = whole.tokenizer
    found = read(tmp_path / "out.jsonl")
    assert len(found) == state.written
    prompts = {line["messages"][0]["content"]: line for line in read(data)}
    twice = 0
    for line in found:
        messages = line["messages"]
        assert len(messages) == len(prompts[messages[0]["content"]]["messages"])
        for at in range(1, len(messages), 2):
            prompt = tokenizer.apply_chat_template(messages[:at], add_generation_prompt=True, return_dict=False)
            answer = greedy(whole, prompt, 16)
            ended = answer[-1] in (256, 273)
            text = tokenizer.decode(answer[:-1] if ended else answer, skip_special_tokens=True)
            assert messages[at]["content"] == text
            twice += at > 1
    assert twice > 2
    assert state.responses == len(found) + twice


@pytest.mark.parametrize("wanted", [WANTED, DRAWN])
def test_responses_do_not_depend_on_who_shares_their_batch(
    whole: target.Target, data: Path, tmp_path: Path, wanted: rewriting.Wanted
) -> None:
    found = []
    for batch in (1, 3, 16):
        out = tmp_path / f"{batch}.jsonl"
        rewrite(whole, data, out, dataclasses.replace(wanted, batch=batch))
        found.append(out.read_bytes())
    assert found[0] == found[1] == found[2]


def test_what_is_drawn_is_decided_by_the_seed_and_is_not_the_greedy_choice(
    whole: target.Target, data: Path, tmp_path: Path
) -> None:
    contents = []
    for number, wanted in enumerate((WANTED, DRAWN, DRAWN, dataclasses.replace(DRAWN, seed=2))):
        rewrite(whole, data, tmp_path / f"{number}.jsonl", wanted)
        contents.append((tmp_path / f"{number}.jsonl").read_bytes())
    assert contents[1] == contents[2]
    assert len(set(contents)) == 3


def test_tokens_are_drawn_as_often_as_they_are_likely_and_never_outside_of_the_likeliest() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]]).repeat(4000, 1)
    names = [number.to_bytes(4, "big") for number in range(4000)]
    for top_p, inside in ((1.0, 4), (0.8, 2)):
        choose = rewriting.Chooser(dataclasses.replace(DRAWN, temperature=1.0, top_p=top_p), names)
        shares = choose(logits, range(4000), 3).bincount(minlength=4) / 4000
        likely = logits[0].softmax(-1)
        kept = likely.sort(descending=True).values[:inside].sum()
        wanted = torch.where(likely >= likely.sort(descending=True).values[inside - 1], likely / kept, 0)
        torch.testing.assert_close(shares, wanted, atol=0.03, rtol=0)


def test_logits_in_a_padded_batch_are_those_alone_within_a_ten_thousandth(whole: target.Target) -> None:
    """The bound that the documentation states: two logits closer than this may change places with the batch."""
    prompts = [list(f"{number} times {number * 17} is {'so ' * (number % 7)}".encode()) for number in range(24)]
    together = decode._prefill(whole.model, decode._new_cache(whole.model), prompts)
    for prompt, logits in zip(prompts, together, strict=True):
        alone = decode._prefill(whole.model, decode._new_cache(whole.model), [prompt])[0]
        assert (logits - alone).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["llama", "mistral-sliding", "gpt2"])
def test_other_architectures_respond_the_same_alone_and_in_a_batch(kind: str) -> None:
    made = target.Target(model=model(kind), tokenizer=small_target.tokenizer(), name=kind, packs=True)
    prompts = [list(range(65, 65 + length)) for length in (3, 17, 8, 8, 30)]
    choose = rewriting.Chooser(WANTED, [b""] * 5)
    together = decode.respond(made.model, prompts, 12, choose, stop=frozenset({256}))
    assert together == [greedy(made, prompt, 12) for prompt in prompts]


def test_a_target_with_a_state_that_cannot_be_padded_is_given_prompts_of_one_length(tmp_path: Path) -> None:
    made = target.Target(model=model("qwen3-next"), tokenizer=chatting.tokenizer(), name="recurrent", packs=False)
    assert not decode.cuts(made.model)
    with pytest.raises(ValueError, match="several lengths"):
        decode.respond(made.model, [[1, 2], [1]], 4, rewriting.Chooser(WANTED, [b""] * 2))
    lines = [{"prompt": prompt, "response": "?"} for prompt in ("abc", "abcdef", "xyz", "q")]
    rewrite(made, chatting.write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl")
    for line in read(tmp_path / "out.jsonl"):
        answer = [token for token in greedy(made, list(line["prompt"].encode()), 16) if token != 256]
        assert line["response"] == made.tokenizer.decode(answer, skip_special_tokens=True)


def test_rows_that_end_early_leave_the_batch_and_change_nothing(whole: target.Target) -> None:
    prompts = [list(f"{number} is".encode()) for number in range(9)]
    choose = rewriting.Chooser(WANTED, [b""] * 9)
    free = decode.respond(whole.model, prompts, 16, choose)
    stop = frozenset(answer[number] for number, answer in enumerate(free[:7]))
    sizes: list[int] = []
    bounded = decode.respond(whole.model, prompts, 16, choose, stop=stop, report=sizes.append)
    for long, short in zip(free, bounded, strict=True):
        end = next((place + 1 for place, token in enumerate(long) if token in stop), len(long))
        assert short == long[:end]


def test_other_keys_stay_and_every_form_is_written_as_it_was_read(whole: target.Target, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"id": 5, "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 1}]},
        {"conversations": [{"from": "human", "value": "a?"}]},
        {"prompt": "é", "response": "b", "score": 0.5},
        {"prompt": "no response yet"},
        {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d", "reasoning": "e"}]},
    ]
    rewrite(whole, chatting.write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl")
    found = read(tmp_path / "out.jsonl")
    assert found[0]["id"] == 5
    assert [set(message) for message in found[0]["conversations"]] == [{"from", "value"}, {"from", "value", "weight"}]
    assert found[1]["conversations"][1]["from"] == "gpt"
    assert (found[2]["prompt"], found[2]["score"]) == ("é", 0.5)
    assert found[3]["response"]
    assert set(found[4]["messages"][1]) == {"role", "content"}
    for line in read(tmp_path / "out.jsonl"):
        chats.parse(json.dumps(line).encode())


def test_lines_of_no_use_are_counted_and_left_out(whole: target.Target, tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    file = chatting.write(
        tmp_path / "in.jsonl",
        b"{",
        {"text": "only a text"},
        {"messages": [{"role": "user", "content": "a"}, call]},
        chatting.chat("a" * 480, "b"),
        chatting.chat("say <|im_end|>", "b"),
        chatting.chat("fine", "b"),
    )
    state = rewrite(whole, file, tmp_path / "out.jsonl")
    assert (state.lines, state.written) == (6, 1)
    assert set(state.faults) == {kind.name for kind in (Kind.JSON, Kind.LOST, Kind.SILENT, Kind.WINDOW, Kind.CONTROL)}
    assert state.sentences()[0].startswith("1 of 6 lines written, 1 responses")


def test_a_killed_process_goes_on_and_ends_with_the_same_bytes(
    whole: target.Target, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriting, "GROUP", 1)
    unbroken, broken = tmp_path / "unbroken.jsonl", tmp_path / "broken.jsonl"
    rewrite(whole, data, unbroken)
    begun = []
    for _ in range(2):

        def work(say: Callable[[str], None]) -> None:
            def watch(lines: int, tokens: int) -> None:
                say(f"{lines}")
                time.sleep(0.002)

            rewrite(whole, data, broken, watch=watch)

        with chatting.forked(work) as process:
            begun.append(int(process.line()))
            journal = tmp_path / "broken.jsonl.json"
            before = journal.read_bytes() if journal.exists() else b""
            while not journal.exists() or journal.read_bytes() == before:
                process.line()
            assert "another process writes" in refusal(lambda: rewrite(whole, data, broken)).message
            for _ in range(3):
                process.line()
            process.kill()
        assert not broken.exists()
    assert begun[0] == 0
    assert begun[1] > 0
    with (tmp_path / "broken.jsonl.partial").open("ab") as file:
        file.write(b'{"messages": [{"ro')
    said: list[str] = []
    rewrite(whole, data, broken, say=said.append)
    assert said[0].startswith("going on after ")
    assert broken.read_bytes() == unbroken.read_bytes()
    assert not (tmp_path / "broken.jsonl.partial").exists()
    rewrite(whole, data, broken, say=said.append)
    assert said[-1] == f"these responses are there already: `{broken}`"


def test_a_file_that_is_something_else_is_never_written_over(whole: target.Target, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    failure = refusal(lambda: rewrite(whole, data, data))
    assert failure.message == f"`{data}` is the data themselves"
    out.write_text("mine\n")
    assert "nothing says what it was made of" in refusal(lambda: rewrite(whole, data, out)).message
    out.unlink()
    rewrite(whole, data, out)
    failure = refusal(lambda: rewrite(whole, data, out, DRAWN))
    assert failure.code is Exit.USAGE
    assert failure.details == ("seed: was 0, is 1", "temperature: was 0.0, is 0.8", "top_p: was 1.0, is 0.9")
    content = out.read_bytes()
    out.write_bytes(content.replace(b"user", b"USER", 1))
    assert "was changed since it was written" in refusal(lambda: rewrite(whole, data, out)).message
    out.write_bytes(content[:-1])
    assert "is cut short" in refusal(lambda: rewrite(whole, data, out)).message
    (tmp_path / "out.jsonl.json").write_text("{}")
    assert "out.jsonl.json` was changed" in refusal(lambda: rewrite(whole, data, out)).message


def test_a_folder_that_cannot_be_written_is_a_sentence(whole: target.Target, data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    failure = refusal(lambda: rewrite(whole, data, tmp_path / "file" / "out.jsonl"))
    assert failure.code is Exit.STORAGE

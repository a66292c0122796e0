from __future__ import annotations

import json
from typing import Any

import chatting
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dflash import chats, rendering
from dflash.chats import Kind, Refused
from dflash.data import Sample
from env.errors import Exit, Failure

ENDS = frozenset({256, 273})
PLACE = chats.Place(file="f", number=7)
TURNS = chatting.chat("hé?", "one", "b", "two two", system="be")


def renderer(template: str | None = chatting.CHATML, sequence: int = 400, **options: Any) -> rendering.Renderer:
    made: dict[str, Any] = {
        "tokenizer": chatting.tokenizer(template),
        "name": "tiny",
        "ends": ENDS,
        "sequence": sequence,
    } | options
    return rendering.Renderer(**made)


def made(whole: rendering.Renderer, content: dict[str, Any]) -> Sample | Refused:
    (found,) = whole.samples([(PLACE, chats.parse(json.dumps(content).encode())[0])])
    return found if isinstance(found, Refused) else found[0]


def learnt(whole: rendering.Renderer, content: dict[str, Any]) -> list[str]:
    """Runs of response tokens as text."""
    sample = made(whole, content)
    assert isinstance(sample, Sample), sample
    runs: list[list[int]] = []
    for place, (token, response) in enumerate(zip(sample.tokens.tolist(), sample.response.tolist(), strict=True)):
        if response and (place == 0 or not sample.response[place - 1]):
            runs.append([])
        if response:
            runs[-1].append(token)
    return [chatting.text(run) for run in runs]


def refused(whole: rendering.Renderer, content: dict[str, Any]) -> Kind:
    found = made(whole, content)
    assert isinstance(found, Refused), found
    return found.kind


def test_a_chat_is_what_its_template_makes_of_it() -> None:
    whole = renderer()
    sample = made(whole, TURNS)
    assert isinstance(sample, Sample)
    wanted: Any = whole.tokenizer.apply_chat_template(TURNS["messages"], tokenize=True, return_dict=False)
    assert sample.tokens.tolist() == wanted


@pytest.mark.parametrize("template", [chatting.CHATML, chatting.MARKED, chatting.ALTERNATING])
def test_responses_and_the_tokens_that_end_them_are_learnt_and_nothing_else(template: str) -> None:
    turns = chatting.chat("hé?", "one", "b", "two two")
    assert learnt(renderer(template), turns) == ["one<|im_end|>", "two two<|im_end|>"]


def test_a_template_that_marks_its_responses_gives_the_mask_that_the_difference_gives() -> None:
    marked, derived = made(renderer(chatting.MARKED), TURNS), made(renderer(chatting.CHATML), TURNS)
    assert isinstance(marked, Sample)
    assert isinstance(derived, Sample)
    assert marked.tokens.tolist() == derived.tokens.tolist()
    assert marked.response.tolist() == derived.response.tolist()


def test_a_template_that_renders_only_the_last_answer_with_its_thoughts_keeps_every_answer() -> None:
    assert learnt(renderer(chatting.THINKING), TURNS) == ["one<|im_end|>", "<think>\n\n</think>\n\ntwo two<|im_end|>"]


def test_answers_that_no_token_ends_are_told_apart_by_what_comes_after() -> None:
    assert learnt(renderer(chatting.BARE), TURNS) == ["one\n", "two two\n"]


def test_a_chat_that_begins_otherwise_than_the_whole_is_refused() -> None:
    assert refused(renderer(chatting.COUNTED), TURNS) is Kind.PREFIX


def test_an_answer_that_begins_within_a_token_is_refused() -> None:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    core.decoder = decoders.Metaspace()
    core.train_from_iterator(["user: b\nassistant: one\n"] * 9, trainers.BpeTrainer(vocab_size=90, show_progress=False))
    maker: Any = PreTrainedTokenizerFast
    tokenizer = maker(tokenizer_object=core, eos_token=None)
    tokenizer.chat_template = chatting.BARE
    whole = renderer(tokenizer=tokenizer, ends=frozenset())
    assert refused(whole, chatting.chat("b", "one")) is Kind.PREFIX


def test_what_the_template_refuses_is_counted_with_its_words() -> None:
    whole = renderer(chatting.ALTERNATING)
    found = made(whole, {"messages": [{"role": "user", "content": "a"}] * 2 + chatting.chat("a", "b")["messages"]})
    assert isinstance(found, Refused)
    assert (found.kind, found.detail) == (Kind.TEMPLATE, "roles must alternate")


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (chatting.chat("a"), Kind.SILENT),
        ({"prompt": "a"}, Kind.SILENT),
        (chatting.chat("a", " \n"), Kind.EMPTY),
        ({"prompt": "a", "response": " "}, Kind.EMPTY),
        (chatting.chat("say <|im_end|>", "b"), Kind.CONTROL),
        (chatting.chat("a", "<|endoftext|>"), Kind.CONTROL),
        (chatting.chat("a" * 400, "b"), Kind.ANCHOR),
        ({"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}, Kind.ANCHOR),
        ({"text": "a"}, Kind.ANCHOR),
    ],
)
def test_a_record_without_anything_to_learn_is_refused_by_kind(content: dict[str, Any], wanted: Kind) -> None:
    assert refused(renderer(), content) is wanted


def test_a_chat_longer_than_a_sequence_is_cut_to_it_and_says_so() -> None:
    whole = renderer(sequence=60)
    record, _ = chats.parse(json.dumps(chatting.chat("a", "b" * 100, "c" * 9000, "d" * 9000)).encode())
    (found,) = whole.samples([(PLACE, record)])
    assert not isinstance(found, Refused)
    sample, cut = found
    assert cut
    assert len(sample.tokens) == 60
    assert chatting.text(sample.tokens[sample.response]).strip("b") == ""
    assert sample.response[-1]


def test_a_hundred_thousand_messages_cost_no_more_than_a_sequence_of_them() -> None:
    whole = renderer(sequence=200)
    assert len(learnt(whole, chatting.chat(*["a", "bc"] * 5000))) < 10


def test_a_text_is_learnt_whole_and_a_pair_from_its_response_on() -> None:
    whole = renderer()
    assert learnt(whole, {"text": "<|im_end|> is text"}) == ["<|im_end|> is text"]
    assert 273 not in made(whole, {"text": "<|im_end|> is text"}).tokens  # type: ignore[union-attr]  # it is a sample
    assert learnt(whole, {"prompt": "a", "response": "bé"}) == ["bé<|endoftext|>"]


def test_a_text_begins_with_the_token_that_the_tokenizer_puts_there() -> None:
    tokenizer = chatting.tokenizer()
    tokenizer.bos_token = "<|reserved_0|>"
    assert renderer(tokenizer=tokenizer).begin == ()
    from tokenizers.processors import TemplateProcessing

    core: Any = tokenizer.backend_tokenizer
    core.post_processor = TemplateProcessing(single="<|reserved_0|> $A", special_tokens=[("<|reserved_0|>", 259)])
    whole = renderer(tokenizer=tokenizer)
    assert whole.begin == (259,)
    sample = made(whole, {"text": "abc"})
    assert isinstance(sample, Sample)
    assert sample.tokens.tolist() == [259, 97, 98, 99]
    assert sample.response.tolist() == [False, True, True, True]


def test_a_tokenizer_without_a_chat_template_is_one_sentence_for_chats_and_enough_for_texts() -> None:
    whole = renderer(None)
    assert learnt(whole, {"text": "abc"}) == ["abc"]
    with pytest.raises(Failure, match="no chat template, which the chat in line 7 of `f` needs") as caught:
        made(whole, TURNS)
    assert caught.value.code is Exit.INPUT


def test_tools_reach_the_template() -> None:
    template = "{%- if tools %}{{- tools[0].name + '\\n' }}{%- endif %}" + chatting.CHATML
    sample = made(renderer(template), {**TURNS, "tools": [{"name": "search"}]})
    assert isinstance(sample, Sample)
    assert chatting.text(sample.tokens[:6]) == "search"

"""Chats and texts as tokens, with a mask on what the target wrote (or would have): the tokens that are learnt.

A chat goes through the tokenizer's own template. Where that marks its responses (`{% generation %}`), the marks are
used. Where it does not, a response is what the whole chat has after its beginning, rendered with the words that ask for
a response. A chat whose beginning comes out otherwise than the whole is refused, since its mask would be a guess.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from dflash.chats import Chat, Kind, Pair, Place, Plain, Record, Refused
from dflash.data import Sample
from env.errors import Exit, Failure

_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PROBE = "\u2402dflash\u2403"
"""Stands for a message's text where only the place of that text is asked for; no chat has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Renderer:
    """Turns records into samples of at most `sequence` tokens, with one tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    """The target's."""
    name: str
    """The target's, for sentences."""
    ends: frozenset[int]
    """Tokens that end a response."""
    sequence: int
    """Longest sample."""
    longest: int = field(init=False)
    """Characters that `sequence` tokens can stand for: what is longer is cut before it is made into tokens."""
    control: re.Pattern[str] = field(init=False)
    """Finds the name of a control token in a message."""
    template: str | None = field(init=False)
    """The chat template; None when the tokenizer has none."""
    begin: tuple[int, ...] = field(init=False)
    """The token that this tokenizer puts before a text, if it does."""

    def __post_init__(self) -> None:
        names = {str(token) for token in self.tokenizer.all_special_tokens}
        names |= {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True) if name)
        object.__setattr__(self, "control", re.compile(pattern or r"(?!)"))
        widest = max((len(token) for token in self.tokenizer.get_vocab()), default=1)
        object.__setattr__(self, "longest", (self.sequence + 1) * widest)
        first = self.tokenizer.bos_token_id
        begins = first is not None and self.tokenizer("a")["input_ids"][:1] == [first]
        object.__setattr__(self, "begin", (first,) if begins else ())
        object.__setattr__(self, "template", template(self.tokenizer))

    def samples(self, records: Sequence[tuple[Place, Record]]) -> list[tuple[Sample, bool] | Refused]:
        """A sample for each record and whether it was cut to a sequence, or why there is none.

        Raises:
            Failure: Exit.INPUT, when a record is a chat and the tokenizer has no chat template.
        """
        found: list[tuple[Sample, bool] | Refused] = []
        for place, record in records:
            try:
                if isinstance(record, Chat):
                    tokens, response, whole = self._chat(record, place)
                else:
                    tokens, response, whole = self._text(record)
                found.append((_sample(tokens[: self.sequence], response[: self.sequence]), not whole))
            except Refused as refused:
                found.append(refused)
        return found

    def prompt(self, chat: Chat, place: Place) -> list[int]:
        """Tokens of a chat whose next message the target is to write.

        Raises:
            Refused: when the template refuses the chat.
            Failure: see `samples`.
        """
        self._require(chat, place)
        return self._ids(self._rendered(chat, len(chat.messages), ask=True))

    def _require(self, chat: Chat, place: Place) -> None:
        if self.template is None:
            raise Failure(
                Exit.INPUT,
                f"the tokenizer of `{self.name}` has no chat template, which the chat in {place} needs",
                hint='a target that was trained for chats has one; lines of {"text": …} need none',
            )
        for message in chat.messages:
            spelt = self.control.search(message["content"])
            if spelt:
                raise Refused(Kind.CONTROL, f"`{spelt[0]}`")

    def _chat(self, chat: Chat, place: Place) -> tuple[np.ndarray, np.ndarray, bool]:
        spoken = [at for at, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if not spoken:
            raise Refused(Kind.SILENT)
        if not any(_says(chat.messages[at]) for at in spoken):
            raise Refused(Kind.EMPTY)
        self._require(chat, place)
        if _MARKS.search(self.template or ""):
            return self._marked(chat)
        text = self._rendered(chat, len(chat.messages))
        whole = len(text) <= self.longest
        tokens, starts, ends = self._spans(text[: self.longest])
        whole = whole and len(tokens) <= self.sequence
        kept = len(text) if whole else int(ends[min(len(ends), self.sequence) - 1])
        response = np.zeros(len(tokens), dtype=bool)
        for at in spoken:
            if at == 0:  # nothing asks for it, and templates refuse to render nothing
                continue
            before = self._rendered(chat, at, ask=True)
            if not text.startswith(before):
                raise Refused(Kind.PREFIX, f"before message {at + 1}")
            if len(before) >= kept:
                break
            first, last = self._response(chat, at, text, len(before), (tokens, starts, ends))
            response[first:last] = True
        return tokens, response, whole

    def _response(
        self, chat: Chat, at: int, text: str, begin: int, spans: tuple[np.ndarray, np.ndarray, np.ndarray]
    ) -> tuple[int, int]:
        """First token of the response in message `at`, which begins at a character, and the one after its last."""
        tokens, starts, ends = spans
        first = int(np.searchsorted(starts, begin))
        if first and ends[first - 1] > begin:
            raise Refused(Kind.PREFIX, f"message {at + 1} begins within a token")
        last = int(np.searchsorted(ends, self._bound(chat, at, text), side="right"))
        stops = np.flatnonzero(np.isin(tokens[first:last], list(self.ends)))
        if len(stops):
            return first, first + int(stops[0]) + 1
        if at + 1 < len(chat.messages):
            # no token ends it, so the scaffold of the next message must be told apart from it
            after = self._rendered(chat, at + 1)
            if not text.startswith(after):
                raise Refused(Kind.PREFIX, f"after message {at + 1}")
            last = int(np.searchsorted(ends, len(after), side="right"))
        return first, last

    def _bound(self, chat: Chat, at: int, text: str) -> int:
        """Where message `at` has surely ended: before the text of the message after it, or with the whole."""
        if at + 1 == len(chat.messages):
            return len(text)
        probed = [*chat.messages[: at + 1], {**chat.messages[at + 1], "content": _PROBE}]
        rendered = self._rendered(Chat(messages=tuple(probed), tools=chat.tools), len(probed))
        place = rendered.rfind(_PROBE)
        if place < 0 or text[:place] != rendered[:place]:
            raise Refused(Kind.PREFIX, f"after message {at + 1}")
        return place

    def _marked(self, chat: Chat) -> tuple[np.ndarray, np.ndarray, bool]:
        made = self._apply(
            chat.messages, chat.tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        tokens = np.asarray(made["input_ids"], dtype=np.int64)
        return tokens, np.asarray(made["assistant_masks"], dtype=bool), len(tokens) <= self.sequence

    def _text(self, record: Pair | Plain) -> tuple[np.ndarray, np.ndarray, bool]:
        if isinstance(record, Plain):
            tokens = [*self.begin, *self._plain(record.text)]
            response = np.arange(len(tokens)) >= len(self.begin)
            whole = len(record.text) <= self.longest
        else:
            if record.response is None:
                raise Refused(Kind.SILENT)
            if not record.response.strip():
                raise Refused(Kind.EMPTY)
            prompt = [*self.begin, *self._plain(record.prompt)]
            end = self.tokenizer.eos_token_id
            tokens = [*prompt, *self._plain(record.response), *([] if end is None else [int(end)])]
            response = np.arange(len(tokens)) >= len(prompt)
            whole = max(len(record.prompt), len(record.response)) <= self.longest
        return np.asarray(tokens, dtype=np.int64), response, whole and len(tokens) <= self.sequence

    def text_prompt(self, record: Pair) -> list[int]:
        """Tokens of a prompt whose response the target is to write."""
        return [*self.begin, *self._plain(record.prompt)]

    def _plain(self, text: str) -> list[int]:
        """Tokens of a text in which the name of a special token is just text."""
        cut = text[: self.longest]
        ids = self.tokenizer.encode(cut, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return [int(one) for one in ids]

    def _ids(self, text: str) -> list[int]:
        return [int(one) for one in self.tokenizer.encode(text, add_special_tokens=False, verbose=False)]

    def _spans(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, and the characters at which each begins and ends."""
        if not self.tokenizer.is_fast:
            raise Failure(
                Exit.INPUT,
                f"the tokenizer of `{self.name}` cannot say which characters a token stands for, and its chat template"
                " does not mark responses",
                hint="a template with {% generation %} round its responses, or a `tokenizer.json`, mends that",
            )
        made = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans = np.asarray(made["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return np.asarray(made["input_ids"], dtype=np.int64), spans[:, 0], spans[:, 1]

    def _rendered(self, chat: Chat, count: int, *, ask: bool = False) -> str:
        """The first `count` messages as text; with what asks for a response after them."""
        return str(self._apply(chat.messages[:count], chat.tools, tokenize=False, add_generation_prompt=ask))

    def _apply(self, messages: Sequence[dict[str, Any]], tools: Any, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=None if tools is None else list(tools), **options
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise Refused(Kind.TEMPLATE, said[:120]) from None


def template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A tokenizer's chat template; None when it has none."""
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        return None


def anchors(sample: Sample) -> int:
    """Places that an anchor may take: response tokens after which another comes."""
    return int((sample.response[:-1] & sample.response[1:]).sum())


def _says(message: dict[str, Any]) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls"))


def _sample(tokens: np.ndarray, response: np.ndarray) -> Sample:
    sample = Sample(tokens=torch.from_numpy(tokens.astype(np.int64)), response=torch.from_numpy(response.astype(bool)))
    if anchors(sample) == 0:
        raise Refused(Kind.ANCHOR)
    return sample

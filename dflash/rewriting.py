"""Chats whose responses the target writes itself: what a drafter must guess is what its own target would say.

Every response is written anew in the light of those before it. Lines go out in the order they came in, whole, and a
journal beside the file says how far it got, so a process that is killed goes on with the first line that is not there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash import appending, chats, decode, prepared
from dflash import target as targets
from dflash.chats import Chat, Faults, Kind, Pair, Place, Plain, Refused
from dflash.rendering import Renderer
from dflash.target import Target
from env.errors import Exit, Failure

GROUP = 4
"""Batches that are read together, so that prompts of about one length can share one: what a kill costs at most."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that belong to the response that was replaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """How responses are to be written."""

    response_tokens: int
    """Longest response."""
    temperature: float
    """0 for the target's greedy choice."""
    top_p: float
    """Likeliest tokens that together have this probability are drawn from."""
    seed: int
    """With a line's content the only source of randomness."""
    batch: int
    """Prompts in one forward pass."""


@dataclass(slots=True, kw_only=True)
class Written:
    """What has been done so far; plain data, so it is the journal."""

    lines: int = 0
    """Lines that were read."""
    written: int = 0
    """Lines that were written."""
    responses: int = 0
    """Responses in them."""
    unended: int = 0
    """Responses that were as long as they may be, and were not ended by the target."""
    tokens: int = 0
    """Tokens of all responses."""
    faults: dict[str, list[Any]] = field(default_factory=dict)
    """Lines that were left out, by kind."""

    def sentences(self) -> list[str]:
        """What a person reads of it."""
        cut = f", {self.unended} of them cut at the longest length" if self.unended else ""
        first = f"{self.written} of {self.lines} lines written, {self.responses} responses{cut}"
        return [first, *(f"  {sentence}" for sentence in Faults.from_json(self.faults).sentences())]


def rewrite(
    target: Target,
    path: Path,
    out: Path,
    wanted: Wanted,
    *,
    watch: Callable[[int, int], None],
    say: Callable[[str], None],
) -> Written:
    """Write the chats of `path` to `out` with responses of the target's own.

    Args:
        target: who responds.
        path: a .jsonl file, or a folder of them.
        out: the file to write; until it is whole, it is called `out` with `.partial` behind.
        wanted: how responses are written.
        watch: takes lines that were just done and tokens that were just written; may raise to stop. The first time it
            is told of what an earlier try had done.
        say: takes a sentence for whoever watches.

    Raises:
        Failure: Exit.INPUT, when the data cannot be read, need a chat template that is not there, or what was written
            earlier was changed; Exit.USAGE, when `out` is something else, or another process writes it; Exit.STORAGE,
            when the disk refuses.
    """
    files = chats.files(path)
    if out.is_dir():
        raise Failure(Exit.USAGE, f"`{out}` is a folder", hint="name a file with `--out`")
    if out.resolve() in {file.resolve() for file in files}:
        raise Failure(Exit.USAGE, f"`{out}` is the data themselves", hint="name another file with `--out`")
    with appending.occupied(out):
        file = appending.Appended(out, _key(target, files, wanted), asdict(Written()))
        state = Written(**file.state)
        if file.whole:
            say(f"these responses are there already: `{out}`")
            return state
        if state.lines:
            say(f"going on after {state.lines} lines of `{file.partial}`")
        watch(state.lines, 0)
        renderer = _renderer(target)
        for group in _groups(files, state.lines, wanted.batch * GROUP):
            work = _Group(target, wanted, renderer, group, state, watch)
            content = work.written()
            file.append(content, asdict(state))
            watch(len(group) - work.told, 0)
        file.finish(asdict(state))
    return state


def count(path: Path) -> int:
    """Lines that are not blank."""
    return sum(1 for _ in chats.lines(chats.files(path)))


class Chooser:
    """The next token of each row: the likeliest, or one that is drawn with a number of the row's own."""

    def __init__(self, wanted: Wanted, names: Sequence[bytes]) -> None:
        """`names` are what tells the rows apart: with the seed, all that decides what is drawn."""
        self.wanted = wanted
        if wanted.temperature > 0:
            draws = [_draws(wanted.seed, name, wanted.response_tokens) for name in names]
            self.draws = torch.from_numpy(np.stack(draws))

    def __call__(self, logits: Tensor, rows: Sequence[int], step: int) -> Tensor:
        """Tokens (R,) from logits (R, V)."""
        if self.wanted.temperature == 0:
            return logits.argmax(-1)
        drawn = self.draws[list(rows), step].to(logits.device)
        chances = (logits.double() / self.wanted.temperature).softmax(-1)
        likely, order = chances.sort(dim=-1, descending=True, stable=True)
        sums = likely.cumsum(-1)
        inside = (sums - likely) < self.wanted.top_p
        whole = (sums * inside).amax(-1, keepdim=True)  # one of the sums itself, so that no rounding leads past it
        place = torch.searchsorted(sums, drawn.unsqueeze(-1) * whole, right=True)
        chosen: Tensor = order.gather(-1, place.clamp(max=order.shape[-1] - 1)).squeeze(-1)
        return chosen


def _draws(seed: int, name: bytes, count: int) -> np.ndarray:
    entropy = (seed, int.from_bytes(hashlib.sha256(name).digest(), "big"))
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy))).random(count)


@dataclass(slots=True, kw_only=True)
class _Line:
    place: Place
    name: bytes
    content: dict[str, Any]
    record: Chat | Pair
    turns: list[int]
    """Which messages the target writes; one past the last for a response that is not there yet."""


class _Group:
    """Some lines on their way from what they said to what the target says."""

    def __init__(
        self,
        target: Target,
        wanted: Wanted,
        renderer: Renderer,
        lines: Sequence[tuple[Place, bytes | None]],
        state: Written,
        watch: Callable[[int, int], None],
    ) -> None:
        self.target, self.wanted, self.renderer, self.state, self.watch = target, wanted, renderer, state, watch
        self.faults = Faults.from_json(state.faults)
        self.lines: list[_Line] = []
        for place, line in lines:
            try:
                self.lines.append(_read(place, line))
            except Refused as refused:
                self.faults.add(refused, place)
        self.flat = decode.cuts(target.model)
        self.told = 0
        self.count = len(lines)

    def written(self) -> bytes:
        """The lines as they go out."""
        for turn in itertools.count():
            due = [line for line in self.lines if turn < len(line.turns)]
            if not due:
                break
            self._turn(due, turn)
        self.state.lines += self.count
        self.state.written += len(self.lines)
        self.state.faults = self.faults.as_json()
        return b"".join(json.dumps(line.content, ensure_ascii=False).encode() + b"\n" for line in self.lines)

    def _turn(self, due: Sequence[_Line], turn: int) -> None:
        prompts = []
        for line in due:
            try:
                prompts.append((self._prompt(line, line.turns[turn]), line))
            except Refused as refused:
                self._lose(line, refused)
        prompts.sort(key=lambda pair: len(pair[0]))  # stable: the order of the lines among equals
        for batch in self._batches(prompts):
            names = [line.name + turn.to_bytes(4, "big") for _, line in batch]
            answers = decode.respond(
                self.target.model,
                [prompt for prompt, _ in batch],
                self.wanted.response_tokens,
                Chooser(self.wanted, names),
                stop=self.renderer.ends,
                report=lambda tokens: self.watch(0, tokens),
            )
            for (_, line), answer in zip(batch, answers, strict=True):
                self._take(line, line.turns[turn], answer)
            ended = sum(turn + 1 >= len(line.turns) for _, line in batch)
            self.told += ended
            self.watch(ended, 0)

    def _batches(self, prompts: Sequence[tuple[list[int], _Line]]) -> Iterator[list[tuple[list[int], _Line]]]:
        for _, same in itertools.groupby(prompts, key=lambda pair: 0 if self.flat else len(pair[0])):
            rest = list(same)
            yield from (rest[at : at + self.wanted.batch] for at in range(0, len(rest), self.wanted.batch))

    def _prompt(self, line: _Line, at: int) -> list[int]:
        if isinstance(line.record, Pair):
            prompt = self.renderer.text_prompt(line.record)
        else:
            chat = Chat(messages=line.record.messages[:at], tools=line.record.tools)
            prompt = self.renderer.prompt(chat, line.place)
        if not prompt:
            raise Refused(Kind.LOST)
        if len(prompt) + self.wanted.response_tokens > self.renderer.sequence:
            raise Refused(Kind.WINDOW, f"{len(prompt)} of {self.renderer.sequence} tokens")
        return prompt

    def _take(self, line: _Line, at: int, answer: list[int]) -> None:
        ended = bool(answer) and answer[-1] in self.renderer.ends
        text = str(self.target.tokenizer.decode(answer[:-1] if ended else answer, skip_special_tokens=True))
        if not text.strip():
            self._lose(line, Refused(Kind.EMPTY, "the target's own"))
            return
        self.state.responses += 1
        self.state.unended += not ended
        self.state.tokens += len(answer)
        if isinstance(line.record, Pair):
            line.content["response"] = text
            return
        where, role, said = chats.roles(line.content)
        messages = line.content[where]
        if at == len(messages):
            messages.append({role: "gpt" if role == "from" else "assistant"})
        messages[at] = {name: value for name, value in messages[at].items() if name not in _THOUGHTS} | {said: text}
        known = line.record.messages
        message = {"role": "assistant", "content": text}
        line.record = Chat(messages=(*known[:at], message, *known[at + 1 :]), tools=line.record.tools)

    def _lose(self, line: _Line, refused: Refused) -> None:
        self.faults.add(refused, line.place)
        self.lines = [each for each in self.lines if each is not line]
        line.turns = []


def _read(place: Place, line: bytes | None) -> _Line:
    record, content = chats.parse(line)
    assert line is not None
    if isinstance(record, Plain):
        raise Refused(Kind.LOST)
    turns = [0]
    if isinstance(record, Chat):
        messages = record.messages
        turns = [
            at
            for at, message in enumerate(messages)
            if at and message["role"] == "assistant" and not message.get("tool_calls")
        ]
        if messages[-1]["role"] != "assistant":
            turns.append(len(messages))
        if not turns:
            raise Refused(Kind.SILENT, "none that the target could write")
    return _Line(place=place, name=line.strip(), content=content, record=record, turns=turns)


def _groups(files: Sequence[Path], done: int, size: int) -> Iterator[list[tuple[Place, bytes | None]]]:
    """Lines in groups that are the same wherever a process begins."""
    left = ((place, line) for place, line, _ in itertools.islice(chats.lines(files), done, None))
    while group := list(itertools.islice(left, size)):
        yield group


def _renderer(target: Target) -> Renderer:
    limit = getattr(target.model.config.get_text_config(), "max_position_embeddings", None)
    longest = int(limit) if isinstance(limit, int) and limit > 0 else 1 << 20
    return Renderer(tokenizer=target.tokenizer, name=target.name, ends=targets.stop_tokens(target), sequence=longest)


def _key(target: Target, files: Sequence[Path], wanted: Wanted) -> dict[str, Any]:
    return {
        "data": chats.digest(files),
        "target": targets.digest(target),
        "tokenizer": prepared.tokenizer_digest(target.tokenizer),
        **asdict(wanted),
    }

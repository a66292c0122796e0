"""Chats and texts out of JSON lines: read within a memory bound, and every line that is of no use named by its kind."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from env.errors import Exit, Failure

LONGEST = 1 << 23
"""Bytes of the longest line that is read; a longer one is passed over in pieces and never held in memory."""
_PIECE = 1 << 20
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
"""What ShareGPT's `from` says, in the words that chat templates know; any other name is taken as it is."""


class Kind(StrEnum):
    """Why a line, or a part of it, is not trained on."""

    LINE = "longer than 8 MiB"
    UTF8 = "not UTF-8"
    JSON = "not JSON"
    DEEP = "nested too deeply"
    TWICE = "a key given twice"
    SURROGATE = "half of a surrogate pair, which is no character"
    SHAPE = "neither a chat nor a text"
    CONTROL = "a message that spells a control token"
    TEMPLATE = "refused by the chat template"
    PREFIX = "a chat whose beginning the template renders otherwise than the whole"
    SILENT = "no response"
    EMPTY = "an empty response"
    ANCHOR = "no two response tokens in a row within a sequence"
    CUT = "longer than a sequence, cut to it"
    LOST = "a text without a prompt"
    WINDOW = "a prompt that leaves the target no room for a response"


KEPT = frozenset({Kind.CUT})
"""Kinds that are told but do not lose the line."""


class Refused(Exception):
    """A line that cannot be used, and why."""

    def __init__(self, kind: Kind, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else str(kind))
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a line stands."""

    file: str
    """The file, as it was given or found."""
    number: int
    """Its number in the file, from 1."""

    def __str__(self) -> str:
        return f"line {self.number} of `{self.file}`"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """Messages in the form that chat templates take."""

    messages: tuple[dict[str, Any], ...]
    """Each with a `role` and, save where it only calls tools, a `content` of text."""
    tools: tuple[dict[str, Any], ...] | None = None
    """What the template is told of tools."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A prompt and its response, joined as they are: no template has a part in it."""

    prompt: str
    """May be empty."""
    response: str | None
    """None where there is none yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """A text, all of which is to be learnt."""

    text: str
    """Not blank."""


Record = Chat | Pair | Plain


class Faults:
    """How many lines had which fault, and where the first of each kind stands."""

    def __init__(self) -> None:
        self.found: dict[Kind, tuple[int, str]] = {}

    def add(self, refused: Refused, place: Place) -> None:
        """Count one."""
        count, first = self.found.get(refused.kind, (0, ""))
        said = f"{place} ({refused.detail})" if refused.detail else str(place)
        self.found[refused.kind] = (count + 1, first or said)

    @property
    def lost(self) -> int:
        """Lines of which nothing is left."""
        return sum(count for kind, (count, _) in self.found.items() if kind not in KEPT)

    def sentences(self) -> list[str]:
        """One line a kind, in a fixed order."""
        counted = [(kind, self.found[kind]) for kind in Kind if kind in self.found]
        return [f"{count} {kind}: first {first}" for kind, (count, first) in counted]

    def as_json(self) -> dict[str, list[Any]]:
        """Plain data for a manifest."""
        return {kind.name: list(self.found[kind]) for kind in Kind if kind in self.found}

    @classmethod
    def from_json(cls, content: dict[str, list[Any]]) -> Faults:
        """What `as_json` gave."""
        made = cls()
        made.found = {Kind[name]: (int(count), str(first)) for name, (count, first) in content.items()}
        return made


def files(path: Path) -> list[Path]:
    """The file itself, or a folder's .jsonl files in the order of their paths (hidden ones are passed over).

    Raises:
        Failure: Exit.INPUT, when there are none.
    """
    try:
        if path.is_file():
            return [path]
        if path.is_dir():
            inside = ((file, file.relative_to(path).parts) for file in sorted(path.rglob("*.jsonl")))
            found = [file for file, parts in inside if file.is_file() and not any(p.startswith(".") for p in parts)]
            if found:
                return found
            raise Failure(Exit.INPUT, f"the folder `{path}` holds no .jsonl file")
        what = "is neither a file nor a folder" if path.exists() else "does not exist"
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    raise Failure(Exit.INPUT, f"the data `{path}` {what}")


def digest(paths: Sequence[Path]) -> str:
    """Sha256 over the files' contents in their order; their names are no part of it.

    Raises:
        Failure: Exit.INPUT, when one cannot be read.
    """
    whole = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise _unreadable(path, error) from None
    return whole.hexdigest()


def size(paths: Sequence[Path]) -> int:
    """Bytes of all files together."""
    return sum(path.stat().st_size for path in paths)


def lines(paths: Sequence[Path]) -> Iterator[tuple[Place, bytes | None, int]]:
    """Each line that is not blank: where it stands, its bytes (None for one that is too long), and bytes it took.

    Raises:
        Failure: Exit.INPUT, when a file cannot be read.
    """
    for path in paths:
        try:
            with path.open("rb") as file:
                number = 0
                while line := file.readline(LONGEST + 1):
                    number += 1
                    length = len(line)
                    place = Place(file=str(path), number=number)
                    if length > LONGEST and not line.endswith(b"\n"):
                        while piece := file.readline(_PIECE):
                            length += len(piece)
                            if piece.endswith(b"\n"):
                                break
                        yield place, None, length
                        continue
                    if number == 1:
                        line = line.removeprefix(codecs.BOM_UTF8)
                    if line.strip():
                        yield place, line, length
        except OSError as error:
            raise _unreadable(path, error) from None


def parse(line: bytes | None) -> tuple[Record, dict[str, Any]]:
    """What a line holds, and the whole JSON object it was read from.

    Raises:
        Refused: when it holds nothing of use.
    """
    content = _object(line)
    if "messages" in content or "conversations" in content:
        return _chat(content), content
    if "prompt" in content and isinstance(content.get("response"), str | None):
        return Pair(prompt=_text(content["prompt"], "prompt"), response=content.get("response")), content
    if "text" in content:
        text = _text(content["text"], "text")
        if not text.strip():
            raise Refused(Kind.EMPTY, "`text` is blank")
        return Plain(text=text), content
    raise Refused(Kind.SHAPE, "no `messages`, `conversations`, `prompt` with `response`, or `text`")


def roles(content: dict[str, Any]) -> tuple[str, str, str]:
    """The names of an object's list of messages, of a message's role in it, and of its text."""
    if "messages" in content:
        return "messages", "role", "content"
    messages = content["conversations"]
    plain = isinstance(messages, list) and any(isinstance(each, dict) and "role" in each for each in messages)
    return ("conversations", "role", "content") if plain else ("conversations", "from", "value")


def _object(line: bytes | None) -> dict[str, Any]:
    if line is None:
        raise Refused(Kind.LINE)
    try:
        text = line.decode().strip()
    except UnicodeDecodeError as error:
        raise Refused(Kind.UTF8, f"byte {error.start} is 0x{line[error.start]:02x}") from None
    try:
        content = json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)
    except RecursionError:
        raise Refused(Kind.DEEP) from None
    except json.JSONDecodeError as error:
        raise Refused(Kind.JSON, f"{error.msg} at column {error.colno}") from None
    except ValueError as error:  # a number of thousands of digits
        raise Refused(Kind.JSON, str(error).split(";")[0]) from None
    if not isinstance(content, dict):
        raise Refused(Kind.SHAPE, f"a {type(content).__name__}, not an object")
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Refused(Kind.SURROGATE) from None
        except RecursionError:
            raise Refused(Kind.DEEP) from None
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # add
        raise Refused(Kind.TWICE, f"`{key[:40]}`")
    return made


def _constant(name: str) -> Any:
    raise Refused(Kind.JSON, f"{name} is no number in JSON")


def _chat(content: dict[str, Any]) -> Chat:
    where, role, text = roles(content)
    messages = content[where]
    if not isinstance(messages, list) or not messages:
        raise Refused(Kind.SHAPE, f"`{where}` is no list of messages")
    tools = content.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise Refused(Kind.SHAPE, "`tools` is no list of objects")
    made = tuple(_message(message, role, text) for message in messages)
    return Chat(messages=made, tools=tuple(tools) if tools else None)


def _message(message: Any, role: str, text: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Refused(Kind.SHAPE, "a message is no object")
    who = message.get(role)
    if not isinstance(who, str) or not who:
        raise Refused(Kind.SHAPE, f"a message has no `{role}`")
    others = {key: value for key, value in message.items() if key not in (role, text)}
    said = message.get(text)
    if isinstance(said, list):  # parts, as those use who mix text with pictures
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in said):
            raise Refused(Kind.SHAPE, f"a part of a message's `{text}` is no text")
        said = "".join(part["text"] for part in said)
    if said is None and message.get("tool_calls"):
        said = ""
    return {"role": _ROLES.get(who, who), "content": _text(said, text), **others}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise Refused(Kind.SHAPE, f"`{name}` is no text")
    return value


def _unreadable(path: Path, error: OSError) -> Failure:
    return Failure(Exit.INPUT, f"the data `{path}` cannot be read: {error.strerror}")

"""A user's chats or texts as packed rows on the disk: made once within a memory bound, and found again by content.

The folder's name is a digest of what decides the rows: the files' bytes, the tokenizer with its template, the shapes,
and the code that reads, renders and packs. Where the files lie is no part of it.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import inspect
import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dflash import chats, data, preparing, rendering, shards, stock, storage
from dflash.chats import Faults
from dflash.preparing import Recipe
from dflash.rendering import Renderer
from env.cache import store
from env.errors import Exit, Failure

MANIFEST = stock.MANIFEST


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Packed rows on the disk, as `data.Packed` has them."""

    folder: Path
    """Where they are."""
    key: str
    """Digest of what decides them."""
    shelf: shards.Shelf
    """Their files."""
    numbers: tuple[int, ...] | None
    """Which rows there are; None for all of them."""
    lines: int
    """Lines that were read."""
    documents: int
    """Documents packed."""
    truncated: int
    """Documents that were longer than a row and lost their ends."""
    empty: int
    """Samples without a token: there are none, since a line without one is a fault."""
    fill: float
    """Share of the places that hold a token."""
    held_out: tuple[tuple[int, ...], ...]
    """Prompts that are in no row."""
    faults: Faults
    """What was left out, by kind."""

    @property
    def tokens(self) -> data.Column:
        """(R, S) int64."""
        return _Column(self, "tokens", torch.int64)

    @property
    def document(self) -> data.Column:
        """(R, S) int32."""
        return _Column(self, "document", torch.int32)

    @property
    def response(self) -> data.Column:
        """(R, S) bool."""
        return _Column(self, "response", torch.bool)

    def sentence(self) -> str:
        """What a person reads of them."""
        cut = f", {self.truncated} cut to a row" if self.truncated else ""
        withheld = self.lines - self.documents - self.faults.lost
        prompts = len(self.held_out)
        with_them = (
            f" ({withheld} documents begin with {'it' if prompts == 1 else 'them'})" if withheld > prompts else ""
        )
        return (
            f"{self.documents} documents in {len(self.tokens)} rows, {self.fill:.0%} full{cut}, "
            f"{prompts} held out{with_them}"
        )


@dataclass(frozen=True, slots=True)
class _Column:
    stored: Stored
    name: str
    dtype: torch.dtype

    def __len__(self) -> int:
        numbers = self.stored.numbers
        return len(self.stored.shelf) if numbers is None else len(numbers)

    def __getitem__(self, rows: list[int], /) -> Tensor:
        numbers = self.stored.numbers
        wanted = rows if numbers is None else [numbers[row] for row in rows]
        return self.stored.shelf.read(self.name, wanted).to(self.dtype)


def key(content: str, renderer: Renderer, recipe: Recipe) -> str:
    """Digest of everything that decides the rows; `content` is the files' own (`chats.digest`)."""
    import jinja2
    import tokenizers
    import transformers

    decisive = {
        "content": content,
        "tokenizer": tokenizer_digest(renderer.tokenizer),
        "template": renderer.template,
        "stop": sorted(renderer.ends),
        "recipe": {name: value for name, value in asdict(recipe).items() if name != "faulty"},
        "code": _code(),
        "libraries": [jinja2.__version__, tokenizers.__version__, transformers.__version__],
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of what a tokenizer does, wherever it was loaded from."""
    core: Any = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.dumps(sorted(tokenizer.get_vocab().items())) if core is None else core.to_str()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    whole = [type(tokenizer).__name__, rules, sorted(special.items()), rendering.template(tokenizer)]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()


def prepare(
    path: Path,
    renderer: Renderer,
    recipe: Recipe,
    home: Path,
    *,
    watch: Callable[[int], None],
    say: Callable[[str], None],
) -> Stored:
    """The packed rows of a file or a folder of JSON lines: found under `home`, or made there.

    Several processes may ask at once: one makes them, the others wait for it. What a process that was killed had begun
    is thrown away. While the rows can be read, no prune frees them.

    Args:
        path: a .jsonl file, or a folder of them.
        renderer: makes tokens of lines.
        recipe: shapes and limits.
        home: folder of all prepared data.
        watch: takes the number of bytes that were just read; may raise to stop.
        say: takes a sentence for whoever watches.

    Raises:
        Failure: Exit.INPUT, when the data cannot be read, nothing is left of them, too many lines are of no use, or
            what was prepared earlier was changed; Exit.STORAGE, when the disk refuses.
    """
    files = chats.files(path)
    content = chats.digest(files)
    name = key(content, renderer, recipe)
    folder = home / name[:32]
    with contextlib.ExitStack() as reading, _held(home, name[:32], say):
        if (used := store.use(folder)) is not None:
            reading.callback(os.close, used)
        if not (folder / MANIFEST).exists():
            for stale in home.glob(f".{name[:32]}.*"):
                if stale.is_dir():
                    shutil.rmtree(stale, ignore_errors=True)
            with storage.new_folder(folder) as beside:
                made = preparing.rows(files, renderer, recipe, beside, watch)
                if chats.digest(files) != content:
                    raise Failure(Exit.INPUT, f"the data `{path}` changed while they were read", hint="start again")
                manifest = {"key": name, "content": content, "recipe": asdict(recipe), **made}
                (beside / MANIFEST).write_bytes(shards.sealed(manifest))
        else:
            say(f"these data were prepared before: `{folder}`")
        rows = opened(folder, name)
        preparing.judge(files, rows.faults, rows.lines, rows.documents, recipe.faulty)
        weakref.finalize(rows.shelf, reading.pop_all().close)
    return rows


def opened(folder: Path, wanted: str | None = None, *, without: Sequence[int] = ()) -> Stored:
    """Rows that were prepared in a folder; `without` are row numbers to pass over.

    Raises:
        Failure: Exit.INPUT, when there are none, they are others than `wanted`, or were changed.
    """
    mend = f"remove it, and it is made again: `rm -r {folder}`"
    what = "the prepared data"
    try:
        manifest = shards.unsealed((folder / MANIFEST).read_bytes())
        found = [shards.Shard(**each) for each in manifest["shards"]]
        faults = Faults.from_json(manifest["faults"])
        held_out = tuple(tuple(map(int, prompt)) for prompt in manifest["held_out"])
        counts = {name: int(manifest[name]) for name in ("lines", "documents", "truncated", "tokens")}
        name, sequence = str(manifest["key"]), int(manifest["recipe"]["sequence"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message = f"{what}: `{folder / MANIFEST}` is missing, or was changed"
        raise Failure(Exit.INPUT, message, hint=mend) from None
    if wanted is not None and name != wanted:
        message = f"{what}: `{folder}` holds key {name[:12]}…, asked for {wanted[:12]}…"
        raise Failure(Exit.INPUT, message, hint=mend)
    shelf = shards.Shelf(folder, found, what=what, mend=mend)
    left_out = set(without)
    return Stored(
        folder=folder,
        key=name,
        shelf=shelf,
        numbers=tuple(row for row in range(len(shelf)) if row not in left_out) if left_out else None,
        lines=counts["lines"],
        documents=counts["documents"],
        truncated=counts["truncated"],
        empty=0,
        fill=counts["tokens"] / max(1, len(shelf) * sequence),
        held_out=held_out,
        faults=faults,
    )


def report(stored: Stored, say: Callable[[str], None]) -> None:
    """Say what the rows are and what was left out, with the first line of each kind."""
    say(stored.sentence())
    for sentence in stored.faults.sentences():
        say(f"  {sentence}")


@contextlib.contextmanager
def _held(home: Path, name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the right to make one entry; waits for whoever else makes it."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / f".{name}.lock").open("w")
    except OSError as error:
        raise storage.refusal(error, "keep prepared data", home) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that prepares the same data")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _code() -> str:
    """Digest of the code that decides the rows, its comments, docstrings and layout apart."""
    whole = hashlib.sha256()
    for module in (chats, data, preparing, rendering):
        tree = ast.parse(inspect.getsource(module))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [  # type: ignore[attr-defined]  # what has a body takes another
                    each for each in body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
                ]
        whole.update(ast.dump(tree).encode())
    return whole.hexdigest()

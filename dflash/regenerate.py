"""Samples to learn from: prompts cut from the text, each continued greedily by the target itself (DFlash, section 4.2).

What the target would say is what a drafter must guess; what stood in the text is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import safetensors
import torch
from safetensors.torch import save
from torch import Tensor
from transformers.cache_utils import DynamicCache

from dflash import config, storage
from dflash.data import Sample
from dflash.target import Target, digest, encode, require_kept, stop_tokens
from dflash.text import Text
from env.errors import Exit, Failure

BATCH = 128
"""Prompts continued together, and samples in a file: what a run that is killed has to do again. On two CPU cores 64 to
256 take the same time for each token; more would only copy a larger cache about."""


def prompts(target: Target, documents: Sequence[str], count: int, length: int, *, seed: int) -> list[list[int]]:
    """Cut `count` prompts of `length` tokens out of documents: no two begin at one place, every place is as likely.

    Raises:
        Failure: Exit.INPUT, when the documents have fewer places where a prompt can begin.
    """
    tokens = [encode(target, document) for document in documents]
    # A prompt lies within one document, so a document has as many beginnings as it has windows.
    ends = np.cumsum([max(0, len(document) - length + 1) for document in tokens])
    places = int(ends[-1]) if len(ends) else 0
    if places < count:
        message = f"the text has room for {places} prompts of {length} tokens, {count} are asked for"
        raise Failure(Exit.INPUT, message, hint="a longer text, or fewer or shorter prompts")
    drawn = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, length))))
    cut = []
    for place in drawn.choice(places, count, replace=False).tolist():
        number = int(np.searchsorted(ends, place, side="right"))
        start = place - (int(ends[number - 1]) if number else 0)
        cut.append(tokens[number][start : start + length].tolist())
    return cut


@torch.inference_mode()
def continuations(target: Target, prompt: Tensor, new_tokens: int) -> list[list[int]]:
    """The target's greedy continuations, each up to its first stop token (included) or `new_tokens` long.

    A plain loop over a key-value cache: transformers' `generate` takes as long, and follows a model's own settings,
    such as a penalty for repetition, which no verification of drafts does.

    Args:
        target: the target.
        prompt: (n, P) int64: prompts of one length, so that there is no padding.
        new_tokens: most tokens to add.
    """
    model = target.model
    ends = torch.tensor(sorted(stop_tokens(target)), dtype=torch.int64, device=model.device)
    cache = DynamicCache(config=model.config)
    latest = prompt.to(model.device)
    ended = torch.zeros(len(prompt), dtype=torch.bool, device=model.device)
    added: list[Tensor] = []
    while len(added) < new_tokens and not bool(ended.all()):
        output = model(input_ids=latest, cache=cache, use_cache=True, logits_to_keep=1)
        require_kept(cache)
        latest = output.logits[:, -1].argmax(-1, keepdim=True)
        added.append(latest)
        ended |= torch.isin(latest[:, 0], ends)
    if not added:
        return [[] for _ in prompt]
    whole = torch.cat(added, dim=1)
    stops = torch.isin(whole, ends)
    # Tokens up to and with the first stop: those before which no stop has been.
    lengths = ((stops.cumsum(1) - stops.long()) == 0).sum(1)
    return [row[:length] for row, length in zip(whole.tolist(), lengths.tolist(), strict=True)]


class Watch(Protocol):
    """What is told of samples as they come."""

    def __call__(self, count: int, /, *, made: bool) -> None:
        """Take how many came, and whether the target has just made them: an earlier start may have."""


def samples(
    settings: config.Config,
    text: Text,
    target: Target,
    folder: Path,
    *,
    seed: int,
    watch: Watch,
) -> list[Sample]:
    """Prompts of the training documents with the target's answers, kept in `folder/samples` as they are made.

    A file is used again if and only if its target's weights, its prompts and its lengths are those asked for.

    Args:
        settings: `data` says how many prompts, and how long they and their answers are.
        text: whose training documents the prompts are cut from.
        target: who answers.
        folder: the run's.
        seed: decides which prompts are cut.
        watch: told of the samples that were just added; may raise to stop, and nothing is lost then.

    Raises:
        Failure: Exit.USAGE, when no prompts are asked for; Exit.INPUT, when the text has too few; Exit.STORAGE, when
            the disk refuses.
    """
    wanted = settings.data
    if wanted.prompts == 0:
        message = "data.prompts is 0, so there is nothing to train on"
        raise Failure(Exit.USAGE, message, hint="the table [data] of a configuration of your own says how many to cut")
    cut = torch.tensor(prompts(target, text.train, wanted.prompts, wanted.prompt_tokens, seed=seed))
    weights = digest(target)
    made: list[Sample] = []
    for number, part in enumerate(cut.split(BATCH)):
        file = folder / "samples" / f"{number:05d}.safetensors"
        key = _key(weights, part, wanted.response_tokens, stop_tokens(target))
        found = _read(file, key)
        missing = found is None
        if found is None:
            found = continuations(target, part, wanted.response_tokens)
            _write(file, key, found)
        made += [_sample(prompt, answer) for prompt, answer in zip(part, found, strict=True)]
        watch(len(part), made=missing)
    return made


def _sample(prompt: Tensor, answer: list[int]) -> Sample:
    tokens = torch.cat((prompt, torch.tensor(answer, dtype=torch.int64)))
    return Sample(tokens=tokens, response=torch.arange(len(tokens)) >= len(prompt))


def _key(weights: str, prompt: Tensor, new_tokens: int, ends: frozenset[int]) -> str:
    decisive = {"weights": weights, "prompts": prompt.tolist(), "new_tokens": new_tokens, "stop": sorted(ends)}
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()


def _write(file: Path, key: str, answers: list[list[int]]) -> None:
    tensors = {
        "tokens": torch.tensor([token for answer in answers for token in answer], dtype=torch.int64),
        "lengths": torch.tensor([len(answer) for answer in answers], dtype=torch.int64),
    }
    # One key: safetensors writes several in an order that changes from call to call.
    metadata = {"answers": json.dumps({"key": key, "sha256": _checksum(tensors)})}
    storage.write(file, save(tensors, metadata=metadata))


def _read(file: Path, key: str) -> list[list[int]] | None:
    """Answers kept under that key; None when there are none, or when the file is not what was written."""
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            promised = json.loads((opened.metadata() or {})["answers"])
            tensors = {name: opened.get_tensor(name) for name in ("tokens", "lengths")}
    except (OSError, safetensors.SafetensorError, KeyError, ValueError):
        return None
    if promised != {"key": key, "sha256": _checksum(tensors)}:
        return None
    return [answer.tolist() for answer in tensors["tokens"].split(tensors["lengths"].tolist())]


def _checksum(tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()

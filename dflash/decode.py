"""Speculative decoding: a proposer drafts a block, the target verifies it in one pass, the leading match is kept.

The loop is DFlash's (section 3 of the paper): a block is [last token, B - 1 proposals]; the target reads it in one
forward pass over its cache; proposals are accepted up to the first that is not the target's own greedy choice, and the
target's choice at that place comes free (the bonus token). Every cycle so keeps at least one token, and the output is
the target's own, whatever is proposed.

Rows advance at different speeds and still share a forward pass, as any left-padded batch does: after every cycle the
cache is shifted so that each row's verified tokens end at its right edge.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from dflash.target import decoder_layers, require_kept
from env.errors import Exit, Failure

NOTHING = -1
"""A slot without a proposal: equal to no token, so never accepted."""

Report = Callable[[int], None]
"""Called with the number of tokens that were just decoded, over all rows; may raise to stop."""


class Proposer(Protocol):
    """Guesses what the target would say next. It may remember rows: one object serves one call of `speculate`."""

    taps: tuple[int, ...]
    """Target layers whose outputs it reads; empty when it reads none."""
    block: int
    """Tokens of a block (B), the last verified token included."""

    def __call__(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], fresh: Sequence[Tensor]) -> Tensor:
        """Propose for each of the given rows.

        Args:
            rows: which prompts are still being continued, R of them.
            tokens: R sequences, prompt and output so far; the last token has not been through the target yet.
            fresh: R tensors (n, K*H), features of the tokens that were verified since the last call: those at the
                places len - 1 - n to len - 2. Their width is 0 without taps.

        Returns:
            (R, B - 1) int64 tokens, NOTHING where there is no proposal.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One prompt's continuation and how it came about."""

    tokens: tuple[int, ...]
    """The new tokens, at most as many as were asked for, a stop token included."""
    kept: tuple[int, ...]
    """Tokens that each cycle added to `tokens`, the bonus token included. The first token is the prefill's and no
    cycle's, and what the last cycle offers past the end of the response does not count: 1 + sum(kept) = len(tokens)."""
    accepted: tuple[int, ...]
    """Leading matches of each cycle, 0 to B - 1; the last cycle's may reach past the end of the response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """One prompt's continuation by the target alone."""

    tokens: tuple[int, ...]
    """The new tokens, at most as many as were asked for, a stop token included."""
    gaps: tuple[float, ...]
    """How far each token's logit was above the second best: where that is little, rounding decides."""


@dataclass(kw_only=True, slots=True)
class _Row:
    """A response in the making."""

    number: int
    text: list[int]
    """Prompt and output so far."""
    room: int
    """Tokens that may still be added."""
    stop: frozenset[int]
    cached: int
    """Tokens whose keys and values the cache holds; one fewer than `text` has, after the prefill."""
    fresh: Tensor
    prompt: int
    kept: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int]) -> int:
        """Take tokens up to the end of the response; returns how many."""
        tokens = tokens[: self.room]
        end = next((place + 1 for place, token in enumerate(tokens) if token in self.stop), None)
        taken = tokens[:end]
        self.text.extend(taken)
        self.room = 0 if end is not None else self.room - len(taken)
        return len(taken)


@torch.inference_mode()
def speculate(
    model: PreTrainedModel,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    stop: frozenset[int] = frozenset(),
    report: Report | None = None,
) -> list[Response]:
    """Continue every prompt by `new_tokens` tokens or to a stop token, as the target would greedily.

    Raises:
        Failure: Exit.INPUT, when the target keeps a state that cannot be rolled back.
    """
    device = model.device
    cache = _new_cache(model)
    with _tapped(model, proposer.taps) as taps:
        first = _prefill(model, cache, prompts).argmax(-1).tolist()
        width = cache.get_seq_length()
        rows = [
            _Row(
                number=number,
                text=list(prompt),
                room=new_tokens,
                stop=stop,
                cached=len(prompt),
                fresh=taps(number, width - len(prompt), width),
                prompt=len(prompt),
            )
            for number, prompt in enumerate(prompts)
        ]
        added = sum(row.add([token]) for row, token in zip(rows, first, strict=True))
        live = rows
        ends = [width] * len(rows)
        while True:
            if report is not None:
                report(added)
            left = [place for place, row in enumerate(live) if row.room > 0]
            live = [live[place] for place in left]
            if not live:
                break
            width = _shift(cache, left, [ends[place] for place in left], max(row.cached for row in live))
            proposals = proposer([row.number for row in live], [row.text for row in live], [row.fresh for row in live])
            last = torch.tensor([[row.text[-1]] for row in live], device=device)
            block = torch.cat((last, proposals.clamp(min=0)), 1)
            verified = _extend(model, cache, block, [row.cached for row in live]).argmax(-1)
            matches = (proposals == verified[:, :-1]).long().cumprod(1).sum(1).tolist()
            added = 0
            for place, (row, accepted, tokens) in enumerate(zip(live, matches, verified.tolist(), strict=True)):
                row.accepted.append(accepted)
                row.kept.append(row.add(tokens[: accepted + 1]))
                row.cached += accepted + 1
                row.fresh = taps(place, 0, accepted + 1)
                added += row.kept[-1]
            ends = [width + accepted + 1 for accepted in matches]
    return [
        Response(tokens=tuple(row.text[row.prompt :]), kept=tuple(row.kept), accepted=tuple(row.accepted))
        for row in rows
    ]


@torch.inference_mode()
def greedy(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    stop: frozenset[int] = frozenset(),
    report: Report | None = None,
) -> list[Reference]:
    """Continue every prompt by the target alone, a token at a time: what `speculate` must reproduce.

    Raises:
        Failure: Exit.INPUT, when the target keeps a state that cannot be rolled back.
    """
    cache = _new_cache(model)
    lengths = [len(prompt) for prompt in prompts]
    logits = _prefill(model, cache, prompts)
    tokens: list[list[int]] = [[] for _ in prompts]
    gaps: list[list[float]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    for step in range(new_tokens):
        best = logits.float().topk(2, -1)
        chosen = best.indices[:, 0].tolist()
        above = (best.values[:, 0] - best.values[:, 1]).tolist()
        for row, (token, gap) in enumerate(zip(chosen, above, strict=True)):
            if not done[row]:
                tokens[row].append(token)
                gaps[row].append(gap)
                done[row] = token in stop
        if report is not None:
            report(len(done) - sum(done))
        if all(done) or step == new_tokens - 1:
            break
        block = best.indices[:, :1]
        logits = _extend(model, cache, block, [length + step for length in lengths])[:, -1]
    return [Reference(tokens=tuple(t), gaps=tuple(g)) for t, g in zip(tokens, gaps, strict=True)]


Choose = Callable[[Tensor, Sequence[int], int], Tensor]
"""From logits (R, V) of what comes next in the given rows, and its place in the response, to tokens (R,)."""


@torch.inference_mode()
def respond(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    choose: Choose,
    *,
    stop: frozenset[int] = frozenset(),
    report: Report | None = None,
) -> list[list[int]]:
    """Continue every prompt by `new_tokens` tokens or to a stop token (included), a token at a time.

    Once half of the rows have ended, the others go on without them. A target with a state that cannot be cut takes
    prompts of one length only, and keeps all rows to the end.
    """
    flat = cuts(model)
    if not flat and len({len(prompt) for prompt in prompts}) > 1:
        raise ValueError("prompts of several lengths for a target whose state knows no padding")
    cache = DynamicCache() if flat else DynamicCache(config=model.config)
    found: list[list[int]] = [[] for _ in prompts]
    live = list(range(len(prompts)))
    logits = _prefill(model, cache, prompts)
    for step in range(new_tokens):
        chosen = choose(logits, live, step)
        for row, token in zip(live, chosen.tolist(), strict=True):
            if not (found[row] and found[row][-1] in stop):
                found[row].append(token)
        ended = [bool(found[row] and found[row][-1] in stop) for row in live]
        if report is not None:
            report(len(live) - sum(ended))
        if all(ended) or step == new_tokens - 1:
            break
        if flat and 2 * sum(ended) >= len(live):
            places = [place for place, over in enumerate(ended) if not over]
            live, chosen = [live[place] for place in places], chosen[places]
            held = max(len(prompts[row]) for row in live) + step
            _shift(cache, places, [cache.get_seq_length()] * len(places), held)
        logits = _extend(model, cache, chosen.unsqueeze(1), [len(prompts[row]) + step for row in live])[:, -1]
    return found


def cuts(model: PreTrainedModel) -> bool:
    """Whether all that a target remembers is keys and values, which can be cut and padded."""
    try:
        _new_cache(model)
    except Failure:
        return False
    return True


def _new_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache of plain keys and values for every layer, sliding ones too: their window is the mask's business here."""
    for layer in DynamicCache(config=model.config).layers:
        if not isinstance(layer, DynamicLayer) or isinstance(layer, LinearAttentionCacheLayerMixin):
            raise Failure(
                Exit.INPUT,
                f"the target `{model.config.model_type}` keeps a state that cannot be rolled back: "
                f"{type(layer).__name__}",
                hint="speculative decoding needs a target whose layers all attend to keys and values",
            )
    return DynamicCache()


def _prefill(model: PreTrainedModel, cache: DynamicCache, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Fill the cache with left-padded prompts; logits (R, V) of what follows each."""
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt is empty: nothing precedes its first token")
    width = max(len(prompt) for prompt in prompts)
    padded = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    return _forward(model, cache, padded, [len(prompt) - width for prompt in prompts], logits_to_keep=1)[:, -1]


def _extend(model: PreTrainedModel, cache: DynamicCache, block: Tensor, cached: Sequence[int]) -> Tensor:
    """Append a block (R, B) to rows that hold `cached` tokens at the cache's right edge; logits (R, B, V)."""
    return _forward(model, cache, block, cached)


def _forward(model: PreTrainedModel, cache: DynamicCache, tokens: Tensor, first: Sequence[int], **more: int) -> Tensor:
    """Run tokens (R, T) whose leftmost stands at place `first[r]` of its row; a negative place is padding."""
    start = torch.tensor(first, device=tokens.device).unsqueeze(1)
    old = cache.get_seq_length()
    places = start + torch.arange(-old, tokens.shape[1], device=tokens.device)
    out: Any = model(
        input_ids=tokens,
        attention_mask=(places >= 0).long(),
        position_ids=places[:, old:].clamp(min=0),
        cache=cache,
        use_cache=True,
        **more,
    )
    require_kept(cache)
    logits: Tensor = out.logits
    return logits


def _shift(cache: DynamicCache, places: Sequence[int], ends: Sequence[int], width: int) -> int:
    """Keep the rows at `places` and, of each, the `width` columns before its end; returns `width`.

    Rejected tokens, which stand right of the end, are dropped so, and a shorter row is padded on its left with what
    happens to stand there; the attention mask hides it.
    """
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        device = layer.keys.device
        columns = torch.tensor(ends, device=device).unsqueeze(1) + torch.arange(-width, 0, device=device)
        columns = columns.clamp(min=0)[:, None, :, None]
        kept = torch.tensor(places, device=device)
        layer.keys = layer.keys[kept].take_along_dim(columns, 2)
        layer.values = layer.values[kept].take_along_dim(columns, 2)
    return width


@contextlib.contextmanager
def _tapped(model: PreTrainedModel, layer_ids: Sequence[int]) -> Iterator[Callable[[int, int, int], Tensor]]:
    """Keep the outputs of decoder layers; yields a function from (row, from, to) to their latest features (n, K*H)."""
    seen: dict[int, Tensor] = {}

    def keep(layer_id: int) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
            seen[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    layers = decoder_layers(model)
    handles = [layers[layer_id].register_forward_hook(keep(layer_id)) for layer_id in layer_ids]

    def latest(row: int, start: int, end: int) -> Tensor:
        if not layer_ids:
            return torch.empty(end - start, 0)
        return torch.cat([seen[layer_id][row, start:end] for layer_id in layer_ids], -1)

    try:
        yield latest
    finally:
        for handle in handles:
            handle.remove()

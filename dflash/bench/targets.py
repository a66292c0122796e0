"""The frozen target: the features that a pass reads, and the responses that data are made of.

Its weights are drawn, not trained: what they are does not change what a product takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dflash import config, small_target
from dflash import target as targets
from dflash.bench.measure import Bench, Figure, Floor, race, require_equal
from dflash.bench.training import TOLERANCE
from dflash.data import positions
from dflash.decode import respond
from dflash.graphs import DTYPES
from dflash.target import Target

DOCUMENTS = 2
"""In each packed row."""


def features(bench: Bench) -> list[Figure]:
    """Tapped layers, the pass ended after the last of them, against transformers' way to all hidden states."""
    sizes, shapes = bench.settings.drafter, bench.settings.shapes
    whole, taps = drawn_target(bench, DTYPES[bench.settings.precision.compute]), sizes.target_layer_ids
    with bench.device:
        tokens = torch.arange(shapes.rows * shapes.sequence).view(shapes.rows, -1) * 7 % sizes.vocab_size
        document = (torch.arange(shapes.sequence) * DOCUMENTS // shapes.sequence).repeat(shapes.rows, 1)
    model: Any = whole.model
    places = positions(document)

    def ours() -> Tensor:
        return targets.features(whole, tokens, document, taps)

    @torch.no_grad()
    def theirs() -> Tensor:
        out = model(input_ids=tokens, position_ids=places, use_cache=False, output_hidden_states=True)
        return torch.cat([out.hidden_states[tap + 1] for tap in taps], -1)

    tolerance = 1e-6 if model.dtype == torch.float32 else TOLERANCE[model.dtype]
    require_equal("features", ours(), theirs(), tolerance=tolerance)
    measured, peers = race(bench, ours, theirs)
    length = shapes.sequence // DOCUMENTS
    seen = shapes.rows * DOCUMENTS * length * (length + 1) // 2
    floor = Floor(
        amount=(taps[-1] + 1) * layer_operations(whole, tokens.numel(), seen),
        what="products up to the last tap, of what is seen",
        rate=bench.machine.products(model.dtype),
    )
    return [
        Figure(
            benchmark="features",
            what=f"{len(taps)} taps of {sizes.target_layers} layers, {shapes.rows} x {shapes.sequence} tokens",
            ours=measured,
            floor=floor,
            peer="transformers, output_hidden_states",
            theirs=peers,
        )
    ]


def responses(bench: Bench, *, prompts: int = 16, new_tokens: int = 64) -> list[Figure]:
    """Greedy responses as samples are written, against transformers' `generate`, token for token the same."""
    recipe, vocabulary = bench.settings.evaluation, bench.settings.drafter.vocab_size
    whole = drawn_target(bench, torch.float32)
    length = min(recipe.prompt_tokens, 64)
    given = (torch.arange(prompts * length).view(prompts, length) * 13 % vocabulary).tolist()
    model: Any = whole.model
    model.generation_config.eos_token_id = None
    padded = torch.tensor(given, device=bench.device)

    def ours() -> list[list[int]]:
        return respond(model, given, new_tokens, likeliest)

    def theirs() -> Tensor:
        out: Tensor = model.generate(
            padded,
            attention_mask=torch.ones_like(padded),
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        return out[:, length:]

    # in bfloat16 rounding decides between two likeliest tokens, so what is compared are products in float32
    require_equal("responses", torch.tensor(ours()), theirs().cpu())
    model.to(DTYPES[bench.settings.precision.compute])
    measured, peers = race(bench, ours, theirs)
    # each step reads all weights but the embeddings, of which it looks up a few rows
    read = sum(weight.nbytes for weight in model.parameters()) - targets.embedding(whole).nbytes
    reading = Floor(amount=read * new_tokens, what="weights, once a token", rate=bench.machine.copying)
    seen = prompts * sum(range(length, length + new_tokens))
    layers = whole.model.config.get_text_config().num_hidden_layers
    head = 2.0 * prompts * new_tokens * targets.head(whole).numel()
    multiplying = Floor(
        amount=layers * layer_operations(whole, prompts * (length + new_tokens), seen) + head,
        what="products",
        rate=bench.machine.products(model.dtype),
    )
    return [
        Figure(
            benchmark="responses",
            what=f"{prompts} responses of {new_tokens} tokens, greedy",
            ours=measured,
            floor=max(reading, multiplying, key=lambda floor: floor.seconds),
            peer="transformers' generate",
            theirs=peers,
        )
    ]


def likeliest(logits: Tensor, rows: Sequence[int], step: int) -> Tensor:
    """The greedy choice."""
    del rows, step
    return logits.argmax(-1)


def drawn_target(bench: Bench, dtype: torch.dtype) -> Target:
    """A target of the configuration's sizes with drawn weights, on the device of training."""
    settings = bench.settings
    if settings.target is None:  # one that a run does not train for itself
        recipe = config.SmallTarget(
            rows=1, sequence=1, steps=1, lr=1.0, warmup=0.0, intermediate_size=settings.drafter.intermediate_size
        )
        settings = replace(settings, target=recipe)
    with bench.device:
        model: Any = small_target.build(settings, seed=0)
    model = model.to(bench.device, dtype).eval().requires_grad_(False)
    packs = targets.keeps_documents_apart(model)
    return Target(model=model, tokenizer=small_target.tokenizer(), name="a drawn target", packs=packs)


def layer_operations(whole: Target, tokens: int, seen: int) -> float:
    """Operations of one decoder layer's products over so many tokens and pairs of a query and a key that it sees."""
    shape: Any = whole.model.config.get_text_config()
    wide = shape.num_attention_heads * shape.head_dim
    narrow = 2 * shape.num_key_value_heads * shape.head_dim
    weights = shape.hidden_size * (2 * wide + narrow + 3 * shape.intermediate_size)
    return float(2 * (tokens * weights + 2 * seen * wide))

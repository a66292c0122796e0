"""Which graphs a configuration compiles: one step that calls them all, and an identity of what defines them.

A bake compiles what this step compiles, and a training process compiles what its own step compiles, so both go through
`micro_step`. A graph depends on shapes, dtypes and which tensors need a gradient, never on values.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from dflash import compiling, config, loss, mask, model, winners
from dflash.loss import Chunk, linear_cross_entropy
from dflash.model import Drafter

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

OUTSIDE = ("rope_theta", "mask_token_id", "target_layers")
"""Sizes of a drafter that no compiled graph contains: angles are tensors, and features arrive already tapped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one forward and backward pass of b packed rows reads, on the device of training."""

    embedded: Tensor
    """(b, N*B, H) embeddings of [anchor, MASK, ...] of every slot, in the compute dtype."""
    positions: Tensor
    """(b, N*B) int32 place of each block token."""
    features: Tensor
    """(b, S, K*H) tapped hidden states of the target, in the compute dtype."""
    position: Tensor
    """(b, N) int32 place of each anchor."""
    start: Tensor
    """(b, N) int32 first place of each anchor's document."""
    labels: Tensor
    """(b*N*B,) int64."""
    weight: Tensor
    """(b*N*B,) float32 weight of each prediction, 0 where none is asked for."""
    head: Tensor
    """(V, H) the target's head, in the compute dtype."""


def micro_step(drafter: Drafter, chunk: Chunk, settings: config.Config, batch: Batch) -> tuple[Tensor, Tensor]:
    """One forward and backward pass: the weighted loss, () float32, and which labels were the likeliest, (b*N*B,) bool.

    Gradients are added to the drafter's. Everything that is compiled is called from here.
    """
    shapes = settings.shapes
    seen = mask.tiled if batch.embedded.device.type == "cuda" else mask.dense
    hidden = drafter(
        batch.embedded,
        batch.positions,
        batch.features,
        seen(batch.position, batch.start, sequence=shapes.sequence, block=shapes.block),
    )
    part, right = linear_cross_entropy(
        hidden.flatten(0, 1),
        batch.head,
        batch.labels,
        batch.weight,
        chunk=chunk,
        pieces=shapes.rows * shapes.anchors // settings.loss.chunk_blocks,
    )
    part.backward()
    return part.detach(), right


def example(settings: config.Config, device: torch.device, *, seed: int = 0) -> Batch:
    """A batch of the configuration's shapes with drawn values, anchors at evenly spread places of one document."""
    sizes, shapes = settings.drafter, settings.shapes
    dtype = DTYPES[settings.precision.compute]
    generator = torch.Generator(device).manual_seed(seed) if _is_real(device) else None

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    # spread over the row, strictly before its end: every block sees another number of features
    position = (torch.arange(shapes.anchors, device=device) * (shapes.sequence - 1) // shapes.anchors).to(torch.int32)
    position = position.repeat(shapes.rows, 1)
    offsets = torch.arange(shapes.block, device=device, dtype=torch.int32)
    asked = (offsets > 0).float().repeat(shapes.rows * shapes.anchors)
    return Batch(
        embedded=drawn(shapes.rows, shapes.queries, sizes.hidden_size),
        positions=(position.unsqueeze(-1) + offsets).flatten(1),
        features=drawn(shapes.rows, shapes.sequence, len(sizes.target_layer_ids) * sizes.hidden_size),
        position=position,
        start=torch.zeros_like(position),
        labels=torch.arange(shapes.rows * shapes.queries, device=device) % sizes.vocab_size,
        weight=asked / (shapes.rows * shapes.anchors * (shapes.block - 1)),
        head=drawn(sizes.vocab_size, sizes.hidden_size) * 0.02,
    )


class Rehearsal:
    """A configuration's step on one device, ready to be called: the drafter, its compiled regions and a batch."""

    def __init__(self, settings: config.Config, device: torch.device, *, seed: int = 0) -> None:
        winners.keep_in_cache()
        self.settings = settings
        with device:  # values matter to nobody, so a billion weights need not be drawn on the CPU first
            self.drafter = Drafter(settings.drafter)
        self.batch = example(settings, device, seed=seed)
        self.chunk = compiling.compile_regions(self.drafter)

    def __call__(self) -> Tensor:
        """One step; its loss. Gradients are dropped, so that the next step is like the first."""
        lost, _ = micro_step(self.drafter, self.chunk, self.settings, self.batch)
        self.drafter.zero_grad()
        return lost


def rehearsal(tables: dict[str, Any], device: str) -> Rehearsal:
    """The step of a configuration given as plain tables (`config.to_tables`): what a bake is handed by name."""
    return Rehearsal(config.parse(tables, "the configuration to bake"), torch.device(device))


def describe(name: str) -> dict[str, Any]:
    """What a bake must know of a configuration, a preset or a file: its tables, and the identity of its graphs.

    Raises:
        Failure: Exit.USAGE, see `config.load`.
    """
    settings = config.load(name)
    return {
        "tables": config.to_tables(settings),
        "graph_ids": {device: graph_id(settings, device) for device in ("cpu", "cuda")},
    }


def graph_id(settings: config.Config, device_type: str = "cuda") -> str:
    """Hexadecimal sha256 over what decides the graphs: sizes, shapes, number formats, and the source that defines them.

    Comments, documentation, and names of this machine do not enter, nor do settings that only steer a run.
    """
    sizes = {name: value for name, value in config.to_tables(settings)["drafter"].items() if name not in OUTSIDE}
    sizes["target_layer_ids"] = len(settings.drafter.target_layer_ids)
    decides = {
        "drafter": sizes,
        "shapes": config.to_tables(settings)["shapes"],
        "chunk_blocks": settings.loss.chunk_blocks,
        "compute": settings.precision.compute,
        "device": device_type,
        "source": [source_digest(module) for module in (model, mask, loss)],
        "compiling": source_digest(compiling.compile_regions),
        "step": source_digest(micro_step),
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def source_digest(thing: ModuleType | Any) -> str:
    """Digest of a module's or function's code as Python reads it: no comments, no layout, no docstrings."""
    return hashlib.sha256(_canonical(ast.parse(inspect.cleandoc("\n" + inspect.getsource(thing)))).encode()).hexdigest()


def _canonical(node: object) -> str:
    """A syntax tree as text, the same from every Python that we support: `ast.dump` differs between them."""
    if isinstance(node, list):
        return "[" + ",".join(_canonical(part) for part in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name in ("kind", "type_comment") or value is None or value == []:
            continue
        if name == "body" and isinstance(value, list) and _is_docstring(value[0]):
            value = value[1:]
        fields.append(f"{name}={_canonical(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _is_docstring(statement: object) -> bool:
    """Whether a statement is a bare string: a docstring, or one that stands below the field that it explains."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _is_real(device: torch.device) -> bool:
    """Whether tensors on this device hold values: not so while a bake stands in for it."""
    return not isinstance(torch.empty(0), FakeTensor) and device.type != "meta"

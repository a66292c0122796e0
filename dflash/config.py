"""The configuration of a run: frozen records, read from a preset or a user's TOML.

A value that cannot be raises ValueError where the record is made; `load` turns it into a sentence with its place.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from env.errors import Exit, Failure

PRESETS = Path(__file__).parent / "presets"
TILE = 128
"""Queries and keys that flex attention handles as one tile; lengths are whole tiles so that no kernel has a ragged edge
(lengths that are not multiples of 128 gave NaN gradients in pytorch/pytorch#153799)."""


LARGEST = 1 << 31
"""No size or count reaches this; torch would fail far from the place where it was written."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_counts(record: object, *names: str, least: int = 1) -> None:
    for name in names:
        value = getattr(record, name)
        rule = "must be positive" if least else "must not be negative"
        _require(value >= least, f"{name} is {value}, {rule}")
        _require(value < LARGEST, f"{name} is {value}, must be below {LARGEST}")


def _require_positive(record: object, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        _require(value > 0 and math.isfinite(value), f"{name} is {value}, must be positive and finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafter:
    """The drafter's architecture: a Qwen3-style decoder without a causal mask (DFlash, section 4)."""

    hidden_size: int
    """Width H; equals the target's, whose embeddings and head the drafter borrows."""
    intermediate_size: int
    """Width of the gated MLP."""
    layers: int
    """Decoder layers."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads, shared by groups of query heads."""
    head_dim: int
    """Width of a head."""
    vocab_size: int
    """Rows of the target's embedding table."""
    rms_norm_eps: float
    """Added to the mean square in every RMSNorm."""
    rope_theta: float
    """Base of the rotary embedding; equals the target's."""
    mask_token_id: int
    """An unused row of the target's table that stands for «to be filled in»; never padding or end of text."""
    target_layers: int
    """Decoder layers that the target has."""
    target_layer_ids: tuple[int, ...]
    """Tapped target layers; id j means the OUTPUT of layer j, which is `hidden_states[j + 1]`."""

    def __post_init__(self) -> None:
        _require_counts(self, "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim")
        _require_counts(self, "vocab_size", "target_layers")
        _require_positive(self, "rms_norm_eps", "rope_theta")
        _require(
            self.heads % self.kv_heads == 0, f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
        )
        _require(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}, must be even: rotary embedding turns pairs")
        _require(
            0 <= self.mask_token_id < self.vocab_size,
            f"mask_token_id is {self.mask_token_id}, must be a row of the table (0 to {self.vocab_size - 1})",
        )
        ids = self.target_layer_ids
        _require(len(ids) > 0, "target_layer_ids is empty, the drafter would see nothing of the target")
        _require(list(ids) == sorted(set(ids)), f"target_layer_ids is {list(ids)}, must rise without repeating a layer")
        _require(
            ids[0] >= 0 and ids[-1] < self.target_layers,
            f"target_layer_ids is {list(ids)}, must lie in 0 to {self.target_layers - 1} (target_layers)",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """The one shape that every step of a run has: what makes the set of graphs closed."""

    rows: int
    """Packed sequences in one forward pass (b)."""
    sequence: int
    """Tokens of a packed sequence (S)."""
    anchors: int
    """Anchor slots of a packed sequence (N); unused ones are masked, never dropped."""
    block: int
    """Tokens of a draft block, its anchor included (B)."""

    def __post_init__(self) -> None:
        _require_counts(self, "rows", "sequence", "anchors", "block")
        _require(self.block >= 2, f"block is {self.block}, must be at least 2: an anchor and one token to predict")
        _require(TILE % self.block == 0, f"block is {self.block}, must divide {TILE}: a tile holds whole blocks")
        whole = self.sequence > 0 and self.sequence % TILE == 0
        _require(whole, f"sequence is {self.sequence}, must be a multiple of {TILE}")
        _require(
            self.anchors > 0 and self.queries % TILE == 0,
            f"anchors * block is {self.anchors} * {self.block} = {self.queries}, must be a multiple of {TILE}",
        )
        _require(
            self.anchors < self.sequence, f"anchors ({self.anchors}) must be fewer than sequence ({self.sequence})"
        )

    @property
    def queries(self) -> int:
        """Draft tokens of a packed sequence (N * B)."""
        return self.anchors * self.block


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Cross-entropy whose weight falls with the place in the block (DFlash, eq. 4)."""

    gamma: float
    """Decay: slot k weighs exp(-(k - 1) / gamma); 7 for blocks of 16."""
    chunk_blocks: int
    """Blocks whose logits exist at once; over a vocabulary of 151,936 all of them would take gigabytes."""

    def __post_init__(self) -> None:
        _require_positive(self, "gamma")
        _require_counts(self, "chunk_blocks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """Steps, and a rate that rises linearly and falls along a cosine to zero."""

    kind: Literal["adamw", "muon"]
    """AdamW throughout, as in the paper; or Muon for matrices, which gets further in few steps, and AdamW for norms."""
    lr: float
    """Peak learning rate; Muon's updates are scaled to the size of AdamW's, so that one rate serves both."""
    warmup: float
    """Share of the steps over which the rate rises."""
    clip: float
    """Largest norm of the whole gradient."""
    weight_decay: float
    """Decoupled weight decay."""
    betas: tuple[float, float]
    """AdamW's decay rates of the two moments."""
    accumulate: int
    """Forward passes whose gradients make one step, over all drafters of a run."""
    epochs: int
    """Passes over the packed rows; each draws its anchors anew."""
    skips: int = 5
    """Steps in a row that may be skipped for numbers that are not finite; with this many the run stops."""
    recompute: bool = False
    """Keep only what goes into decoder layers, and compute the rest again in the backward pass: less memory, slower."""
    shard: bool = False
    """Spread weights, gradients and optimizer state over the drafters: less memory on each, slower."""

    def __post_init__(self) -> None:
        _require_positive(self, "lr", "clip")
        whole = self.kind == "muon"
        _require(not (self.shard and whole), 'shard is true, which needs kind = "adamw": muon turns whole matrices')
        _require(0 <= self.warmup < 1, f"warmup is {self.warmup}, must be a share of the steps (0 to below 1)")
        _require(0 <= self.weight_decay < 1, f"weight_decay is {self.weight_decay}, must lie in 0 to below 1")
        _require(all(0 <= beta < 1 for beta in self.betas), f"betas is {list(self.betas)}, must lie in 0 to below 1")
        _require_counts(self, "accumulate", "epochs", "skips")


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Weights, gradients and optimizer are float32; products are computed in `compute`."""

    compute: Literal["bfloat16", "float32"]
    """dtype of activations and of the weights' working copies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """When training state is saved."""

    every: int
    """Steps between two checkpoints."""
    keep: int
    """Newest checkpoints that stay on disk."""

    def __post_init__(self) -> None:
        _require_counts(self, "every", "keep")


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallTarget:
    """The small target that a run without `--target` trains for itself; its width and heads are the drafter's."""

    rows: int
    """Sequences a step."""
    sequence: int
    """Tokens of a sequence."""
    steps: int
    """Training steps: a number, never a time, since a worse target flatters the drafter."""
    lr: float
    """Peak learning rate of Muon for the matrices; AdamW takes a tenth for the rest."""
    warmup: float
    """Share of the steps over which the rate rises."""
    intermediate_size: int
    """Width of the gated MLP."""

    def __post_init__(self) -> None:
        _require_counts(self, "rows", "sequence", "steps", "intermediate_size")
        _require_positive(self, "lr")
        _require(0 <= self.warmup < 1, f"warmup is {self.warmup}, must be a share of the steps (0 to below 1)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The samples: prompts cut from the text, each continued by the target itself (DFlash, section 4.2)."""

    prompts: int
    """Prompts cut from the training part of a text; 0 when samples come with responses."""
    prompt_tokens: int
    """Tokens of a prompt."""
    response_tokens: int
    """Tokens that the target adds to each prompt, at most."""

    def __post_init__(self) -> None:
        _require_counts(self, "prompts", least=0)
        _require_counts(self, "prompt_tokens", "response_tokens", least=1 if self.prompts else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Speculative decoding of held-out prompts."""

    prompts: int
    """Held-out prompts."""
    prompt_tokens: int
    """Tokens of a prompt."""
    response_tokens: int
    """Tokens decoded for each prompt."""

    def __post_init__(self) -> None:
        _require_counts(self, "prompts", "prompt_tokens", "response_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything that decides what a run computes, its seed and its inputs apart."""

    drafter: Drafter
    """The drafter's architecture."""
    shapes: Shapes
    """The one shape of every step."""
    loss: Loss
    """Objective."""
    optimizer: Optimizer
    """Optimizer and schedule."""
    precision: Precision
    """Number formats."""
    checkpoint: Checkpoint
    """Saving."""
    data: Data
    """Samples."""
    evaluation: Evaluation
    """Decoding at the end of a run."""
    target: SmallTarget | None = None
    """How to train a small target; without it `--target` must name one."""

    def __post_init__(self) -> None:
        total = self.data.prompt_tokens + self.data.response_tokens
        _require(
            self.data.prompts == 0 or total <= self.shapes.sequence,
            f"data.prompt_tokens + data.response_tokens is {total}, "
            f"must fit in shapes.sequence ({self.shapes.sequence})",
        )
        _require(
            self.shapes.rows * self.shapes.anchors % self.loss.chunk_blocks == 0,
            f"loss.chunk_blocks ({self.loss.chunk_blocks}) must divide shapes.rows * shapes.anchors "
            f"({self.shapes.rows * self.shapes.anchors}): every chunk has one shape",
        )


def presets() -> list[str]:
    """Names of the configurations that come with the project."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def load(name: str) -> Config:
    """Read a configuration: a preset's name, or a TOML file, whose key `preset` names what it changes.

    Raises:
        Failure: Exit.USAGE, naming the file, the place, what stands there and what may.
    """
    return parse(_read(name), name)


def parse(tables: dict[str, Any], source: str) -> Config:
    """Turn TOML's tables into a checked configuration; `source` names them in an error.

    Raises:
        Failure: Exit.USAGE, naming the place, what stands there and what may.
    """
    _refuse_unknown(tables, Config, source, "")
    try:
        return msgspec.convert(tables, Config, strict=True)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        where = place.rstrip("`").lstrip(".")
        hint = None
        if what.startswith("Invalid enum value"):
            hint = f"may be {' or '.join(f'`{choice}`' for choice in _choices(where))}"
        elif what.startswith("Object missing required field"):
            hint = 'with `preset = "tiny"` as its first line, a file need only say what it changes'
        raise Failure(Exit.USAGE, f"{source}: {where}: {what}" if where else f"{source}: {what}", hint=hint) from None


def to_tables(config: Config) -> dict[str, Any]:
    """The configuration as plain tables, as they are written to a run's folder and read back from it."""
    tables: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    return {key: value for key, value in tables.items() if value is not None}


def _read(name: str) -> dict[str, Any]:
    path = Path(name)
    if name in presets():
        path = PRESETS / f"{name}.toml"
    elif path.suffix != ".toml":
        close = difflib.get_close_matches(name, presets(), n=1)
        known = ", ".join(f"`{preset}`" for preset in presets())
        hint = f"did you mean `--config {close[0]}`?" if close else f"presets are {known}; a file's name ends in .toml"
        raise Failure(Exit.USAGE, f"no configuration is called `{name}`", hint=hint)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark
    except FileNotFoundError:
        raise Failure(Exit.USAGE, f"the configuration `{name}` does not exist") from None
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not TOML, numbers of thousands of digits
        raise Failure(Exit.USAGE, f"the configuration `{name}` cannot be read: {error}") from None
    base = tables.pop("preset", None)
    if base is None:
        return tables
    if base not in presets():
        close = difflib.get_close_matches(str(base), presets(), n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"presets are {', '.join(presets())}"
        raise Failure(Exit.USAGE, f"{name}: preset: no preset is called `{base}`", hint=hint)
    return _overlay(_read(base), tables)


def _overlay(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        below = merged.get(key)
        merged[key] = _overlay(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _choices(place: str) -> tuple[str, ...]:
    """The words that may stand at a place that holds one of several."""
    kind: Any = Config
    for name in place.split("."):
        hint = get_type_hints(kind)[name]
        kind = next((part for part in (hint, *get_args(hint)) if is_dataclass(part)), hint)
    return get_args(kind)


def _refuse_unknown(tables: dict[str, Any], record: type, source: str, place: str) -> None:
    """Msgspec names an unknown key without saying which one was meant; this does."""
    hints = get_type_hints(record)
    known = [field.name for field in fields(record)]
    for key, value in tables.items():
        where = f"{place}.{key}" if place else key
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"known there: {', '.join(known)}"
            raise Failure(Exit.USAGE, f"{source}: {where}: unknown key", hint=hint)
        kinds = [kind for kind in (hints[key], *get_args(hints[key])) if is_dataclass(kind)]
        if kinds and isinstance(value, dict):
            _refuse_unknown(value, kinds[0], source, where)  # type: ignore[arg-type]  # is_dataclass says it is a type

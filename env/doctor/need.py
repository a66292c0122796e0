"""How much disk and memory a configuration needs, from its sizes.

Estimates to be held against a host before hours are spent, not budgets: each formula names what it counts. The two
that are exact, weights and optimizer state, make most of it for real drafters. Sizes are read from the configuration's
tables as they stand; whether the configuration is sound is for dflash to say, which knows it and which env does not
import.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from env.errors import Exit, Failure
from env.variants import ROOT

PRESETS = ROOT / "dflash" / "presets"

PROCESS = 1_500_000_000
"""Bytes of main memory that a training process takes before any model: 0.78 GB with torch and transformers imported
(measured, torch 2.11.0+cu130, no GPU), and the compile workers and the C++ compiler beside it (a kernel's translation
unit takes g++ about 0.5 GB)."""

CONTEXT = 1_000_000_000
"""Bytes of a card that the CUDA context, cuBLAS workspaces and NCCL take beside tensors."""

KERNELS = 1_000_000_000
"""Bytes for compiled kernels; a sealed cache of one configuration and card is a few MB, its working copy some tens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What a configuration needs, in bytes."""

    name: str
    """The configuration, as the user names it."""

    compute: str
    """dtype of the products: bfloat16 or float32."""

    parameters: int
    """Trained parameters of the drafter."""

    state: int
    """Weights, gradients and optimizer state of the drafter, which are there as long as it trains."""

    drafter: int
    """`state`, the borrowed embeddings and head, and the activations of one forward and backward pass."""

    target: int
    """The target's weights, and the activations of its forward pass."""

    target_files: int
    """The target's folder on disk; 0 where the run trains a small target itself."""

    checkpoint: int
    """One checkpoint: weights and both moments in float32."""

    run: int
    """The run's folder when it is largest: the checkpoints kept, the one being written, and the exported drafter."""


def read(name: str) -> Need:
    """The need of a preset, or of a user's TOML file, which may name a preset and change some of it.

    Raises:
        Failure: Exit.USAGE, if there is no such configuration or a size in it is missing or no number.
    """
    tables = _tables(name, base=True)
    try:
        return derive(name, tables)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise Failure(Exit.USAGE, f"the configuration `{name}` has not the sizes that are needed: {what}") from None


def _tables(name: str, *, base: bool) -> dict[str, Any]:
    preset = PRESETS / f"{name}.toml"
    path = preset if "/" not in name and preset.is_file() else Path(name)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        known = ", ".join(f"`{file.stem}`" for file in sorted(PRESETS.glob("*.toml")))
        raise Failure(
            Exit.USAGE,
            f"the configuration `{name}` cannot be read: {getattr(error, 'strerror', None) or error}",
            hint=f"presets are {known}; or name a TOML file" if known else None,
        ) from None
    changed = tables.pop("preset", None)
    if changed is None or not base:
        return tables
    whole = _tables(str(changed), base=False)
    for key, table in tables.items():
        below = whole.get(key)
        whole[key] = {**below, **table} if isinstance(below, dict) and isinstance(table, dict) else table
    return whole


def derive(name: str, tables: Mapping[str, Any]) -> Need:
    """Derive the need from a configuration's tables; KeyError or ValueError where a size is missing or impossible."""
    drafter, shapes = tables["drafter"], tables["shapes"]

    def size(table: Mapping[str, Any], key: str) -> int:
        value = table[key]
        if not isinstance(value, int) or value <= 0:
            raise ValueError(f"{key} is {value!r}")
        return value

    hidden, inner, layers, vocabulary = (
        size(drafter, key) for key in ("hidden_size", "intermediate_size", "layers", "vocab_size")
    )
    queries, keys = (size(drafter, key) * size(drafter, "head_dim") for key in ("heads", "kv_heads"))
    taps, depth = drafter["target_layer_ids"], size(drafter, "target_layers")
    rows, length, anchors, block = (size(shapes, key) for key in ("rows", "sequence", "anchors", "block"))
    compute = str(tables["precision"]["compute"])
    width = 2 if compute == "bfloat16" else 4

    # Qwen3's layer: q, k, v, o, three matrices of the gated MLP, two norms of the width and two of a head.
    layer = 2 * hidden * (queries + keys) + 3 * hidden * inner + 2 * hidden + 2 * size(drafter, "head_dim")
    parameters = layers * layer + len(taps) * hidden * hidden + 2 * hidden
    # float32 weights, gradients and AdamW's two moments; beside them the working copy that bfloat16 products use.
    state = parameters * (16 + (2 if width == 2 else 0))

    tokens = rows * anchors * block
    # What a layer keeps for its backward pass, per draft token: queries, attention's output and its projection's
    # input, six tensors of the width (residuals, norms), four of the MLP; per feature the keys and values, before and
    # after rope.
    kept = tokens * (3 * queries + 4 * keys + 6 * hidden + 4 * inner) + rows * length * 4 * keys
    features = rows * length * hidden * (len(taps) + 2)
    # Logits of one chunk in the compute type, as float32, and their gradient.
    chunk = size(tables["loss"], "chunk_blocks") * block * vocabulary * (width + 8)
    activations = (layers * kept + features) * width + chunk
    borrowed = 2 * vocabulary * hidden * width

    # The drafter is as wide as its target, and its layers are the target's own kind.
    small = tables.get("target")
    whole = depth * layer + 2 * vocabulary * hidden
    if small is None:
        target = whole * width + rows * length * (6 * hidden + 4 * inner) * width
        files = whole * 2
    else:  # trained here, in float32, with both moments and the logits of a step
        seen = size(small, "rows") * size(small, "sequence")
        mlp = size(small, "intermediate_size") - inner
        trained = whole + depth * 3 * hidden * mlp
        target = trained * 16 + seen * (depth * (10 * hidden + 4 * (inner + mlp)) + 3 * vocabulary) * 4
        files = 0
    checkpoint = 12 * parameters
    return Need(
        name=name,
        compute=compute,
        parameters=parameters,
        state=state,
        drafter=state + borrowed + activations,
        target=target,
        target_files=files,
        checkpoint=checkpoint,
        run=(size(tables["checkpoint"], "keep") + 1) * checkpoint + 4 * parameters,
    )


def human(size: float) -> str:
    """Bytes as people say them: `12.6 GB`, `350 MB`; powers of ten, as disks and `nvidia-smi`'s users count."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            value = size / factor
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{size / 1e3:.0f} kB"

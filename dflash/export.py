"""A drafter on disk as other people's programs load it: z-lab's layout, which vLLM and SGLang read too.

A folder with `config.json` (a Qwen3 configuration, `architectures: ["DFlashDraftModel"]`, and what DFlash adds) and
`model.safetensors` (11 tensors a layer and 3 more). Embeddings and head are the target's and are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from dflash import config, storage
from dflash.model import Drafter
from env.errors import Exit, Failure

ARCHITECTURE = "DFlashDraftModel"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
KNOWN = {"block_size", "mask_token", "mask_token_id", "num_target_layers", "target_layer_ids"}
"""Keys of `dflash_config` that change nothing beyond what `read` understands; others turn parts on that we lack."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Exported(NamedTuple):
    """What an export holds."""

    drafter: Drafter
    """With float32 parameters, whatever they were stored as."""
    sizes: config.Drafter
    """The architecture that config.json tells of."""
    block: int
    """Tokens of a block (B), its anchor included."""


def write(folder: Path, drafter: Drafter, settings: config.Config, *, longest: int | None = None) -> str:
    """Write a drafter as a folder, whole or not at all; returns the sha256 of its weights.

    Weights are stored in the dtype that training computed in: products ran with working copies in that dtype, so the
    exported drafter is the one that was trained, and no larger than need be. The same weights give the same bytes.

    Args:
        folder: the folder to be; one that is there is replaced.
        drafter: its float32 weights may be on any device.
        settings: the run's configuration.
        longest: positions that engines may serve (`max_position_embeddings`), the target's by custom; the length that
            training saw unless given.

    Raises:
        Failure: Exit.STORAGE, when the disk refuses; an old folder is then still there.
    """
    dtype = settings.precision.compute
    weights = {name: value.detach().to("cpu", DTYPES[dtype]) for name, value in drafter.state_dict().items()}
    content = describe(drafter.sizes, settings.shapes.block, dtype, longest or settings.shapes.sequence)
    with storage.new_folder(folder) as beside:
        (beside / CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        # transformers refuses weights whose metadata does not say which framework wrote them
        (beside / WEIGHTS).write_bytes(safetensors.torch.save(weights, metadata={"format": "pt"}))
    return storage.sha256(folder / WEIGHTS)


def describe(sizes: config.Drafter, block: int, dtype: str, longest: int) -> dict[str, Any]:
    """The content of config.json.

    `block_size` stands in both places that are in use, the top level and `dflash_config`, for readers that know one.
    """
    return {
        "architectures": [ARCHITECTURE],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": block,
        "dflash_config": {
            "block_size": block,
            "mask_token_id": sizes.mask_token_id,
            "target_layer_ids": list(sizes.target_layer_ids),
        },
        "dtype": dtype,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "layer_types": ["full_attention"] * sizes.layers,
        "max_position_embeddings": longest,
        "max_window_layers": sizes.layers,
        "model_type": "qwen3",
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "num_target_layers": sizes.target_layers,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": sizes.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": sizes.vocab_size,
    }


def read(folder: Path) -> Exported:
    """Load an export, ours or another's, strictly: what cannot be used as it stands is refused by its name.

    Raises:
        Failure: Exit.INPUT, naming the file and the key or tensor that is missing, unknown, or not what it must be.
    """
    sizes, block = _understand(_Keys(_load_config(folder / CONFIG), folder / CONFIG))
    weights = _load_weights(folder / WEIGHTS)
    with torch.device("meta"):  # names and shapes without memory, which a wrong config.json could ask any amount of
        drafter = Drafter(sizes)
    expected = drafter.state_dict()
    details = [
        *(f"{name}  missing" for name in expected if name not in weights),
        *(f"{name}  unknown" for name in weights if name not in expected),
    ]
    for name in sorted(expected.keys() & weights.keys()):
        found, wanted = weights[name], expected[name]
        if found.shape != wanted.shape:
            details.append(f"{name}  is {_shape(found)}, must be {_shape(wanted)}")
        elif not found.is_floating_point():
            details.append(f"{name}  holds {str(found.dtype).removeprefix('torch.')}, must hold floating-point numbers")
    if details:
        raise Failure(Exit.INPUT, f"`{folder / WEIGHTS}` does not hold the tensors of its {CONFIG}", details=details)
    drafter.load_state_dict({name: value.float() for name, value in weights.items()}, assign=True)
    return Exported(drafter, sizes, block)


class _Keys:
    """The keys of a config.json, each fetched with the type it must have."""

    def __init__(self, content: dict[str, Any], path: Path) -> None:
        self.content, self.path = content, path

    def get(self, name: str, kind: type | tuple[type, ...], content: dict[str, Any] | None = None) -> Any:
        """A key that must be there."""
        place = self.content if content is None else content
        if name not in place:
            raise self.refusal(f"lacks the key `{name}`")
        value = place[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.refusal(f"has {json.dumps(value)} as `{name}`")
        return value

    def refusal(self, what: str, hint: str | None = None) -> Failure:
        return Failure(Exit.INPUT, f"`{self.path}` {what}", hint=hint)


def _understand(keys: _Keys) -> tuple[config.Drafter, int]:
    """Sizes and block of a config.json; both places of `block_size` are read, and must agree where both are there."""
    architectures = keys.content.get("architectures")
    if architectures != [ARCHITECTURE]:
        hint = f"a drafter's architecture is `{ARCHITECTURE}`"
        raise keys.refusal(f"is for {json.dumps(architectures)}, not for a DFlash drafter", hint)
    ours = {"hidden_act": "silu", "attention_bias": False, "rope_scaling": None, "use_sliding_window": False}
    for name, value in ours.items():
        if keys.content.get(name, value) != value:
            found = json.dumps(keys.content[name])
            raise keys.refusal(f"has {found} as `{name}`; only {json.dumps(value)} is supported")
    layers = keys.get("num_hidden_layers", int)
    kinds = keys.content.get("layer_types") or ["full_attention"] * layers
    if kinds != ["full_attention"] * layers:
        raise keys.refusal(f"has {json.dumps(kinds)} as `layer_types`; only {layers} of full_attention are supported")
    more: dict[str, Any] = keys.get("dflash_config", dict)
    unknown = {name: value for name, value in more.items() if name not in KNOWN and value not in (None, False)}
    if unknown:
        name, value = next(iter(unknown.items()))
        raise keys.refusal(f"has `{name}` = {json.dumps(value)} in `dflash_config`, which this drafter does not know")
    blocks = {place["block_size"] for place in (keys.content, more) if isinstance(place.get("block_size"), int)}
    if len(blocks) != 1:
        what = f"names two block sizes: {min(blocks)} and {max(blocks)}" if blocks else "lacks the key `block_size`"
        raise keys.refusal(what)
    ids = keys.get("target_layer_ids", list, more)
    if not all(type(one) is int for one in ids):
        raise keys.refusal(f"has {json.dumps(ids)} as `target_layer_ids`")
    try:
        sizes = config.Drafter(
            hidden_size=keys.get("hidden_size", int),
            intermediate_size=keys.get("intermediate_size", int),
            layers=layers,
            heads=keys.get("num_attention_heads", int),
            kv_heads=keys.get("num_key_value_heads", int),
            head_dim=keys.get("head_dim", int),
            vocab_size=keys.get("vocab_size", int),
            rms_norm_eps=float(keys.get("rms_norm_eps", (int, float))),
            rope_theta=float(_rope_theta(keys)),
            mask_token_id=keys.get("mask_token_id", int, more),
            target_layers=keys.get("num_target_layers", int, more if "num_target_layers" in more else None),
            target_layer_ids=tuple(ids),
        )
    except ValueError as error:
        raise keys.refusal(f"cannot be a drafter's: {error}") from None
    return sizes, blocks.pop()


def _rope_theta(keys: _Keys) -> Any:
    """The base of the rotary embedding, where transformers 4 or transformers 5 writes it."""
    if "rope_theta" in keys.content:
        return keys.get("rope_theta", (int, float))
    parameters = keys.get("rope_parameters", dict)
    if parameters.get("rope_type", "default") != "default":
        raise keys.refusal(f"has {json.dumps(parameters)} as `rope_parameters`; only the default type is supported")
    return keys.get("rope_theta", (int, float), parameters)


def _load_config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Failure(Exit.INPUT, f"the drafter folder `{path.parent}` has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise Failure(Exit.INPUT, f"`{path}` cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise Failure(Exit.INPUT, f"`{path}` cannot be read: it holds no table")
    return content


def _load_weights(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise Failure(Exit.INPUT, f"the drafter folder `{path.parent}` has no {path.name}") from None
    except (OSError, SafetensorError) as error:
        raise Failure(Exit.INPUT, f"`{path}` cannot be read: {error}") from None


def _shape(tensor: Tensor) -> str:
    sizes: Sequence[int] = tensor.shape
    return "(" + ", ".join(map(str, sizes)) + ")"

"""The target: any causal language model that transformers reads, frozen, and what a drafter takes from it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import Cache
from transformers.masking_utils import create_masks_for_generate

from dflash import config, tensor_parallel
from dflash.data import positions
from dflash.tensor_parallel import whole
from env.errors import Exit, Failure

_UNUSABLE = (
    OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError,
    AttributeError, TypeError, ArithmeticError, StrictDataclassError,
)  # fmt: skip
"""What transformers raises over a folder or name that is no model; the last four over a config.json of nonsense."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Target:
    """A frozen model with its tokenizer."""

    model: PreTrainedModel
    """The whole model, in evaluation mode; no parameter takes a gradient."""
    tokenizer: PreTrainedTokenizerBase
    """Turns text into the model's tokens."""
    name: str
    """The folder or hub name it was loaded from."""
    packs: bool
    """Whether documents packed into one row stay apart. Where they would not, `features` runs them one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a drafter must agree with its target about; the names are those of `config.Drafter`."""

    hidden_size: int
    """Width of the hidden states."""
    vocab_size: int
    """Rows of the embedding table, which may be more than the tokenizer knows."""
    target_layers: int
    """Decoder layers."""
    rope_theta: float | None
    """Base of the rotary embedding; None when the target has none."""


def load(name: str, *, device: torch.device, dtype: torch.dtype, split: bool = False) -> Target:
    """Load a folder in transformers' format, or a model of the hub by its name, frozen.

    Code that comes with a model is never run: only architectures that transformers itself has.

    Args:
        name: folder or hub name.
        device: where it goes.
        dtype: number format of its weights.
        split: over all processes of the group, which must all call this: for one that is larger than a GPU.

    Raises:
        Failure: Exit.INPUT, when there is no such model, it cannot be read whole, it has no tokenizer, or cannot be
            split; Exit.UNREACHABLE, when it would have to be fetched and the hub does not answer.
    """
    _require_config(name)
    with quiet():
        try:
            # Cheap, and without it a name that is no model would only be noticed after the tokenizer's files.
            AutoConfig.from_pretrained(name, trust_remote_code=False)
            # An explicit type: what transformers annotates leaves the second form of the result out.
            pair: Any = AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype, output_loading_info=True, trust_remote_code=False
            )
            model, loaded = pair
        except _UNUSABLE as error:
            raise _refusal(name, error) from None
        absent = sorted(loaded["missing_keys"])
        if absent:
            # transformers would draw them at random and only warn.
            raise Failure(Exit.INPUT, f"the target `{name}` lacks {len(absent)} of its weights, `{absent[0]}` first")
        tokenizer = _tokenizer(name)
        rows = _table(model).weight.shape[0]
        if len(tokenizer) > rows:
            message = f"the target `{name}` has {rows} rows in its table, its tokenizer {len(tokenizer)} tokens"
            raise Failure(Exit.INPUT, message)
    if split:
        model = tensor_parallel.split(model, name)
    model = model.to(device).eval().requires_grad_(False)
    return Target(model=model, tokenizer=tokenizer, name=name, packs=keeps_documents_apart(model))


def reader(name: str) -> tuple[PreTrainedTokenizerBase, frozenset[int]]:
    """A target's tokenizer and the tokens that end its responses, without its weights.

    Raises:
        Failure: as `load`.
    """
    _require_config(name)
    with quiet():
        try:
            shape = AutoConfig.from_pretrained(name, trust_remote_code=False)
        except _UNUSABLE as error:
            raise _refusal(name, error) from None
        try:
            settings = GenerationConfig.from_pretrained(name)
        except OSError:
            settings = GenerationConfig.from_model_config(shape)
        tokenizer = _tokenizer(name)
    return tokenizer, _ends(settings, tokenizer)


def _require_config(name: str) -> None:
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise Failure(Exit.INPUT, f"the target folder `{name}` holds no model: it has no config.json")


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except _UNUSABLE as error:
        raise Failure(Exit.INPUT, f"the target `{name}` has no usable tokenizer: {_sentence(error)}") from None
    # For some architectures transformers makes up an empty tokenizer where there are no files.
    if not tokenizer.encode("text", add_special_tokens=False):
        raise Failure(Exit.INPUT, f"the target `{name}` has no usable tokenizer: it has no tokens for text")
    return tokenizer


def describe(target: Target) -> Facts:
    """The target's sizes, read off its tables and layers rather than believed."""
    text = target.model.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    # Models that mix attention kinds have a set of parameters for each.
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    table = _table(target.model).weight
    return Facts(
        hidden_size=table.shape[1],
        vocab_size=table.shape[0],
        target_layers=len(decoder_layers(target.model)),
        rope_theta=None if theta is None else float(theta),
    )


def check(target: Target, drafter: config.Drafter) -> None:
    """Refuse a drafter that was configured for another target.

    Raises:
        Failure: Exit.INPUT, naming each size that differs with both values, or what else forbids this target.
    """
    facts = describe(target)
    wanted = {name: getattr(drafter, name) for name in Facts.__dataclass_fields__}
    found = {name: getattr(facts, name) for name in wanted}
    if facts.rope_theta is None:
        # A target without rotary embedding has no base that the drafter's could contradict.
        del found["rope_theta"]
    differing = [name for name, value in found.items() if value != wanted[name]]
    if differing:
        width = max(map(len, differing))
        raise Failure(
            Exit.INPUT,
            f"the target `{target.name}` is not the one that the drafter is configured for",
            details=[f"{name:<{width}}  target {found[name]}  configured {wanted[name]}" for name in differing],
            hint="the table [drafter] of a configuration of your own can say the target's sizes",
        )
    special = {**target.tokenizer.special_tokens_map, **{f"end of text {id_}": id_ for id_ in stop_tokens(target)}}
    for what, token in special.items():
        token_id = token if isinstance(token, int) else target.tokenizer.convert_tokens_to_ids(str(token))
        if token_id == drafter.mask_token_id and what != "mask_token":
            message = f"drafter.mask_token_id ({token_id}) is the {what} of `{target.name}`; it must be an unused row"
            raise Failure(Exit.INPUT, message)
    if getattr(_output(target.model), "bias", None) is not None:
        message = f"the head of the target `{target.name}` has a bias, for which a drafter's checkpoint has no place"
        raise Failure(Exit.INPUT, message)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers in order, whatever their attribute is called.

    Raises:
        Failure: Exit.INPUT, when there is no such list.
    """
    count = model.config.get_text_config().num_hidden_layers
    for child in _decoder(model).children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise Failure(Exit.INPUT, f"{type(model).__name__} has no list of {count} decoder layers to read from")


def embedding(target: Target) -> Tensor:
    """The frozen embedding table, (V, H), in the model's dtype; scaled where the target scales what it looks up."""
    table = _table(target.model)
    if type(table) is nn.Embedding:
        return whole(table.weight.detach())
    with torch.no_grad():
        rows: Tensor = table(torch.arange(table.weight.shape[0], device=table.weight.device))
    return rows


def head(target: Target) -> Tensor:
    """The frozen head, (V, H), in the model's dtype; the embedding table itself where the two are tied."""
    weight: Tensor = _output(target.model).weight
    return whole(weight.detach())


def encode(target: Target, text: str) -> Tensor:
    """Tokens of a text, (T,) int64 on the CPU: none is added, and a special token's name in the text is just text."""
    ids = target.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
    return torch.tensor(ids, dtype=torch.int64)


def stop_tokens(target: Target) -> frozenset[int]:
    """Tokens that end a response: those of the model's generation settings and the tokenizer's own."""
    return _ends(target.model.generation_config, target.tokenizer)


def _ends(settings: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    ends = getattr(settings, "eos_token_id", None)
    found = ends if isinstance(ends, list) else [ends]
    return frozenset(int(token) for token in (*found, tokenizer.eos_token_id) if token is not None)


def require_kept(cache: Cache) -> None:
    """Stop where a target has put nothing into the cache that it was given: it would go on without its own context.

    Transformers 5.17 calls the argument otherwise, and models take arguments that they do not know in silence.

    Raises:
        Failure: Exit.DRIFT.
    """
    if any(getattr(layer, "is_initialized", True) for layer in cache.layers):
        return
    message = f"transformers {transformers.__version__} keeps nothing in the cache that a target is given"
    hint = "`nox -s train -- --repair` installs the locked version"
    raise Failure(Exit.DRIFT, f"{message}, so every token would forget those before it", hint=hint)


def digest(target: Target) -> str:
    """Sha256 over every weight and buffer that is saved: name, type, shape and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(target.model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        values: Tensor = whole(tensor.detach()).contiguous().cpu()
        found.update(values.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def features(target: Target, tokens: Tensor, document: Tensor | None, layer_ids: Sequence[int]) -> Tensor:
    """Hidden states that the drafter reads: outputs of the tapped layers, joined, (b, S, K*H) in the model's dtype.

    Id j is the output of layer j, `hidden_states[j + 1]` of transformers (z-lab, `extract_context_feature`). The pass
    ends with the last tapped layer: what stands above it is never computed. Without a gradient.

    Args:
        target: the target.
        tokens: (b, S) int64, on the model's device.
        document: (b, S) number of each token's document within its row, as in `data.Rows`: none sees another, and
            each starts at position 0. None when a row is one document.
        layer_ids: tapped layers (K), rising.
    """
    if document is None or target.packs:
        return _tap(target.model, tokens, document, layer_ids)
    return _one_by_one(target.model, tokens, document, layer_ids)


def keeps_documents_apart(model: PreTrainedModel) -> bool:
    """Whether a packed document comes out as if it were alone, whatever stands before it.

    Found by trying, on three short documents: a recurrent layer, for one, carries its state past every mask. Rounding
    may differ between a row of one and a row of two documents, what stands before must make no difference at all.
    """
    vocabulary = _table(model).weight.shape[0]
    length, last = 8, [len(decoder_layers(model)) - 1]
    place = torch.arange(length, device=model.device)
    first, other, second = ((place * step + 1) % vocabulary for step in (3, 5, 7))
    document = torch.arange(2, device=model.device).repeat_interleave(length).expand(1, -1)
    try:
        after_first = _tap(model, torch.cat((first, second))[None], document, last)[:, length:]
        after_other = _tap(model, torch.cat((other, second))[None], document, last)[:, length:]
    except (ValueError, TypeError, RuntimeError, IndexError, AttributeError):
        # It does not take a mask for each pair of tokens.
        return False
    alone = _tap(model, second[None], None, last)
    near = (after_first - alone).float().norm() <= 0.1 * alone.float().norm()
    return bool(near) and torch.equal(after_first, after_other)


def _table(model: Any) -> nn.Embedding:
    table: nn.Embedding = model.get_input_embeddings()
    return table


def _output(model: Any) -> nn.Linear:
    output: nn.Linear = model.get_output_embeddings()
    return output


def _decoder(model: Any) -> nn.Module:
    decoder: nn.Module = model.get_decoder()
    return decoder


class _Enough(Exception):
    """The last tapped layer has run."""


@torch.no_grad()
def _tap(model: PreTrainedModel, tokens: Tensor, document: Tensor | None, layer_ids: Sequence[int]) -> Tensor:
    layers = decoder_layers(model)
    kept: dict[int, Tensor] = {}

    def hook(layer_id: int) -> Any:
        def keep(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
            kept[layer_id] = output[0] if isinstance(output, tuple) else output
            if layer_id == layer_ids[-1]:
                raise _Enough

        return keep

    arguments: dict[str, Any] = {}
    if document is not None:
        places = positions(document)
        # Positions that restart make transformers build masks in which documents do not see each other, one for each
        # kind of attention that the model has; handing them over leaves nothing to what a model does with positions.
        like = torch.empty((*tokens.shape, 0), dtype=model.dtype, device=tokens.device)
        masks = create_masks_for_generate(model.config, like, None, None, places)
        arguments = {"position_ids": places, "attention_mask": masks}
    handles = [layers[layer_id].register_forward_hook(hook(layer_id)) for layer_id in layer_ids]
    try:
        with contextlib.suppress(_Enough):
            _decoder(model)(input_ids=tokens, use_cache=False, **arguments)
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([kept[layer_id] for layer_id in layer_ids], dim=-1)


def _one_by_one(model: PreTrainedModel, tokens: Tensor, document: Tensor, layer_ids: Sequence[int]) -> Tensor:
    rows = []
    for row, numbers in zip(tokens, document, strict=True):
        lengths = torch.unique_consecutive(numbers, return_counts=True)[1].tolist()
        rows.append(torch.cat([_tap(model, part[None], None, layer_ids) for part in row.split(lengths)], dim=1))
    return torch.cat(rows)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Transformers' and the hub's own progress bars and log lines stay away; errors become one sentence of ours."""
    hub = logging.getLogger("huggingface_hub")
    noise: Any = transformers.logging
    verbosity, bars, level = noise.get_verbosity(), noise.is_progress_bar_enabled(), hub.level
    noise.set_verbosity_error()
    noise.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        noise.set_verbosity(verbosity)
        hub.setLevel(level)
        if bars:
            noise.enable_progress_bar()


def _refusal(name: str, error: Exception) -> Failure:
    if Path(name).is_dir():
        return Failure(Exit.INPUT, f"the target folder `{name}` holds no usable model: {_sentence(error)}")
    looks_like_a_path = name.count("/") != 1 or name.startswith((".", "~"))
    if looks_like_a_path and "/" in name:
        return Failure(Exit.INPUT, f"the target folder `{name}` does not exist")
    if "connect" in str(error).lower() or "offline" in str(error).lower():
        return Failure(
            Exit.UNREACHABLE,
            f"the target `{name}` is no folder, and the hub cannot be reached to look for it there",
            hint="`--target FOLDER` takes a model that is already on this machine",
        )
    return Failure(Exit.INPUT, f"the target `{name}` is neither a folder nor a model of the hub: {_sentence(error)}")


def _sentence(error: Exception) -> str:
    """An error's first line, without its full stop; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
